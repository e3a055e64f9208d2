"""From a registered model to one that is ready to score: weights checked, evaluation mode, dtype and device known."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.errors import NotFound, Refused
from registry.identity import hash_files
from registry.queries.model_info import ModelInfo
from registry.settings import settings
from tasks.file_stamps import require_same, same, stamp
from tasks.load_errors import first_line, load_errors
from tasks.quiet import quiet

PROBE = "The quick brown fox jumps over the lazy dog, and then it goes back to sleep in the sun."
"""English, since nearly every model has read some; only a sanity bound rests on it."""

EXPLAINED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|(^|\.)mtp\.|\.k_scale$|\.v_scale$")
"""In files, but not in the model: buffers that are computed, and heads that predict several tokens at once."""

ROOM_ON_CARD = 0.8
"""Share of a card's free memory that weights may take; the rest is for activations and logits."""


@dataclass
class LoadedModel:
    model: Any
    """A torch module in evaluation mode without gradients."""
    tokenizer: Any
    context_length: int | None
    """Tokens; None where the architecture has no limit."""
    vocabulary: int
    """Rows of the embedding: token ids from here on do not exist."""
    dtype: str
    """Of most of the weights as they are now."""
    device: Any
    """Where input ids go (torch.device)."""
    device_class: str
    """`cpu` or `cuda:<name of the card>`."""
    attention: str
    load_report: dict[str, Any] = field(default_factory=dict)
    """Requested and actual dtype, quantisation, adapter, warnings, sanity: goes into a vector's provenance."""
    watched: dict[Path, dict[str, int]] = field(default_factory=dict)
    """Stamps of the local files, older than their check; empty where modelkin holds a copy of its own."""
    name: str = "the model"
    split: Any = None
    """`tasks.split_model.SplitModel`, made when first asked for."""

    def still_unchanged(self) -> None:
        """Raises Refused("changed") when a file was written since: weights on the CPU are mapped, not read."""
        require_same(self.watched, self.name)


@dataclass(frozen=True)
class Place:
    """Where the files of one model lie."""

    name: str
    kind: str
    source: str
    revision: str
    file: str
    files: Mapping[str, Mapping[str, Any]]
    load: tuple[str, ...]
    on_hub: bool


def load(
    info: ModelInfo,
    *,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    attention: str | None = None,
    merge_adapter: bool | None = None,
) -> LoadedModel:
    """Fetches what is missing and loads it.

    `attention` None lets transformers choose.  `merge_adapter` None merges in float32 only, since half precision
    would round the sum.

    Raises Refused: bad_weights (tensors missing, of another shape, or unexplained), missing_shards, missing_backend,
    bad_tokenizer, remote_code, pickle_only, unloadable, changed (the files are not the registered ones); NotFound when
    a folder is gone; HubUnavailable, NoSpace.
    """
    own = _place(info.name, info.kind, info.source, info.revision, info.file, info.facts)
    if info.kind != "adapter":
        return _load(own, own, device, dtype, trust_remote_code or info.trust_remote_code, attention)
    stored = info.facts["base"]
    base = _place(
        f"the base of {info.name}", stored["kind"], stored["source"], stored["revision"], stored["file"], stored
    )
    watched = _stamps(own)
    adapter = folder_of(own)
    has_tokenizer = any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    loaded = _load(
        base,
        own if has_tokenizer else base,
        device,
        dtype,
        trust_remote_code or info.trust_remote_code,
        attention,
        before_checks=lambda model: _with_adapter(model, adapter, info.name, merge_adapter, dtype),
    )
    loaded.watched |= watched
    loaded.name = info.name
    loaded.still_unchanged()
    loaded.load_report["adapter"] = {"merged": not hasattr(loaded.model, "peft_config"), "base": base.source}
    return loaded


def folder_of(place: Place) -> Path:
    """The folder with config, tokenizer and safetensors of this place; downloads and unpacks what is needed."""
    from tasks import gguf_files, hub

    if place.on_hub:
        sizes = {name: int(place.files[name]["size"]) for name in place.load}
        hashes = {name: place.files[name].get("sha256") for name in place.load}
        folder = hub.download(place.source, place.revision, sizes, hashes)
        if not place.file:
            return folder
        path = folder / place.file
        known = place.files[place.file].get("sha256")
        return gguf_files.converted(path, known or hash_files(folder, [place.file])[place.file], settings().home)
    path = Path(place.source)
    if not path.exists():
        raise NotFound(f"{place.name}: nothing lies at {path} any more", hint="register it where it is now")
    _require_unchanged(place, path if path.is_dir() else path.parent)
    if place.kind == "gguf":
        return gguf_files.converted(path, str(place.files[path.name]["sha256"]), settings().home)
    return path


