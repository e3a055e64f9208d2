"""Text sets by name or hash: stored once a content, whoever adds it and however often."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.errors import Ambiguous, BadInput, Conflict, NotFound, Unsupported
from registry.shuffles import shuffle_prompts
from registry.tables import Text, TextSet, TextSetName
from registry.textsets import FrozenSet, Pair, check_name, freeze, freeze_ids

COPY_TEXTS: LiteralString = (
    "copy texts (text_set_id, position, text_hash, prompt_id, prompt, response, response_bytes, source_id, columns,"
    " tags) from stdin"
)

MAX_SHUFFLES = 100

STARTER = "starter"
STARTER_FILE = Path(__file__).parent.parent / "data" / "starter.jsonl"


@dataclass(frozen=True)
class TextSetInfo:
    id: int
    name: str
    """The name it was asked for by, else its first."""
    names: tuple[str, ...]
    """All of them, the first given first."""
    content_hash: str
    """sha256 hex."""
    n_texts: int
    n_prompts: int
    opaque: bool
    parent_id: int | None
    derivation: dict[str, Any] | None
    source: dict[str, Any]
    created_at: Any


@dataclass(frozen=True)
class StoredText:
    position: int
    """Index into every vector over the set."""
    text_hash: bytes
    prompt_id: int
    prompt: str | None
    """None in an opaque set, as is the response."""
    response: str | None
    response_bytes: int | None
    source_id: str | None
    columns: dict[str, Any]
    tags: dict[str, Any]

    @property
    def pair(self) -> tuple[str, str]:
        """Prompt and response.  Raises Unsupported in an opaque set."""
        if self.prompt is None or self.response is None:
            raise Unsupported(f"text {self.position} of an opaque set has no text, only the id {self.source_id!r}")
        return self.prompt, self.response


def add(
    session: Session,
    name: str,
    frozen: FrozenSet,
    *,
    parent_id: int | None = None,
    derivation: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
) -> TextSetInfo:
    """Stores the set under `name`; content that is there already only gets the name as one more.

    Two processes that add the same content at once end with one set.  Raises Conflict when the name is another
    set's.
    """
    values = {
        "content_hash": frozen.content_hash,
        "n_texts": len(frozen.pairs),
        "n_prompts": max(frozen.prompt_ids) + 1,
        "parent_id": parent_id,
        "derivation": derivation,
        "source": {**(source or {}), "report": frozen.report.to_dict()},
    }
    return _add(session, name, values, _rows(frozen))


def add_opaque(session: Session, name: str, ids: Sequence[str], *, source: dict[str, Any] | None = None) -> TextSetInfo:
    """A set of ordered ids without text: vectors can be imported on it, nothing can be scored.

    Raises BadInput on empty or double ids, Conflict when the name is another set's.
    """
    hashes, content = freeze_ids(ids)
    values = {
        "content_hash": content,
        "n_texts": len(ids),
        "n_prompts": len(ids),
        "opaque": True,
        "source": source or {},
    }
    rows = (
        (position, digest, position, None, None, None, identifier, "{}", "{}")
        for position, (digest, identifier) in enumerate(zip(hashes, ids, strict=True))
    )
    return _add(session, name, values, rows)


def is_known(session: Session, content_hash: str) -> bool:
    """Whether a set of this content is stored."""
    return session.scalar(select(TextSet.id).where(TextSet.content_hash == content_hash)) is not None


def get(session: Session, name_or_hash: str) -> TextSetInfo:
    """By name, by whole content hash or by its first eight or more digits; `starter` is stored on first use.

    Raises NotFound, naming what is near, or Ambiguous.
    """
    found = session.execute(
        select(TextSet, TextSetName.name)
        .join(TextSetName, TextSetName.text_set_id == TextSet.id)
        .where(TextSetName.name == name_or_hash)
    ).first()
    if found is not None:
        return _info(session, found[0], found[1])
    if name_or_hash == STARTER:
        return ensure_starter(session)
    rows: Sequence[TextSet] = ()
    if len(name_or_hash) >= 8 and set(name_or_hash) <= set("0123456789abcdef"):
        rows = session.scalars(select(TextSet).where(TextSet.content_hash.startswith(name_or_hash))).all()
    if len(rows) > 1:
        raise Ambiguous(f"{len(rows)} text sets have a hash that begins with {name_or_hash}", hint="give more digits")
    if rows:
        return _info(session, rows[0])
    raise _unknown(session, name_or_hash)


def ensure_starter(session: Session) -> TextSetInfo:
    """The bundled set, stored on first use; its name is kept for it."""
    taken = session.scalar(select(TextSetName.name).where(TextSetName.name == STARTER))
    if taken is not None:
        return get(session, STARTER)
    frozen, source = _bundled()
    return add(session, STARTER, frozen, source=source)


def _bundled() -> tuple[FrozenSet, dict[str, Any]]:
    from registry.exchange.text_rows import open_rows

    rows = open_rows(STARTER_FILE)
    return freeze(rows), rows.provenance()


def by_id(session: Session, text_set_id: int) -> TextSetInfo:
    """Raises NotFound."""
    row = session.get(TextSet, text_set_id)
    if row is None:
        raise NotFound(f"no text set has the id {text_set_id}")
    return _info(session, row)


def list_all(session: Session) -> list[TextSetInfo]:
    """Every set once, in the order in which they were added."""
    names: dict[int, list[str]] = {}
    for text_set_id, name in session.execute(
        select(TextSetName.text_set_id, TextSetName.name).order_by(TextSetName.created_at, TextSetName.name)
    ):
        names.setdefault(text_set_id, []).append(name)
    rows = session.scalars(select(TextSet).order_by(TextSet.id))
    return [_shaped(row, names.get(row.id, [])) for row in rows]


def derived(session: Session, parent_id: int) -> list[TextSetInfo]:
    """The sets derived from this one, oldest first."""
    rows = session.scalars(select(TextSet).where(TextSet.parent_id == parent_id).order_by(TextSet.id)).all()
    return [_info(session, row) for row in rows]


def texts(session: Session, text_set_id: int, start: int = 0, stop: int | None = None) -> list[StoredText]:
    """The texts at positions `start` ≤ position < `stop`, in order."""
    columns = (
        Text.position,
        Text.text_hash,
        Text.prompt_id,
        Text.prompt,
        Text.response,
        Text.response_bytes,
        Text.source_id,
        Text.columns,
        Text.tags,
    )
    query = select(*columns).where(Text.text_set_id == text_set_id, Text.position >= start).order_by(Text.position)
    if stop is not None:
        query = query.where(Text.position < stop)
    return [StoredText(*row) for row in session.execute(query)]


def response_bytes(session: Session, text_set_id: int) -> int | None:
    """UTF-8 bytes of all responses; None for an opaque set."""
    total = session.scalar(select(func.sum(Text.response_bytes)).where(Text.text_set_id == text_set_id))
    return None if total is None else int(total)


def response_byte_counts(session: Session, text_set_id: int) -> list[int] | None:
    """UTF-8 bytes of each response, by position; None for an opaque set."""
    query = select(Text.response_bytes).where(Text.text_set_id == text_set_id).order_by(Text.position)
    counts = [one for one in session.scalars(query) if one is not None]
    return counts or None


def derive_shuffled(session: Session, name_or_hash: str, c: int, seed: int = 0) -> list[TextSetInfo]:
    """`c` sets named NAME/shuffle-0 … (with another seed than 0: NAME/shuffle-seed1-0 …).

    Each response keeps its position and gets another position's prompt, see `registry.shuffles`.  Deriving again
    changes nothing.  Very small sets have few permutations: equal ones are one set with several names.  Raises
    Unsupported for an opaque set, BadInput where no such shuffle exists, Conflict when a name is another set's.
    """
    if not 1 <= c <= MAX_SHUFFLES:
        raise BadInput(f"{c} shuffles were asked for", hint=f"give a number from 1 to {MAX_SHUFFLES}")
    parent = require_text(get(session, name_or_hash), "shuffling prompts")
    rows = texts(session, parent.id)
    responses = [row.response for row in rows]
    stem = f"{parent.name}/shuffle-" + (f"seed{seed}-" if seed else "")
    made = []
    for draw in range(c):
        order = shuffle_prompts([row.prompt_id for row in rows], responses, seed=seed, draw=draw)
        pairs = [
            Pair(rows[order[s]].prompt or "", row.response or "", row.source_id, row.columns, row.tags)
            for s, row in enumerate(rows)
        ]
        # Whitespace was dealt with in the parent: what is there now was kept on purpose.
        frozen = freeze(pairs, keep_whitespace=True)
        derivation = {"shuffle_prompts": draw, "seed": seed}
        source = {"parent": parent.content_hash}
        made.append(add(session, f"{stem}{draw}", frozen, parent_id=parent.id, derivation=derivation, source=source))
    return made


def require_text(info: TextSetInfo, doing: str = "this") -> TextSetInfo:
    """The set itself.  Raises Unsupported when it is opaque: `doing` says what needs its text."""
    if info.opaque:
        raise Unsupported(
            f"{doing} needs text, but the text set {info.name!r} is opaque: only the ids of its texts are known",
            hint="use a text set added from a file (modelkin textset add FILE), or import vectors on this one",
        )
    return info


def _rows(frozen: FrozenSet) -> Iterator[tuple[Any, ...]]:
    for position, (pair, digest, prompt_id) in enumerate(
        zip(frozen.pairs, frozen.text_hashes, frozen.prompt_ids, strict=True)
    ):
        yield (
            position,
            digest,
            prompt_id,
            pair.prompt,
            pair.response,
            len(pair.response.encode()),
            pair.source_id,
            json.dumps(pair.columns, allow_nan=False),
            json.dumps(pair.tags, allow_nan=False),
        )


def _add(session: Session, name: str, values: dict[str, Any], rows: Iterable[tuple[Any, ...]]) -> TextSetInfo:
    check_name(name)
    _require_free(session, name, values["content_hash"])
    # Two processes may add the same content: the second waits here until the first has committed or given up.
    made = session.scalar(
        insert(TextSet).values(values).on_conflict_do_nothing(index_elements=["content_hash"]).returning(TextSet.id)
    )
    if made is not None:
        _copy(session, made, rows)
    row = session.scalars(select(TextSet).where(TextSet.content_hash == values["content_hash"])).one()
    session.execute(insert(TextSetName).values(name=name, text_set_id=row.id).on_conflict_do_nothing())
    _require_free(session, name, values["content_hash"])
    return _info(session, row, name)


def _require_free(session: Session, name: str, content_hash: str) -> None:
    # Commands that name no set mean the bundled one: nothing else may stand in its place, even before it is stored.
    if name == STARTER and content_hash != _bundled()[0].content_hash:
        raise Conflict(
            f"the name {STARTER!r} is kept for the bundled text set", hint="choose another name for this one"
        )
    bound = session.scalar(select(TextSet.content_hash).join(TextSetName).where(TextSetName.name == name))
    if bound is not None and bound != content_hash:
        raise Conflict(
            f"the name {name!r} is taken by another text set ({bound[:12]}…; this one is {content_hash[:12]}…)",
            hint="a text set never changes: choose another name for this one",
        )


def _copy(session: Session, text_set_id: int, rows: Iterable[tuple[Any, ...]]) -> None:
    driver: Any = session.connection().connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(COPY_TEXTS) as copy:
        for row in rows:
            copy.write_row((text_set_id, *row))


def _unknown(session: Session, name: str) -> NotFound:
    names = list(session.scalars(select(TextSetName.name).order_by(TextSetName.name)))
    near = difflib.get_close_matches(name, names, n=1)
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return NotFound(
        f"no text set is named {name!r}" + (f"; there are {shown}" if names else "; there is none yet"),
        hint=f"did you mean {near[0]!r}?" if near else "add one: modelkin textset add FILE --name NAME",
    )


def _info(session: Session, row: TextSet, name: str | None = None) -> TextSetInfo:
    names = session.scalars(
        select(TextSetName.name)
        .where(TextSetName.text_set_id == row.id)
        .order_by(TextSetName.created_at, TextSetName.name)
    ).all()
    return _shaped(row, names, name)


def _shaped(row: TextSet, names: Sequence[str], name: str | None = None) -> TextSetInfo:
    return TextSetInfo(
        id=row.id,
        name=name or (names[0] if names else row.content_hash[:12]),
        names=tuple(names),
        content_hash=row.content_hash,
        n_texts=row.n_texts,
        n_prompts=row.n_prompts,
        opaque=row.opaque,
        parent_id=row.parent_id,
        derivation=row.derivation,
        source=row.source,
        created_at=row.created_at,
    )
