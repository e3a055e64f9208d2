"""What a file of log-likelihood vectors holds, whatever its format, and how one is written without leaving half of it.

modelkin's own formats (`npz`, `parquet_vectors`) fill every field; other people's fill what they know.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from registry.errors import BadInput, Conflict, NotFound, Unparseable, Unsupported
from registry.spaces import Space
from registry.statuses import FIRST_WITHOUT_VALUE, Status
from registry.textsets import content_hash

Array = np.ndarray[Any, np.dtype[Any]]

FORMAT = "modelkin-vectors/1"
UNITS = ("nats", "bits_per_byte")
MAX_BYTES = 1 << 35
"""Unpacked size of a file that is read: 32 GiB, some 20,000 models on 100,000 texts."""
MAX_NAME = 300
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Keys:
    """Where somebody else's file keeps things: names of arrays (npz) or columns (Parquet)."""

    values: str | None = None
    """[models × texts]"""
    models: str | None = None
    texts: str | None = None
    """Ids of the texts, or their hashes."""
    unit: str = "nats"


@dataclass(frozen=True)
class FileTexts:
    """The texts that the columns stand for."""

    count: int
    hashes: tuple[str, ...] | None = None
    """sha256 hex by position, see `registry.textsets`."""
    ids: tuple[str, ...] | None = None
    """Where the set is opaque; without hashes and ids only positions are known."""
    name: str | None = None
    content_hash: str | None = None


@dataclass(frozen=True)
class FileTransform:
    name: str
    spec: list[dict[str, Any]]
    parts: tuple[tuple[str, list[dict[str, Any]]], ...] = ()
    """Name and spec of what a composite is made of, in order."""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "spec": self.spec, "parts": [list(part) for part in self.parts]}


@dataclass(frozen=True)
class FileRow:
    """One model's vector."""

    name: str
    """The handle in our own files; in others whatever the model is called there."""
    values: Array
    """float32 [n], NaN where there is no value."""
    statuses: Array
    """uint8 [n]"""
    token_counts: Array
    """int32 [n], 0 where unknown."""
    dtype: str = "unknown"
    revision: str = ""
    identity: str = ""
    kind: str = ""
    file: str = ""
    engine_version: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """path, device_class, attention, template_hash, tokenizer_hash, noise_floor_nats."""


@dataclass(frozen=True)
class Heading:
    """What all rows of a file share."""

    texts: FileTexts
    unit: str
    space: Space | None = None
    """Only in our own files."""
    transform: FileTransform | None = None

    def stated(self) -> tuple[Space, FileTransform, tuple[str, ...]]:
        """What our own formats need.  Raises BadInput without it."""
        if self.space is None or self.transform is None or self.texts.hashes is None:
            raise BadInput("only vectors of a known space, transform and texts can be written")
        return self.space, self.transform, self.texts.hashes


@dataclass(frozen=True)
class VectorFile:
    """A file understood."""

    format: str
    """npz, parquet, modelmap-jsonl or modelmap-pickle."""
    names: tuple[str, ...]
    """The files' own names, no folders: those are nobody's business."""
    sha256: str
    heading: Heading
    rows: tuple[FileRow, ...]

    @property
    def stem(self) -> str:
        return re.sub(r"[^A-Za-z0-9._+-]+", "-", Path(self.names[0]).stem).strip("-._+") or "file"


def own_heading(
    path: Path, space: str, text_set: Any, transform: Any, hashes: Sequence[str], ids: Sequence[str] | None
) -> Heading:
    """From the parts of one of our own files.  Raises Unparseable where they contradict one another, Unsupported for
    vectors of another kind."""
    try:
        key = Space(**json.loads(space))
        stated = FileTransform(
            str(transform["name"]), list(transform["spec"]), tuple((str(n), list(s)) for n, s in transform["parts"])
        )
        digest, name = str(text_set["hash"]), str(text_set["name"])
        own_digest = content_hash(bytes.fromhex(one) for one in hashes)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise Unparseable(f"{path}: its heading cannot be read ({error})", hint="export it again") from error
    if (key.method, key.version) != ("log-likelihood", "1") or key.unit not in UNITS:
        raise Unsupported(f"{path} holds points of the space {key.key}, not log-likelihood vectors of version 1")
    if key.inputs != f"sha256:{digest}" or own_digest != digest:
        raise Unparseable(
            f"{path} contradicts itself: its space names the texts {key.inputs}, its text set is {digest}, "
            f"its texts hash to {own_digest}",
            hint="the file was edited or damaged: export it again",
        )
    texts = FileTexts(len(hashes), tuple(hashes), tuple(ids) if ids is not None else None, name, digest)
    return Heading(texts, key.unit, key, stated)


def own_row(path: Path, about: dict[str, Any], values: Array, statuses: Array, counts: Array) -> FileRow:
    """A row of one of our own files.  Raises Unparseable when values and statuses contradict one another."""
    name = str(about.get("name"))
    try:
        details = json.loads(about.pop("details"))
        about = {**about, "engine_version": int(about["engine_version"])}
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise Unparseable(f"{path}: the details of {name!r} cannot be read ({error})") from error
    if not isinstance(details, dict):
        raise Unparseable(f"{path}: the details of {name!r} are no object")
    if statuses.size and statuses.max() > max(Status):
        raise Unparseable(f"{path}: {name!r} has the unknown status {int(statuses.max())}", hint="upgrade modelkin")
    valid = statuses < FIRST_WITHOUT_VALUE
    if not np.array_equal(valid, np.isfinite(values)):
        at = int(np.flatnonzero(valid != np.isfinite(values))[0])
        raise Unparseable(
            f"{path}: {name!r} has at text {at} the value {values[at]} with status {Status(int(statuses[at])).name}",
            hint="the file was edited or damaged: export it again",
        )
    if counts.min(initial=0) < 0:
        raise Unparseable(f"{path}: {name!r} has a negative token count")
    return FileRow(**about, details=details, values=_one_nan(values, valid), statuses=statuses, token_counts=counts)


