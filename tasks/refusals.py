"""What will not be registered, and why: decided from names, sizes and configs, before any weight is downloaded.

The order of the checks matters: BERT is in transformers' causal mapping, Gemma 3 with its vision tower is too, and a
repo may hold several formats side by side.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from registry.errors import Refused
from tasks.facts import Description, as_list

SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
OTHER_FORMATS = re.compile(r"\.(msgpack|h5|ot|onnx|tflite|mlmodel|nemo|pt|pth|ckpt|npz)$|^onnx/|^consolidated")
PICKLES = re.compile(r"^pytorch_model(-\d{5}-of-\d{5})?\.bin$")
TOKENIZER_FILES = re.compile(
    r"^(tokenizer.*\.(json|model)|vocab\.(json|txt)|.*spiece\.model|tekken\.json|.*\.tiktoken)$"
)
EMBEDDING_TASKS = {"feature-extraction", "sentence-similarity"}
EMBEDDING_FILES = {"modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"}
DECODER_HEADS = ("ForCausalLM", "LMHeadModel", "LMHead", "ForConditionalGeneration")


def choose_weights(found: Description, *, allow_pickle: bool) -> list[str]:
    """The weight files to load: one format, whole.

    Raises Refused: gguf_only, pickle_only, missing_shards, unsupported_format.
    """
    names = set(found.files)
    if "quantization" in (found.config or {}) and "quantization_config" not in (found.config or {}):
        raise Refused(
            "unsupported_format", f"{found.where} is in the MLX format", hint="register the model it was made from"
        )
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if found.weight_map is not None:
        return _shards_of_index(found, sorted(set(found.weight_map.values())))
    shards = [name for name in names if SHARD.match(name) and name.startswith("model-")]
    if shards:
        raise Refused(
            "missing_shards",
            f"{found.where} has {len(shards)} shards but no model.safetensors.index.json that says what is in them",
            hint="ask the owner for the index, or save the model anew with save_pretrained",
        )
    ggufs = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower())
    pickles = sorted(name for name in names if PICKLES.match(name))
    if pickles and allow_pickle:
        return pickles
    if pickles:
        raise Refused(
            "pickle_only",
            f"{found.where} has only pickled weights ({pickles[0]}), which can run code when they are loaded",
            hint="look for a safetensors conversion of it (on the Hub often in refs/pr/…), or set "
            "MODELKIN_ALLOW_PICKLE=1 if you trust every file",
        )
    if ggufs:
        raise Refused("gguf_only", f"{found.where} has only GGUF weights: name one file", hint=gguf_hint(found, ggufs))
    others = sorted(name for name in names if OTHER_FORMATS.search(name) or name.endswith((".bin", ".safetensors")))
    seen = f"only {', '.join(others[:3])}" if others else "no weight files"
    raise Refused(
        "unsupported_format",
        f"{found.where} has {seen}",
        hint="modelkin loads model.safetensors (whole or in shards with an index) and GGUF files",
    )


def gguf_hint(found: Description, ggufs: list[str]) -> str:
    repo, _, revision = found.where.partition("@")
    at = f"@{revision}" if revision else ""
    shown = ", ".join(f"{repo}{at}:{name}" for name in ggufs[:4])
    return f"modelkin model add one of: {shown}" + (f", … ({len(ggufs)} files)" if len(ggufs) > 4 else "")


def _shards_of_index(found: Description, shards: list[str]) -> list[str]:
    missing = [name for name in shards if name not in found.files]
    if missing:
        raise Refused(
            "missing_shards",
            f"{found.where}: the index names {len(shards)} shards, of which {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} not there",
            hint="the upload is incomplete: try another revision or ask the owner",
        )
    return shards


def check_architecture(found: Description, *, remote_code: bool) -> bool:
    """Whether the model's own code must run (only where `remote_code` allows it).

    Raises Refused: encoder_only, encoder_decoder, vision_language, vision_only, unsupported_architecture,
    remote_code, unsupported_format.
    """
    config = found.config
    if config is None:
        raise Refused(
            "unsupported_format", f"{found.where} has no config.json", hint="is it a transformers model at all?"
        )
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    architectures, model_type = as_list(config.get("architectures")), str(config.get("model_type") or "")
    _refuse_embedding(found, architectures, auto)
    if config.get("is_encoder_decoder") or set(architectures) & _values(
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    ):
        raise Refused(
            "encoder_decoder",
            f"{found.where} is an encoder-decoder ({_shown(architectures, model_type)})",
            hint="modelkin scores decoder-only language models",
        )
    _refuse_vision(found, architectures, auto)
    native = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type in native and _has_head(architectures, auto):
        return _tokenizer_needs_code(found, remote_code)
    if model_type in auto.CONFIG_MAPPING_NAMES:
        raise Refused(
            "unsupported_architecture",
            f"{found.where} has no language-model head ({_shown(architectures, model_type)})",
            hint="classifiers, reward models and bare bodies give no log-probabilities of text",
        )
    mapped = config.get("auto_map")
    if not isinstance(mapped, Mapping) or not any("CausalLM" in str(name) for name in mapped):
        raise Refused(
            "unsupported_architecture",
            f"this version of transformers does not know {_shown(architectures, model_type)} of {found.where}",
            hint="upgrade transformers, or check the model type in config.json",
        )
    if any("--" in str(name) for name in _values(mapped)):
        raise Refused(
            "remote_code",
            f"{found.where} takes its code from another repo, which its commit does not fix",
            hint="register a copy that carries its own code",
        )
    return _require_code(found, remote_code, f"the model type {model_type!r} is defined by code in the repo")


def check_tokenizer(found: Description) -> None:
    """Raises Refused("bad_tokenizer") where there is none."""
    if not any(TOKENIZER_FILES.match(name) for name in found.files):
        raise Refused(
            "bad_tokenizer", f"{found.where} has no tokenizer files", hint="add the tokenizer of the base model to it"
        )


def check_backend(config: Mapping[str, Any], where: str) -> None:
    """Raises Refused("missing_backend") when the checkpoint's quantisation needs a package that is not here."""
    found = config.get("quantization_config")
    method = str(found.get("quant_method") or "") if isinstance(found, Mapping) else ""
    packages = {
        "gptq": ("gptqmodel",),
        "awq": ("gptqmodel", "awq"),
        "bitsandbytes": ("bitsandbytes",),
        "compressed-tensors": ("compressed_tensors",),
    }.get(method, ())
    if packages and not any(importlib.util.find_spec(package) for package in packages):
        raise Refused(
            "missing_backend",
            f"{where} is quantised with {method}, which needs the package {packages[0].replace('_', '-')}",
            hint=f"pip install {packages[0].replace('_', '-')}, or register the unquantised model",
        )


