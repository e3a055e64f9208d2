"""From what a user typed to a candidate for the registry: every fact and the identity, nothing stored yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.canonical import sha256_hex
from registry.errors import NotFound, Refused
from registry.identity import (
    IDENTITY_FILES,
    WEIGHT_FILES,
    Candidate,
    adapter_identity,
    content_identity,
    handle_from_name,
    hash_files,
    hub_identity,
    weights_hash,
)
from registry.settings import settings
from tasks import facts, gguf_files, hub, refusals
from tasks.facts import Description
from tasks.references import HubReference, parse

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PROMPT_LEARNING = {"PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CARTRIDGE"}


@dataclass(frozen=True)
class Size:
    """What a plan needs to know."""

    parameters: int | None
    vocabulary: int | None
    download_bytes: int
    """Still to be fetched."""


def candidate(
    reference: str, name: str | None = None, *, trust_remote_code: bool = False, base: str | None = None
) -> Candidate:
    """Reads everything that can be known without downloading weights.

    `name` is the handle of something local, and an alias of a Hub model; `base` replaces the base that an adapter
    names.  Raises BadInput, NotFound, Refused (with its reason), HubUnavailable, NoSpace.
    """
    place = parse(reference)
    if isinstance(place, HubReference):
        return _of_hub(place, name, trust_remote_code, base)
    if place.is_file():
        if place.suffix != ".gguf":
            raise Refused(
                "unsupported_format", f"{place} is not a GGUF file", hint="give a .gguf file or a model's folder"
            )
        return _of_gguf(place, name)
    return _of_folder(place, name, trust_remote_code, base)


def size_of(found: Candidate) -> Size:
    columns, files = found.columns, found.facts.get("files", {})
    sizes = {each: files[each]["size"] for each in found.facts.get("load", [])}
    missing = hub.missing_bytes(found.source, found.revision, sizes) if _is_on_hub(found.facts) else 0
    if found.base is not None:
        of_base = size_of(found.base)
        return Size(of_base.parameters, of_base.vocabulary, missing + of_base.download_bytes)
    return Size(columns.get("parameters"), columns.get("vocabulary"), missing)


def facts_of(reference: str) -> Size:
    """Of a registered model (by any of its names) or of one that could be registered."""
    from registry import database
    from registry.queries import models

    with database.session() as session:
        try:
            model = models.find(session, reference)
        except NotFound:
            model = None
    if model is None:
        return size_of(candidate(reference))
    files = model.facts.get("files", {})
    sizes = {each: files[each]["size"] for each in model.facts.get("load", [])}
    missing = hub.missing_bytes(model.source, model.revision, sizes) if _is_on_hub(model.facts) else 0
    return Size(model.parameters, model.vocabulary, missing)


def _is_on_hub(known: Mapping[str, Any]) -> bool:
    return known.get("place") == "hub"


# --- folders and files ------------------------------------------------------------------------------------------


def _of_folder(folder: Path, name: str | None, trust: bool, base: str | None) -> Candidate:
    found = facts.describe_folder(folder)
    if found.config is None and found.adapter_config is not None:
        return _adapter_in_folder(folder, found, name, trust, base)
    code = refusals.check_architecture(found, remote_code=trust)
    weights = refusals.choose_weights(found, allow_pickle=settings().allow_pickle)
    refusals.check_tokenizer(found)
    headers = {each: facts.safetensors_header(folder / each) for each in weights if each.endswith(".safetensors")}
    _require_tensors_of_index(found, headers)
    found = _with_parameters(found, facts.count_parameters(list(headers.values())))
    hashes, columns = _hash_folder(folder, found, weights), facts.columns(found, weights)
    identity = content_identity("folder", hashes)
    handle = handle_from_name(name or folder.name)[0]
    return Candidate(
        kind="folder",
        handle=handle,
        revision=identity,
        identity=identity,
        source=str(folder),
        weights_hash=weights_hash(hashes),
        trust_remote_code=code,
        aliases=((handle, "user"),) if name else (),
        columns=columns,
        facts=_folder_facts(folder, found, hashes, columns),
    )


def _of_gguf(path: Path, name: str | None) -> Candidate:
    header = gguf_files.read_header(path)
    columns = gguf_files.columns(header, str(path), path.stat().st_size)
    if int(header.fields.get("split.count") or 0) > 1:
        raise Refused(
            "unsupported_format", f"{path} is one part of several", hint="merge them: llama-gguf-split --merge"
        )
    hashes = hash_files(path.parent, [path.name])
    identity = content_identity("gguf", hashes)
    handle = handle_from_name(name or path.stem)[0]
    return Candidate(
        kind="gguf",
        handle=handle,
        revision=identity,
        identity=identity,
        source=str(path),
        weights_hash=weights_hash(hashes),
        aliases=((handle, "user"),) if name else (),
        columns=columns,
        facts={
            "place": "folder",
            "files": _file_facts(path.parent, hashes),
            "named_in_file": header.fields.get("general.name"),
        },
    )


def _adapter_in_folder(folder: Path, found: Description, name: str | None, trust: bool, base: str | None) -> Candidate:
    weights = _adapter_weights(found)
    of_base = _base_of_adapter(found, trust, base)
    hashes = _hash_folder(folder, found, weights)
    own = content_identity("folder", hashes)
    handle = handle_from_name(name or folder.name)[0]
    return Candidate(
        kind="adapter",
        handle=handle,
        revision=own,
        identity=adapter_identity(of_base.identity, own),
        source=str(folder),
        weights_hash=None,
        trust_remote_code=of_base.trust_remote_code,
        base=of_base,
        aliases=((handle, "user"),) if name else (),
        columns=_adapter_columns(found, of_base, weights),
        facts={**_folder_facts(folder, found, hashes, {}), "base": _place_of(of_base)},
    )


def _hash_folder(folder: Path, found: Description, weights: list[str]) -> dict[str, str]:
    """Of what decides the log-probabilities; weights in a format that is not loaded are left out."""
    others = [each for each in found.files if IDENTITY_FILES.match(each) and not WEIGHT_FILES.match(each)]
    return hash_files(folder, sorted({*weights, *others}))


def _folder_facts(
    folder: Path, found: Description, hashes: dict[str, str], columns: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "place": "folder",
        "files": _file_facts(folder, hashes),
        "card": _card_facts(found),
        "warnings": _warnings(found, columns),
    }


def _file_facts(folder: Path, hashes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The time of change lets a later load see in a moment that a file is still the one that was registered."""
    stats = {each: (folder / each).stat() for each in hashes}
    return {
        each: {"size": stats[each].st_size, "sha256": digest, "mtime_ns": stats[each].st_mtime_ns}
        for each, digest in hashes.items()
    }


