"""The shapes of answers: every format, and what must never leave."""

import json
import math

import numpy as np
import pytest

from api.cli.output import Format, emit, emit_record, jsonable


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
