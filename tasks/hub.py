"""The Hugging Face Hub: resolve to a commit first, describe without weights, download by commit.

Commit first, because a warm cache hides that a repo is gone, gated or moved, and because `main` may move between two
files.  The `HF_*` variables are huggingface_hub's own and hold here as everywhere.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import HubUnavailable, NoSpace
from tasks import facts
from tasks.facts import Description, File
from tasks.hub_checks import checked_sha256, checked_size, is_intact, is_safe_name, require_answer, stated_sha256
from tasks.hub_errors import hub_errors, refusal
from tasks.hub_pace import patiently
from tasks.references import HubReference

LOADED_PATTERNS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*spiece.model",
    "tekken.json",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*.index.json",
)
"""Downloaded beside the chosen weight files; everything else stays where it is."""


DOWNLOADS_AT_ONCE = 4
LARGE_FILE = 10_000_000
"""Bytes."""


@dataclass(frozen=True)
class Repo:
    """A repo at a commit, as the Hub describes it."""

    id: str
    """Canonical: what the Hub answers, not what was asked for."""
    commit: str
    asked: HubReference
    description: Description
    gated: str | None
    downloads: int | None
    likes: int | None
    gguf: Mapping[str, Any]
    """The Hub's reading of a GGUF header: architecture, context_length, chat_template, total."""
    relation: str | None
    """From the Hub's own tags, e.g. `quantized` of base_model:quantized:org/base."""


def describe(reference: HubReference) -> Repo:
    """Resolves the commit and reads the small files of that commit; no weights.

    Waits for a busy Hub as `hub_pace` says.  Raises Refused (gated, not_found_or_private, disabled, revision_gone,
    unauthorised) or HubUnavailable.
    """
    return patiently(lambda: _describe(reference), str(reference))


def _describe(reference: HubReference) -> Repo:
    from huggingface_hub import HfApi

    with hub_errors(str(reference)):
        info = HfApi().model_info(reference.repo, revision=reference.revision, files_metadata=True)
    if info.disabled:
        raise refusal("disabled", str(reference))
    if info.sha is None:
        raise HubUnavailable(f"the Hub gave no commit for {reference}", hint="try again")
    require_answer(info.id, info.sha, str(reference))
    files = {}
    for sibling in info.siblings or []:
        if is_safe_name(sibling.rfilename):
            digest = checked_sha256(sibling.lfs.sha256) if sibling.lfs is not None else None
            files[sibling.rfilename] = File(checked_size(sibling.size), digest)
    where = f"{info.id}@{info.sha[:12]}"
    small = {name: _small_file(info.id, info.sha, name) for name in facts.SMALL_FILES if name in files}
    documents = {name: facts.read_json(path) for name, path in small.items() if name.endswith(".json")}
    tokenizer_config = documents.get("tokenizer_config.json") or {}
    jinja = small.get("chat_template.jinja")
    index = documents.get("model.safetensors.index.json")
    card: dict[str, Any] = vars(info.card_data) if info.card_data is not None else {}
    description = Description(
        where=where,
        files=files,
        config=documents.get("config.json"),
        adapter_config=documents.get("adapter_config.json"),
        tokenizer_config=tokenizer_config,
        chat_template=facts.template_text(facts.read_template(jinja) if jinja else None, tokenizer_config),
        weight_map=facts.read_weight_map(index, where),
        parameters=dict(info.safetensors.parameters) if info.safetensors is not None else None,
        card=card,
        pipeline_tag=info.pipeline_tag,
        library=info.library_name,
    )
    return Repo(
        id=info.id,
        commit=info.sha,
        asked=reference,
        description=description,
        gated=str(info.gated) if info.gated else None,
        downloads=info.downloads,
        likes=info.likes,
        gguf=info.gguf or {},
        relation=_relation(info.tags or []),
    )


