"""From what people type to the one model they mean."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry.errors import Ambiguous, BadInput, NotFound
from registry.queries.model_info import ModelInfo, get, info_of
from registry.tables import Model, ModelAlias


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
