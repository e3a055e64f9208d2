"""The shapes of answers: every format, and what must never leave."""

import json
import math
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

from api.cli.output import Format, counted, emit, emit_record, jsonable, number


@pytest.fixture
def rows():
    return [{"model": "org/a", "kl_nats": 1.25, "n": 3}, {"model": "org/ü", "kl_nats": None, "n": 4}]


def test_json_carries_items_and_next(rows, capsys):
    emit(rows, ["model"], Format.json)
    assert json.loads(capsys.readouterr().out) == {"items": rows, "next": None}


def test_csv_and_quiet(rows, capsys):
    emit(rows, ["model", "kl_nats"], Format.csv)
    assert capsys.readouterr().out == "model,kl_nats\norg/a,1.25\norg/ü,\n"
    emit(rows, ["model", "kl_nats"], Format.quiet)
    assert capsys.readouterr().out == "org/a\norg/ü\n"


def test_csv_carries_every_digit(capsys):
    emit([{"kl_nats": 0.1234567890123456}], ["kl_nats"], Format.csv)
    assert capsys.readouterr().out == "kl_nats\n0.1234567890123456\n"


def test_a_table_in_a_pipe_is_not_wrapped(capsys):
    emit([{"model": "org/" + "x" * 300, "n": 1}], ["model", "n"])
    assert "x" * 300 in capsys.readouterr().out


def test_an_empty_answer_leaves_stdout_empty(capsys):
    emit([], ["model"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "nothing" in shown.err


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_no_nan_crosses(value):
    assert json.dumps(jsonable({"value": value}), allow_nan=False) == '{"value": null}'


def test_numpy_scalars_become_numbers():
    assert jsonable({"n": np.int64(3), "x": np.float64(0.5)}) == {"n": 3, "x": 0.5}


def test_control_characters_of_strangers_do_not_reach_the_terminal(capsys):
    emit_record({"name": "evil\x1b[2Jname"})
    assert "\x1b" not in capsys.readouterr().out


def test_a_table_in_a_pipe_is_not_padded(capsys):
    emit([{"check": "hub", "detail": "x" * 90}, {"check": "a", "detail": "y"}], ["check", "detail"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == "a      y"


NEAREST = """
from api.cli.output import emit
rows = [
    {"rank": rank, "model": f"local/some-family-{rank}-instruct", "revision": "0123456789ab", "kl_nats": 1234.4 * rank,
     "low": 1000.25, "high": 2000.75, "kl_bits_per_byte": 0.012345, "order": "not resolved", "n": 400}
    for rank in range(1, 4)
]
emit(rows, list(rows[0]), dispensable=["revision", "kl_bits_per_byte"])
"""


def on_a_terminal(code, width):
    """The lines that `code` prints on a terminal `width` letters wide."""
    mine, its = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width), "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], env=environment, stdout=its, stdin=its, check=True, timeout=60)
    os.close(its)
    shown = b""
    try:
        while piece := os.read(mine, 65536):
            shown += piece
    except OSError:  # Linux says so when the other end is closed.
        pass
    os.close(mine)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


@pytest.mark.parametrize(
    ("width", "gone"), [(200, []), (100, ["revision"]), (80, ["revision", "kl_bits_per_byte"])], ids=str
)
def test_a_narrow_terminal_loses_columns_before_it_breaks_words(width, gone):
    heading, *lines = on_a_terminal(NEAREST, width)
    columns = ["rank", "model", "revision", "kl_nats", "low", "high", "kl_bits_per_byte", "order", "n"]
    assert heading.split() == [column for column in columns if column not in gone]
    assert len(lines) == 3
    assert "local/some-family-2-instruct" in lines[1]
    assert all(len(line) <= width for line in [heading, *lines])


def test_no_terminal_is_too_narrow_for_whole_numbers():
    text = "\n".join(on_a_terminal(NEAREST, 18))
    assert set(text.split()) >= {"1234", "2469", "3703", "1000", "2001", "400"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1120.0, "1120"),
        (660.4, "660.4"),
        (123456.7, "123457"),
        (0.00012345, "0.0001234"),
        (-0.5, "-0.5"),
        (0.0, "0"),
        (2.5e-7, "2.5e-07"),
        (4e9, "4e+09"),
        (12.0, "12"),
        (100.0, "100"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_look_alike(value, shown):
    assert number(value) == shown


def test_one_is_not_many():
    assert (counted(1, "other model"), counted(2, "other model")) == ("1 other model", "2 other models")