def _refuse_embedding(found: Description, architectures: list[str], auto: Any) -> None:
    masked_types, two_part_types = (
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    encoders = set(masked_types) - set(two_part_types)
    heads = {name for key, name in _pairs(masked_types) if key in encoders}
    bodies = {name for key, name in _pairs(auto.MODEL_MAPPING_NAMES) if key in encoders}
    encoder = bool(set(architectures) & ((heads | bodies) - _values(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
    embedding = bool(EMBEDDING_FILES & set(found.files)) or found.library == "sentence-transformers"
    embedding = embedding or found.pipeline_tag in EMBEDDING_TASKS
    # BERT is in the causal mapping; it looks back only if its config says that it is a decoder.
    config = found.config or {}
    if str(config.get("model_type")) in encoders and not config.get("is_decoder"):
        encoder = encoder or not architectures or "LMHeadModel" in architectures[0]
    if encoder or embedding:
        kind = "an embedding model" if embedding else "an encoder"
        raise Refused(
            "encoder_only",
            f"{found.where} is {kind} ({', '.join(architectures) or found.pipeline_tag or found.library})",
            hint="it gives no log-probability of a text; modelkin scores causal language models",
        )


def _refuse_vision(found: Description, architectures: list[str], auto: Any) -> None:
    config = found.config or {}
    reads_text = _values(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) | _values(
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    )
    reads_text -= {name for name in reads_text if name.endswith("ForCausalLM")}
    if set(architectures) & reads_text or ("vision_config" in config and _head_named(architectures)):
        raise Refused(
            "vision_language",
            f"{found.where} reads images and text ({', '.join(architectures)})",
            hint="scoring the text path of such a model is not offered yet; register a text-only model of the family",
        )
    other_senses = {"vision_config", "image_size", "audio_config", "num_mel_bins"} & set(config)
    if other_senses and not set(architectures) & _values(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise Refused(
            "vision_only",
            f"{found.where} has no path from text to text ({', '.join(architectures) or config.get('model_type')})",
            hint="modelkin scores language models",
        )


def _has_head(architectures: list[str], auto: Any) -> bool:
    """A config without `architectures` is taken at its model type's word."""
    known = _values(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return not architectures or any(name in known or name.endswith(DECODER_HEADS[:3]) for name in architectures)


def _head_named(architectures: list[str]) -> bool:
    return any(name.endswith(DECODER_HEADS) for name in architectures)


def _tokenizer_needs_code(found: Description, remote_code: bool) -> bool:
    mapped = found.tokenizer_config.get("auto_map")
    if not mapped or "tokenizer.json" in found.files:
        return False
    import transformers

    stated = str(found.tokenizer_config.get("tokenizer_class") or "")
    if stated and hasattr(transformers, stated):
        return False
    return _require_code(found, remote_code, f"its tokenizer {stated or '(unnamed)'} is defined by code in the repo")


def _require_code(found: Description, allowed: bool, why: str) -> bool:
    if allowed:
        return True
    raise Refused(
        "remote_code",
        f"{found.where} runs its own code: {why}",
        hint="read that code, then repeat with --trust-remote-code; the allowance holds for this commit only",
    )


def _values(mapping: Mapping[str, Any]) -> set[str]:
    return {name for _, name in _pairs(mapping)}


def _pairs(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in mapping.items():
        names = value if isinstance(value, (tuple, list)) else (value,)
        pairs += [(key, name) for name in names if name]
    return pairs


def _shown(architectures: list[str], model_type: str) -> str:
    return ", ".join(architectures) or f"model type {model_type!r}"


GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_quantization(name: str) -> str | None:
    """From the file's name, which is all there is before it is downloaded: model.Q4_K_M.gguf → Q4_K_M."""
    match = re.search(r"(?:^|[-._])((?:IQ|Q|TQ)\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16)(?=[-._])", name, re.IGNORECASE)
    return match[1].upper() if match else None
