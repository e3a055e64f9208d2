"""Prompt transforms: a typed pipeline of edits with one canonical spelling.

An edit changes the user's prompt (`append`, `prepend`, `repeat`, `wrap`, `clear`) or sets a system prompt (`system`).
A pipeline applies its edits in order.  The canonical spec is a list of objects with every field present; its hash
identifies the transform.

The built-ins are the three of Appendix G of "Language Model Maps for Prompt-Response Distributions" (2603.18593),
beside `base` (the prompt as it is) and `empty` (no prompt: the empty user turn of Appendix B.3):

    cot         x + "\\n" + "Let's think step by step."
    repeat      x + "\\n\\n" + x
    repeat+cot  x + "\\n\\n" + x + "\\n" + "Let's think step by step."

The apostrophe is the ASCII one (0x27): so the appendix's formulas print it, as does Kojima et al. (2022); only the
paper's running prose sets a typographic one.  These bytes never change: other bytes get another name.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from registry.canonical import hash_json
from registry.errors import BadInput, NotFound

MAX_TEXT_BYTES = 1 << 16
"""UTF-8 bytes of one text of an edit."""
MAX_TIMES = 64

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(\+[a-z0-9][a-z0-9._-]*)*", re.ASCII)


@dataclass(frozen=True)
class EditedPrompt:
    system: str | None
    """None: no system message at all."""
    user: str


@dataclass(frozen=True)
class Append:
    kind: ClassVar[str] = "append"
    text: str

    def apply(self, prompt: EditedPrompt) -> EditedPrompt:
        return EditedPrompt(prompt.system, prompt.user + self.text)


@dataclass(frozen=True)
class Prepend:
    kind: ClassVar[str] = "prepend"
    text: str

    def apply(self, prompt: EditedPrompt) -> EditedPrompt:
        return EditedPrompt(prompt.system, self.text + prompt.user)


@dataclass(frozen=True)
class Repeat:
    kind: ClassVar[str] = "repeat"
    separator: str
    times: int = 2

    def apply(self, prompt: EditedPrompt) -> EditedPrompt:
        return EditedPrompt(prompt.system, self.separator.join([prompt.user] * self.times))


@dataclass(frozen=True)
class Wrap:
    kind: ClassVar[str] = "wrap"
    before: str
    after: str

    def apply(self, prompt: EditedPrompt) -> EditedPrompt:
        return EditedPrompt(prompt.system, self.before + prompt.user + self.after)


@dataclass(frozen=True)
class System:
    kind: ClassVar[str] = "system"
    text: str

    def apply(self, prompt: EditedPrompt) -> EditedPrompt:
        return EditedPrompt(self.text, prompt.user)


@dataclass(frozen=True)
class Clear:
    """Removes the user's prompt: what is left is the empty turn."""

    kind: ClassVar[str] = "clear"

    def apply(self, prompt: EditedPrompt) -> EditedPrompt:
        return EditedPrompt(prompt.system, "")


Edit = Append | Prepend | Repeat | Wrap | System | Clear

EDITS: dict[str, type[Edit]] = {edit.kind: edit for edit in (Append, Prepend, Repeat, Wrap, System, Clear)}


@dataclass(frozen=True)
class Pipeline:
    """Edits in the order in which they are applied."""

    edits: tuple[Edit, ...] = ()
    parts: tuple[str, ...] = ()
    """The names it was composed of in order; empty when it was written as edits.  Not part of its identity."""

    def apply(self, prompt: str) -> EditedPrompt:
        edited = EditedPrompt(None, prompt)
        for edit in self.edits:
            edited = edit.apply(edited)
        return edited

    @property
    def spec(self) -> list[dict[str, Any]]:
        """The canonical list: `{"edit": kind, **every field}` an edit."""
        return [{"edit": edit.kind, **asdict(edit)} for edit in self.edits]

    @property
    def spec_hash(self) -> str:
        """sha256 hex of the canonical JSON of `spec`."""
        return hash_json(self.spec)


_COT = Append("\nLet's think step by step.")
_REPEAT = Repeat("\n\n", 2)

BUILT_IN: dict[str, Pipeline] = {
    "base": Pipeline(),
    "cot": Pipeline((_COT,)),
    "repeat": Pipeline((_REPEAT,)),
    "repeat+cot": Pipeline((_REPEAT, _COT), ("repeat", "cot")),
    "empty": Pipeline((Clear(),)),
}


def parse(spec: str | list[Any], known: Mapping[str, Pipeline] = BUILT_IN) -> Pipeline:
    """A pipeline from any of its spellings.  Raises BadInput, or NotFound for a name not in `known`.

    - a list of edits, as JSON or parsed: `[{"edit": "repeat", "separator": "\\n\\n"}, {"edit": "append", …}]`
    - names joined by `+`: `repeat+cot`
    - edits written as calls, and names, joined by `+`: `repeat("\\n\\n") + append("\\nBe brief.")`
    """
    if isinstance(spec, list):
        return _checked([_edit_from_json(entry, place) for place, entry in enumerate(spec)])
    text = spec.strip()
    if not text:
        raise BadInput("the transform has no spec", hint=_HOW_TO)
    if text[0] in "[{":
        return parse(_json_list(text), known)
    if "(" in text:
        return _from_calls(text, known)
    return _from_names([name.strip() for name in text.split("+")], known)


