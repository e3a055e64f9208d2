"""Repos of the Hub as candidates for the registry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from registry.canonical import sha256_hex
from registry.errors import Refused
from registry.identity import Candidate, adapter_identity, handle_from_name, hub_identity, weights_hash
from registry.settings import settings
from tasks import adapters, facts, gguf_files, hub, refusals
from tasks.facts import Description
from tasks.references import HubReference


def of_hub(reference: HubReference, name: str | None, trust: bool, base: str | None) -> Candidate:
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
        found = replace(found, parameters=hub.header_parameters(repo.id, repo.commit))
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
        facts={**_hub_facts(repo, load), "warnings": facts.warnings(found, columns)},
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
    weights = adapters.choose_weights(found)
    of_base = adapters.base_of(found, trust, base)
    load = hub.files_to_load(found, weights, code=False)
    return Candidate(
        kind="adapter",
        identity=adapter_identity(of_base.identity, hub_identity(repo.id, repo.commit)),
        trust_remote_code=of_base.trust_remote_code,
        base=of_base,
        columns={**adapters.columns(found, of_base, weights), **_hub_columns(repo)},
        facts={**_hub_facts(repo, load), "base": adapters.place_of(of_base)},
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
        "card": facts.card_facts(found),
    }


def _hub_weights_hash(found: Description, weights: list[str]) -> str | None:
    """None where the Hub does not tell a weight file's sha256 (small files outside LFS)."""
    hashes = {each: found.files[each].sha256 for each in weights}
    return weights_hash({each: digest for each, digest in hashes.items() if digest}) if all(hashes.values()) else None
