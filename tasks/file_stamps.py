"""Seeing in a moment, without reading it, whether a file may have been written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.errors import Refused

STAMP = ("size", "mtime_ns", "ctime_ns", "inode")
"""A program can set a file's time of modification, but not that of its last change of status (ctime)."""


def stamp(path: Path) -> dict[str, int]:
    """Raises FileNotFoundError."""
    stat = path.stat()
    return dict(zip(STAMP, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino), strict=True))


def same(found: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """False as well where `known` lacks a part: then only the content can tell."""
    return all(found[part] == known.get(part) for part in STAMP)


def require_same(watched: Mapping[Path, Mapping[str, int]], name: str) -> None:
    """Raises Refused("changed") when a file was written, replaced or removed since its stamp was taken."""
    for path, known in watched.items():
        if not path.is_file() or not same(stamp(path), known):
            raise Refused(
                "changed",
                f"{path} changed while {name} was in use: the numbers may be those of other weights",
                hint="leave a model's files alone while it is scored; register what lies there now and score that",
            )