def check_name(name: str, pipeline: Pipeline) -> str:
    """The name itself.  Raises BadInput when it is no name, or has a `+` and is not what that composes."""
    if len(name) > 100 or not _NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot name a transform",
            hint="use small letters, digits and . _ -, starting with a letter or digit",
        )
    if "+" in name and tuple(name.split("+")) != pipeline.parts:
        raise BadInput(
            f"the name {name!r} says that it is composed of {' and '.join(name.split('+'))}, but its spec is not",
            hint=f"give the spec '{name}', or choose a name without +",
        )
    return name


_HOW_TO = (
    'write a JSON list such as [{"edit": "append", "text": "…"}], calls such as '
    'repeat("\\n\\n", 2) + append("…"), or names joined by + such as repeat+cot; '
    "edits: append(text), prepend(text), repeat(separator, times), wrap(before, after), system(text), clear()"
)


def _json_list(text: str) -> list[Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the transform's spec is not JSON: {error}", hint=_HOW_TO) from error
    return parsed if isinstance(parsed, list) else [parsed]


def _edit_from_json(entry: Any, place: int) -> Edit:
    if not isinstance(entry, dict) or not isinstance(entry.get("edit"), str):
        raise BadInput(f'edit {place + 1} is not an object with an "edit"', hint=_HOW_TO)
    return _edit(entry["edit"], (), {name: value for name, value in entry.items() if name != "edit"}, place)


def _from_names(names: list[str], known: Mapping[str, Pipeline]) -> Pipeline:
    pipelines = [_known(name, known) for name in names]
    # A single name is no composition: its own parts stay its parts.
    parts = tuple(names) if len(names) > 1 else pipelines[0].parts
    return _checked([edit for pipeline in pipelines for edit in pipeline.edits], parts)


def _from_calls(text: str, known: Mapping[str, Pipeline]) -> Pipeline:
    try:
        tree = ast.parse(text, mode="eval").body
        terms = _terms(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"cannot read the transform's spec {text[:200]!r}", hint=_HOW_TO) from error
    edits: list[Edit] = []
    for place, term in enumerate(terms):
        if isinstance(term, ast.Name):
            edits.extend(_known(term.id, known).edits)
        else:
            edits.append(_called(term, place))
    return _checked(edits)


def _terms(tree: ast.expr) -> list[ast.expr]:
    """The summands of `a + b + c`, in order."""
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return [*_terms(tree.left), *_terms(tree.right)]
    return [tree]


def _called(term: ast.expr, place: int) -> Edit:
    if not isinstance(term, ast.Call) or not isinstance(term.func, ast.Name):
        raise BadInput(f"term {place + 1} of the transform is neither a name nor an edit", hint=_HOW_TO)
    try:
        positional = tuple(ast.literal_eval(value) for value in term.args)
        named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in term.keywords}
    except (ValueError, TypeError) as error:
        raise BadInput(f"{term.func.id}(…) takes only texts and whole numbers", hint=_HOW_TO) from error
    return _edit(term.func.id, positional, named, place)


def _known(name: str, known: Mapping[str, Pipeline]) -> Pipeline:
    if name not in known:
        raise NotFound(f"no transform is named {name!r}; there are {', '.join(sorted(known))}", hint=_HOW_TO)
    return known[name]


def _edit(kind: str, positional: tuple[Any, ...], named: dict[str, Any], place: int) -> Edit:
    edit_type = EDITS.get(kind)
    if edit_type is None:
        raise BadInput(f"edit {place + 1} is of an unknown kind {kind!r}; there are {', '.join(EDITS)}", hint=_HOW_TO)
    allowed = [field.name for field in fields(edit_type)]
    unknown = sorted(set(named) - set(allowed))
    if unknown:
        raise BadInput(f"{kind} has no {', '.join(unknown)}; it takes {', '.join(allowed) or 'nothing'}", hint=_HOW_TO)
    try:
        edit = edit_type(*positional, **named)
    except TypeError as error:
        raise BadInput(f"{kind} takes {', '.join(allowed) or 'nothing'}", hint=_HOW_TO) from error
    for name, value in asdict(edit).items():
        if name == "times":
            _require_times(value)
        else:
            _require_text(kind, name, value)
    return _canonical(edit)


def _require_times(value: Any) -> None:
    if not isinstance(value, int) or not 2 <= value <= MAX_TIMES:
        raise BadInput(f"repeat's times is {value!r}; it is a whole number from 2 to {MAX_TIMES}", hint=_HOW_TO)


def _require_text(kind: str, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise BadInput(f"{kind}'s {name} is {type(value).__name__}, not a text", hint=_HOW_TO)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise BadInput(f"{kind}'s {name} is not UTF-8") from error
    if "\0" in value:
        raise BadInput(f"{kind}'s {name} holds a NUL character, which PostgreSQL cannot store")
    if size > MAX_TEXT_BYTES:
        raise BadInput(f"{kind}'s {name} has {size} bytes; at most {MAX_TEXT_BYTES} are kept")


def _canonical(edit: Edit) -> Edit:
    """One spelling for equal edits; an edit that edits nothing is refused, since `base` is no edit."""
    if isinstance(edit, Wrap):
        if not edit.before:
            return _canonical(Append(edit.after))
        if not edit.after:
            return _canonical(Prepend(edit.before))
    elif isinstance(edit, (Append, Prepend, System)) and not edit.text:
        raise BadInput(f"{edit.kind} with an empty text changes nothing", hint="leave the edit out")
    return edit


def _checked(edits: Iterable[Edit], parts: tuple[str, ...] = ()) -> Pipeline:
    pipeline = Pipeline(tuple(edits), parts)
    if sum(isinstance(edit, System) for edit in pipeline.edits) > 1:
        raise BadInput("the transform sets two system prompts", hint="write both into one system edit")
    return pipeline
