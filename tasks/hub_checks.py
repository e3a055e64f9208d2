"""What a Hub says is checked before it is used in a path, and what it sends before it is scored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from registry.errors import HubUnavailable
from registry.settings import settings
from tasks.file_stamps import same, stamp

REPO_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")

LONGEST_PART, LONGEST_NAME = 255, 1024
"""Bytes of a file's name between slashes (what disks allow) and in all."""

LARGEST_FILE = 2**60
"""Bytes; more is a mistake of the listing."""


def require_answer(repo: str, commit: str, asked: str) -> None:
    """Raises HubUnavailable when what answers names no repo and commit: both become folders and names of rows."""
    if not REPO_ID.fullmatch(repo) or ".." in repo or not COMMIT.fullmatch(commit):
        raise HubUnavailable(
            f"what answers for {asked} is no Hub: it names the repo {repo[:100]!r} at commit {commit[:50]!r}",
            hint="check HF_ENDPOINT and proxies, then run it again",
        )


def is_safe_name(name: str) -> bool:
    """Whether a listed file can lie below the repo's folder and be shown on a terminal.

    Others are passed over as if they were not listed: nothing that modelkin loads is named so.
    """
    parts = name.split("/")
    return (
        name.isprintable()
        and "\\" not in name
        and len(name.encode(errors="surrogatepass")) <= LONGEST_NAME
        and all(part not in ("", ".", "..") and len(part.encode()) <= LONGEST_PART for part in parts)
    )


def checked_size(size: object) -> int:
    """Bytes; what is no size counts as none."""
    return size if isinstance(size, int) and 0 <= size < LARGEST_FILE else 0


def checked_sha256(digest: object) -> str | None:
    return digest if isinstance(digest, str) and SHA256.fullmatch(digest) else None


def stated_sha256(path: Path) -> str | None:
    """Of a file in the Hub cache, by the name of its blob: LFS files are stored under their SHA-256.

    One link is followed, not all: a blob may be a link itself, into a store that names files in another way.
    """
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if SHA256.fullmatch(name) else None


def is_intact(path: Path, sha256: str) -> bool:
    """Whether the content has this SHA-256.

    huggingface_hub compares sizes only.  Hashing reads the file once, at 1.4 GB/s on one core of the machine that this
    was written on: eleven seconds for 16 GB, which take minutes to download.  That it was done is remembered with the
    file's stamp in MODELKIN_HOME, so that later loads cost one look at the stamp.
    """
    before = stamp(path)
    note = settings().home / "cache" / "verified" / f"{sha256}.json"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if same(before, json.loads(note.read_bytes())):
            return True
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != sha256 or not same(stamp(path), before):
            return False
    with contextlib.suppress(OSError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(before))
        part.replace(note)
    return True
