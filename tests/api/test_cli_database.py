"""`modelkin init`, `down` and `doctor`, as typed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from registry import localdb
from registry.database import head_revision

MODELKIN = [sys.executable, "-c", "from api.cli import main; main()"]
# Nobody listens on the discard port.
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}

Modelkin = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="modelkin-cli-"))
    yield folder / "home"
    if (folder / "home").exists():
        localdb.remove(folder / "home")
    shutil.rmtree(folder)


@pytest.fixture
def modelkin(modelkin_env: dict[str, str], home: Path) -> Modelkin:
    """Runs the command with an embedded database of its own; keywords go into its environment."""
    kept = {name: value for name, value in modelkin_env.items() if name != "DATABASE_URL"}
    environment = kept | NO_HUB | {"MODELKIN_HOME": str(home), "MODELKIN_POSTGRES_FSYNC": "0"}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [*MODELKIN, *words]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=120, check=False)

    return run


def execute(url: str | URL, *statements: str) -> None:
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))


def checks(ran: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for item in json.loads(ran.stdout)["items"]:
        found.setdefault(item["check"], []).append(item)
    return found


def test_init_doctor_down(modelkin: Modelkin, home: Path) -> None:
    made = modelkin("init", "--format", "json")
    assert made.returncode == 0, made.stderr
    record = json.loads(made.stdout)
    assert record["migration"] == head_revision()
    assert record["migrated_from"] is None
    password = localdb.places.locate(home).password
    assert password not in made.stdout + made.stderr
    state = localdb.places.locate(home).state
    assert record["database"] == f"embedded (under {state})"
    assert "next: modelkin" in made.stderr

    again = modelkin("init", "--format", "json")
    assert json.loads(again.stdout)["migrated_from"] == head_revision()
    assert "up to date" in again.stderr

    examined = modelkin("doctor", "--format", "json")
    assert examined.returncode == 0, examined.stdout
    assert password not in examined.stdout + examined.stderr
    found = checks(examined)
    assert {
        "python",
        "packages",
        "home",
        "database",
        "migrations",
        "pgvector",
        "broker",
        "device",
        "hub",
        "cache",
    } <= set(found)
    assert [item["state"] for item in found["migrations"] + found["pgvector"]] == ["ok", "ok"]
    # Said, since it means that a crash may lose data; and what cannot be reached but is not needed is no failure.
    assert any("fsync is off" in item["detail"] for item in found["database"])
    assert [item["state"] for item in found["hub"]] == ["warn"]
    assert all(item["advice"] for items in found.values() for item in items if item["state"] == "fail")

    read = modelkin("doctor").stdout.splitlines()
    assert read == [line.rstrip() for line in read]
    assert any(line.endswith(f"embedded (under {state})") for line in read)
    [above] = [number for number, line in enumerate(read) if "fsync is off" in line]
    assert read[above + 1].split() == ["→", *found["database"][1]["advice"].split()]

    stopped = modelkin("down")
    assert stopped.returncode == 0
    assert "stopped PostgreSQL" in stopped.stderr
    again = modelkin("down", "--format", "json")
    assert json.loads(again.stdout)["items"] == []
    assert json.loads(modelkin("init", "--format", "json").stdout)["migrated_from"] == head_revision()

    # Without a terminal to ask on, nothing is deleted.
    assert modelkin("down", "--delete").returncode != 0
    assert state.exists()
    assert modelkin("down", "--delete", "--yes").returncode == 0
    assert not state.exists()
    assert json.loads(modelkin("init", "--format", "json").stdout)["migrated_from"] is None


def test_a_doctor_makes_nothing(modelkin: Modelkin, home: Path) -> None:
    ran = modelkin("doctor", "--format", "json")
    assert ran.returncode == 0, ran.stdout
    [database] = checks(ran)["database"]
    assert database["state"] == "warn"
    assert database["advice"] == "modelkin init"
    assert not home.exists()


def test_a_doctor_fails_when_a_need_is_not_met(modelkin: Modelkin) -> None:
    url = "postgres://somebody:hidden-word@127.0.0.1:9/nothing"
    ran = modelkin("doctor", "--format", "json", DATABASE_URL=url, BROKER_URL="redis://:other-word@127.0.0.1:9/0")
    assert ran.returncode == 7
    found = checks(ran)
    assert found["database"][0]["state"] == "fail"
    assert "DATABASE_URL" in found["database"][0]["advice"]
    assert found["broker"][0]["state"] == "warn"
    assert "hidden-word" not in ran.stdout + ran.stderr
    assert "other-word" not in ran.stdout + ran.stderr


def test_init_on_a_server_where_pgvector_may_not_be_made(modelkin: Modelkin, server_url: str) -> None:
    execute(server_url, "create database limited", "create role limited login password 'hidden-word'")
    try:
        # Tables it may make, extensions not.
        execute(make_url(server_url).set(database="limited"), "grant create on schema public to limited")
        url = make_url(server_url).set(username="limited", password="hidden-word", database="limited")
        ran = modelkin("init", DATABASE_URL=url.render_as_string(hide_password=False))
    finally:
        execute(server_url, "drop database limited with (force)", "drop role limited")
    assert ran.returncode == 7
    assert "pgvector" in ran.stderr
    assert "create extension vector" in ran.stderr
    assert "hidden-word" not in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


def test_init_says_why_the_embedded_database_cannot_start(modelkin: Modelkin, tmp_path: Path) -> None:
    ran = modelkin("init", MODELKIN_POSTGRES_BIN=str(tmp_path))
    assert ran.returncode == 7
    assert ran.stdout == ""
    assert "holds no postgres" in ran.stderr
    assert "hint: MODELKIN_POSTGRES_BIN" in ran.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://me:hidden-word@h/x", "mysql"),
        ("postgresql+asyncpg://me:hidden-word@h/x", "asyncpg"),
        ("no url hidden-word", "not a URL"),
        ("postgres://me:hidden-word@h:port/x", "not a URL"),
        ("postgres://127.0.0.1:9/x?user=me&password=hidden-word", "cannot connect"),
        ("postgres://127.0.0.1:9/x?user=me&sslpassword=hidden-word", "cannot connect"),
    ],
)
def test_a_database_url_that_cannot_be_used_ends_in_a_sentence_without_its_password(modelkin, url, said):
    for command in (["init"], ["model", "list"]):
        ran = modelkin(*command, DATABASE_URL=url)
        assert ran.returncode in (2, 7), ran.stderr
        assert said in ran.stderr
        assert "Traceback" not in ran.stderr
        assert "hidden-word" not in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("statement", "at_init", "at_a_question"),
    [
        ("update alembic_version set version_num = '0999'", "newer than this version", "newer than this version"),
        ("drop table alembic_version", "not modelkin's", "holds no registry"),
    ],
)
def test_a_database_of_another_making_is_left_as_it_is(modelkin, database_url, statement, at_init, at_a_question):
    execute(database_url, statement)
    for command, said in ((["init"], at_init), (["model", "list"], at_a_question)):
        ran = modelkin(*command, DATABASE_URL=database_url)
        assert ran.returncode == 4, ran.stderr
        assert said in ran.stderr
        assert "Traceback" not in ran.stderr


def test_a_database_that_may_only_be_read_says_so(modelkin, database_url, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "response": "b"}\n')
    name = make_url(database_url).database
    execute(database_url, f"alter database {name} set default_transaction_read_only = on")
    ran = modelkin("textset", "add", str(pairs), "--name", "mine", DATABASE_URL=database_url)
    assert ran.returncode == 7, ran.stderr
    assert "read-only" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_question_leaves_an_empty_database_empty(modelkin, database_url):
    name = make_url(database_url).database
    execute(database_url, "drop schema public cascade", "create schema public")
    ran = modelkin("model", "list", DATABASE_URL=database_url)
    assert ran.returncode == 4
    assert f"/{name}" in ran.stderr
    assert "holds no registry" in ran.stderr
    assert "modelkin init" in ran.stderr
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.connect() as connection:
        assert connection.scalar(text("select count(*) from pg_tables where schemaname = 'public'")) == 0
    assert modelkin("init", DATABASE_URL=database_url).returncode == 0
    assert modelkin("model", "list", DATABASE_URL=database_url).returncode == 0
