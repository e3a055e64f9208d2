"""`modelkin textset` and `modelkin transform` as they are typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest


@pytest.fixture
def modelkin(modelkin_env, tmp_path):
    def run(*words, code=0):
        done = subprocess.run(
            [sys.executable, "-c", RUN, *map(str, words)],
            env=modelkin_env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


# Only the two nouns, each under its name: the whole command also loads what these do not need.
RUN = """
import sys, typer
import api.cli
from api.cli import textset, transform

def app():
    whole = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    whole.add_typer(textset.app, name="textset")
    whole.add_typer(transform.app, name="transform")
    return whole

api.cli._app = app
api.cli.main()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my rows.jsonl"
    rows = [{"prompt": f"p{i}", "response": f"y{i} ", "lang": "de"} for i in range(20)] + [
        {"prompt": "", "response": "y"}
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_add_list_show_derive(modelkin, file):
    added = modelkin("textset", "add", file, "--name", "mine", "--n", "10", "--format", "json")
    record = json.loads(added.stdout)
    assert (record["name"], record["texts"]) == ("mine", 10)
    assert record["source"]["n"] == 10
    assert "read as jsonl: prompt = prompt, response = response" in added.stderr
    assert "10 of 21 rows kept, drawn from 20 usable ones" in added.stderr
    assert "left out: row 21: the prompt is empty" in added.stderr
    assert "next: modelkin score MODEL --text-set mine" in added.stderr

    plain = modelkin("textset", "show", "mine").stdout
    assert "left out: row 21: the prompt is empty" in plain
    assert '"rows"' not in plain
    assert "my rows.jsonl (jsonl: prompt = prompt, response = response) 10 drawn with seed 0" in plain
    assert re.search(r"^  0  p\d+\n     → y\d+$", plain, re.MULTILINE)
    assert "{" not in plain

    again = modelkin("textset", "add", file, "--name", "also", "--n", "10")
    assert "one set with the names" in again.stderr

    listed = json.loads(modelkin("textset", "list", "--format", "json").stdout)["items"]
    assert [(row["name"], row["aliases"]) for row in listed] == [("mine", ["also"])]
    assert modelkin("textset", "list", "--format", "quiet").stdout == "mine\n"

    derived = modelkin("textset", "derive", "mine", "--shuffle-prompts", "2", "--format", "quiet")
    assert derived.stdout == "mine/shuffle-0\nmine/shuffle-1\n"

    shown = json.loads(modelkin("textset", "show", record["hash"][:12], "--format", "json").stdout)
    assert shown["hash"] == record["hash"]
    assert shown["derived"] == ["mine/shuffle-0", "mine/shuffle-1"]
    assert shown["source"]["report"]["refused"]["empty_prompt"] == {"count": 1, "rows": [21]}
    assert len(shown["first_texts"]) == 3
    assert shown["first_texts"][0]["tags"] == {"language": "de"}
    assert json.loads(modelkin("textset", "show", "mine/shuffle-1", "--format", "json").stdout)["parent"] == "mine"


def test_a_file_of_known_content_is_answered_with_its_own_report(modelkin, file, tmp_path):
    assert json.loads(modelkin("textset", "add", file, "--format", "json").stdout)["known_already"] is False
    longer = tmp_path / "longer.jsonl"
    longer.write_text(file.read_text() + json.dumps({"prompt": "p", "response": ""}) + "\n")
    again = modelkin("textset", "add", longer, "--name", "longer", "--format", "json")
    record = json.loads(again.stdout)
    assert record["known_already"] is True
    assert record["source"]["report"]["rows"] == 22
    assert "known already; `modelkin textset show" in again.stderr
    shown = json.loads(modelkin("textset", "show", "longer", "--format", "json").stdout)
    assert shown["source"]["report"]["rows"] == 21, "what is stored stays"


def test_the_name_defaults_to_the_files(modelkin, file):
    assert json.loads(modelkin("textset", "add", file, "--format", "json").stdout)["name"] == "my-rows"


def test_errors_say_what_to_do(modelkin, file, tmp_path):
    missing = modelkin("textset", "show", "mine", code=3)
    assert "no text set is named 'mine'; there is none yet" in missing.stderr
    assert "hint: add one: modelkin textset add FILE" in missing.stderr
    assert "does not exist" in modelkin("textset", "add", "none.jsonl", code=3).stderr
    assert "does not read yet" in modelkin("textset", "add", "hub:org/set", "--name", "a", code=2).stderr
    assert "cannot name a text set" in modelkin("textset", "add", file, "--name", "a b", code=2).stderr
    modelkin("textset", "add", file, "--name", "mine")
    assert "'mine' is taken" in modelkin("textset", "add", file, "--name", "mine", "--n", "5", code=4).stderr
    assert "ask for at most 20" in modelkin("textset", "add", file, "--n", "21", code=2).stderr


def test_the_bundled_set_needs_no_file(modelkin):
    record = json.loads(modelkin("textset", "add", "starter", "--format", "json").stdout)
    assert record["name"] == "starter"
    assert record["texts"] >= 300


def test_transforms(modelkin):
    names = modelkin("transform", "list", "--format", "quiet").stdout.split()
    assert names == ["base", "cot", "repeat", "repeat+cot", "empty"]
    modelkin("transform", "add", "polite", '[{"edit": "prepend", "text": "Please: "}]')
    added = modelkin("transform", "add", "repeat+polite", "repeat+polite", "--format", "json")
    assert json.loads(added.stdout)["parts"] == ["repeat", "polite"]
    shown = json.loads(modelkin("transform", "show", "repeat+polite", "--prompt", "x", "--format", "json").stdout)
    assert shown["example"] == {"prompt": "x", "system": None, "user": "Please: x\n\nx"}
    assert "already there, named 'cot'" in modelkin("transform", "add", "mine", "cot", code=4).stderr
    assert "there are append, prepend" in modelkin("transform", "add", "mine", 'shout("x")', code=2).stderr
    assert "did you mean 'cot'?" in modelkin("transform", "show", "cott", code=3).stderr
