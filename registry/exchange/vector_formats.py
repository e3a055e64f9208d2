"""Which format a file of vectors is in, by its first bytes rather than by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from registry.errors import BadInput, NotFound, Unparseable, Unsupported
from registry.exchange import modelmap, npz, parquet_vectors
from registry.exchange.vector_file import UNITS, Keys, VectorFile


def open_vectors(paths: Sequence[str | Path], keys: Keys | None = None) -> list[VectorFile]:
    """Reads the files; JSON Lines files, one a model, are read as one matrix, as is a folder of them.

    Raises NotFound, Unparseable, Unsupported or BadInput.
    """
    keys = keys or Keys()
    if keys.unit not in UNITS:
        raise BadInput(f"{keys.unit!r} is not a unit", hint=f"give {' or '.join(UNITS)}")
    files: list[VectorFile] = []
    lines: list[Path] = []
    for path in (one for given in paths for one in _expanded(Path(given))):
        format = _format(path)
        if format == "jsonl":
            lines.append(path)
        elif format == "npz":
            files.append(npz.read(path, keys))
        elif format == "parquet":
            files.append(parquet_vectors.read(path, keys))
        else:
            files.append(modelmap.read_pickle(path, keys.unit))
    if lines:
        files.append(modelmap.read_jsonl(lines, keys.unit))
    return files


def _expanded(path: Path) -> list[Path]:
    if path.is_dir():
        inside = sorted(path.glob("*.jsonl"))
        if not inside:
            raise NotFound(f"the folder {path} holds no .jsonl files", hint="give a file, or a folder of them")
        return inside
    if not path.is_file():
        raise NotFound(f"{path} does not exist", hint="give a .npz, .parquet, .jsonl or .pkl file")
    return [path]


def _format(path: Path) -> str:
    with path.open("rb") as stream:
        head = stream.read(4096)
    if not head.strip():
        raise Unparseable(f"{path} is empty", hint="fetch or write the file again")
    if head.startswith(b"PK"):
        return "npz"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"version https://git-lfs"):
        raise Unparseable(f"{path} is a Git LFS pointer, not the file itself", hint="fetch it: git lfs pull")
    if head.startswith(b"\x93NUMPY"):
        raise Unsupported(
            f"{path} is one bare array, without the models' names",
            hint="save both: numpy.savez(FILE, models=names, values=matrix)",
        )
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        raise Unsupported(f"{path} is compressed", hint="unpack it first")
    if path.suffix in (".npz", ".parquet"):
        raise Unparseable(f"{path} is not a {path.suffix[1:]} file", hint="was it cut, renamed or damaged?")
    if head.lstrip()[:1] == b"{" or path.suffix == ".jsonl":
        return "jsonl"
    if head[0] == 0x80 or path.suffix in (".pkl", ".pickle"):
        return "pickle"
    raise Unsupported(f"{path} is in no format that modelkin reads", hint="give a .npz, .parquet, .jsonl or .pkl file")
