"""Log-likelihood vectors in and out of PostgreSQL, in bulk.

Both ways go by binary COPY on the session's own connection; `benchmarks/bulk.py` measures it against the ORM.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from registry.errors import BadInput, Conflict, Corrupt
from registry.statuses import FIRST_WITHOUT_VALUE, Status
from registry.tables import Vector

Floats = np.ndarray[Any, np.dtype[Any]]

COLUMNS = {
    "model_id": "int8",
    "text_set_id": "int8",
    "transform_id": "int8",
    "profile": "text",
    "dtype": "text",
    "engine_version": "int4",
    "unit": "text",
    "log_likelihoods": "bytea",
    "statuses": "bytea",
    "token_counts": "bytea",
    "checksum": "bytea",
    "n_ok": "int4",
    "sum_value": "float8",
    "mean_value": "float8",
    "tokens": "int8",
    "response_bytes": "int8",
    "noise_floor_nats": "float8",
    "path": "text",
    "device_class": "text",
    "attention": "text",
    "template_hash": "text",
    "tokenizer_hash": "text",
    "provenance": "jsonb",
}

# float32 before bfloat16 before float16 before what nobody knows.
_DTYPE_RANK = "array_position(array['float32', 'bfloat16', 'float16'], v.dtype::text)"


@dataclass(frozen=True)
class NewVector:
    """A vector on its way in; the fields are those of `registry.tables.Vector`."""

    model_id: int
    text_set_id: int
    transform_id: int
    profile: str
    dtype: str
    engine_version: int
    log_likelihoods: Floats
    """float32 [n]; where the status carries no value it is stored as NaN, whatever stands there."""
    statuses: Floats
    """uint8 [n]"""
    token_counts: Floats
    """int32 [n]"""
    path: str
    unit: str = "nats"
    device_class: str = "unknown"
    attention: str = "unknown"
    template_hash: str | None = None
    tokenizer_hash: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    response_bytes: int | None = None
    noise_floor_nats: float | None = None


@dataclass(frozen=True)
class Values:
    """What was measured, one entry a text."""

    vector_id: int
    log_likelihoods: Floats
    """float32 [n], NaN where there is no value."""
    statuses: Floats
    """uint8 [n]"""
    checksum: bytes

    @property
    def valid(self) -> Floats:
        """bool [n]"""
        return is_valid(self.statuses)


@dataclass(frozen=True)
class Member:
    """The vector that stands for one model in a space."""

    model_id: int
    """The model's, also where the vector was imported under a name that has been resolved to it."""
    vector_id: int
    dtype: str
    engine_version: int
    checksum: bytes
    noise_floor_nats: float | None
    template_hash: str | None


def insert_many(session: Session, vectors: Iterable[NewVector]) -> int:
    """Writes vectors; returns how many.  An iterator of them must not use the session: the connection is busy.

    All or none: raises BadInput for shapes that disagree, unknown statuses or a non-finite value under a status that
    promises one; Conflict when a point (model, text set, transform, profile, dtype, engine) is taken.
    """
    names = ", ".join(COLUMNS)
    written = 0
    try:
        with (
            session.begin_nested(),
            _driver(session).cursor() as cursor,
            cursor.copy(f"copy vectors ({names}) from stdin (format binary)") as copy,
        ):
            copy.set_types(list(COLUMNS.values()))
            for vector in vectors:
                copy.write_row(_row(vector))
                written += 1
    except psycopg.errors.UniqueViolation as error:
        raise Conflict(
            f"such a vector is stored already: {error.diag.message_detail or ''}".strip(),
            hint="a stored vector is never overwritten; score with another engine version or dtype",
        ) from error
    except psycopg.errors.ForeignKeyViolation as error:
        raise Conflict(f"the vector's model, text set or transform is gone: {error.diag.message_detail}") from error
    return written


def _driver(session: Session) -> Any:
    """The psycopg connection.  Asked for inside a savepoint's block, since only then the savepoint is set on it."""
    return session.connection().connection.driver_connection


def is_valid(statuses: Floats) -> Floats:
    """Which texts carry a value, bool of the same shape."""
    valid: Floats = statuses < FIRST_WITHOUT_VALUE
    return valid


def checksum(log_likelihoods: bytes, statuses: bytes) -> bytes:
    return hashlib.sha256(log_likelihoods + statuses).digest()


