"""Text sets: rows in, a frozen and content-hashed list of (prompt, response) out, with a report of every row left out.

The rules, each reported by row number:

- A response loses its outer whitespace (`str.strip`) unless `keep_whitespace`; a prompt is never touched.
- A row whose prompt or response is empty or only whitespace is refused.
- A row with text that is not UTF-8 (lone surrogates) or holds a NUL (PostgreSQL has none in text) is refused.
- A row with a prompt or response over `MAX_TEXT_BYTES` is refused; nothing is cut.
- A pair seen before is left out: the first stays.
- `n` pairs are drawn without replacement after all of that, and stay in the order of their source.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from registry.errors import BadInput

MAX_TEXT_BYTES = 1 << 20
"""UTF-8 bytes of one prompt or one response: 1 MiB."""

ROWS_STORED = 1000
"""Row numbers that a stored report keeps a reason; its counts are always whole."""

REASONS = {
    "duplicate": "the same pair as an earlier row",
    "empty_prompt": "the prompt is empty",
    "empty_response": "the response is empty",
    "invalid_utf8": "not UTF-8",
    "nul": "holds a NUL character, which PostgreSQL cannot store",
    "too_long": f"a prompt or response over {MAX_TEXT_BYTES} bytes",
    "missing": "a field is missing or null",
    "not_text": "a field holds no text",
    "no_user_turn": "a conversation without a user turn",
    "no_assistant_turn": "a conversation without an assistant turn after its first user turn",
    "stripped": "outer whitespace of the response was removed",
    "turns_left_out": "later turns were left out",
    "system_left_out": "a system turn was left out of the prompt and kept as a column",
    "columns_cut": "further columns were too large and are only named",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)*", re.ASCII)
_LOOKS_LIKE_HASH = re.compile(r"[0-9a-f]{8,}", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """One prompt and one response to it, before freezing."""

    prompt: str
    response: str
    source_id: str | None = None
    """The row's id where it came from."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further columns of the source: JSON values."""
    tags: dict[str, Any] = field(default_factory=dict)
    """language, topic, source, licence: outside the hash."""
    row: int | None = None
    """Where it stood in its source, from 1; counted where not given."""
    notes: tuple[str, ...] = ()
    """Keys of `REASONS`: what was done to the row before it came here."""


@dataclass(frozen=True)
class Unusable:
    """A row that could not even become a pair."""

    row: int
    reason: str
    """A key of `REASONS`."""


@dataclass(frozen=True)
class Report:
    """What became of the rows.  Row numbers count from 1; in a file of lines they are line numbers."""

    rows: int
    kept: int
    sampled_from: int
    """Usable, distinct pairs before `n` were drawn."""
    refused: dict[str, list[int]]
    """Reason → rows left out."""
    altered: dict[str, list[int]]
    """Reason → rows that stayed, but not as they were."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with at most `ROWS_STORED` row numbers a reason."""

        def short(rows: dict[str, list[int]]) -> dict[str, Any]:
            return {reason: {"count": len(r), "rows": r[:ROWS_STORED]} for reason, r in sorted(rows.items())}

        return {
            "rows": self.rows,
            "kept": self.kept,
            "sampled_from": self.sampled_from,
            "refused": short(self.refused),
            "altered": short(self.altered),
        }

    def sentences(self) -> list[str]:
        """The report for a person, one reason a line."""
        return report_sentences(self.to_dict())


def report_sentences(stored: dict[str, Any]) -> list[str]:
    """A stored report (`Report.to_dict`) for a person, one reason a line."""
    lines = [f"{stored['kept']} of {stored['rows']} rows kept"]
    if stored["sampled_from"] != stored["kept"]:
        lines[0] += f", drawn from {stored['sampled_from']} usable ones"
    for verb, group in (("left out", stored["refused"]), ("altered", stored["altered"])):
        for reason, found in sorted(group.items()):
            lines.append(f"{verb}: {_listed(found['rows'], found['count'])}: {REASONS.get(reason, reason)}")
    return lines


@dataclass(frozen=True)
class FrozenSet:
    """The ordered pairs of a text set and its identity."""

    pairs: tuple[Pair, ...]
    text_hashes: tuple[bytes, ...]
    """32 bytes each: sha256(prompt ‖ 0x00 ‖ response)."""
    prompt_ids: tuple[int, ...]
    """Dense, by first appearance."""
    content_hash: str
    report: Report


def text_hash(prompt: str, response: str) -> bytes:
    """sha256(prompt ‖ 0x00 ‖ response), UTF-8, no normalisation; no text holds a NUL, so no two pairs share it."""
    return hashlib.sha256(prompt.encode() + b"\0" + response.encode()).digest()


def content_hash(text_hashes: Iterable[bytes]) -> str:
    """sha256 hex over the concatenated 32-byte digests, in order."""
    whole = hashlib.sha256()
    for digest in text_hashes:
        whole.update(digest)
    return whole.hexdigest()


