"""What makes a model itself: one sha256 a thing, whatever it is called and wherever it lies.

Names and places are not part of it.  A Hub repo is itself by its commit; what is read from a disk is itself by the
bytes that decide its log-probabilities: config, tokenizer, template and weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.canonical import hash_json
from registry.errors import BadInput

IDENTITY_FILES = re.compile(
    r"""^(config\.json|adapter_config\.json|.*\.safetensors(\.index\.json)?|.*\.gguf|pytorch_model.*\.bin(\.index\.json)?
    |adapter_model\.bin|tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt
    |.*spiece\.model|tekken\.json|chat_template.*\.(json|jinja)|additional_chat_templates/.*\.jinja|.*\.py)$""",
    re.VERBOSE,
)
"""Files of a folder that decide what the model says.  READMEs, optimizer states and logs do not."""

WEIGHT_FILES = re.compile(r"^.*\.(safetensors|gguf|bin)$")


@dataclass(frozen=True)
class Candidate:
    """A thing as it was found, with everything needed to make its row; nothing is stored yet."""

    kind: str
    handle: str
    """`owner/name`, in its owner's spelling."""
    revision: str
    identity: str
    source: str
    file: str = ""
    weights_hash: str | None = None
    trust_remote_code: bool = False
    base: Candidate | None = None
    """An adapter's base: registered first."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(alias, kind) that come with it: the old id of a renamed repo."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Values of the fact columns of `models`, e.g. architecture, parameters, licence."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Everything else as read: file sizes and hashes, card data, `refs` (the branches and tags asked for), warnings."""


def hub_identity(repo_id: str, commit: str, file: str = "") -> str:
    """The Hub compares ids without case; a commit is 40 hex digits; `file` only for one GGUF among several."""
    return hash_json({"kind": "hub", "repo": repo_id.lower(), "commit": commit.lower(), "file": file})


def content_identity(kind: str, hashes: Mapping[str, str]) -> str:
    """Of a `folder` (relative file name → sha256) or a `gguf` (one file; its name does not count)."""
    content: Any = sorted(hashes.values()) if kind == "gguf" else dict(hashes)
    return hash_json({"kind": kind, "files": content})


def adapter_identity(base_identity: str, adapter: str) -> str:
    """`adapter` is the identity of the adapter's own repo or folder: the same adapter on another base is another
    model."""
    return hash_json({"kind": "adapter", "base": base_identity, "adapter": adapter})


def named_identity(handle: str, revision: str = "unknown") -> str:
    """A name in two imports is one row until somebody says which model it is."""
    return hash_json({"kind": "named", "handle": handle.lower(), "revision": revision})


def weights_hash(hashes: Mapping[str, str]) -> str | None:
    """sha256 over the weight files' own sha256, names left out: equal for a re-upload.  None without weight files."""
    weights = sorted(digest for name, digest in hashes.items() if WEIGHT_FILES.match(name))
    return hash_json(weights) if weights else None


def hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    """Name → sha256 hex of each file's bytes, read in pieces."""
    hashes = {}
    for name in sorted(names):
        with (folder / name).open("rb") as stream:
            hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def handle_from_name(name: str) -> tuple[str, str]:
    """(handle, revision) for a name as people and imports write it.

    `owner/name` stays; a name without an owner becomes `local/name`; of several slashes the first divides and the
    others become `--`; white space becomes `-`; what follows an `@` is the revision, `unknown` without one.
    Raises BadInput when nothing is left.
    """
    text, _, revision = name.strip().partition("@")
    text = re.sub(r"\s+", "-", text.strip().strip("/"))
    owner, slash, rest = text.partition("/")
    if not slash:
        owner, rest = "local", text
    rest = re.sub(r"/+", "--", rest.strip("/"))
    if not owner or not rest:
        raise BadInput(f"{name!r} is not a model name", hint="write owner/name or just name")
    return f"{owner}/{rest}", re.sub(r"\s+", "-", revision.strip()) or "unknown"
