"""Prompt-response rows from JSON Lines and Parquet files.

A row whose text cannot be used is reported by number and the reading goes on; a file that is not what it should be
ends it, with the line.  Blank lines and a byte order mark are no rows.  JSON's unofficial NaN reads as null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from registry.errors import BadInput, NotFound, Unparseable, Unsupported
from registry.exchange.text_layouts import Layout, choose_layout, lookup, read_row
from registry.textsets import Pair, Unusable

MAX_LINE_BYTES = 1 << 26
"""One line of JSON: 64 MiB."""
LAYOUT_ROWS = 20
"""Rows of a JSON Lines file whose fields are looked at to find the layout."""
BATCH_ROWS = 1024


@dataclass(frozen=True)
class TextRows:
    """A file understood: iterate it, as often as needed, for its pairs."""

    path: Path
    format: str
    """jsonl or parquet."""
    layout: Layout
    columns: tuple[str, ...]

    def __iter__(self) -> Iterator[Pair | Unusable]:
        reader = _jsonl_rows if self.format == "jsonl" else _parquet_rows
        for number, row in reader(self.path):
            yield read_row(row, number, self.layout) if isinstance(row, dict) else Unusable(number, row)

    def provenance(self) -> dict[str, Any]:
        """What a text set keeps of where it came from: no folder names, they are nobody's business."""
        with self.path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"file": self.path.name, "sha256": digest, "format": self.format, "layout": str(self.layout)}


def open_rows(
    path: str | Path,
    *,
    prompt_field: str | None = None,
    response_field: str | None = None,
    messages_field: str | None = None,
) -> TextRows:
    """Finds out how to read the file.

    Raises NotFound, Unsupported for another kind of file, Unparseable, or BadInput when its columns hold no prompt
    and response; the fields may reach into objects by dots.
    """
    if str(path).startswith("hub:"):
        raise Unsupported(
            f"{path} is a data set on the Hub, which this release does not read yet",
            hint="download its Parquet or JSON Lines file and give that; a later release reads Hub data sets itself",
        )
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise NotFound(f"{path} {what}", hint="give a .jsonl or .parquet file")
    format = _format(path)
    first = _first_rows(path) if format == "jsonl" else []
    columns = (
        _parquet_columns(path) if format == "parquet" else list(dict.fromkeys(key for row in first for key in row))
    )
    layout = choose_layout(
        columns, prompt_field=prompt_field, response_field=response_field, messages_field=messages_field
    )
    if format == "parquet":
        _require_parquet_types(path, layout, columns)
    else:
        _require_fields(first, layout, columns)
    return TextRows(path, format, layout, tuple(columns))


def _format(path: Path) -> str:
    with path.open("rb") as handle:
        head = handle.read(4096)
    if head[:4] == b"PAR1":
        return "parquet"
    if not head.strip():
        raise Unparseable(f"{path} is empty", hint="give a file with rows in it")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise Unparseable(f"{path} is UTF-16", hint="save it as UTF-8")
    if head[:2] == b"\x1f\x8b" or head[:4] in (b"\x28\xb5\x2f\xfd", b"PK\x03\x04"):
        raise Unsupported(f"{path} is compressed", hint="unpack it first")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"[":
        raise Unparseable(
            f"{path} is one JSON list", hint=f"write one object a line: jq -c '.[]' {path.name} > rows.jsonl"
        )
    if path.suffix in (".parquet", ".pq"):
        raise Unparseable(f"{path} is not a Parquet file", hint="its first bytes are not PAR1: was it cut or renamed?")
    if start == b"{" or path.suffix in (".jsonl", ".ndjson", ".json"):
        return "jsonl"
    raise Unsupported(f"{path} is neither JSON Lines nor Parquet", hint="give a .jsonl or .parquet file")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, object), or (line number, reason) where the line is not UTF-8."""
    with path.open("rb") as handle:
        for number, line in _lines(handle, path):
            text = _decoded(line)
            yield number, "invalid_utf8" if text is None else _object(text, line, path, number)


def _lines(handle: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a text.
    while line := handle.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise Unparseable(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes", hint="is it JSON Lines?")
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _decoded(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def _object(text: str, line: bytes, path: Path, number: int) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise Unparseable(f"{where}: nested too deeply", hint="flatten that row") from error
    except ValueError as error:
        if not line.endswith(b"\n"):
            raise Unparseable(
                f"{where}: the last line is cut off", hint="fetch or write the file again; nothing was stored"
            ) from error
        raise Unparseable(f"{where}: not JSON ({error})", hint="every line must be one JSON object") from error
    if not isinstance(parsed, dict):
        raise Unparseable(f"{where}: {type(parsed).__name__}, not an object", hint="every line must be one JSON object")
    return parsed


def _first_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _, row in _jsonl_rows(path):
        if isinstance(row, dict):
            rows.append(row)
        if len(rows) == LAYOUT_ROWS:
            break
    return rows


def _require_fields(rows: list[dict[str, Any]], layout: Layout, columns: list[str]) -> None:
    for name in layout.required():
        if rows and all(lookup(row, name) is None for row in rows):
            raise BadInput(
                f"no row has a field {name!r}; the columns are {', '.join(columns[:40])}",
                hint="name the fields that hold the prompt and the response",
            )


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    import pyarrow as pa

    number = 0
    try:
        with _parquet(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Unparseable(
            f"{path}, near row {number + 1}: damaged ({error})",
            hint="fetch or write the file again; nothing was stored",
        ) from error


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    try:
        rows: list[dict[str, Any] | str] = batch.to_pylist()
    except UnicodeDecodeError:
        rows = []
        for place in range(batch.num_rows):
            try:
                rows.extend(batch.slice(place, 1).to_pylist())
            except UnicodeDecodeError:
                rows.append("invalid_utf8")
    yield from rows


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise Unparseable(f"{path} is not a whole Parquet file: {error}", hint="fetch or write it again") from error


def _parquet_columns(path: Path) -> list[str]:
    return list(_parquet_schema(path).names)


def _parquet_schema(path: Path) -> Any:
    with _parquet(path) as file:
        return file.schema_arrow


def _require_parquet_types(path: Path, layout: Layout, columns: list[str]) -> None:
    """Raises BadInput when a field is absent or cannot hold what the layout needs of it."""
    import pyarrow as pa

    schema = _parquet_schema(path)
    for name in layout.required():
        if name not in columns:
            if name.split(".")[0] in columns and "." in name:
                continue  # Inside an object: seen row by row.
            raise BadInput(
                f"{path} has no column {name!r}; the columns are {', '.join(columns[:40])}",
                hint="name the columns that hold the prompt and the response",
            )
        if columns.count(name) > 1:
            raise BadInput(f"{path} has {columns.count(name)} columns named {name!r}", hint="rename all but one")
        kind = schema.field(name).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        turns = name == layout.messages and (pa.types.is_list(kind) or pa.types.is_large_list(kind))
        if not texts and not turns:
            raise BadInput(
                f"column {name!r} of {path} holds {kind}, not {'conversations' if layout.messages else 'text'}",
                hint="name the columns that hold the prompt and the response",
            )
