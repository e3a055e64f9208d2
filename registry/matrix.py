"""All vectors of one space and transform as memory-mapped matrices on this machine's disk.

A cache and nothing else: it is made from the database, extended when vectors were added, made anew when it is damaged
or members changed, and may be deleted at any time.  Files of one folder:

    manifest.json    what the rows are; written last, replaced atomically
    raw.f32          float32 [K, N] as stored, NaN where there is no value
    statuses.u1      uint8 [K, N]
    centered.f32     float32 [K, N]: ξ minus a per-text offset, 0 where there is no value
    norms.f64        float64 [K]: squared norms of the centred rows
    sums.f64         float64 [K]: their sums
    gaps.i4          int32: the texts without a value, row after row
    gap_counts.i4    int32 [K]: how many of them each row has
    offset.f64       float64 [N]: the per-text offset

The per-text offset (the median of the first rows) changes no distance, but it is what lets a float32 product tell near
duplicates apart: without it |x|² is 10⁵ times the distance that is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from registry.canonical import hash_json
from registry.errors import NoSpace, Unavailable
from registry.queries import textsets, transforms, vectors
from registry.queries.vectors import Member
from registry.settings import settings
from registry.spaces import Space

Array = np.ndarray[Any, np.dtype[Any]]

FORMAT = 5
OFFSET_ROWS = 256
"""Rows whose median is the per-text offset; any offset near the bulk will do."""

LIMIT = 1e15
"""Of a centred value: beyond it sums of squares leave float32.  Such a row is kept as 0 with an infinite norm, and is
compared in float64 only."""

ATTEMPTS = 3
"""To build a folder that another program keeps deleting."""

BLOCK_ROWS = 256

# What this process has mapped, by folder, with the stamp it was mapped at.
_opened: dict[Path, tuple[list[int], Matrix]] = {}


@dataclass(frozen=True)
class Matrix:
    """Read-only views, one row a member, by ascending vector id."""

    space: Space
    transform: str
    model_ids: Array
    vector_ids: Array
    raw: Array
    statuses: Array
    centered: Array
    norms: Array
    sums: Array
    gaps: Array
    """int32: texts without a value, row after row."""
    gap_counts: Array
    """int32 [K]"""
    response_bytes: Array | None
    """int64 [N], None for an opaque set."""
    members: dict[int, Member]
    """By model id."""

    @property
    def complete(self) -> bool:
        """Every row carries a value for every text."""
        return not self.gaps.size

    def valid(self, rows: Any) -> Array:
        """bool, of one row or several."""
        return vectors.is_valid(self.statuses[rows])

    def row_of(self, model_id: int) -> int | None:
        found = np.flatnonzero(self.model_ids == model_id)
        return int(found[0]) if found.size else None


def load(session: Session, text_set: textsets.TextSetInfo, transform: transforms.TransformInfo, space: Space) -> Matrix:
    """The matrix of a space, brought up to date first.

    Two processes that find it out of date take turns.  A folder that cannot be read is made anew.

    Raises Unavailable, or NoSpace, where the files cannot be written.
    """
    folder = _folder(text_set, transform, space)
    stamp = vectors.stamp(session, text_set.id, transform.id, space.profile, space.unit)
    if folder in _opened and _opened[folder][0] == stamp and (folder / "manifest.json").exists():
        return _opened[folder][1]
    manifest = _manifest(folder)
    matrix = _mapped(folder, manifest, transform, space) if manifest and manifest["stamp"] == stamp else None
    for _ in range(ATTEMPTS):
        if matrix is not None:
            break
        with _clear_errors(folder), contextlib.suppress(FileNotFoundError), _lock(folder):
            manifest = _manifest(folder)
            if manifest is None or manifest["stamp"] != stamp:
                manifest = _refresh(session, folder, text_set, transform, space, stamp)
            # Under the lock no process of ours removes what the manifest names.
            matrix = _mapped(folder, manifest, transform, space)
    if matrix is None:
        raise Unavailable(f"the cache in {folder} is being deleted by another program", hint="try again")
    _opened[folder] = (stamp, matrix)
    return matrix


def discard(text_set: textsets.TextSetInfo, transform: transforms.TransformInfo, space: Space) -> None:
    """Forgets the files, for whoever found them damaged; the next `load` makes them anew."""
    folder = _folder(text_set, transform, space)
    _opened.pop(folder, None)
    with _clear_errors(folder), _lock(folder):
        (folder / "manifest.json").unlink(missing_ok=True)


@contextlib.contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Raises NoSpace or Unavailable for what the file system refuses."""
    try:
        yield
    except OSError as error:
        message = f"the cache in {folder} cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(message, hint="free some space and run the same again") from error
        raise Unavailable(message, hint=f"remove or repair {error.filename or folder}") from error