def sanity(loaded: LoadedModel) -> dict[str, Any]:
    """Whether the model predicts text better than a uniform guess.

    A fact, not a refusal: an untrained model is a model.  {mean_log_p, uniform, plausible}, nats a token.
    """
    import torch

    ids = loaded.tokenizer(PROBE, add_special_tokens=True)["input_ids"][: loaded.context_length]
    uniform = -math.log(loaded.vocabulary)
    if len(ids) < 2 or max(ids) >= loaded.vocabulary:
        return {"mean_log_p": None, "uniform": uniform, "plausible": None}
    inputs = torch.tensor([ids], device=loaded.device)
    with torch.inference_mode():
        logits = loaded.model(input_ids=inputs, use_cache=False).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, inputs[0, 1:, None].to(logits.device))
    mean = chosen.double().mean().item()
    finite = math.isfinite(mean)
    return {"mean_log_p": mean if finite else None, "uniform": uniform, "plausible": finite and mean > uniform}


def _place(name: str, kind: str, source: str, revision: str, file: str, known: Mapping[str, Any]) -> Place:
    if kind in ("named", "endpoint"):
        raise Refused("no_weights", f"{name} has no weights that could be loaded", hint="register the model itself")
    files = known.get("files", {})
    return Place(name, kind, source, revision, file, files, tuple(known.get("load", ())), known.get("place") == "hub")


def _stamps(place: Place) -> dict[Path, dict[str, int]]:
    """Taken before the files are checked and read.  Hub files and unpacked GGUFs are in folders of modelkin's own."""
    if place.on_hub or place.kind == "gguf":
        return {}
    folder = Path(place.source)
    return {folder / name: stamp(folder / name) for name in place.files if (folder / name).is_file()}


def _require_unchanged(place: Place, folder: Path) -> None:
    """Vectors belong to the bytes that were registered.  Hashes again only what looks touched.

    A file that was added counts as well: a template or a whole model.safetensors beats what was there before.
    """
    from tasks import local_models

    for name, known in place.files.items():
        path = folder / name
        if path.is_file() and same(stamp(path), known):
            continue
        if not path.is_file() or hash_files(folder, [name])[name] != known["sha256"]:
            raise Refused(
                "changed",
                f"{path} is not the file that was registered as {place.name}",
                hint=f"register what lies there now: modelkin model add {place.source}",
            )
    added = set() if place.kind == "gguf" else set(local_models.identity_files_of(folder)) - set(place.files)
    if added:
        raise Refused(
            "changed",
            f"{folder / min(added)} was not there when {place.name} was registered",
            hint=f"take it away, or register what lies there now: modelkin model add {place.source}",
        )


def _load(
    place: Place,
    tokenizer_place: Place,
    device: str,
    dtype: str,
    trust: bool,
    attention: str | None,
    before_checks: Any = None,
) -> LoadedModel:
    from transformers import AutoConfig

    from tasks import refusals
    from tasks.devices import chosen_device

    options: dict[str, Any] = {"trust_remote_code": trust, "local_files_only": True}
    watched = _stamps(place)
    folder = folder_of(place)
    with quiet(), load_errors(place.name):
        config = AutoConfig.from_pretrained(folder, **options)
        stated = config.to_dict()
        refusals.check_backend(stated, place.name)
        tokenizer = _tokenizer(folder_of(tokenizer_place), options)
        target = chosen_device(device)
        spread = _placement(folder, target, device, dtype)
        model, report = _weights(folder, place, options, dtype, spread, attention)
        if before_checks is not None:
            model = before_checks(model)
        loaded = _described(model, tokenizer, stated, place.name, report, dtype)
    loaded.watched = watched
    loaded.still_unchanged()
    return loaded


def _described(
    model: Any, tokenizer: Any, stated: dict[str, Any], name: str, report: dict[str, Any], dtype: str
) -> LoadedModel:
    import torch

    from tasks import facts

    model.eval().requires_grad_(False)
    rows = model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is not None:
        rows = min(rows, head.weight.shape[0])
    found = _main_dtype(model)
    where = model.get_input_embeddings().weight.device
    card = torch.cuda.get_device_name(where).replace(" ", "-") if where.type == "cuda" else ""
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        context_length=facts.context_length(stated),
        vocabulary=rows,
        dtype=found,
        device=where,
        device_class=f"cuda:{card}" if card else where.type,
        attention=str(getattr(model.config, "_attn_implementation", None) or "none"),
        load_report={**report, "requested_dtype": dtype, "dtype": found},
        name=name,
    )
    if len(tokenizer) > rows:
        loaded.load_report["warnings"] = [f"the tokenizer has {len(tokenizer)} entries, the embedding {rows} rows"]
    if facts.quantization(stated):
        loaded.load_report["quantization"] = facts.quantization(stated)
    loaded.load_report["sanity"] = sanity(loaded)
    return loaded


