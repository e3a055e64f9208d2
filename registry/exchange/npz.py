"""Vectors as NumPy's `.npz`: our own layout, and other people's matrices by the names of their arrays.

np.load(FILE)                # nothing pickled, so allow_pickle stays off
  values          float32 [models × texts]   nats (see space), NaN where there is no value
  valid           bool    [models × texts]
  statuses        uint8   [models × texts]   registry/statuses.py
  token_counts    int32   [models × texts]   scored tokens
  models, revisions, identities, kinds, files   str [models]
  dtypes          str     [models]
  engine_versions int32   [models]
  details         str     [models]           JSON: path, device_class, attention, template_hash, …
  texts           str     [texts]            sha256 hex of each text, by position
  text_ids        str     [texts]            only where the set is opaque
  space           str     []                 the space key, JSON
  text_set        str     []                 JSON: name, hash
  transform       str     []                 JSON: name, spec, parts
  format          str     []                 "modelkin-vectors/1"
"""

from __future__ import annotations

import json
import math
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from registry.errors import BadInput, Unparseable, Unsupported
from registry.exchange.vector_file import (
    FORMAT,
    MAX_BYTES,
    Array,
    FileRow,
    FileTexts,
    Heading,
    Keys,
    VectorFile,
    checked,
    file_sha256,
    foreign_rows,
    own_heading,
    own_row,
)
from registry.statuses import FIRST_WITHOUT_VALUE

_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    MemoryError,
    OverflowError,
    SyntaxError,
)
_PER_MODEL = {"models": "name", "revisions": "revision", "identities": "identity", "kinds": "kind", "files": "file"}
_PIECE = 1 << 22


def write(stream: BinaryIO, heading: Heading, rows: Iterable[FileRow], count: int, spool: Path) -> None:
    """Writes `count` rows as they come; `spool` is a folder with room for 6 bytes a cell.

    Equal content makes equal bytes: the members carry no time.
    """
    shape = (count, heading.texts.count)
    about: list[FileRow] = []
    with (
        zipfile.ZipFile(stream, "w") as archive,
        tempfile.TemporaryFile(dir=spool) as statuses,
        tempfile.TemporaryFile(dir=spool) as counts,
    ):
        with _matrix(archive, "values", "<f4", shape, zipfile.ZIP_STORED) as out:
            for row in rows:
                out.write(row.values.astype("<f4", copy=False).tobytes())
                statuses.write(row.statuses.astype(np.uint8, copy=False).tobytes())
                counts.write(row.token_counts.astype("<i4", copy=False).tobytes())
                about.append(_without_values(row))
        with _matrix(archive, "valid", "|b1", shape) as out:
            for piece in _pieces(statuses):
                out.write((np.frombuffer(piece, np.uint8) < FIRST_WITHOUT_VALUE).tobytes())
        for name, descr, kept in (("statuses", "|u1", statuses), ("token_counts", "<i4", counts)):
            with _matrix(archive, name, descr, shape) as out:
                for piece in _pieces(kept):
                    out.write(piece)
        if len(about) != count:
            raise Unparseable(f"{count} vectors were announced, {len(about)} came")
        for name, array in _labels(heading, about).items():
            with _member(archive, name) as out:
                npy.write_array(out, array, allow_pickle=False)


def _without_values(row: FileRow) -> FileRow:
    nothing = np.empty(0)
    return FileRow(**{**row.__dict__, "values": nothing, "statuses": nothing, "token_counts": nothing})


def _labels(heading: Heading, rows: list[FileRow]) -> dict[str, Array]:
    space, transform, hashes = heading.stated()
    labels = {key: np.array([getattr(row, name) for row in rows], dtype=np.str_) for key, name in _PER_MODEL.items()}
    labels["dtypes"] = np.array([row.dtype for row in rows], dtype=np.str_)
    labels["engine_versions"] = np.array([row.engine_version for row in rows], dtype="<i4")
    labels["details"] = np.array([json.dumps(row.details, sort_keys=True) for row in rows], dtype=np.str_)
    labels["texts"] = np.array(hashes, dtype=np.str_)
    if heading.texts.ids is not None:
        labels["text_ids"] = np.array(heading.texts.ids, dtype=np.str_)
    labels["space"] = np.array(space.key)
    labels["text_set"] = np.array(json.dumps({"name": heading.texts.name, "hash": heading.texts.content_hash}))
    labels["transform"] = np.array(json.dumps(transform.to_dict()))
    labels["format"] = np.array(FORMAT)
    return labels


@contextmanager
def _member(archive: zipfile.ZipFile, name: str, method: int = zipfile.ZIP_DEFLATED) -> Iterator[IO[bytes]]:
    info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980
    info.compress_type = method
    with archive.open(info, "w", force_zip64=True) as out:
        yield out


@contextmanager
def _matrix(
    archive: zipfile.ZipFile, name: str, descr: str, shape: tuple[int, int], method: int = zipfile.ZIP_DEFLATED
) -> Iterator[IO[bytes]]:
    with _member(archive, name, method) as out:
        npy.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
        yield out


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    stream.seek(0)
    while piece := stream.read(_PIECE):
        yield piece


def read(path: Path, keys: Keys) -> VectorFile:
    """Raises Unparseable for a damaged file, Unsupported for arrays of objects, BadInput for what does not fit."""
    try:
        shapes = _look(path)
        with np.load(path, allow_pickle=False) as arrays:
            own = "space" in shapes and keys.values is None
            heading, rows = _own(path, arrays) if own else _foreign(path, arrays, shapes, keys)
    except _BROKEN as error:
        raise Unparseable(
            f"{path} is damaged or cut off ({error})", hint="fetch or write the file again; nothing was stored"
        ) from error
    return checked(VectorFile("npz", (path.name,), file_sha256([path]), heading, rows))