def _folder(text_set: textsets.TextSetInfo, transform: transforms.TransformInfo, space: Space) -> Path:
    # The set's row, so that two databases behind one home never share a folder.
    row = [text_set.id, text_set.created_at.isoformat()]
    return settings().home / "cache" / "vectors" / hash_json([space.key, transform.spec_hash, row])[:32]


def _manifest(folder: Path) -> dict[str, Any] | None:
    """None unless it is readable and nobody has written to the files since it was: as after a killed writer."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            return None
        if manifest["files"] != _stamps(_data(folder, manifest)) or any(len(one) != 7 for one in manifest["members"]):
            return None
        return manifest
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stamps(data: Path) -> dict[str, list[int]]:
    """Size and time of writing of every file."""
    found = {name: (data / name).stat() for name in _sizes(0, 0, 0)}
    return {name: [one.st_size, one.st_mtime_ns] for name, one in found.items()}


def _sizes(k: int, n: int, gaps: int) -> dict[str, int]:
    return {
        "raw.f32": 4 * k * n,
        "statuses.u1": k * n,
        "centered.f32": 4 * k * n,
        "norms.f64": 8 * k,
        "sums.f64": 8 * k,
        "gaps.i4": 4 * gaps,
        "gap_counts.i4": 4 * k,
        "offset.f64": 8 * n,
    }


def _data(folder: Path, manifest: dict[str, Any]) -> Path:
    return folder / f"data-{manifest['generation']}"


def _refresh(
    session: Session,
    folder: Path,
    text_set: textsets.TextSetInfo,
    transform: transforms.TransformInfo,
    space: Space,
    stamp: list[int],
) -> dict[str, Any]:
    """Appends what is new where the old rows still stand, else builds a new generation beside the old one."""
    wanted = sorted(
        vectors.members(session, text_set.id, transform.id, space.profile, space.unit), key=lambda one: one.vector_id
    )
    old = _manifest(folder)
    kept = old["members"] if old is not None else []
    if old is not None and kept == [_entry(one) for one in wanted[: len(kept)]]:
        generation = old["generation"]
    else:
        kept, generation = [], (old["generation"] + 1 if old is not None else _next_generation(folder))
        shutil.rmtree(folder / f"data-{generation}", ignore_errors=True)
        (folder / f"data-{generation}").mkdir(parents=True)
    data = folder / f"data-{generation}"
    gaps = old["gaps"] if kept and old is not None else 0
    gaps = _append(session, data, text_set.n_texts, len(kept), gaps, wanted[len(kept) :])
    sizes = textsets.response_byte_counts(session, text_set.id)
    manifest = {
        "format": FORMAT,
        "generation": generation,
        "stamp": stamp,
        "space": space.key,
        "transform": transform.name,
        "n_texts": text_set.n_texts,
        "gaps": gaps,
        "files": _stamps(data),
        "response_bytes": sizes,
        "members": [_entry(one) for one in wanted],
    }
    _replace(folder / "manifest.json", json.dumps(manifest))
    for stale in folder.glob("data-*"):
        if stale != data:
            # A reader that has it mapped keeps its pages; the names may go.
            shutil.rmtree(stale, ignore_errors=True)
    return manifest


def _next_generation(folder: Path) -> int:
    """Beyond every generation on disk: a reader may still have the files of a damaged one mapped."""
    found = [int(path.name.removeprefix("data-")) for path in folder.glob("data-*") if path.name[5:].isdigit()]
    return max(found, default=0) + 1


def _append(session: Session, data: Path, n: int, start: int, gaps: int, new: Sequence[Member]) -> int:
    """Writes the rows of `new` behind row `start`, which have `gaps` texts without a value; how many there are then.

    What a killed writer left behind the rows that the manifest counts is overwritten.
    """
    offset_file = data / "offset.f64"
    offset = np.fromfile(offset_file) if start else None
    with contextlib.ExitStack() as stack:
        files = {}
        for name, size in _sizes(start, n, gaps).items():
            path = data / name
            path.touch()
            if name != "offset.f64":
                files[name] = stack.enter_context(path.open("r+b"))
                files[name].truncate(size)
                files[name].seek(size)
        for block in _blocks(vectors.read(session, [one.vector_id for one in new])):
            raw = np.stack([one.log_likelihoods for one in block])
            statuses = np.stack([one.statuses for one in block])
            valid = vectors.is_valid(statuses)
            missing = np.nonzero(~valid)[1].astype("<i4")
            gaps += len(missing)
            xi = _centered(raw, valid)
            if offset is None:
                offset = _middle(xi[:OFFSET_ROWS], valid[:OFFSET_ROWS])
                offset.tofile(offset_file)
            shifted = np.where(valid, xi - offset, 0.0)
            beyond = np.abs(shifted).max(axis=1, initial=0.0) > LIMIT
            shifted[beyond] = 0.0
            centered = shifted.astype("<f4")
            files["raw.f32"].write(raw.astype("<f4").tobytes())
            files["statuses.u1"].write(statuses.tobytes())
            files["centered.f32"].write(centered.tobytes())
            # Of what is stored, not of what it was rounded from: the search subtracts products of the stored values.
            norms = np.einsum("ij,ij->i", centered, centered, dtype=np.float64)
            norms[beyond] = np.inf
            files["norms.f64"].write(norms.tobytes())
            files["sums.f64"].write(centered.sum(axis=1, dtype=np.float64).tobytes())
            files["gaps.i4"].write(missing.tobytes())
            files["gap_counts.i4"].write(np.count_nonzero(~valid, axis=1).astype("<i4").tobytes())
        if offset is None:
            np.zeros(n).tofile(offset_file)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return gaps


def _middle(xi: Array, valid: Array) -> Array:
    """The median over rows, text by text: one model with a wild value must not take everybody's digits."""
    some = valid.any(axis=0)
    middle = np.zeros(xi.shape[1])
    middle[some] = np.nanmedian(np.where(valid, xi, np.nan)[:, some], axis=0)
    return middle