def header_parameters(repo: str, commit: str) -> dict[str, int] | None:
    """Values by dtype from the safetensors headers (a few kilobytes each); None where the Hub cannot say."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = patiently(
            lambda: HfApi().get_safetensors_metadata(repo, revision=commit).parameter_count, f"{repo}@{commit[:12]}"
        )
        return {str(name): count for name, count in found.items()}
    except (NotASafetensorsRepoError, SafetensorsParsingError):
        return None


def files_to_load(description: Description, weights: list[str], *, code: bool) -> list[str]:
    """Weights of one format, and what config and tokenizer need."""
    from fnmatch import fnmatch

    patterns = [*LOADED_PATTERNS, *(["*.py"] if code else [])]
    beside = [
        name
        for name in description.files
        if any(fnmatch(name, pattern) for pattern in patterns) and ("/" not in name or name.endswith(".jinja"))
    ]
    return sorted({*weights, *beside})


def download(repo: str, commit: str, sizes: Mapping[str, int], hashes: Mapping[str, str | None] | None = None) -> Path:
    """The snapshot folder that holds these files (name → size in bytes) at that commit.

    `hashes` are the registered SHA-256 of files; without them the Hub's own for files in LFS.  Content that differs is
    fetched once more.  Without a request when all are there and right.

    Raises NoSpace before anything is fetched that would not fit, HubUnavailable when content stays wrong, Refused and
    HubUnavailable as `describe` does.
    """
    where = f"{repo}@{commit[:12]}"
    folder = _cached_folder(repo, commit, sizes)
    if folder is None:
        require_space(where, missing_bytes(repo, commit, sizes))
        patiently(lambda: _fetch(repo, commit, sizes), where)
        folder = _cached_folder(repo, commit, sizes)
    if folder is None:
        raise HubUnavailable(f"the files of {where} are not of the size the Hub stated", hint="run it again")
    damaged = _damaged(folder, sizes, hashes or {})
    if damaged:
        require_space(where, sum(sizes[name] for name in damaged))
        patiently(lambda: _fetch_anew(repo, commit, damaged), where)
        damaged = _damaged(folder, sizes, hashes or {})
    if damaged:
        raise HubUnavailable(
            f"{damaged[0]} of {where} has not the content (SHA-256) that the Hub states, fetched twice",
            hint="a proxy or mirror may damage it: check HF_ENDPOINT, or run it again later",
        )
    return folder


def _fetch(repo: str, commit: str, sizes: Mapping[str, int]) -> None:
    """File by file: snapshot_download gives back a half-filled folder when the Hub refuses or limits its listing.

    Large files come one after another in the calling thread (xet and fast mirrors fill the line with one), since
    Ctrl-C reaches no other thread.
    """
    from huggingface_hub import hf_hub_download

    missing = sorted(name for name, size in sizes.items() if not _is_cached(repo, commit, name, size))
    # A file of another size is there: without force the library would be content with it.
    wrong = [name for name in missing if _cached(repo, commit, name) is not None]
    small = [name for name in missing if name not in wrong and sizes[name] < LARGE_FILE]
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        waiting = [pool.submit(hf_hub_download, repo, name, revision=commit) for name in small]
        try:
            for one in waiting:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for name in missing:
        if name not in small and name not in wrong:
            hf_hub_download(repo, name, revision=commit)
    _fetch_anew(repo, commit, wrong)


def _fetch_anew(repo: str, commit: str, names: list[str]) -> None:
    """In place of what is there.  A process that has the old file open keeps it: the new one takes over its name."""
    from huggingface_hub import constants, hf_hub_download

    for name in names:
        if constants.HF_HUB_OFFLINE:
            raise HubUnavailable(
                f"{name} of {repo}@{commit[:12]} is damaged in the Hub cache, and HF_HUB_OFFLINE forbids to fetch it",
                hint="unset HF_HUB_OFFLINE and run it again",
            )
        hf_hub_download(repo, name, revision=commit, force_download=True)


def _damaged(folder: Path, names: Iterable[str], hashes: Mapping[str, str | None]) -> list[str]:
    found = []
    for name in sorted(names):
        digest = hashes.get(name) or stated_sha256(folder / name)
        if digest is not None and not is_intact(folder / name, digest):
            found.append(name)
    return found


def missing_bytes(repo: str, commit: str, sizes: Mapping[str, int]) -> int:
    """What is still to be downloaded."""
    return sum(size for name, size in sizes.items() if not _is_cached(repo, commit, name, size))


def require_space(where: str, needed: int) -> None:
    """Raises NoSpace when the Hub cache's disk has less room than that, with a little to spare."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    place = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed and needed + 2**20 > free:
        raise NoSpace(
            f"{where} needs {_size(needed)} in {cache}, and {_size(free)} are free",
            hint="free some space (`hf cache prune`), or set HF_HUB_CACHE to a larger disk",
        )


def _small_file(repo: str, commit: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    with hub_errors(f"{repo}@{commit[:12]}"):
        return Path(hf_hub_download(repo, name, revision=commit))


def _cached(repo: str, commit: str, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=commit)
    return Path(found) if isinstance(found, str) else None


def _is_cached(repo: str, commit: str, name: str, size: int) -> bool:
    path = _cached(repo, commit, name)
    return path is not None and path.stat().st_size == size


def _cached_folder(repo: str, commit: str, sizes: Mapping[str, int]) -> Path | None:
    if not all(_is_cached(repo, commit, name, size) for name, size in sizes.items()):
        return None
    first = _cached(repo, commit, min(sizes, key=lambda name: name.count("/")))
    return first.parent if first is not None else None


def _relation(tags: list[str]) -> str | None:
    """The Hub computes it from the card and the files: base_model:finetune:org/base."""
    kinds = ("finetune", "adapter", "quantized", "merge")
    return next((kind for tag in tags for kind in kinds if tag.startswith(f"base_model:{kind}:")), None)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
