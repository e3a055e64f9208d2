"""Which fields of a row are the prompt and the response, and which of the rest are tags.

A conversation becomes one pair by this rule: the prompt is its first user turn, the response the first assistant turn
after that.  System turns are never part of the prompt (no profile has a system message of its own): their text is
kept in the column `system_turn`.  Whatever else was said is left out.  Both are reported by row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from registry.errors import BadInput
from registry.textsets import Pair, Unusable

CONVERSATIONS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("prompt", "output"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)
"""Known pairs of fields, the first that a file has counts."""
CONTEXTS = ("input", "context")
"""Beside an `instruction`: what it is about.  The prompt is instruction + two newlines + context where there is any."""
TAGS = {
    "language": "language",
    "lang": "language",
    "topic": "topic",
    "category": "topic",
    "source": "source",
    "licence": "licence",
    "license": "licence",
}
IDS = ("id", "uuid", "_id")

USER = {"user", "human", "prompter"}
ASSISTANT = {"assistant", "gpt", "bot", "model", "chatgpt"}

MAX_COLUMNS_BYTES = 1 << 14
"""JSON bytes of all further columns of one row; larger ones are only named, under `_omitted`."""


@dataclass(frozen=True)
class Layout:
    """Either `messages`, or `prompt` and `response` (with `context` beside an instruction); dots reach into objects."""

    prompt: str | None = None
    response: str | None = None
    context: str | None = None
    messages: str | None = None

    def __str__(self) -> str:
        if self.messages is not None:
            return f"{self.messages}: the first user turn is the prompt, the next assistant turn the response"
        context = f' + "\\n\\n" + {self.context} (where there is one)' if self.context else ""
        return f"prompt = {self.prompt}{context}, response = {self.response}"

    def fields(self) -> list[str]:
        return [name for name in (self.prompt, self.response, self.context, self.messages) if name is not None]

    def required(self) -> list[str]:
        return [name for name in (self.prompt, self.response, self.messages) if name is not None]


def choose_layout(
    columns: Iterable[str], *, prompt_field: str | None, response_field: str | None, messages_field: str | None
) -> Layout:
    """The layout asked for, else the first known one that the columns have.  Raises BadInput, naming the columns."""
    columns = list(columns)
    there = f"the columns are {', '.join(columns[:40]) or 'none'}"
    if messages_field is not None:
        if prompt_field is not None or response_field is not None:
            raise BadInput("a messages field excludes a prompt and a response field", hint="give one or the other")
        return Layout(messages=messages_field)
    if prompt_field is not None and response_field is not None:
        return Layout(prompt=prompt_field, response=response_field)
    if prompt_field is not None or response_field is not None:
        lone = "response" if response_field is None else "prompt"
        raise BadInput(f"the {lone} field is not given; {there}", hint=f"add --{lone}-field")
    for name in CONVERSATIONS:
        if name in columns:
            return Layout(messages=name)
    for prompt, response in PAIRS:
        if prompt in columns and response in columns:
            context = next((c for c in CONTEXTS if prompt == "instruction" and c in columns), None)
            return Layout(prompt=prompt, response=response, context=context)
    raise BadInput(
        f"no prompt and response were recognised: {there}",
        hint="name them: --prompt-field A --response-field B, or --messages-field C for conversations",
    )


def read_row(row: Mapping[str, Any], number: int, layout: Layout) -> Pair | Unusable:
    """One row of a file as a pair, or why it is none."""
    notes: list[str] = []
    system = None
    if layout.messages is not None:
        reduced = _reduce(lookup(row, layout.messages))
        if isinstance(reduced, str):
            return Unusable(number, reduced)
        prompt, response, system, notes = reduced
    else:
        parts = [lookup(row, name) for name in layout.required()]
        if any(_absent(part) for part in parts):
            return Unusable(number, "missing")
        context = lookup(row, layout.context) if layout.context else None
        if not all(isinstance(part, str) for part in parts) or not (_absent(context) or isinstance(context, str)):
            return Unusable(number, "not_text")
        prompt, response = parts
        if isinstance(context, str) and context.strip() and prompt.strip():
            prompt = f"{prompt}\n\n{context}"
    columns, tags, source_id = _beside({**row, "system_turn": system} if system is not None else row, layout)
    if "_omitted" in columns:
        notes.append("columns_cut")
    return Pair(prompt, response, source_id, columns, tags, number, tuple(notes))


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """The column of that very name, else down the dots; None where there is nothing."""
    if path in row:
        return row[path]
    found: Any = row
    for step in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def json_safe(value: Any) -> Any:
    """As PostgreSQL's JSON can hold it: no NaN, no NUL, no lone surrogates; what JSON has no word for becomes text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {json_safe(str(key)): json_safe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(entry) for entry in value]
    return json_safe(str(value))


