"""Folders and GGUF files on this disk as candidates for the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from registry.errors import Refused
from registry.identity import (
    IDENTITY_FILES,
    WEIGHT_FILES,
    Candidate,
    adapter_identity,
    content_identity,
    handle_from_name,
    hash_files,
    weights_hash,
)
from registry.settings import settings
from tasks import adapters, facts, gguf_files, refusals
from tasks.facts import Description
from tasks.file_stamps import stamp


def of_folder(folder: Path, name: str | None, trust: bool, base: str | None) -> Candidate:
    found = facts.describe_folder(folder)
    if found.config is None and found.adapter_config is not None:
        return _adapter_in_folder(folder, found, name, trust, base)
    code = refusals.check_architecture(found, remote_code=trust)
    weights = refusals.choose_weights(found, allow_pickle=settings().allow_pickle)
    refusals.check_tokenizer(found)
    headers = {each: facts.safetensors_header(folder / each) for each in weights if each.endswith(".safetensors")}
    _require_tensors_of_index(found, headers)
    found = replace(found, parameters=facts.count_parameters(list(headers.values())))
    (hashes, files), columns = _hash_folder(folder, found, weights), facts.columns(found, weights)
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
        facts=_folder_facts(found, files, columns),
    )


def of_gguf(path: Path, name: str | None) -> Candidate:
    header = gguf_files.read_header(path)
    columns = gguf_files.columns(header, str(path), path.stat().st_size)
    if int(header.fields.get("split.count") or 0) > 1:
        raise Refused(
            "unsupported_format", f"{path} is one part of several", hint="merge them: llama-gguf-split --merge"
        )
    hashes, files = _hash(path.parent, [path.name])
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
            "files": files,
            "named_in_file": header.fields.get("general.name"),
        },
    )


def _adapter_in_folder(folder: Path, found: Description, name: str | None, trust: bool, base: str | None) -> Candidate:
    weights = adapters.choose_weights(found)
    of_base = adapters.base_of(found, trust, base)
    hashes, files = _hash_folder(folder, found, weights)
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
        columns=adapters.columns(found, of_base, weights),
        facts={**_folder_facts(found, files, {}), "base": adapters.place_of(of_base)},
    )


def identity_files_of(folder: Path) -> list[str]:
    """The names that registering this folder now would hash."""
    found = facts.describe_folder(folder)
    if found.config is None and found.adapter_config is not None:
        return _identity_files(found, adapters.choose_weights(found))
    return _identity_files(found, refusals.choose_weights(found, allow_pickle=settings().allow_pickle))


def _identity_files(found: Description, weights: list[str]) -> list[str]:
    """What decides the log-probabilities; weights in a format that is not loaded are left out."""
    others = [each for each in found.files if IDENTITY_FILES.match(each) and not WEIGHT_FILES.match(each)]
    return sorted({*weights, *others})


def _hash_folder(folder: Path, found: Description, weights: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    return _hash(folder, _identity_files(found, weights))


def _hash(folder: Path, names: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """SHA-256 by name, and the same with the stamp that lets a later load see a touched file in a moment.

    The stamps are older than the hashes, so a file that is written meanwhile does not pass for the hashed one.
    """
    stamps = {each: stamp(folder / each) for each in names}
    hashes = hash_files(folder, names)
    return hashes, {each: {"sha256": digest, **stamps[each]} for each, digest in hashes.items()}


def _folder_facts(found: Description, files: dict[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "place": "folder",
        "files": files,
        "card": facts.card_facts(found),
        "warnings": facts.warnings(found, columns),
    }


def _require_tensors_of_index(found: Description, headers: Mapping[str, Mapping[str, Any]]) -> None:
    for tensor, shard in (found.weight_map or {}).items():
        if shard in headers and tensor not in headers[shard]:
            raise Refused(
                "bad_weights",
                f"{found.where}: the index promises {tensor} in {shard}, which does not hold it",
                hint="the index is stale or the shard is of another upload: get the files again",
            )
