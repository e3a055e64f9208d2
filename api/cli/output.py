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
    dispensable: Sequence[str] = (),
) -> None:
    """Writes `rows` to stdout.

    `columns` chooses and orders what the table and CSV show; JSON carries `payload` (default {"items": rows}) whole.
    A table on a terminal too narrow for it leaves out `dispensable` columns, the first first, until it fits.
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
        _table(rows, columns, dispensable)


def emit_record(record: Mapping[str, Any], format: Format = Format.auto, *, below: Sequence[str] = ()) -> None:
    """One thing: name and value a line, or one JSON object; the lines `below` only where a person reads."""
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
    for line in below:
        sys.stdout.write(_printable(line) + "\n")


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


def number(value: float) -> str:
    """Four significant digits at least, all that stand before the point, and no exponent from 1e-4 up to 1e7."""
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.4g}"
    text = f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(n: int, one: str, many: str | None = None) -> str:
    """ "1 model", "2 models"."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
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


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], dispensable: Sequence[str]) -> None:
    from rich.console import Console, ConsoleDimensions

    # Outside a terminal no line is wrapped, and none is padded: a pipe has no width.
    if not sys.stdout.isatty():
        console = Console(markup=False, highlight=False, width=10_000)
        with console.capture() as captured:
            console.print(_drawn(rows, columns))
        sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
        return
    console = Console(markup=False, highlight=False)
    shown = list(columns)
    for column in dispensable:
        if console.measure(_drawn(rows, shown), options=console.options.update(width=10_000)).maximum <= console.width:
            break
        shown = [one for one in shown if one != column]
    # Below this, numbers would be cut: the terminal may break the lines, the digits stay.
    console.size = ConsoleDimensions(max(console.width, _least_width(rows, shown)), console.height)
    console.print(_drawn(rows, shown))


_LEAST_LETTERS = 12
"""Of a column of words, on the narrowest terminal."""


def _least_width(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> int:
    widest = {column: max(len(column), *(len(_plain(row.get(column))) for row in rows)) for column in columns}
    least = (widest[name] if _numeric(rows, name) else min(widest[name], _LEAST_LETTERS) for name in columns)
    return sum(width + 2 for width in least)


def _numeric(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return all(isinstance(row.get(column), (int, float)) or row.get(column) is None for row in rows)


def _drawn(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = _numeric(rows, column)
        # A number over two lines is another number.
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for row in rows:
        table.add_row(*(_plain(row.get(column)) for column in columns))
    return table