def freeze(
    rows: Iterable[Pair | Unusable], *, keep_whitespace: bool = False, n: int | None = None, seed: int = 0
) -> FrozenSet:
    """Applies the rules of this module.  Raises BadInput when no row is usable or fewer than `n` are.

    The draw keeps the `n` pairs with the smallest sha256(seed ‖ text hash): it depends on the seed and the texts
    alone, not on a library's generator or the order of the source, and a smaller draw is part of a larger one.
    """
    if n is not None and n < 1:
        raise BadInput(f"n is {n}, but a text set has at least one text", hint="give n ≥ 1, or leave it out")
    seen: set[bytes] = set()
    chosen: list[tuple[int, int, bytes, Pair]] = []
    refused: dict[str, list[int]] = defaultdict(list)
    total = 0
    for total, given in enumerate(rows, start=1):
        row = given.row if given.row is not None else total
        if isinstance(given, Unusable):
            refused[given.reason].append(row)
            continue
        pair = replace(given if keep_whitespace else _strip(given), row=row)
        reason = refusal(pair)
        if reason is not None:
            refused[reason].append(row)
            continue
        digest = text_hash(pair.prompt, pair.response)
        if digest in seen:
            refused["duplicate"].append(row)
            continue
        seen.add(digest)
        _draw(chosen, (-_rank(seed, digest) if n is not None else 0, len(seen), digest, pair), n)
    if not chosen:
        raise BadInput(f"none of the {total} rows is usable{_reasons(refused)}", hint="check the fields that were read")
    if n is not None and len(seen) < n:
        raise BadInput(
            f"{n} texts were asked for, but only {len(seen)} of {total} rows are usable and distinct"
            f"{_reasons(refused)}",
            hint=f"ask for at most {len(seen)}",
        )
    chosen.sort(key=lambda entry: entry[1])
    return _frozen([entry[3] for entry in chosen], [entry[2] for entry in chosen], total, len(seen), dict(refused))


def refusal(pair: Pair) -> str | None:
    """Why this pair cannot be in a text set, as a key of `REASONS`; None when it can."""
    for value, name in ((pair.prompt, "prompt"), (pair.response, "response")):
        if not value.strip():
            return f"empty_{name}"
        if "\0" in value:
            return "nul"
        try:
            if len(value.encode()) > MAX_TEXT_BYTES:
                return "too_long"
        except UnicodeEncodeError:
            return "invalid_utf8"
    return None


def number_prompts(prompts: Iterable[str]) -> tuple[int, ...]:
    """Dense ids by first appearance: equal prompts share one."""
    ids: dict[str, int] = {}
    return tuple(ids.setdefault(prompt, len(ids)) for prompt in prompts)


def freeze_ids(ids: Sequence[str]) -> tuple[tuple[bytes, ...], str]:
    """Hashes of an opaque set: sha256 of each id, and over them in order.  Raises BadInput on empty or double ids."""
    if not ids:
        raise BadInput("an opaque text set needs at least one id")
    first: dict[str, int] = {}
    for position, identifier in enumerate(ids):
        try:
            identifier.encode()
            storable = bool(identifier) and "\0" not in identifier
        except UnicodeEncodeError:
            storable = False
        if not storable:
            raise BadInput(f"the id at position {position} is empty, holds a NUL or is not UTF-8")
        if identifier in first:
            raise BadInput(f"the id {identifier!r} is at positions {first[identifier]} and {position}")
        first[identifier] = position
    hashes = tuple(hashlib.sha256(identifier.encode()).digest() for identifier in ids)
    return hashes, content_hash(hashes)


def check_name(name: str) -> str:
    """The name itself.  Raises BadInput when no text set can have it."""
    if len(name) > 200 or not _NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot name a text set",
            hint="use letters, digits and . _ + - (and / between parts), starting with a letter or digit",
        )
    if _LOOKS_LIKE_HASH.fullmatch(name):
        raise BadInput(f"{name!r} looks like the beginning of a hash", hint="choose a name with another letter in it")
    return name


def _strip(pair: Pair) -> Pair:
    stripped = pair.response.strip()
    if stripped == pair.response:
        return pair
    return replace(pair, response=stripped, notes=(*pair.notes, "stripped"))


def _rank(seed: int, digest: bytes) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + digest).digest())


def _draw(chosen: list[tuple[int, int, bytes, Pair]], entry: tuple[int, int, bytes, Pair], n: int | None) -> None:
    """Keeps at most `n` entries, so that a source larger than memory can be sampled."""
    if n is None:
        chosen.append(entry)
    elif len(chosen) < n:
        heapq.heappush(chosen, entry)
    else:
        heapq.heappushpop(chosen, entry)


def _frozen(
    pairs: list[Pair], digests: list[bytes], total: int, usable: int, refused: dict[str, list[int]]
) -> FrozenSet:
    altered: dict[str, list[int]] = defaultdict(list)
    for pair in pairs:
        for note in pair.notes:
            altered[note].append(pair.row or 0)
    return FrozenSet(
        pairs=tuple(pairs),
        text_hashes=tuple(digests),
        prompt_ids=number_prompts(pair.prompt for pair in pairs),
        content_hash=content_hash(digests),
        report=Report(rows=total, kept=len(pairs), sampled_from=usable, refused=refused, altered=dict(altered)),
    )


def _reasons(refused: dict[str, list[int]]) -> str:
    told = "; ".join(
        f"{_listed(rows, len(rows))}: {REASONS.get(reason, reason)}" for reason, rows in sorted(refused.items())
    )
    return f" ({told})" if told else ""


def _listed(rows: list[int], count: int) -> str:
    shown = ", ".join(str(row) for row in rows[:10])
    more = f" and {count - 10} more" if count > 10 else ""
    return f"row{'s' if count > 1 else ''} {shown}{more}"
