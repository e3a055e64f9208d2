"""Vectors as Parquet: one row a model, for tools that read tables.

model, revision, identity, kind, file, dtype   string
engine_version                                 int32
details                                        string, JSON
values                                         list<float>    nats (see the space), NaN where there is no value
valid                                          list<bool>
statuses                                       list<uint8>
token_counts                                   list<int32>
schema metadata `modelkin`                     JSON: format, space, text_set {name, hash}, texts, text_ids, transform
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from registry.errors import BadInput, Unparseable
from registry.exchange.npz import labelled
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
    foreign_row,
    own_heading,
    own_row,
)
from registry.statuses import FIRST_WITHOUT_VALUE

_ABOUT = {
    "model": "name",
    "revision": "revision",
    "identity": "identity",
    "kind": "kind",
    "file": "file",
    "dtype": "dtype",
}
_GROUP_CELLS = 1 << 22
"""Cells of a row group: some 40 MB in memory."""


def write(stream: BinaryIO, heading: Heading, rows: Iterable[FileRow], count: int) -> None:
    """Writes `count` rows as they come."""
    import pyarrow.parquet as pq

    schema = _schema(heading)
    per_group = max(1, _GROUP_CELLS // heading.texts.count)
    written = 0
    # A dictionary of floats would only cost time.
    with pq.ParquetWriter(stream, schema, compression="zstd", use_dictionary=["kind", "dtype"]) as writer:
        group: list[FileRow] = []
        for row in rows:
            group.append(row)
            if len(group) == per_group:
                writer.write_table(_table(group, schema))
                written, group = written + len(group), []
        if group:
            writer.write_table(_table(group, schema))
    if written + len(group) != count:
        raise Unparseable(f"{count} vectors were announced, {written + len(group)} came")


def _schema(heading: Heading) -> Any:
    import pyarrow as pa

    space, transform, hashes = heading.stated()
    about = {
        "format": FORMAT,
        "space": space.key,
        "text_set": {"name": heading.texts.name, "hash": heading.texts.content_hash},
        "texts": hashes,
        "text_ids": heading.texts.ids,
        "transform": transform.to_dict(),
    }
    return pa.schema(
        [
            *((name, pa.string()) for name in _ABOUT),
            ("engine_version", pa.int32()),
            ("details", pa.string()),
            ("values", pa.list_(pa.float32())),
            ("valid", pa.list_(pa.bool_())),
            ("statuses", pa.list_(pa.uint8())),
            ("token_counts", pa.list_(pa.int32())),
        ],
        metadata={"modelkin": json.dumps(about)},
    )


def _table(rows: list[FileRow], schema: Any) -> Any:
    import pyarrow as pa

    ends = np.arange(len(rows) + 1, dtype=np.int32) * len(rows[0].values)

    def lists(arrays: list[Array]) -> Any:
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(arrays)))

    columns = [pa.array([getattr(row, field) for row in rows], pa.string()) for field in _ABOUT.values()]
    columns += [
        pa.array([row.engine_version for row in rows], pa.int32()),
        pa.array([json.dumps(row.details, sort_keys=True) for row in rows], pa.string()),
        lists([row.values for row in rows]),
        lists([row.statuses < FIRST_WITHOUT_VALUE for row in rows]),
        lists([row.statuses for row in rows]),
        lists([row.token_counts for row in rows]),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def read(path: Path, keys: Keys) -> VectorFile:
    """Raises Unparseable for a damaged file, BadInput for columns that do not fit."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            about = (file.schema_arrow.metadata or {}).get(b"modelkin")
            groups = (file.metadata.row_group(at).total_byte_size for at in range(file.metadata.num_row_groups))
            total = sum(groups)
            if total > MAX_BYTES:
                raise BadInput(f"{path} unpacks to {total >> 30} GiB; at most {MAX_BYTES >> 30} are read")
            own = about is not None and keys.values is None
            heading, rows = _own(path, file, json.loads(about or b"{}")) if own else _foreign(path, file, keys)
    except (pa.ArrowException, OSError, ValueError, MemoryError, RecursionError, KeyError) as error:
        raise Unparseable(
            f"{path} is damaged or cut off ({error})", hint="fetch or write the file again; nothing was stored"
        ) from error
    if not rows:
        raise BadInput(f"{path} has no rows", hint="give a file with a row for each model")
    return checked(VectorFile("parquet", (path.name,), file_sha256([path]), heading, rows))