def _require_tensors_of_index(found: Description, headers: Mapping[str, Mapping[str, Any]]) -> None:
    for tensor, shard in (found.weight_map or {}).items():
        if shard in headers and tensor not in headers[shard]:
            raise Refused(
                "bad_weights",
                f"{found.where}: the index promises {tensor} in {shard}, which does not hold it",
                hint="the index is stale or the shard is of another upload: get the files again",
            )


# --- the Hub ----------------------------------------------------------------------------------------------------


def _of_hub(reference: HubReference, name: str | None, trust: bool, base: str | None) -> Candidate:
    repo = hub.describe(reference)
    found = repo.description
    trust = trust or f"{repo.id}@{repo.commit}" in _allowed_code()
    aliases = [(name, "user")] if name else []
    if repo.id.lower() != reference.repo.lower():
        aliases.append((reference.repo, "renamed"))
    common: dict[str, Any] = {
        "handle": handle_from_name(repo.id)[0],
        "revision": repo.commit,
        "source": repo.id,
        "aliases": tuple(aliases),
    }
    if reference.file:
        return _hub_gguf(repo, common)
    if found.config is None and found.adapter_config is not None:
        return _hub_adapter(repo, common, trust, base)
    ggufs = any(each.endswith(".gguf") for each in found.files)
    if found.config is None and ggufs:
        refusals.choose_weights(found, allow_pickle=False)
    code = refusals.check_architecture(found, remote_code=trust)
    weights = refusals.choose_weights(found, allow_pickle=settings().allow_pickle)
    refusals.check_tokenizer(found)
    if found.parameters is None and weights[0].endswith(".safetensors"):
        found = _with_parameters(found, hub.header_parameters(repo.id, repo.commit))
    load = hub.files_to_load(found, weights, code=code)
    sizes = {each: found.files[each].size for each in load}
    hub.require_space(found.where, hub.missing_bytes(repo.id, repo.commit, sizes))
    columns = {**facts.columns(found, weights), **_hub_columns(repo)}
    return Candidate(
        kind="hub",
        identity=hub_identity(repo.id, repo.commit),
        weights_hash=_hub_weights_hash(found, weights),
        trust_remote_code=code,
        columns=columns,
        facts={**_hub_facts(repo, load), "warnings": _warnings(found, columns)},
        **common,
    )


def _hub_gguf(repo: hub.Repo, common: dict[str, Any]) -> Candidate:
    name, found = repo.asked.file, repo.description
    ggufs = sorted(each for each in found.files if each.endswith(".gguf"))
    if name not in found.files:
        raise Refused(
            "not_found_or_private",
            f"{found.where} has no file {name}",
            hint=refusals.gguf_hint(found, ggufs) if ggufs else "it has no GGUF file",
        )
    if refusals.GGUF_PART.search(name):
        raise Refused("unsupported_format", f"{name} is one part of several", hint="choose a whole file")
    architecture = str(repo.gguf.get("architecture") or "")
    known, head = gguf_files.check_architecture(architecture, found.where) if architecture else (None, None)
    file = found.files[name]
    hub.require_space(found.where, hub.missing_bytes(repo.id, repo.commit, {name: file.size}))
    template = repo.gguf.get("chat_template")
    columns = {
        **facts.columns(found, [name]),
        "architecture": head,
        "model_type": known,
        "parameters": repo.gguf.get("total"),
        "dtype": None,
        "quantization": refusals.gguf_quantization(name),
        "context_length": repo.gguf.get("context_length"),
        "template_hash": sha256_hex(template) if isinstance(template, str) else None,
        **_hub_columns(repo),
    }
    return Candidate(
        kind="hub",
        identity=hub_identity(repo.id, repo.commit, name),
        file=name,
        weights_hash=_hub_weights_hash(found, [name]),
        columns=columns,
        facts=_hub_facts(repo, [name]),
        **common,
    )


