"""Models by what they are: register, find, list, mark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, any_, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.errors import BadInput, Unsupported
from registry.identity import Candidate, handle_from_name, named_identity
from registry.queries.model_info import STATED, ModelInfo, get, info_of, model_ref
from registry.queries.model_lookup import find, split_name
from registry.tables import Model, ModelAlias, ModelTag, Vector

__all__ = [
    "ModelInfo",
    "Page",
    "find",
    "get",
    "info_of",
    "list_models",
    "mark_unstable",
    "model_ref",
    "register",
    "register_named",
    "register_named_many",
    "require_scorable",
    "same_weights",
    "split_name",
]

VOLATILE = ("downloads", "likes", "gated", "pipeline_tag", "licence")
"""Facts that change while the model stays itself; registering again reads them anew."""


def register(session: Session, candidate: Candidate) -> tuple[ModelInfo, bool]:
    """The row of this identity, and whether it is new.  Safe when several processes register the same thing.

    Registering again keeps the row and its handle, and renews what may have changed: place, downloads, likes, gate,
    licence, allowance for remote code, and the refs by which it was asked for.
    """
    base_id = register(session, candidate.base)[0].id if candidate.base is not None else None
    values = {
        "kind": candidate.kind,
        "handle": candidate.handle,
        "revision": candidate.revision,
        "identity": candidate.identity,
        "source": candidate.source,
        "file": candidate.file,
        "base_id": base_id,
        "weights_hash": candidate.weights_hash,
        "trust_remote_code": candidate.trust_remote_code,
        "facts": dict(candidate.facts),
        **candidate.columns,
    }
    added = session.scalar(
        insert(Model).values(**values, facts_at=func.now()).on_conflict_do_nothing().returning(Model.id)
    )
    row = session.scalars(select(Model).where(Model.identity == candidate.identity)).one()
    if added is None:
        _renew(session, row, candidate)
    for alias, kind in candidate.aliases:
        if alias.lower() != row.handle.lower():
            from registry.queries.model_names import set_alias

            set_alias(session, alias, row.id, actor="registration", kind=kind)
    return info_of(row), added is not None


def _renew(session: Session, row: Model, candidate: Candidate) -> None:
    fresh = {name: candidate.columns[name] for name in VOLATILE if candidate.columns.get(name) is not None}
    refs = [*row.facts.get("refs", [])]
    refs += [ref for ref in candidate.facts.get("refs", []) if ref not in refs]
    facts = {**row.facts, **({"refs": refs} if refs else {})}
    # A folder that moved has other times of change; the hashes are the same, or it would be another row.
    facts |= {name: candidate.facts[name] for name in ("files", "load", "base") if name in candidate.facts}
    session.execute(
        update(Model)
        .where(Model.id == row.id)
        .values(
            **fresh,
            source=candidate.source,
            facts=facts,
            facts_at=func.now(),
            weights_hash=func.coalesce(Model.weights_hash, candidate.weights_hash),
            trust_remote_code=row.trust_remote_code or candidate.trust_remote_code,
        )
    )
    session.refresh(row)


def register_named(session: Session, name: str, source: str) -> ModelInfo:
    """A holder for imported results; see `registry.identity.handle_from_name` for what becomes of the name."""
    return register_named_many(session, [name], source)[name]


def register_named_many(
    session: Session, names: Iterable[str], source: str, *, identities: Mapping[str, str] | None = None
) -> dict[str, ModelInfo]:
    """Name → its row, old or new.  A name is never taken for a model of the same handle: `resolve` says that.

    `identities` (by name) are what the file states of its models; they are kept, so that a model that is registered
    later is known again.  Raises BadInput when a name is empty.
    """
    names = list(names)
    places = {name: handle_from_name(name) for name in names}
    stated = identities or {}
    own = {name: named_identity(*place) for name, place in places.items()}
    # In one order for everybody, so that two imports cannot wait for one another.
    rows = {
        own[name]: {
            "kind": "named",
            "handle": handle,
            "revision": revision,
            "identity": own[name],
            "source": source,
            "facts": {"named_as": name},
        }
        for name, (handle, revision) in places.items()
    }
    if rows:
        ordered = [rows[identity] for identity in sorted(rows)]
        session.execute(insert(Model).on_conflict_do_nothing(), ordered)
    told: dict[str, list[str]] = {}
    for name in sorted(stated.keys() & own.keys()):
        told.setdefault(own[name], []).append(stated[name])
    found: dict[str, ModelInfo] = {}
    for row in session.scalars(select(Model).where(Model.identity.in_(list(rows))).order_by(Model.identity)).all():
        _keep_stated(session, row, [one for one in told.get(row.identity, []) if one != row.identity])
        found[row.identity] = info_of(row)
    return {name: found[own[name]] for name in names}


def _keep_stated(session: Session, row: Model, stated: list[str]) -> None:
    if set(stated) <= set(row.facts.get(STATED, [])):
        return
    session.refresh(row, with_for_update=True)
    row.facts = {**row.facts, STATED: sorted({*row.facts.get(STATED, []), *stated})}
    session.flush()


def same_weights(session: Session, model: ModelInfo) -> list[ModelInfo]:
    """Other rows with the same weight files: re-uploads, or other commits that did not touch the weights."""
    if model.weights_hash is None:
        return []
    query = select(Model).where(Model.weights_hash == model.weights_hash, Model.id != model.id).order_by(Model.id)
    return [info_of(row) for row in session.scalars(query)]


def require_scorable(model: ModelInfo) -> None:
    """Raises Unsupported for a thing without weights that modelkin can load."""
    if model.kind == "named":
        raise Unsupported(
            f"{model.handle} is only a name from an import ({model.source}): there are no weights to score",
            hint=f"say which model it is: modelkin model resolve {model.handle} org/repo@commit",
        )
    if model.kind == "endpoint":
        raise Unsupported(f"{model.handle} is an endpoint: its log-likelihoods cannot be read", hint="score a model")


def mark_unstable(session: Session, model_id: int, reason: str) -> None:
    """Its numbers exist but should not be leaned on, e.g. because many came out as NaN."""
    session.execute(update(Model).where(Model.id == model_id).values(status="unstable", status_reason=reason))


@dataclass(frozen=True)
class Page:
    items: tuple[ModelInfo, ...]
    next: str | None
    """Pass it as `after` for the following page; None on the last."""


def list_models(
    session: Session,
    *,
    architecture: str | None = None,
    min_parameters: int | None = None,
    max_parameters: int | None = None,
    licence: str | None = None,
    base_model: str | None = None,
    status: str | None = None,
    kind: str | None = None,
    tag: str | None = None,
    search: str | None = None,
    has_vectors_for: int | None = None,
    limit: int = 100,
    after: str | None = None,
) -> Page:
    """Newest first.  Words compare without case; `architecture` also matches the model type, `search` any part of a
    handle or alias; `has_vectors_for` is the id of a text set.  Raises BadInput for a bad `after` or `limit`."""
    if not 1 <= limit <= 10_000:
        raise BadInput(f"a page holds 1 to 10000 models, not {limit}", hint="give another limit")
    conditions = _conditions(architecture, min_parameters, max_parameters, licence, base_model, status, kind)
    if tag is not None:
        conditions.append(Model.id.in_(select(ModelTag.model_id).where(ModelTag.tag == tag.strip().lower())))
    if search is not None:
        # Escaped: a name may hold the wildcard `_`.
        aliased = select(ModelAlias.model_id).where(ModelAlias.alias.icontains(search, autoescape=True))
        conditions.append(or_(Model.handle.icontains(search, autoescape=True), Model.id.in_(aliased)))
    if has_vectors_for is not None:
        conditions.append(Model.id.in_(select(Vector.model_id).where(Vector.text_set_id == has_vectors_for)))
    if after is not None:
        if not re.fullmatch(r"\d{1,18}", after):
            raise BadInput(f"{after!r} is not a page mark", hint="pass on the `next` of the page before")
        # Ids only grow, so a walk neither repeats nor skips a row while others are added.
        conditions.append(Model.id < int(after))
    query = select(Model).where(*conditions).order_by(Model.id.desc()).limit(limit + 1)
    rows = list(session.scalars(query))
    following = str(rows[limit - 1].id) if len(rows) > limit else None
    return Page(items=tuple(info_of(row) for row in rows[:limit]), next=following)


def _conditions(
    architecture: str | None,
    min_parameters: int | None,
    max_parameters: int | None,
    licence: str | None,
    base_model: str | None,
    status: str | None,
    kind: str | None,
) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if architecture is not None:
        wanted = architecture.lower()
        conditions.append(or_(func.lower(Model.architecture) == wanted, func.lower(Model.model_type) == wanted))
    if min_parameters is not None:
        conditions.append(Model.parameters >= min_parameters)
    if max_parameters is not None:
        conditions.append(Model.parameters <= max_parameters)
    for column, value in ((Model.licence, licence), (Model.status, status), (Model.kind, kind)):
        if value is not None:
            conditions.append(func.lower(column) == value.lower())
    if base_model is not None:
        # A merge declares several, joined by ", ".
        bases = func.string_to_array(func.lower(Model.base_model), ", ")
        conditions.append(literal(base_model.lower()) == any_(bases))
    return conditions
