"""What a model says about itself before its weights are read: config, tokenizer files, headers and card.

One form for a Hub repo and a folder, so that every rule and every fact is written once.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.canonical import sha256_hex
from registry.errors import Refused

SMALL_FILES = (
    "config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
"""All that is fetched of a Hub repo to describe it."""

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn"}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class File:
    size: int
    sha256: str | None = None
    """Known for the large files of the Hub."""


@dataclass(frozen=True)
class Description:
    where: str
    """How messages name the place: `org/name@0123456789ab` or a path."""
    files: Mapping[str, File]
    config: Mapping[str, Any] | None = None
    adapter_config: Mapping[str, Any] | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    weight_map: Mapping[str, str] | None = None
    """Tensor → shard, of the safetensors index."""
    parameters: Mapping[str, int] | None = None
    """Values by safetensors dtype name, from the headers."""
    card: Mapping[str, Any] = field(default_factory=dict)
    pipeline_tag: str | None = None
    library: str | None = None


def describe_folder(folder: Path) -> Description:
    """Raises Refused("unsupported_format") for a config that is no JSON."""
    documents = {name: read_json(folder / name) for name in SMALL_FILES if name.endswith(".json")}
    jinja = folder / "chat_template.jinja"
    card = _card(folder / "README.md")
    tokenizer_config = documents["tokenizer_config.json"] or {}
    index = documents["model.safetensors.index.json"]
    paths = [
        *folder.iterdir(),
        *folder.glob("additional_chat_templates/*.jinja"),
        *folder.glob("1_Pooling/config.json"),
    ]
    return Description(
        where=str(folder),
        files={str(path.relative_to(folder)): File(path.stat().st_size) for path in paths if path.is_file()},
        config=documents["config.json"],
        adapter_config=documents["adapter_config.json"],
        tokenizer_config=tokenizer_config,
        chat_template=template_text(read_template(jinja) if jinja.is_file() else None, tokenizer_config),
        weight_map=read_weight_map(index, str(folder)),
        card=card,
        pipeline_tag=_text(card.get("pipeline_tag")),
        library=_text(card.get("library_name")),
    )


def columns(description: Description, weights: Iterable[str]) -> dict[str, Any]:
    """Values for the fact columns of `models`; `weights` are the files to load."""
    config = description.config or {}
    text = _text_config(config)
    _require_whole_vocabulary(text, description.where)
    relation = description.card.get("base_model_relation")
    return {
        "architecture": next(iter(as_list(config.get("architectures"))), None),
        "model_type": _text(config.get("model_type")),
        "parameters": sum(description.parameters.values()) if description.parameters else None,
        "dtype": checkpoint_dtype(config, description.parameters),
        "quantization": quantization(config),
        "vocabulary": _whole(text.get("vocab_size")),
        "context_length": context_length(config),
        "licence": _licence(description.card),
        "base_model": ", ".join(as_list(description.card.get("base_model"))) or None,
        "base_model_relation": relation if isinstance(relation, str) else None,
        "pipeline_tag": description.pipeline_tag,
        "template_hash": sha256_hex(description.chat_template) if description.chat_template else None,
        "size_bytes": sum(description.files[name].size for name in weights),
    }


def context_length(config: Mapping[str, Any]) -> int | None:
    """From the config only: a tokenizer's `model_max_length` is 1e30 when nobody set it."""
    for source in (config, _text_config(config)):
        for name in (
            "max_position_embeddings",
            "n_positions",
            "max_sequence_length",
            "seq_length",
            "max_seq_len",
            "n_ctx",
        ):
            found = _whole(source.get(name))
            if found is not None and 0 < found < 2**31:
                return found
    return None


