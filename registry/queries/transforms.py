"""Transforms by name: one spec has one name, one name has one spec, for ever."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.errors import Conflict, NotFound
from registry.tables import Transform
from registry.transforms import BUILT_IN, Pipeline, check_name, parse


@dataclass(frozen=True)
class TransformInfo:
    id: int
    name: str
    spec: list[dict[str, Any]]
    """Canonical list of edits."""
    spec_hash: str
    parts: tuple[str, ...]
    """Names it was composed of in order; empty when it was written as edits."""
    pipeline: Pipeline


def get(session: Session, name: str) -> TransformInfo:
    """The transform of that name; a built-in is stored on first use.  Raises NotFound, listing what there is."""
    row = session.scalar(select(Transform).where(Transform.name == name))
    if row is None and name in BUILT_IN:
        ensure_built_in(session)
        row = session.scalar(select(Transform).where(Transform.name == name))
    if row is None:
        names = sorted({*session.scalars(select(Transform.name)), *BUILT_IN})
        near = difflib.get_close_matches(name, names, n=1)
        raise NotFound(
            f"no transform is named {name!r}; there are {', '.join(names)}",
            hint=f"did you mean {near[0]!r}?" if near else f"add it: modelkin transform add {name} '<spec>'",
        )
    return _info(row)


def get_many(session: Session, ids: Collection[int]) -> list[TransformInfo]:
    """In the order of `ids`.  Raises NotFound when one of them is gone."""
    found = {row.id: _info(row) for row in session.scalars(select(Transform).where(Transform.id.in_(ids)))}
    missing = [str(one) for one in ids if one not in found]
    if missing:
        raise NotFound(f"no transform has the id {', '.join(missing)}")
    return [found[one] for one in ids]


def list_all(session: Session) -> list[TransformInfo]:
    """In the order in which they were added, the built-ins first."""
    ensure_built_in(session)
    return [_info(row) for row in session.scalars(select(Transform).order_by(Transform.id))]


def add(session: Session, name: str, spec: str | list[Any]) -> TransformInfo:
    """Stores a new transform; adding the same spec under the same name again changes nothing.

    Raises BadInput or NotFound for a spec that cannot be read, Conflict when the name has another spec or the spec
    another name: two names for one transform would split its vectors.
    """
    ensure_built_in(session)
    known = {info.name: info.pipeline for info in list_all(session)}
    pipeline = parse(spec, known)
    check_name(name, pipeline)
    return _store(session, name, pipeline)


def ensure_built_in(session: Session) -> list[TransformInfo]:
    """Stores the built-ins where they are absent.  Raises Conflict when one of their names has another spec."""
    return [_store(session, name, pipeline) for name, pipeline in BUILT_IN.items()]


def _store(session: Session, name: str, pipeline: Pipeline) -> TransformInfo:
    found = _named_or_equal(session, name, pipeline)
    if found is None:
        values = {
            "name": name,
            "spec": pipeline.spec,
            "spec_hash": pipeline.spec_hash,
            "parts": list(pipeline.parts),
        }
        # Two processes may add it at once: the second waits here for the first, then reads its row.
        session.execute(insert(Transform).values(values).on_conflict_do_nothing())
        found = _named_or_equal(session, name, pipeline)
    if found is None:  # only when somebody deleted it in between
        raise Conflict(f"the transform {name!r} was removed while it was added", hint="run the same command again")
    if found.name != name:
        raise Conflict(
            f"this transform is already there, named {found.name!r}", hint=f"use {found.name!r} instead of {name!r}"
        )
    if found.spec_hash != pipeline.spec_hash:
        raise Conflict(
            f"the transform {name!r} exists with another spec",
            hint=f"see it with: modelkin transform show {name}; choose another name for the new one",
        )
    return _info(found)


def _named_or_equal(session: Session, name: str, pipeline: Pipeline) -> Transform | None:
    """The row of that name, else the row of that spec."""
    rows = session.scalars(
        select(Transform).where(or_(Transform.name == name, Transform.spec_hash == pipeline.spec_hash))
    ).all()
    return min(rows, key=lambda row: row.name != name, default=None)


def _info(row: Transform) -> TransformInfo:
    parts = tuple(row.parts)
    read = parse(row.spec)
    return TransformInfo(row.id, row.name, row.spec, row.spec_hash, parts, Pipeline(read.edits, parts))