def _absent(value: Any) -> bool:
    # pandas writes a missing text as NaN.
    return value is None or (isinstance(value, float) and math.isnan(value))


def _reduce(turns: Any) -> str | tuple[str, str, str | None, list[str]]:
    """(prompt, response, system text, notes), or the reason why the conversation gives no pair."""
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            return "not_text"
    if _absent(turns):
        return "missing"
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return "not_text"
    said = [(_role(turn), _first(turn, "content", "value")) for turn in turns]
    user = next((place for place, (role, _) in enumerate(said) if role in USER), None)
    if user is None:
        return "no_user_turn"
    answer = next((place for place, (role, _) in enumerate(said) if place > user and role in ASSISTANT), None)
    if answer is None:
        return "no_assistant_turn"
    prompt, response = _content(said[user][1]), _content(said[answer][1])
    if prompt is None or response is None:
        return "not_text"
    system = [_content(content) or "" for role, content in said if role == "system"]
    notes = ["system_left_out"] if system else []
    if len(said) - len(system) > 2:
        notes.append("turns_left_out")
    return prompt, response, "\n\n".join(system) if system else None, notes


def _role(turn: Mapping[str, Any]) -> str:
    return str(_first(turn, "role", "from")).lower()


def _first(turn: Mapping[str, Any], *names: str) -> Any:
    """The first that is there: in Parquet every turn has every key, with nulls."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _content(value: Any) -> str | None:
    """A turn's text; of a list of parts, when all are text, their texts one after the other."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    return None


def _beside(row: Mapping[str, Any], layout: Layout) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """(columns, tags, id) of what is neither prompt nor response.  An object named `tags` gives tags too."""
    used = {name for name in layout.fields() if name in row}
    columns: dict[str, Any] = {}
    tags: dict[str, Any] = {}
    source_id = None
    too_deep = []
    for name, value in row.items():
        if name in used or _absent(value):
            continue
        try:
            safe = json_safe(value)
        except RecursionError:
            too_deep.append(name)
            continue
        if name in IDS and source_id is None and not isinstance(value, (Mapping, list)):
            source_id = str(safe)
        elif name == "tags" and isinstance(value, Mapping):
            tags.update({TAGS.get(key, key): entry for key, entry in safe.items() if entry is not None})
        elif name in TAGS and isinstance(value, (str, int, float)):
            tags.setdefault(TAGS[name], safe)
        else:
            columns[json_safe(name)] = safe
    return _bounded(columns, too_deep), tags, source_id


def _bounded(columns: dict[str, Any], omitted: list[str]) -> dict[str, Any]:
    """Leaves out the largest columns until the rest fits `MAX_COLUMNS_BYTES`, and names all that are left out."""
    sizes = {name: len(json.dumps(value)) + len(name) for name, value in columns.items()}
    omitted = list(omitted)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sum(sizes.values()) <= MAX_COLUMNS_BYTES:
            break
        del sizes[name]
        omitted.append(name)
    kept = {name: columns[name] for name in columns if name in sizes}
    return {**kept, "_omitted": sorted(json_safe(name[:200]) for name in omitted)[:100]} if omitted else kept
