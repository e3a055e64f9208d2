"""Adapters: weights that change a base model.  Their base is a model of its own, registered first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from registry.errors import Refused
from registry.identity import Candidate
from registry.settings import settings
from tasks import facts
from tasks.facts import Description

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PROMPT_LEARNING = {"PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CARTRIDGE"}


def choose_weights(found: Description) -> list[str]:
    config = found.adapter_config or {}
    if str(config.get("peft_type")) in PROMPT_LEARNING:
        raise Refused(
            "unsupported_format",
            f"{found.where} is a {config['peft_type']} adapter: it adds virtual tokens to every prompt",
            hint="modelkin scores adapters that change weights, such as LoRA",
        )
    safe, pickled = ADAPTER_WEIGHTS
    if safe in found.files:
        return [safe]
    if pickled in found.files and settings().allow_pickle:
        return [pickled]
    reason = "pickle_only" if pickled in found.files else "unsupported_format"
    raise Refused(reason, f"{found.where} has no {safe}", hint="ask the owner for adapter weights in safetensors")


def base_of(found: Description, trust: bool, base: str | None) -> Candidate:
    """Raises Refused("adapter_without_base") when the stated base is a path of its author's disk, or none."""
    config = found.adapter_config or {}
    stated = base or config.get("base_model_name_or_path") or ""
    hint = "name it: modelkin model add … --base org/name"
    if not isinstance(stated, str) or not stated:
        raise Refused("adapter_without_base", f"{found.where} does not say what it adapts", hint=hint)
    if base is None:
        beside = Path(stated).expanduser()
        if beside.is_absolute() and beside.is_dir():
            stated = str(beside)
        elif not _looks_like_hub(stated):
            raise Refused(
                "adapter_without_base", f"{found.where} adapts {stated!r}, a path that is not here", hint=hint
            )
        elif config.get("revision"):
            stated = f"{stated}@{config['revision']}"
    from tasks.registration import candidate

    try:
        found_base = candidate(stated, trust_remote_code=trust)
    except Refused as error:
        raise Refused(error.reason, f"the base of {found.where}: {error.message}", hint=error.hint) from error
    if found_base.kind == "adapter":
        raise Refused("unsupported_format", f"{found.where} adapts another adapter", hint="merge that one first")
    return found_base


def columns(found: Description, base: Candidate, weights: list[str]) -> dict[str, Any]:
    """The base's facts hold for the sum, but for what the adapter's own card and template say."""
    own = facts.columns(found, weights)
    inherited = ("architecture", "model_type", "parameters", "dtype", "quantization", "vocabulary", "context_length")
    columns = {each: base.columns.get(each) for each in inherited}
    columns.update({each: value for each, value in own.items() if each not in inherited})
    columns["template_hash"] = own["template_hash"] or base.columns.get("template_hash")
    columns["base_model"], columns["base_model_relation"] = base.handle, "adapter"
    return columns


def place_of(base: Candidate) -> dict[str, Any]:
    """What loading needs to know of the base."""
    keys = ("place", "files", "load")
    return {
        "kind": base.kind,
        "source": base.source,
        "revision": base.revision,
        "file": base.file,
        **{key: base.facts[key] for key in keys if key in base.facts},
    }


def _looks_like_hub(stated: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", stated) is not None
