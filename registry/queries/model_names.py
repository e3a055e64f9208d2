"""What people call models: aliases that move and are audited, free tags, and names that get resolved."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.errors import Ambiguous, BadInput, Conflict, NotFound
from registry.identity import handle_from_name, named_identity
from registry.queries.model_info import STATED, ModelInfo, get, info_of
from registry.tables import AliasEvent, Model, ModelAlias, ModelTag


def set_alias(session: Session, alias: str, model_id: int, *, actor: str, kind: str = "user") -> int | None:
    """Points `alias` at a model, wherever it pointed before (that model's id is returned), and writes down who did.

    Raises BadInput for a name that could not be typed, Conflict where a registered handle has it already.
    """
    name = _alias_name(alias)
    handle = name if "/" in name else f"local/{name}"
    owner = session.scalars(select(Model).where(func.lower(Model.handle) == handle, Model.id != model_id)).first()
    mine = session.get_one(Model, model_id)
    if owner is not None and owner.handle.lower() != mine.handle.lower():
        if kind == "renamed":
            return None  # A new repo took the old id: it means that one now.
        raise Conflict(f"{name!r} is the handle of a registered model", hint="choose another alias")
    # The row is locked first, so that two movers write their events in the order in which they moved it.
    before = session.scalar(select(ModelAlias.model_id).where(ModelAlias.alias == name).with_for_update())
    if before == model_id:
        return before
    put = insert(ModelAlias).values(alias=name, model_id=model_id, kind=kind)
    session.execute(
        put.on_conflict_do_update(index_elements=[ModelAlias.alias], set_={"model_id": model_id, "kind": kind})
    )
    session.add(AliasEvent(alias=name, from_model_id=before, to_model_id=model_id, actor=actor))
    session.flush()
    return before


def remove_alias(session: Session, alias: str, *, actor: str) -> int:
    """The id it pointed at.  Raises NotFound."""
    name = _alias_name(alias)
    gone = delete(ModelAlias).where(ModelAlias.alias == name).returning(ModelAlias.model_id)
    before: int | None = session.scalar(gone)
    if before is None:
        raise NotFound(f"no alias {name!r}", hint="`modelkin model show MODEL` lists a model's aliases")
    session.add(AliasEvent(alias=name, from_model_id=before, to_model_id=None, actor=actor))
    session.flush()
    return before


def aliases(session: Session, model_id: int) -> list[str]:
    query = select(ModelAlias.alias).where(ModelAlias.model_id == model_id).order_by(ModelAlias.alias)
    return list(session.scalars(query))


def alias_history(session: Session, alias: str) -> list[dict[str, Any]]:
    """Where it pointed before and after, when, and who moved it; oldest first."""
    query = select(AliasEvent).where(AliasEvent.alias == alias.strip().lower()).order_by(AliasEvent.id)
    return [
        {"from": event.from_model_id, "to": event.to_model_id, "actor": event.actor, "at": event.at}
        for event in session.scalars(query)
    ]


def add_tags(session: Session, model_id: int, tags: list[str]) -> list[str]:
    """All tags of the model afterwards.  A tag is lower case."""
    for tag in sorted({_tag_name(tag) for tag in tags}):
        session.execute(insert(ModelTag).values(model_id=model_id, tag=tag).on_conflict_do_nothing())
    return tags_of(session, model_id)


def remove_tags(session: Session, model_id: int, tags: list[str]) -> list[str]:
    """All tags of the model afterwards."""
    wanted = [_tag_name(tag) for tag in tags]
    session.execute(delete(ModelTag).where(ModelTag.model_id == model_id, ModelTag.tag.in_(wanted)))
    return tags_of(session, model_id)


def tags_of(session: Session, model_id: int) -> list[str]:
    return list(session.scalars(select(ModelTag.tag).where(ModelTag.model_id == model_id).order_by(ModelTag.tag)))


def tags_of_many(session: Session, model_ids: list[int]) -> dict[int, list[str]]:
    """In one query, for a page of a list; models without tags are absent."""
    found: dict[int, list[str]] = {}
    query = select(ModelTag).where(ModelTag.model_id.in_(model_ids)).order_by(ModelTag.model_id, ModelTag.tag)
    for row in session.scalars(query):
        found.setdefault(row.model_id, []).append(row.tag)
    return found


def resolve(session: Session, named: ModelInfo, target: ModelInfo, *, actor: str, move: bool = False) -> ModelInfo:
    """Says that an imported name is this model.  The named row, its vectors and its history stay.

    Raises BadInput when `named` is a model itself or `target` is only a name, Conflict when it was resolved to
    another model before and `move` is off.
    """
    if named.kind != "named":
        raise BadInput(f"{named.name} is a {named.kind} model itself, not a name", hint="only imported names resolve")
    if target.kind == "named":
        raise BadInput(
            f"{target.name} is only a name too", hint="register the model itself first: modelkin model add …"
        )
    row = session.scalars(select(Model).where(Model.id == named.id).with_for_update()).one()
    session.refresh(row)
    before = row.resolved_to_id
    if before == target.id:
        return info_of(row)
    if before is not None and not move:
        raise Conflict(
            f"{named.handle} was resolved to {get(session, before).name} before",
            hint="repeat with --move if that was wrong",
        )
    history = [*row.facts.get("resolutions", []), {"from": before, "to": target.id, "actor": actor}]
    stamped = {**history[-1], "at": session.scalar(select(func.to_char(func.now(), "YYYY-MM-DD HH24:MI:SSOF")))}
    session.execute(
        update(Model)
        .where(Model.id == row.id)
        .values(resolved_to_id=target.id, facts={**row.facts, "resolutions": [*history[:-1], stamped]})
    )
    session.refresh(row)
    return info_of(row)


def find_named(session: Session, text: str) -> ModelInfo:
    """The named row itself, also where a model of the same handle is registered.

    The name as it was imported, or its handle alone or with the beginning of a revision where only one name begins
    like that.  Upper and lower case are one.  Raises NotFound, or Ambiguous with the names.
    """
    handle, revision = handle_from_name(text)
    begins = revision.lower() if "@" in text else ""
    of_handle = select(Model).where(Model.kind == "named", func.lower(Model.handle) == handle.lower())
    rows = list(session.scalars(of_handle.order_by(Model.revision)))
    fitting = [row for row in rows if row.revision.lower().startswith(begins)]
    exact = [row for row in rows if row.identity == named_identity(handle, revision)]
    if not fitting:
        others = f"; of {handle} there is {_listed(rows)}" if rows else ""
        raise NotFound(
            f"no import has named {text!r}{others}", hint="`modelkin model list --kind named` shows the names"
        )
    if len(fitting) > 1 and not exact:
        raise Ambiguous(f"{text!r} could be {_listed(fitting)}", hint="write more of the revision")
    return info_of((exact or fitting)[0])


def claim_names(session: Session, model: ModelInfo, *, actor: str) -> list[ModelInfo]:
    """Resolves to `model` the imported names that are proven to be it, and returns them.

    Proof is the identity that the import's file stated, or, where none was stated, the same handle and whole revision.
    A name under which files of several identities came in is left alone; so is one that was resolved before.
    """
    if model.kind == "named":
        return []
    stated = Model.facts[STATED].contains([model.identity])
    query = select(Model.id).where(Model.kind == "named", Model.resolved_to_id.is_(None))
    query = query.where(or_(stated, Model.identity == _named_as(model))).order_by(Model.id)
    claimed = []
    for named in [get(session, one) for one in session.scalars(query).all()]:
        identities = named.facts.get(STATED, [])
        # The revision of an adapter says nothing of its base, so that equal names may be two models.
        if identities == [model.identity] or (not identities and model.kind != "adapter"):
            claimed.append(resolve(session, named, model, actor=actor))
    return claimed


def unresolved_twins(session: Session, model: ModelInfo) -> list[ModelInfo]:
    """The imported names with this model's handle of which nobody has said what they are."""
    if model.kind == "named":
        return []
    handles = {model.handle.lower(), handle_from_name(f"{model.handle}/{model.file}")[0].lower()}
    query = select(Model).where(Model.kind == "named", Model.resolved_to_id.is_(None))
    return [info_of(row) for row in session.scalars(query.where(func.lower(Model.handle).in_(handles)))]


def written(named: ModelInfo) -> str:
    """A name as `find_named` reads it."""
    return named.handle if named.revision == "unknown" else named.name


def names_resolved_to(session: Session, model_id: int) -> list[ModelInfo]:
    """The named rows that turned out to be this model: their imported vectors are its vectors too."""
    return [info_of(row) for row in session.scalars(select(Model).where(Model.resolved_to_id == model_id))]


def _named_as(model: ModelInfo) -> str:
    """The identity of the name under which an import brings this model where it is not registered."""
    handle = handle_from_name(f"{model.handle}/{model.file}")[0]
    return named_identity(handle, model.revision)


def _listed(rows: list[Model]) -> str:
    return ", ".join(f"{row.handle}@{row.revision[:16]}" for row in rows)


def _alias_name(alias: str) -> str:
    name = alias.strip().lower()
    if not re.fullmatch(r"[\w][\w.+-]*(/[\w.+-]+)?", name) or len(name) > 200:
        raise BadInput(f"{alias!r} cannot be an alias", hint="letters, digits and . _ + -, with at most one slash")
    return name


def _tag_name(tag: str) -> str:
    name = tag.strip().lower()
    if not name or len(name) > 100 or not name.isprintable() or "," in name:
        raise BadInput(f"{tag!r} cannot be a tag", hint="printable characters without commas, at most 100")
    return name
