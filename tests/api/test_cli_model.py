"""`modelkin model …` as typed, against a Hub on the loopback."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

from api.cli.output import Format
from tests.fake_hub import FakeHub, files_of
from tests.tiny_models import save_llama

# Only this noun: the whole command also loads what it does not need.
RUN = """
import sys, typer
import api.cli
from api.cli import model

def app():
    whole = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    whole.add_typer(model.app, name="model")
    return whole

api.cli._app = app
{before}
api.cli.main()
"""

Run = Callable[..., "Done"]


@pytest.fixture
def environment(modelkin_env: dict[str, str], fake_hub: FakeHub) -> dict[str, str]:
    hub = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
    return modelkin_env | hub | {"HF_HUB_OFFLINE": "0"}


@dataclasses.dataclass
class Done:
    stdout: str
    stderr: str


@pytest.fixture
def modelkin(
    fresh_database: Engine,
    fake_hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """In this process, since each start would import transformers anew."""
    import typer

    import api.cli
    from api.cli import model

    whole = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    whole.add_typer(model.app, name="model")
    monkeypatch.setattr(api.cli, "_app", lambda: whole)
    monkeypatch.chdir(tmp_path)

    def run(*words: Any, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["modelkin", "model", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            api.cli.main()
        done = Done(*capsys.readouterr())
        assert (ended.value.code or 0) == code, done.stderr
        return done

    return run


def rows(url: str) -> list[tuple[Any, ...]]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text("select handle, kind, revision from models order by id"))]


def test_the_life_of_a_model(
    modelkin: Run, fake_hub: FakeHub, tiny_llama: Path, database_url: str, tmp_path: Path
) -> None:
    repo = fake_hub.add("Org/Tiny", files_of(tiny_llama), cardData={"license": "mit"})
    fake_hub.moved["old/tiny"] = "Org/Tiny"
    commit = repo.refs["main"]

    added = modelkin("add", "old/tiny", "--as", "champion", "--tag", "small", "--format", "json")
    record = json.loads(added.stdout)
    assert record["model"] == f"Org/Tiny@{commit[:12]}"
    assert (record["architecture"], record["licence"], record["kind"]) == ("LlamaForCausalLM", "mit", "hub")
    assert f"registered Org/Tiny@{commit[:12]}" in added.stderr
    assert "next: modelkin score Org/Tiny" in added.stderr
    assert "model.safetensors" not in fake_hub.files_asked()
    assert "registered already" in modelkin("add", f"Org/Tiny@{commit}").stderr

    local = modelkin("add", "./tiny-llama", "--as", "mine")
    assert "Org/Tiny@" in local.stderr
    assert "has the same weights" in local.stderr
    assert [row[:2] for row in rows(database_url)] == [("Org/Tiny", "hub"), ("local/mine", "folder")]

    listed = json.loads(modelkin("list", "--format", "json").stdout)
    assert [item["model"] for item in listed["items"]] == ["local/mine", "Org/Tiny"]
    assert listed["items"][1]["tags"] == ["small"]
    assert listed["next"] is None
    assert modelkin("list", "--tag", "small", "--format", "quiet").stdout == "Org/Tiny\n"
    assert modelkin("list", "--min-parameters", "1B").stdout == ""
    page = modelkin("list", "--limit", 1, "--format", "csv")
    assert page.stdout.count("\n") == 2
    assert "--after" in page.stderr

    for name in ("champion", "old/tiny", "TINY"):
        shown = json.loads(modelkin("show", name, "--format", "json").stdout)
        assert shown["revision"] == commit
    assert shown["aliases"] == ["champion", "old/tiny"]
    assert [each.split("@")[0] for each in shown["same_weights"]] == ["local/mine"]
    assert "champion is Org/Tiny" in modelkin("show", "champion").stderr

    moved = modelkin("alias", "mine", "champion")
    assert f"champion pointed to Org/Tiny@{commit[:12]} before" in moved.stderr
    mine = json.loads(modelkin("show", "mine", "--format", "json").stdout)["model"]
    first = f"Org/Tiny@{commit[:12]}"
    for words in (("mine", "champion"), ("champion",)):
        history = json.loads(modelkin("alias", *words, "--history", "--format", "json").stdout)
        assert [(each["from"], each["to"]) for each in history["items"]] == [(None, first), (first, mine)]
    modelkin("alias", "mine", "champion", "--remove")
    assert modelkin("alias", "champion", "--history").stdout.count(mine) == 2
    modelkin("show", "champion", code=3)

    assert "fast" in modelkin("tag", "mine", "fast", "local-only").stdout
    assert modelkin("tag", "mine", "fast", "--remove", "--format", "quiet").stdout == "local-only\n"

    repo.commit(files_of(tiny_llama) | {"README.md": b"new"})
    modelkin("add", "Org/Tiny")
    bare = modelkin("show", "Org/Tiny", "--format", "json")
    assert json.loads(bare.stdout)["revision"] == repo.refs["main"]
    assert "the newest; 1 other revision is registered" in bare.stderr


def test_errors_say_what_to_do(modelkin: Run, fake_hub: FakeHub, tiny_llama: Path) -> None:
    fake_hub.add("Org/Tiny", files_of(tiny_llama))
    modelkin("add", "Org/Tiny")
    unknown = modelkin("show", "Org/Tyni", code=3)
    assert "did you mean Org/Tiny?" in unknown.stderr
    assert "hint: " in unknown.stderr
    assert "write ./tiny-llama" in modelkin("add", "tiny-llama", code=6).stderr
    fake_hub.add("org/bert", {"config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}'})
    assert "is an encoder" in modelkin("add", "org/bert", code=6).stderr
    fake_hub.always = (429, {"Retry-After": "7"})
    assert "limits our requests" in modelkin("add", "org/other", code=7).stderr
    assert "not a number of parameters" in modelkin("list", "--min-parameters", "many", code=2).stderr


def test_resolve(modelkin: Run, fake_hub: FakeHub, tiny_llama: Path, fresh_database: Engine) -> None:
    from registry import database
    from registry.queries import models

    with database.session() as session:
        models.register_named(session, "Tiny Model", "somebody's matrix")
    fake_hub.add("Org/Tiny", files_of(tiny_llama))
    done = modelkin("resolve", "Tiny Model", "Org/Tiny", "--format", "json")
    assert json.loads(done.stdout)["name"] == "local/Tiny-Model"
    assert "was resolved to Org/Tiny@" in modelkin("show", "local/tiny-model").stderr
    assert json.loads(modelkin("show", "Org/Tiny", "--format", "json").stdout)["imported_as"] == ["local/Tiny-Model"]
    fake_hub.add("Org/New", files_of(tiny_llama))
    assert "no import has named" in modelkin("resolve", "Other", "Org/New", code=3).stderr
    modelkin("show", "Org/New", code=3)  # a misspelt name registers nothing


def test_a_folder_registered_after_its_vectors_were_imported(
    modelkin: Run, tiny_llama: Path, fresh_database: Engine
) -> None:
    from registry import database
    from registry.queries import models
    from tasks import registration

    found = registration.candidate("./tiny-llama")
    with database.session() as session:
        name = f"lab/tuned@{found.revision}"
        models.register_named_many(session, [name], "import:lab", identities={name: found.identity})
        models.register_named(session, "local/tiny-llama", "import:else")
    added = modelkin("add", "./tiny-llama")
    assert f"the vectors imported as lab/tuned@{found.revision[:12]} are now this model's" in added.stderr
    model = f"local/tiny-llama@{found.revision[:12]}"
    assert f"next: modelkin model resolve local/tiny-llama {model}" in added.stderr
    assert json.loads(modelkin("show", "tiny-llama", "--format", "json").stdout)["imported_as"] == ["lab/tuned"]
    modelkin("resolve", "local/tiny-llama", model)
    assert "model resolve" not in modelkin("add", "./tiny-llama").stderr


def test_a_plan_goes_on_without_the_model_that_cannot_be_reached(
    fresh_database: Engine, fake_hub: FakeHub, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from api.cli.score import score

    fake_hub.add("Org/Tiny", files_of(tiny_llama))
    with pytest.raises(typer.Exit) as ended:
        score(
            ["org/nothing-here", "Org/Tiny"],
            text_set="starter",
            transforms="base",
            unconditional=False,
            device="cpu",
            dtype="float32",
            plan=True,
            format=Format.json,
        )
    assert ended.value.exit_code == 6
    told = capsys.readouterr()
    missing, planned = json.loads(told.out)["items"]
    assert missing["model"] == "org/nothing-here"
    assert missing["error"] in told.err
    assert (planned["model"], planned["device"]) == ("Org/Tiny", "cpu")


def test_find_or_add_registers_what_is_new_and_names_what_is_near(
    fresh_database: Any, fake_hub: FakeHub, tiny_llama: Path, tmp_path: Path
) -> None:
    from api.cli.model import find_or_add
    from registry.errors import NotFound, Refused

    fake_hub.add("Org/Tiny", files_of(tiny_llama))
    first = find_or_add("Org/Tiny")
    asked = len(fake_hub.requests)
    assert find_or_add("org/tiny").id == first.id
    assert len(fake_hub.requests) == asked
    with pytest.raises(NotFound, match=r"did you mean Org/Tiny\?"):
        find_or_add("org/tinny")
    with pytest.raises(Refused, match="the Hub has no"):
        find_or_add("somebody/quite-different")
    mine = find_or_add(str(tiny_llama))
    shutil.rmtree(tiny_llama)
    save_llama(tiny_llama, seed=9)
    assert find_or_add(str(tiny_llama)).id != mine.id


@pytest.mark.parametrize("moment", ["while the Hub answers", "before the commit"])
def test_a_kill_during_registration(
    fake_hub: FakeHub, tiny_llama: Path, environment: dict[str, str], database_url: str, moment: str
) -> None:
    fake_hub.add("Org/Tiny", files_of(tiny_llama))
    reached, go_on = threading.Event(), threading.Event()
    before = ""
    if moment == "while the Hub answers":

        def stall() -> None:
            reached.set()
            go_on.wait(60)

        fake_hub.after_file.append(stall)
    else:
        before = (
            "import time\nfrom registry.queries import model_names\n"
            "model_names.add_tags = lambda *_: (print('stored', flush=True), time.sleep(60))"
        )
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.format(before=before), "model", "add", "Org/Tiny"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        if before:
            assert process.stdout.readline() == "stored\n"
        else:
            assert reached.wait(60)
        process.send_signal(signal.SIGKILL)
    go_on.set()
    assert rows(database_url) == []
    for _ in range(2):
        again = [sys.executable, "-c", RUN.format(before=""), "model", "add", "Org/Tiny"]
        subprocess.run(again, env=environment, check=True, capture_output=True)
    commit = fake_hub.repos["Org/Tiny"].refs["main"]
    assert rows(database_url) == [("Org/Tiny", "hub", commit)]