def foreign_row(
    name: str, values: Array, *, valid: Array | None = None, counts: Array | None = None, **more: Any
) -> FileRow:
    """A row of numbers that came without statuses: NaN is `not_scored`, infinite (also beyond float32)
    `non_finite`."""
    wide = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    statuses = np.full(wide.shape, Status.OK, np.uint8)
    statuses[np.isinf(narrow)] = Status.NON_FINITE
    statuses[np.isnan(wide)] = Status.NOT_SCORED
    if valid is not None:
        statuses[~valid] = Status.NOT_SCORED
    if counts is None:
        counts = np.zeros(wide.shape, np.int32)
    return FileRow(name, _one_nan(narrow, statuses == Status.OK), statuses, counts, **more)


def foreign_rows(where: str, names: Sequence[str], matrix: Array, valid: Array | None = None) -> tuple[FileRow, ...]:
    """Rows of a [models × texts] matrix.  Raises BadInput where names and numbers do not fit."""
    if matrix.dtype.kind not in "fiu":
        raise BadInput(f"{where} is {matrix.dtype}, not numbers", hint="log-likelihoods are real numbers")
    if matrix.ndim != 2 or not matrix.size or len(names) != len(matrix):
        turned = matrix.ndim == 2 and len(names) == matrix.shape[1]
        raise BadInput(
            f"{where} has shape {matrix.shape}, and there are {len(names)} model names",
            hint="transpose it: one row a model" if turned else "it should be [models × texts]",
        )
    if valid is not None and (valid.shape != matrix.shape or valid.dtype != np.bool_):
        raise BadInput(f"{where} has shape {matrix.shape}, its `valid` is {valid.dtype} of shape {valid.shape}")
    return tuple(
        foreign_row(name, values, valid=None if valid is None else valid[place])
        for place, (name, values) in enumerate(zip(names, matrix, strict=True))
    )


def checked(file: VectorFile) -> VectorFile:
    """The file itself.  Raises BadInput for names that cannot be stored, models that are there twice, and foreign
    values that cannot be of the stated unit."""
    heading = file.heading
    seen: dict[tuple[str, ...], int] = {}
    for place, row in enumerate(file.rows):
        _check_name(row.name, f"{file.names[0]}, model {place}")
        about: tuple[str, ...] = (row.name, row.revision, row.identity, row.file)
        if not _DTYPE.fullmatch(row.dtype):
            raise BadInput(
                f"{file.names[0]}: {row.dtype!r:.80} is no dtype", hint="float32, bfloat16, float16, unknown"
            )
        if heading.space is None:
            about = (row.name, row.dtype)
        if about in seen:
            raise BadInput(
                f"{file.names[0]}: the model {row.name!r} is there twice, in rows {seen[about]} and {place}",
                hint="keep one of them, or give them two names",
            )
        seen[about] = place
        if heading.space is None:
            _check_sign(file.names[0], row, heading.unit)
    return file


def _check_name(name: str, where: str) -> None:
    try:
        name.encode()
        good = bool(name.strip()) and name.isprintable() and len(name) <= MAX_NAME
    except UnicodeEncodeError:
        good = False
    if not good:
        raise BadInput(
            f"{where}: {name[:80]!r} cannot name a model",
            hint=f"names are 1 to {MAX_NAME} printable characters",
        )


def _check_sign(where: str, row: FileRow, unit: str) -> None:
    """log p is at most 0 and bits per byte at least 0, but for rounding."""
    signed = row.values if unit == "nats" else -row.values
    wrong = np.flatnonzero(np.nan_to_num(signed, nan=-1.0) > 1e-3)
    if wrong.size:
        what = "log-likelihoods in nats are never above 0" if unit == "nats" else "bits per byte are never below 0"
        raise BadInput(
            f"{where}: {row.name!r} has {row.values[wrong[0]]:g} at text {int(wrong[0])}, but {what}",
            hint="turn the sign of negative log-likelihoods, or say --unit bits_per_byte where they are that",
        )


def _one_nan(values: Array, valid: Array) -> Array:
    """One bit pattern for "no value", as the database keeps it, so that equal vectors have equal checksums."""
    values = np.array(values, dtype="<f4")
    values[~valid] = np.nan
    return values


def file_sha256(paths: Sequence[Path]) -> str:
    """Of one file its own sha256; of several that of theirs in order."""
    digests = []
    for path in paths:
        with path.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


@contextlib.contextmanager
def whole_file(out: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A stream that becomes `out` when the block ends well, and nothing when it does not.

    Raises Conflict when `out` is there already and `force` is off, NotFound without its folder.
    """
    require_free(out, force=force)
    handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent)
    try:
        with os.fdopen(handle, "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp made it 0600; a result has the mode that any new file gets.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        require_free(out, force=force)
        os.replace(temporary, out)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def require_free(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise Conflict(f"{out} is a folder", hint="give the name of a file in it")
    if not out.parent.is_dir():
        raise NotFound(f"the folder {out.parent} does not exist", hint="make it, or give another place")
    if out.exists() and not force:
        raise Conflict(f"{out} exists already", hint="give another name, or --force to replace it")