def _look(path: Path) -> dict[str, str]:
    """Name → "dtype shape" of every array, from the headers alone: a small file may claim to unpack to terabytes."""
    found: dict[str, str] = {}
    total = 0
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(".npy"):
                continue
            total += info.file_size
            with archive.open(info) as member:
                version = npy.read_magic(member)
                header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
                if header is None:
                    raise Unsupported(f"{path}: {info.filename} is of npy version {version}")
                shape, _, dtype = header(member)
            name = info.filename.removesuffix(".npy")
            if dtype.hasobject:
                raise Unsupported(
                    f"{path}: the array {name!r} holds pickled Python objects, which modelkin does not load",
                    hint="save it as numbers or fixed-width strings: np.array(names, dtype=str)",
                )
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
                raise Unparseable(
                    f"{path}: the array {name!r} claims the shape {shape}, but has {info.file_size} bytes"
                )
            found[name] = f"{dtype}{list(shape)}"
    if not found:
        raise Unparseable(f"{path} holds no arrays", hint="give a file written by numpy.savez or modelkin")
    if total > MAX_BYTES:
        raise BadInput(f"{path} unpacks to {total >> 30} GiB; at most {MAX_BYTES >> 30} are read", hint="split it")
    return found


def _own(path: Path, arrays: Any) -> tuple[Heading, tuple[FileRow, ...]]:
    wanted = [*_PER_MODEL, "dtypes", "engine_versions", "details", "texts", "text_set", "transform", "values", "valid"]
    missing = [name for name in [*wanted, "statuses", "token_counts"] if name not in arrays.files]
    if missing:
        raise Unparseable(f"{path} has a space key but lacks {', '.join(missing)}", hint="export it again")
    texts = _strings(arrays, "texts", path)
    ids = _strings(arrays, "text_ids", path) if "text_ids" in arrays.files else None
    text_set, transform = (json.loads(str(arrays[name])) for name in ("text_set", "transform"))
    heading = own_heading(path, str(arrays["space"]), text_set, transform, texts, ids)
    about: dict[str, Any] = {name: _strings(arrays, key, path) for key, name in _PER_MODEL.items()}
    about |= {"dtype": _strings(arrays, "dtypes", path), "details": _strings(arrays, "details", path)}
    about["engine_version"] = arrays["engine_versions"].tolist()
    count = len(about["name"])
    matrices = [arrays[name] for name in ("values", "statuses", "token_counts", "valid")]
    shape = (count, len(texts))
    for matrix, kind in zip(matrices, ("f4", "u1", "i4", "b1"), strict=True):
        if matrix.shape != shape or matrix.dtype.str[1:] != kind:
            raise BadInput(f"{path}: {matrix.dtype}{list(matrix.shape)} stands where {kind}{list(shape)} should")
    if not count or not len(texts) or any(len(column) != count for column in about.values()):
        raise BadInput(
            f"{path} describes {[len(column) for column in about.values()]} models; the numbers should agree"
        )
    values, statuses, counts, valid = matrices
    if not np.array_equal(valid, statuses < FIRST_WITHOUT_VALUE):
        raise Unparseable(f"{path}: `valid` and `statuses` contradict one another", hint="export it again")
    rows = tuple(
        own_row(path, {name: column[at] for name, column in about.items()}, values[at], statuses[at], counts[at])
        for at in range(count)
    )
    return heading, rows


def _foreign(path: Path, arrays: Any, shapes: dict[str, str], keys: Keys) -> tuple[Heading, tuple[FileRow, ...]]:
    names = _strings(arrays, _key(path, shapes, keys.models or "models", "--models-key"), path)
    values_key = _key(path, shapes, keys.values or "values", "--values-key")
    matrix = arrays[values_key]
    valid = arrays["valid"] if "valid" in shapes else None
    rows = foreign_rows(f"{path}: the array {values_key!r}", names, matrix, valid)
    texts_key = keys.texts or ("texts" if "texts" in shapes else None)
    texts = FileTexts(matrix.shape[1])
    if texts_key is not None:
        labels = _strings(arrays, _key(path, shapes, texts_key, "--texts-key"), path)
        if len(labels) != matrix.shape[1]:
            raise BadInput(f"{path}: {len(labels)} texts in {texts_key!r}, {matrix.shape[1]} columns in {values_key!r}")
        texts = labelled(labels)
    return Heading(texts, keys.unit), rows


def labelled(labels: list[str]) -> FileTexts:
    """Texts under other people's labels: hashes where each is the 64 hex digits of one, else ids."""
    hexadecimal = all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in labels)
    return FileTexts(len(labels), tuple(labels) if hexadecimal else None, tuple(labels))


def _key(path: Path, shapes: dict[str, str], name: str, option: str) -> str:
    if name not in shapes:
        listed = ", ".join(f"{key} {shape}" for key, shape in list(shapes.items())[:30])
        raise BadInput(f"{path} has no array {name!r}; there are {listed}", hint=f"name the right one with {option}")
    return name


def _strings(arrays: Any, name: str, path: Path) -> list[str]:
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "USiu":
        raise BadInput(f"{path}: the array {name!r} is {array.dtype}{list(array.shape)}, not a list of names")
    if array.dtype.kind == "S":
        return [one.decode() for one in array.tolist()]
    return [str(one) for one in array.tolist()]