def _centered(raw: Array, valid: Array) -> Array:
    """ξ in float64, over each row's valid texts; 0 where there is no value."""
    exact = np.where(valid, raw, 0.0).astype(np.float64)
    means = exact.sum(axis=1) / np.maximum(valid.sum(axis=1), 1)
    centered: Array = np.where(valid, exact - means[:, None], 0.0)
    return centered


def _blocks(values: Iterator[vectors.Values]) -> Iterator[list[vectors.Values]]:
    block: list[vectors.Values] = []
    for one in values:
        block.append(one)
        if len(block) == BLOCK_ROWS:
            yield block
            block = []
    if block:
        yield block


def _entry(member: Member) -> list[Any]:
    return [
        member.model_id,
        member.vector_id,
        member.dtype,
        member.engine_version,
        member.checksum.hex(),
        member.noise_floor_nats,
        member.template_hash,
    ]


def _mapped(folder: Path, manifest: dict[str, Any], transform: transforms.TransformInfo, space: Space) -> Matrix | None:
    """None when another process removed the files since the manifest was read."""
    try:
        return _views(folder, manifest, transform, space)
    except (FileNotFoundError, ValueError):
        return None


def _views(folder: Path, manifest: dict[str, Any], transform: transforms.TransformInfo, space: Space) -> Matrix:
    data = _data(folder, manifest)
    k, n = len(manifest["members"]), manifest["n_texts"]

    def view(name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(data / name, dtype, "r", shape=shape)

    members = {
        entry[0]: Member(entry[0], entry[1], entry[2], entry[3], bytes.fromhex(entry[4]), entry[5], entry[6])
        for entry in manifest["members"]
    }
    sizes = manifest["response_bytes"]
    return Matrix(
        space=space,
        transform=transform.name,
        model_ids=np.array([entry[0] for entry in manifest["members"]], dtype=np.int64),
        vector_ids=np.array([entry[1] for entry in manifest["members"]], dtype=np.int64),
        raw=view("raw.f32", "<f4", (k, n)),
        statuses=view("statuses.u1", "u1", (k, n)),
        centered=view("centered.f32", "<f4", (k, n)),
        norms=view("norms.f64", "<f8", (k,)),
        sums=view("sums.f64", "<f8", (k,)),
        gaps=view("gaps.i4", "<i4", (manifest["gaps"],)),
        gap_counts=view("gap_counts.i4", "<i4", (k,)),
        response_bytes=np.array(sizes, dtype=np.int64) if sizes is not None else None,
        members=members,
    )


def _replace(path: Path, content: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with scratch.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
