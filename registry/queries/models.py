"""Models by what they are and by what people call them: register, find, list."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.errors import Ambiguous, BadInput, NotFound
from registry.evidence import ModelRef
from registry.identity import Candidate, handle_from_name, named_identity
from registry.tables import Model, ModelAlias, ModelTag, Vector

VOLATILE = ("downloads", "likes", "gated", "pipeline_tag", "licence")
"""Facts that change while the model stays itself; registering again reads them anew."""


@dataclass(frozen=True)
class ModelInfo:
    """A row of `models` (each field is documented there), and how the question led to it."""

    id: int
    kind: str
    handle: str
    revision: str
    identity: str
    source: str
    file: str
    base_id: int | None
    resolved_to_id: int | None
    weights_hash: str | None
    status: str
    status_reason: str
    trust_remote_code: bool
    architecture: str | None
    model_type: str | None
    parameters: int | None
    dtype: str | None
    quantization: str | None
    vocabulary: int | None
    context_length: int | None
    licence: str | None
    base_model: str | None
    base_model_relation: str | None
    pipeline_tag: str | None
    template_hash: str | None
    size_bytes: int | None
    gated: str | None
    downloads: int | None
    likes: int | None
    facts: Mapping[str, Any]
    facts_at: datetime.datetime | None
    created_at: datetime.datetime
    found_by: str = "id"
    """id, handle, revision, ref (a branch or tag that was asked for at registration), alias, source, resolved."""
    other_revisions: int = 0
    """How many other revisions of the handle are registered; the answer was the newest of them."""
    resolved_from_id: int | None = None
    """The named row that led here; vectors imported under the name still belong to it."""

    @property
    def name(self) -> str:
        """Short and unambiguous: `owner/name@0123456789ab`, with `:FILE` for one GGUF among several."""
        return f"{self.handle}@{self.revision[:12]}" + (f":{self.file}" if self.file else "")


_ROW_FIELDS = [field.name for field in fields(ModelInfo)][:32]


def info_of(row: Model, **how: Any) -> ModelInfo:
    return ModelInfo(**{name: getattr(row, name) for name in _ROW_FIELDS}, **how)


def model_ref(model: ModelInfo | Model) -> ModelRef:
    """How an answer names it.  One file among several of a repo is named `owner/name:FILE`, which `find` reads."""
    handle = model.handle + (f":{model.file}" if model.file else "")
    return ModelRef(handle=handle, revision=model.revision, kind=model.kind, id=model.id, identity=model.identity)


def get(session: Session, model_id: int) -> ModelInfo:
    """Raises NotFound."""
    row = session.get(Model, model_id)
    if row is None:
        raise NotFound(f"no model has id {model_id}", hint="see `modelkin model list`")
    return info_of(row)


# --- register ---------------------------------------------------------------------------------------------------


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


def register_named_many(session: Session, names: Iterable[str], source: str) -> dict[str, ModelInfo]:
    """Name → its row, old or new.  A name is never taken for a model of the same handle: `resolve` says that.

    Raises BadInput when a name is empty.
    """
    names = list(names)
    places = {name: handle_from_name(name) for name in names}
    identities = {name: named_identity(*place) for name, place in places.items()}
    # In one order for everybody, so that two imports cannot wait for one another.
    rows = {
        identities[name]: {
            "kind": "named",
            "handle": handle,
            "revision": revision,
            "identity": identities[name],
            "source": source,
            "facts": {"named_as": name},
        }
        for name, (handle, revision) in places.items()
    }
    if rows:
        ordered = [rows[identity] for identity in sorted(rows)]
        session.execute(insert(Model).on_conflict_do_nothing(), ordered)
    found: dict[str, ModelInfo] = {}
    for row in session.scalars(select(Model).where(Model.identity.in_(list(rows)))):
        found[row.identity] = info_of(row)
    return {name: found[identities[name]] for name in names}


def same_weights(session: Session, model: ModelInfo) -> list[ModelInfo]:
    """Other rows with the same weight files: re-uploads, or other commits that did not touch the weights."""
    if model.weights_hash is None:
        return []
    query = select(Model).where(Model.weights_hash == model.weights_hash, Model.id != model.id).order_by(Model.id)
    return [info_of(row) for row in session.scalars(query)]


# --- find -------------------------------------------------------------------------------------------------------


def find(session: Session, text: str, *, revision: str | None = None, follow: bool = True) -> ModelInfo:
    """The model that `text` means.

    `owner/name` (its newest registered revision), `owner/name@REV` (a prefix of the revision, or a branch or tag it
    was registered by), with `:FILE.gguf` for one file among several; an alias; a bare `name` if only one owner has
    it (`local` first); the path of a registered folder or file.  Upper and lower case are one.
    A name that was resolved leads to its model unless `follow` is off.
    Raises NotFound (with near names) or Ambiguous (with the candidates).
    """
    text = text.strip()
    if not text:
        raise BadInput("an empty model name", hint="write owner/name, an alias or a path")
    found = _by_path(session, text) if text.startswith((".", "/", "~")) else _by_name(session, text, revision)
    if found is None:
        near = _near(session, text)
        raise NotFound(
            f"no model called {text!r} is registered" + (f"; did you mean {', '.join(near)}?" if near else ""),
            hint=f"register it: modelkin model add {text}",
        )
    if follow and found.resolved_to_id is not None:
        return replace(get(session, found.resolved_to_id), found_by="resolved", resolved_from_id=found.id)
    return found


def split_name(text: str) -> tuple[str, str | None, str | None]:
    """(handle, revision, file) of `handle[@revision][:file]` or `handle[:file][@revision]`."""
    swapped = re.fullmatch(r"([^@:]+):([^@]+)@([^@:]+)", text)
    if swapped:
        return swapped[1], swapped[3], swapped[2]
    match = re.fullmatch(r"([^@:]+)(?:@([^:]+))?(?::(.+))?", text)
    return (match[1], match[2], match[3]) if match else (text, None, None)


def _by_name(session: Session, text: str, revision: str | None) -> ModelInfo | None:
    """The whole text first, since the handle of a name may hold a colon; then its parts."""
    for handle, wanted, file in dict.fromkeys([(text, None, None), split_name(text)]):
        wanted = revision or wanted
        rows = _of_handle(session, handle)
        if rows:
            return _choose(rows, text, wanted, file)
        target = session.get(ModelAlias, handle.lower())
        if target is not None:
            row = session.get_one(Model, target.model_id)
            if wanted is None and file is None:
                return info_of(row, found_by="alias")
            # The old id of a renamed repo stands for the repo, not for one commit of it.
            return _choose(_of_handle(session, row.handle), text, wanted, file)
    return None


def _of_handle(session: Session, handle: str) -> list[Model]:
    """All rows of a handle, newest first; a bare name means `local/name`, else the only owner that has it."""
    handle = handle.lower()
    lowered = func.lower(Model.handle)
    newest_first = (Model.created_at.desc(), Model.id.desc())
    if "/" in handle:
        return list(session.scalars(select(Model).where(lowered == handle).order_by(*newest_first)))
    rows = list(session.scalars(select(Model).where(lowered == f"local/{handle}").order_by(*newest_first)))
    if rows or session.get(ModelAlias, handle) is not None:
        return rows
    rows = list(
        session.scalars(select(Model).where(func.split_part(lowered, "/", 2) == handle).order_by(*newest_first))
    )
    owners = sorted({row.handle for row in rows}, key=str.lower)
    if len({owner.lower() for owner in owners}) > 1:
        raise Ambiguous(f"{handle!r} could be {', '.join(owners)}", hint="write the owner too")
    return rows


def _choose(rows: list[Model], text: str, revision: str | None, file: str | None) -> ModelInfo:
    """One of the rows of a handle, given newest first."""
    # Results imported under a name never hide the model itself.
    rows = [row for row in rows if row.kind != "named"] or rows
    how = "handle"
    if file is not None:
        rows = [row for row in rows if row.file.lower() == file.lower()]
    if revision is not None:
        matching = [row for row in rows if row.revision.lower().startswith(revision.lower())]
        how = "revision"
        if not matching:
            matching, how = [row for row in rows if revision in row.facts.get("refs", [])][:1], "ref"
        elif len({row.revision for row in matching}) > 1:
            listed = ", ".join(sorted({row.revision[:16] for row in matching}))
            raise Ambiguous(f"several revisions begin like that in {text!r}: {listed}", hint="write more of it")
        rows = matching
    if not rows:
        raise NotFound(
            f"{text!r}: the model is registered, but not that revision or file",
            hint=f"see `modelkin model list`, or register it: modelkin model add {text}",
        )
    chosen = rows[0]
    same_revision = [row for row in rows if row.revision == chosen.revision]
    whole = [row for row in same_revision if not row.file]
    if file is None and len({row.file for row in same_revision}) > 1:
        if not whole:
            names = ", ".join(f"{row.handle}:{row.file}" for row in same_revision)
            raise Ambiguous(f"{text!r} has several registered files: {names}", hint="name the file")
        chosen = whole[0]
    others = len({row.revision for row in rows}) - 1
    return info_of(chosen, found_by=how, other_revisions=others)


def _by_path(session: Session, text: str) -> ModelInfo | None:
    from pathlib import Path

    path = str(Path(text).expanduser().resolve())
    query = select(Model).where(Model.source == path, Model.kind.in_(("folder", "gguf", "adapter")))
    row = session.scalars(query.order_by(Model.created_at.desc(), Model.id.desc()).limit(1)).first()
    return None if row is None else info_of(row, found_by="source")


def _near(session: Session, text: str, count: int = 3) -> list[str]:
    known = [
        *session.scalars(select(Model.handle).distinct().limit(20_000)),
        *session.scalars(select(ModelAlias.alias)),
    ]
    by_lower = {name.lower(): name for name in known}
    handle = split_name(text)[0].lower()
    close = difflib.get_close_matches(handle, by_lower, n=count, cutoff=0.6)
    by_part: dict[str, str] = {lower.rpartition("/")[2]: name for lower, name in by_lower.items()}
    close_parts = difflib.get_close_matches(handle.rpartition("/")[2], by_part, n=count, cutoff=0.6)
    return list(dict.fromkeys([by_lower[name] for name in close] + [by_part[name] for name in close_parts]))[:count]


# --- list -------------------------------------------------------------------------------------------------------


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
        conditions.append(bases.contains([base_model.lower()]))
    return conditions