def _weights(
    folder: Path, place: Place, options: dict[str, Any], dtype: str, spread: Any, attention: str | None
) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers

    # With output_loading_info it returns a pair, which its types do not say.
    auto: Any = transformers.AutoModelForCausalLM
    pickled = not any(folder.glob("*.safetensors"))
    if pickled and not settings().allow_pickle:
        raise Refused("pickle_only", f"{place.name} has only pickled weights", hint="set MODELKIN_ALLOW_PICKLE=1")
    arguments: dict[str, Any] = {
        **options,
        "dtype": getattr(torch, dtype),
        "use_safetensors": not pickled,
        "output_loading_info": True,
        # Only so that the mismatch is reported, with its shapes, instead of raised with advice to ignore it.
        "ignore_mismatched_sizes": True,
    }
    if spread is not None:
        arguments["device_map"] = spread
    report: dict[str, Any] = {"format": "pickle" if pickled else "safetensors"}
    if attention is None:
        model, info = auto.from_pretrained(folder, **arguments)
    else:
        try:
            model, info = auto.from_pretrained(folder, **arguments, attn_implementation=attention)
        except (ValueError, ImportError):
            # Gemma 2 caps its attention scores, which sdpa cannot.
            model, info = auto.from_pretrained(folder, **arguments, attn_implementation="eager")
            report["attention_fallback"] = f"{attention} → eager"
    _require_whole(place.name, info)
    return model, report


def _require_whole(name: str, info: Mapping[str, Any]) -> None:
    """transformers fills what is missing with random numbers and only logs it."""
    missing = sorted(info.get("missing_keys", ()))
    mismatched = [
        f"{key} is {_shape(stored)} in the files and {_shape(wanted)} by config.json"
        for key, stored, wanted in sorted(info.get("mismatched_keys", ()), key=lambda entry: str(entry[0]))
    ]
    unexpected = sorted(key for key in info.get("unexpected_keys", ()) if not EXPLAINED_TENSORS.search(key))
    faults = [
        f"{len(found)} {what} (first: {found[0]})"
        for what, found in (
            ("tensors missing", missing),
            ("tensors of another shape", mismatched),
            ("tensors that the architecture does not have", unexpected),
        )
        if found
    ]
    faults += [str(error) for error in info.get("error_msgs", ())]
    if faults:
        raise Refused(
            "bad_weights",
            f"{name}: " + "; ".join(faults),
            hint="the files do not make the model that config.json describes: get them again or ask the owner",
        )


def _shape(sides: Iterable[int]) -> str:
    return "×".join(str(side) for side in sides) or "a single number"


def _placement(folder: Path, target: str, asked: str, dtype: str) -> Any:
    """None on the CPU; one card where the weights fit, else all cards (and the CPU's memory) by accelerate."""
    if not target.startswith("cuda"):
        return None
    import torch

    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # Files may hold another dtype; twice their size is the most that half precision in, float32 out can take.
    needed = stored * (2 if dtype == "float32" else 1)
    free, _ = torch.cuda.mem_get_info(torch.device(target))
    if asked == "auto" and needed > ROOM_ON_CARD * free:
        return "auto"
    return {"": target}


def _tokenizer(folder: Path, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    from tasks.rendering import verify_tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except ImportError:
        raise
    except Exception as error:  # each tokenizer class reads its files in its own way, the Rust ones raise Exception
        raise Refused(
            "bad_tokenizer", f"the tokenizer in {folder} cannot be read: {first_line(error)}", hint="get it again"
        ) from error
    raw = folder / "tokenizer.json"
    verify_tokenizer(tokenizer, raw if raw.is_file() else None)
    return tokenizer


def _with_adapter(model: Any, adapter: Path, name: str, merge: bool | None, dtype: str) -> Any:
    from peft import PeftModel

    from tasks.facts import safetensors_header

    weights = adapter / "adapter_model.safetensors"
    rows = [
        entry["shape"][0]
        for key, entry in (safetensors_header(weights) if weights.is_file() else {}).items()
        if re.search(r"(embed_tokens|wte|lm_head)\.(modules_to_save\.)?weight$", key)
    ]
    if rows and max(rows) > model.get_input_embeddings().weight.shape[0]:
        # The adapter brings the rows of tokens that it added.
        model.resize_token_embeddings(max(rows), mean_resizing=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted: Any = PeftModel.from_pretrained(model, adapter, is_trainable=False)
    lost = [str(entry.message) for entry in said if "missing adapter keys" in str(entry.message)]
    if lost:
        raise Refused("bad_weights", f"{name}: {lost[0][:300]}", hint="the adapter was made for another base")
    merge = dtype == "float32" if merge is None else merge
    return adapted.merge_and_unload() if merge else adapted


def _main_dtype(model: Any) -> str:
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name])
