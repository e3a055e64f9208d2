"""The vectors of one space, out of the database and into a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry.errors import Ambiguous, BadInput, Conflict, NotFound
from registry.exchange import npz, parquet_vectors
from registry.exchange.vector_file import FileRow, FileTexts, FileTransform, Heading, require_free, whole_file
from registry.queries import textsets, transforms, vectors
from registry.queries.textsets import TextSetInfo
from registry.queries.transforms import TransformInfo
from registry.queries.vectors import Member
from registry.spaces import log_likelihood_space
from registry.tables import Model, Text, Transform, Vector

FORMATS = (".npz", ".parquet")
_AT_ONCE = 64
"""Vectors read together: a COPY must end before the next begins on the same connection."""


@dataclass(frozen=True)
class Exported:
    file: str
    models: int
    texts: int
    text_set: str
    transform: str
    profile: str
    unit: str
    space: str
    """The space key."""
    bytes: int


def export_vectors(
    session: Session,
    out: Path,
    *,
    text_set: str,
    transform: str = "base",
    profile: str | None = None,
    unit: str | None = None,
    force: bool = False,
) -> Exported:
    """Writes one vector a model (see `vectors.members` for which) to `out`, an `.npz` or `.parquet` file.

    Streams: never more than some 64 vectors in memory.  The file appears whole or not at all, and equal vectors make
    equal files.  Raises NotFound when there is nothing to export, Ambiguous when several profiles or units are there
    and none was named, Conflict when `out` exists and `force` is off.
    """
    if out.suffix not in FORMATS:
        raise BadInput(f"{out} has the ending {out.suffix!r}", hint=f"end it in {' or '.join(FORMATS)}")
    require_free(out, force=force)
    texts, edits = textsets.get(session, text_set), transforms.get(session, transform)
    profile, unit = _which(session, texts, edits, profile, unit)
    chosen = sorted(vectors.members(session, texts.id, edits.id, profile, unit), key=lambda one: one.vector_id)
    space = log_likelihood_space(texts.content_hash, profile, unit)
    heading = Heading(_texts(session, texts), unit, space, _transform(session, edits))
    rows = _rows(session, chosen)
    with whole_file(out, force=force) as stream:
        if out.suffix == ".npz":
            npz.write(stream, heading, rows, len(chosen), out.parent)
        else:
            parquet_vectors.write(stream, heading, rows, len(chosen))
    return Exported(
        file=str(out),
        models=len(chosen),
        texts=texts.n_texts,
        text_set=texts.name,
        transform=edits.name,
        profile=profile,
        unit=unit,
        space=space.key,
        bytes=out.stat().st_size,
    )


def _which(
    session: Session, texts: TextSetInfo, edits: TransformInfo, profile: str | None, unit: str | None
) -> tuple[str, str]:
    """The profile and unit meant: the only ones there, unless they are named."""
    rows = session.execute(
        select(Transform.name, Vector.profile, Vector.unit)
        .join(Transform, Transform.id == Vector.transform_id)
        .where(Vector.text_set_id == texts.id)
        .distinct()
        .order_by(Transform.name, Vector.profile, Vector.unit)
    ).all()
    here = [(p, u) for name, p, u in rows if name == edits.name]
    fitting = [(p, u) for p, u in here if profile in (None, p) and unit in (None, u)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        listed = ", ".join(f"{p} in {u}" for p, u in fitting)
        raise Ambiguous(
            f"text set {texts.name}, transform {edits.name} has vectors of several profiles: {listed}",
            hint=f"choose one: --profile {fitting[0][0]}",
        )
    elsewhere = ", ".join(f"transform {name} in profile {p}" for name, p, _ in rows)
    raise NotFound(
        f"nothing to export: text set {texts.name} has no vectors for transform {edits.name}"
        + (f" in profile {profile}" if profile else "")
        + (f"; there are {elsewhere}" if rows else ", nor for any other"),
        hint="name one that is there" if rows else f"make some: modelkin score MODEL --text-set {texts.name}",
    )


def _texts(session: Session, info: TextSetInfo) -> FileTexts:
    rows = session.execute(
        select(Text.text_hash, Text.source_id).where(Text.text_set_id == info.id).order_by(Text.position)
    ).all()
    ids = tuple(str(row[1]) for row in rows) if info.opaque else None
    hashes = tuple(bytes(row[0]).hex() for row in rows)
    return FileTexts(len(rows), hashes, ids, info.name, info.content_hash)


def _transform(session: Session, info: TransformInfo) -> FileTransform:
    parts = [(name, transforms.get(session, name).spec) for name in info.parts]
    return FileTransform(info.name, info.spec, tuple(parts))


def _rows(session: Session, chosen: Sequence[Member]) -> Iterator[FileRow]:
    """By vector id."""
    for start in range(0, len(chosen), _AT_ONCE):
        batch = chosen[start : start + _AT_ONCE]
        ids = [one.vector_id for one in batch]
        values = list(vectors.read(session, ids))
        counts = dict(vectors.read_token_counts(session, ids))
        about = _about(session, batch)
        if [one.vector_id for one in values] != ids or set(counts) != set(ids):
            raise Conflict("vectors were removed while they were exported", hint="run the same command again")
        for one in values:
            yield FileRow(
                values=one.log_likelihoods,
                statuses=one.statuses,
                token_counts=counts[one.vector_id],
                **about[one.vector_id],
            )


def _about(session: Session, batch: Sequence[Member]) -> dict[int, dict[str, Any]]:
    models = {row.id: row for row in session.scalars(select(Model).where(Model.id.in_([m.model_id for m in batch])))}
    kept = (Vector.path, Vector.device_class, Vector.attention, Vector.template_hash, Vector.tokenizer_hash)
    query = select(Vector.id, *kept, Vector.noise_floor_nats).where(Vector.id.in_([m.vector_id for m in batch]))
    details = {
        row.id: {key: value for key, value in row._mapping.items() if key != "id"} for row in session.execute(query)
    }
    found = {}
    for member in batch:
        model = models[member.model_id]
        found[member.vector_id] = {
            "name": model.handle,
            "revision": model.revision,
            "identity": model.identity,
            "kind": model.kind,
            "file": model.file,
            "dtype": member.dtype,
            "engine_version": member.engine_version,
            "details": details.get(member.vector_id, {}),
        }
    return found