def _row(vector: NewVector) -> tuple[Any, ...]:
    statuses = np.asarray(vector.statuses)
    values = np.asarray(vector.log_likelihoods, dtype="<f4").copy()
    counts = np.asarray(vector.token_counts)
    where = f"vector of model {vector.model_id}, transform {vector.transform_id}"
    if not (values.shape == statuses.shape == counts.shape and values.ndim == 1 and values.size):
        raise BadInput(f"{where}: shapes {values.shape}, {statuses.shape}, {counts.shape} should be one length ≥ 1")
    if statuses.min() < 0 or statuses.max() > max(Status):
        raise BadInput(f"{where}: status {int(statuses.max())} is not known")
    valid = is_valid(statuses)
    if not np.isfinite(values[valid]).all():
        at = int(np.flatnonzero(valid & ~np.isfinite(values))[0])
        raise BadInput(f"{where}: text {at} has status {Status(int(statuses[at])).name} but the value {values[at]}")
    # One bit pattern for "no value", so that equal vectors have equal checksums.
    values[~valid] = np.nan
    value_bytes, status_bytes = values.tobytes(), statuses.astype(np.uint8).tobytes()
    total = math.fsum(values[valid].tolist())
    n_ok = int(valid.sum())
    return (
        vector.model_id,
        vector.text_set_id,
        vector.transform_id,
        vector.profile,
        vector.dtype,
        vector.engine_version,
        vector.unit,
        value_bytes,
        status_bytes,
        counts.astype("<i4").tobytes(),
        checksum(value_bytes, status_bytes),
        n_ok,
        total,
        total / n_ok if n_ok else None,
        int(counts[valid].sum()),
        vector.response_bytes,
        vector.noise_floor_nats,
        vector.path,
        vector.device_class,
        vector.attention,
        vector.template_hash,
        vector.tokenizer_hash,
        psycopg.types.json.Jsonb(vector.provenance, dumps=_dumps),
    )


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def read(session: Session, vector_ids: Sequence[int], *, verify: bool = True) -> Iterator[Values]:
    """Values by ascending vector id, streamed.  Raises Corrupt, naming the model, when a row does not match its
    checksum."""
    # The name comes along because no second query fits into a COPY.
    query = (
        "copy (select v.id, v.log_likelihoods, v.statuses, v.checksum, m.handle || '@' || left(m.revision, 12)"
        " from vectors v join models m on m.id = v.model_id where v.id = any(array["
        + ",".join(str(int(one)) for one in vector_ids)
        + "]::int8[]) order by v.id) to stdout (format binary)"
    )
    with _driver(session).cursor() as cursor, cursor.copy(query) as copy:
        copy.set_types(["int8", "bytea", "bytea", "bytea", "text"])
        for vector_id, values, statuses, stored, model in copy.rows():
            if verify and checksum(values, statuses) != stored:
                raise Corrupt(
                    f"vector {vector_id}, of {model}, does not match its checksum: the database's files are damaged",
                    hint="restore a backup, or delete the row and score again",
                )
            yield Values(
                vector_id,
                np.frombuffer(values, "<f4"),
                np.frombuffer(statuses, np.uint8),
                bytes(stored),
            )


def read_token_counts(session: Session, vector_ids: Sequence[int]) -> Iterator[tuple[int, Floats]]:
    """(vector id, int32 [n] scored tokens a text) by ascending id, streamed."""
    listed = ",".join(str(int(one)) for one in vector_ids)
    query = (
        f"copy (select id, token_counts from vectors where id = any(array[{listed}]::int8[]) order by id)"
        " to stdout (format binary)"
    )
    with _driver(session).cursor() as cursor, cursor.copy(query) as copy:
        copy.set_types(["int8", "bytea"])
        for vector_id, counts in copy.rows():
            yield vector_id, np.frombuffer(counts, "<i4")


def members(session: Session, text_set_id: int, transform_id: int, profile: str, unit: str) -> list[Member]:
    """One vector a model, by model id: float32 before bfloat16 before float16, then the newest engine; what was scored
    here before what was imported.

    A vector imported under a name counts for the model that the name was resolved to, unless that has its own.
    """
    rows = session.execute(
        text(
            f"""
            select distinct on (owner) coalesce(m.resolved_to_id, m.id) as owner, v.id, v.dtype, v.engine_version,
                   v.checksum, v.noise_floor_nats, v.template_hash
            from vectors v join models m on m.id = v.model_id
            where v.text_set_id = :text_set and v.transform_id = :transform and v.profile = :profile and v.unit = :unit
            order by owner, m.resolved_to_id is not null, v.engine_version = 0, {_DTYPE_RANK}, v.engine_version desc,
                     v.id desc
            """
        ),
        {"text_set": text_set_id, "transform": transform_id, "profile": profile, "unit": unit},
    )
    return [Member(row[0], row[1], row[2], row[3], bytes(row[4]), row[5], row[6]) for row in rows]


def stamp(session: Session, text_set_id: int, transform_id: int, profile: str, unit: str) -> list[int]:
    """Changes whenever `members` may: vectors are only added or removed, names only ever resolved."""
    row = session.execute(
        text(
            """
            select count(*), coalesce(max(id), 0), (select count(*) from models where resolved_to_id is not null)
            from vectors
            where text_set_id = :text_set and transform_id = :transform and profile = :profile and unit = :unit
            """
        ),
        {"text_set": text_set_id, "transform": transform_id, "profile": profile, "unit": unit},
    ).one()
    return [int(value) for value in row]


@dataclass(frozen=True)
class Held:
    """One point that a model has."""

    text_set_id: int
    transform_id: int
    profile: str
    unit: str


def held_by(session: Session, model_id: int) -> list[Held]:
    """Every (text set, transform, profile, unit) in which the model has a vector."""
    rows = session.execute(
        text(
            """
            select distinct v.text_set_id, v.transform_id, v.profile, v.unit
            from vectors v join models m on m.id = v.model_id
            where coalesce(m.resolved_to_id, m.id) = :model
            order by 1, 3, 4, 2
            """
        ),
        {"model": model_id},
    )
    return [Held(*row) for row in rows]


def scored_transforms(
    session: Session, model_id: int, text_set_id: int, profile: str, dtype: str, engine_version: int
) -> set[int]:
    """Transforms that already have a vector of exactly this engine and dtype."""
    return set(
        session.scalars(
            select(Vector.transform_id).where(
                Vector.model_id == model_id,
                Vector.text_set_id == text_set_id,
                Vector.profile == profile,
                Vector.dtype == dtype,
                Vector.engine_version == engine_version,
            )
        )
    )