def quantization(config: Mapping[str, Any]) -> str | None:
    """The checkpoint's own, e.g. `gptq-4bit`, `fp8`; None for plain weights."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or "unknown")
    bits = found.get("bits") or (4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else None)
    return f"{method}-{bits}bit" if bits else method


def checkpoint_dtype(config: Mapping[str, Any], parameters: Mapping[str, int] | None) -> str | None:
    """What the files hold, which the config may not say or may say wrongly."""
    if parameters:
        largest = max(parameters, key=lambda name: parameters[name])
        return DTYPES.get(largest, largest.lower())
    stated = config.get("dtype") or config.get("torch_dtype")
    return str(stated).removeprefix("torch.") if stated else None


def template_text(jinja: str | None, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The chat template that transformers would use: the file beats the tokenizer's config; of a list, `default`."""
    if jinja is not None:
        return jinja
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if _is_named(entry)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor name → {dtype, shape, data_offsets}.  Raises Refused("bad_weights") when the file is cut or broken."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if not isinstance(entry["dtype"], str) or not all(_whole(side) is not None for side in entry["shape"]):
                raise ValueError(f"no dtype and shape for {name}")
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"the header promises {8 + length + end} bytes, the file has {size}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise Refused(
            "bad_weights", f"{path} is not a whole safetensors file: {error}", hint="copy or download it again"
        ) from error
    return header


def count_parameters(headers: list[dict[str, Any]]) -> dict[str, int] | None:
    """Values by dtype over all headers; None without any."""
    counts: dict[str, int] = {}
    for header in headers:
        for entry in header.values():
            total = 1
            for side in entry["shape"]:
                total *= side
            counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + total
    return counts or None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None without the file.  Raises Refused("unsupported_format") when it is no object."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused("unsupported_format", f"{path} is not JSON: {error}", hint="get the file again") from error
    if not isinstance(found, dict):
        raise Refused("unsupported_format", f"{path} holds no JSON object", hint="get the file again")
    return found


def read_template(path: Path) -> str:
    """Raises Refused("bad_template") when it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            "bad_template", f"{path} is not UTF-8: {error}", hint="get it again or save it as UTF-8"
        ) from error


def read_weight_map(index: Mapping[str, Any] | None, where: str) -> dict[str, str] | None:
    """Tensor → shard of an index.  Raises Refused("bad_weights") when the index holds something else."""
    found = (index or {}).get("weight_map")
    if index is None or found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        raise Refused(
            "bad_weights",
            f"{where}: weight_map in model.safetensors.index.json does not map tensors to files",
            hint="get the index again, or save the model anew with save_pretrained",
        )
    return found


def as_list(value: Any) -> list[str]:
    """Card fields hold a string, a list of strings, or something odd."""
    if isinstance(value, str):
        return [value]
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and "vocab_size" not in config else config


def _require_whole_vocabulary(text: Mapping[str, Any], where: str) -> None:
    stated = text.get("vocab_size")
    if stated is not None and (_whole(stated) or 0) < 1:
        raise Refused(
            "unsupported_format",
            f"{where}: vocab_size in config.json is {stated!r:.80}, not a number of tokens",
            hint="get config.json again",
        )


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _licence(card: Mapping[str, Any]) -> str | None:
    stated = as_list(card.get("license"))
    if stated == ["other"] and isinstance(card.get("license_name"), str):
        return str(card["license_name"])
    return ", ".join(stated) or None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _card(readme: Path) -> dict[str, Any]:
    """The YAML block at the head of a README; an unreadable one is no reason to refuse a model."""
    if not readme.is_file():
        return {}
    match = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", readme.read_text("utf-8", errors="replace"), re.DOTALL)
    if match is None:
        return {}
    import yaml  # type: ignore[import-untyped]  # it ships no types

    try:
        found = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def card_facts(found: Description) -> dict[str, Any]:
    wanted = ("language", "datasets", "tags", "library_name", "license_link")
    card = {key: found.card[key] for key in wanted if isinstance(found.card.get(key), (str, list))}
    return {
        key: value for key, value in card.items() if isinstance(value, str) or all(isinstance(v, str) for v in value)
    }


def warnings(found: Description, columns: Mapping[str, Any]) -> list[str]:
    said = []
    if columns.get("template_hash") is None:
        said.append("no chat template: score it with --profile plain")
    if str(columns.get("dtype")).startswith("float8"):
        said.append("the checkpoint holds 8-bit floats; other dtypes are made from them")
    if columns.get("quantization") and columns.get("parameters"):
        said.append("the parameter count is that of the packed tensors")
    return said