def _own(path: Path, file: Any, about: dict[str, Any]) -> tuple[Heading, tuple[FileRow, ...]]:
    columns = [*_ABOUT, "engine_version", "details", "values", "statuses", "token_counts"]
    missing = [name for name in columns if name not in file.schema_arrow.names]
    missing += [name for name in ("space", "text_set", "texts", "transform") if name not in about]
    if missing:
        raise Unparseable(f"{path} is a modelkin export but lacks {', '.join(missing)}", hint="export it again")
    heading = own_heading(
        path, about["space"], about["text_set"], about["transform"], about["texts"], about.get("text_ids")
    )
    rows = []
    for batch in file.iter_batches(batch_size=max(1, _GROUP_CELLS // heading.texts.count), columns=columns):
        values = _matrix(batch, "values", path, heading.texts.count, "float")
        statuses = _matrix(batch, "statuses", path, heading.texts.count, "uint8")
        counts = _matrix(batch, "token_counts", path, heading.texts.count, "int32")
        labels = batch.select([*_ABOUT, "engine_version", "details"]).to_pylist()
        for at, label in enumerate(labels):
            fields = {_ABOUT.get(name, name): value for name, value in label.items()}
            rows.append(own_row(path, fields, values[at], statuses[at], counts[at]))
    return heading, tuple(rows)


def _foreign(path: Path, file: Any, keys: Keys) -> tuple[Heading, tuple[FileRow, ...]]:
    models = _column(path, file, keys.models or "model", "--models-key")
    values = _column(path, file, keys.values or "values", "--values-key")
    wanted = list(dict.fromkeys([models, values, *([keys.texts] if keys.texts else [])]))
    if keys.texts:
        _column(path, file, keys.texts, "--texts-key")
    rows: list[FileRow] = []
    texts: FileTexts | None = None
    for batch in file.iter_batches(batch_size=256, columns=wanted):
        matrix = _matrix(batch, values, path, texts.count if texts else None, None)
        labels = [str(one) for one in batch.column(batch.schema.get_field_index(models)).to_pylist()]
        rows += [foreign_row(name, one) for name, one in zip(labels, matrix, strict=True)]
        texts = texts or _texts(path, batch, keys.texts, matrix.shape[1])
    return Heading(texts or FileTexts(0), keys.unit), tuple(rows)


def _texts(path: Path, batch: Any, column: str | None, count: int) -> FileTexts:
    """The ids of the texts, a list in the first row."""
    if column is None:
        return FileTexts(count)
    first = batch.column(batch.schema.get_field_index(column))[0].as_py()
    if not isinstance(first, list) or len(first) != count:
        raise BadInput(f"{path}: the column {column!r} is no list of {count} ids")
    return labelled([str(one) for one in first])


def _column(path: Path, file: Any, name: str, option: str) -> str:
    names = file.schema_arrow.names
    if names.count(name) != 1:
        listed = ", ".join(f"{field.name} {field.type}" for field in list(file.schema_arrow)[:30])
        raise BadInput(
            f"{path} has {names.count(name)} columns {name!r}; there are {listed}", hint=f"name it: {option}"
        )
    return name


def _matrix(batch: Any, name: str, path: Path, count: int | None, kind: str | None) -> Array:
    """[rows × count] from a column of lists, all of one length."""
    import pyarrow as pa

    column = batch.column(batch.schema.get_field_index(name))
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    inner = column.type.value_type if pa.types.is_list(column.type) else None
    numeric = inner is not None and (pa.types.is_floating(inner) or pa.types.is_integer(inner))
    if not numeric or (kind is not None and str(inner) != kind):
        raise BadInput(f"{path}: the column {name!r} is {column.type}, not list<{kind or 'number'}>")
    lengths = set(column.value_lengths().to_pylist())
    count = count if count is not None else next(iter(lengths), None)
    if lengths != {count} or not count:
        raise BadInput(
            f"{path}: the lists in {name!r} have lengths {sorted(lengths, key=str)[:10]}, not all {count}",
            hint="each row needs one number a text",
        )
    flat = column.flatten()
    if kind is not None and flat.null_count:
        raise BadInput(f"{path}: {flat.null_count} nulls in {name!r}")
    numbers: Array = flat.to_numpy(zero_copy_only=False)
    return numbers.reshape(-1, count)
