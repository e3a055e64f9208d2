"""How answers look: data on stdout, talk on stderr, one set of formats for every read."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import enum
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_quiet = False


class Format(enum.StrEnum):
    auto = "auto"
    """A table on a terminal, JSON lines of the same rows in a pipe would surprise: so a plain table there too."""
    table = "table"
    json = "json"
    csv = "csv"
    quiet = "quiet"
    """Only the first column, one a line: for scripts."""


def emit(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    format: Format = Format.auto,
    *,
    payload: Any = None,
    empty: str = "nothing to show",
) -> None:
    """Writes `rows` to stdout.

    `columns` chooses and orders what the table and CSV show; JSON carries `payload` (default {"items": rows}) whole.
    """
    if format is Format.json:
        json.dump(
            jsonable(payload if payload is not None else {"items": list(rows), "next": None}), sys.stdout, indent=2
        )
        sys.stdout.write("\n")
    elif format is Format.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_exact(row.get(column)) for column in columns] for row in rows)
    elif format is Format.quiet:
        for row in rows:
            sys.stdout.write(f"{_plain(row.get(columns[0]))}\n")
    elif not rows:
        talk(empty)
    else:
        _table(rows, columns)


def emit_record(record: Mapping[str, Any], format: Format = Format.auto) -> None:
    """One thing: name and value a line, or one JSON object."""
    if format is Format.json:
        json.dump(jsonable(record), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    if format is Format.csv:
        emit([record], list(record), format)
        return
    if format is Format.quiet:
        sys.stdout.write(f"{_plain(next(iter(record.values())))}\n")
        return
    width = max((len(name) for name in record), default=0)
    for name, value in record.items():
        if value not in (None, "", [], {}):
            sys.stdout.write(f"{name:<{width}}  {_plain(value)}\n")


def talk(message: str) -> None:
    """Progress and advice, on stderr."""
    if not _quiet:
        sys.stderr.write(message + "\n")


def next_command(*words: str) -> None:
    """The next useful command, ready to paste."""
    talk("next: " + shlex.join(words))


def set_quiet(quiet: bool) -> None:
    global _quiet
    _quiet = quiet


def jsonable(value: Any) -> Any:
    """What JSON can carry: a NaN or infinity becomes null, since JSON has no word for it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "item"):
        return jsonable(value.item())
    return str(value)


def _exact(value: Any) -> str:
    """For programs: every digit of a float."""
    return repr(float(value)) if isinstance(value, float) and math.isfinite(value) else _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(entry) for entry in value)
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat(timespec="seconds") if isinstance(value, datetime.datetime) else value.isoformat()
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return json.dumps(jsonable(value), ensure_ascii=False)
    return _printable(str(value))


def _printable(value: str) -> str:
    """Names come from strangers: a control character must not reach the terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in value)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = all(isinstance(row.get(column), (int, float)) or row.get(column) is None for row in rows)
        # A number over two lines is another number.
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for row in rows:
        table.add_row(*(_plain(row.get(column)) for column in columns), style=None)
    # Outside a terminal no line is wrapped: a pipe has no width.
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)