def _hub_adapter(repo: hub.Repo, common: dict[str, Any], trust: bool, base: str | None) -> Candidate:
    found = repo.description
    weights = _adapter_weights(found)
    of_base = _base_of_adapter(found, trust, base)
    load = hub.files_to_load(found, weights, code=False)
    return Candidate(
        kind="adapter",
        identity=adapter_identity(of_base.identity, hub_identity(repo.id, repo.commit)),
        trust_remote_code=of_base.trust_remote_code,
        base=of_base,
        columns={**_adapter_columns(found, of_base, weights), **_hub_columns(repo)},
        facts={**_hub_facts(repo, load), "base": _place_of(of_base)},
        **common,
    )


def _allowed_code() -> set[str]:
    return {entry.strip() for entry in settings().remote_code_allowed.split(",") if entry.strip()}


def _hub_columns(repo: hub.Repo) -> dict[str, Any]:
    columns: dict[str, Any] = {"gated": repo.gated, "downloads": repo.downloads, "likes": repo.likes}
    if not repo.description.card.get("base_model_relation") and repo.relation:
        columns["base_model_relation"] = repo.relation
    return columns


def _hub_facts(repo: hub.Repo, load: list[str]) -> dict[str, Any]:
    """Of the files that are loaded; what else lies in a repo can be thousands of checkpoints."""
    found = repo.description
    return {
        "place": "hub",
        "files": {each: {"size": found.files[each].size, "sha256": found.files[each].sha256} for each in load},
        "load": load,
        "refs": [repo.asked.revision or "main"],
        "card": _card_facts(found),
    }


def _hub_weights_hash(found: Description, weights: list[str]) -> str | None:
    """None where the Hub does not tell a weight file's sha256 (small files outside LFS)."""
    hashes = {each: found.files[each].sha256 for each in weights}
    return weights_hash({each: digest for each, digest in hashes.items() if digest}) if all(hashes.values()) else None


# --- adapters ---------------------------------------------------------------------------------------------------


def _adapter_weights(found: Description) -> list[str]:
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


def _base_of_adapter(found: Description, trust: bool, base: str | None) -> Candidate:
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
    try:
        found_base = candidate(stated, trust_remote_code=trust)
    except Refused as error:
        raise Refused(error.reason, f"the base of {found.where}: {error.message}", hint=error.hint) from error
    if found_base.kind == "adapter":
        raise Refused("unsupported_format", f"{found.where} adapts another adapter", hint="merge that one first")
    return found_base


def _looks_like_hub(stated: str) -> bool:
    import re

    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", stated) is not None


def _adapter_columns(found: Description, base: Candidate, weights: list[str]) -> dict[str, Any]:
    """The base's facts hold for the sum, but for what the adapter's own card and template say."""
    own = facts.columns(found, weights)
    inherited = ("architecture", "model_type", "parameters", "dtype", "quantization", "vocabulary", "context_length")
    columns = {each: base.columns.get(each) for each in inherited}
    columns.update({each: value for each, value in own.items() if each not in inherited})
    columns["template_hash"] = own["template_hash"] or base.columns.get("template_hash")
    columns["base_model"], columns["base_model_relation"] = base.handle, "adapter"
    return columns


def _place_of(base: Candidate) -> dict[str, Any]:
    """What loading needs to know of the base."""
    keys = ("place", "files", "load")
    return {
        "kind": base.kind,
        "source": base.source,
        "revision": base.revision,
        "file": base.file,
        **{key: base.facts[key] for key in keys if key in base.facts},
    }


# --- both -------------------------------------------------------------------------------------------------------


def _with_parameters(found: Description, parameters: dict[str, int] | None) -> Description:
    from dataclasses import replace

    return replace(found, parameters=parameters)


def _card_facts(found: Description) -> dict[str, Any]:
    wanted = ("language", "datasets", "tags", "library_name", "license_link")
    card = {key: found.card[key] for key in wanted if isinstance(found.card.get(key), (str, list))}
    return {
        key: value for key, value in card.items() if isinstance(value, str) or all(isinstance(v, str) for v in value)
    }


def _warnings(found: Description, columns: Mapping[str, Any]) -> list[str]:
    said = []
    if columns.get("template_hash") is None:
        said.append("no chat template: score it with --profile plain")
    if str(columns.get("dtype")).startswith("float8"):
        said.append("the checkpoint holds 8-bit floats; other dtypes are made from them")
    if columns.get("quantization") and columns.get("parameters"):
        said.append("the parameter count is that of the packed tensors")
    return said
