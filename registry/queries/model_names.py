"""What people call models: aliases that move and are audited, free tags, and names that get resolved."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.errors import BadInput, Conflict, NotFound
from registry.identity import handle_from_name, named_identity
from registry.queries.model_info import ModelInfo, get, info_of
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
    """The named row itself, also where a model of the same handle is registered.  Raises NotFound."""
    identity = named_identity(*handle_from_name(text))
    row = session.scalars(select(Model).where(Model.identity == identity)).one_or_none()
    if row is None:
        raise NotFound(f"no import has named {text!r}", hint="`modelkin model list --kind named` shows the names")
    return info_of(row)


def names_resolved_to(session: Session, model_id: int) -> list[ModelInfo]:
    """The named rows that turned out to be this model: their imported vectors are its vectors too."""
    return [info_of(row) for row in session.scalars(select(Model).where(Model.resolved_to_id == model_id))]


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
