"""The database of the tests: one embedded PostgreSQL a run, a migrated template, a copy per worker.

- `session`: in an outer transaction that is rolled back; code under test may commit to its heart's content.
- `fresh_database`: an engine on a copy of its own, for COPY, concurrency and crashes; `registry.database` points to it.
- `database_url`: the URL of that copy; `modelkin_env`: the environment for running the command line against it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from registry import database, localdb
from registry.localdb.processes import file_lock
from registry.settings import settings

# The tiny models of known ancestry.
pytest_plugins = ["tests.population_fixture", "tests.fake_hub", "tests.tiny_models"]

REPOSITORY = Path(__file__).parent.parent
TEMPLATE = "modelkin_template"
HOME = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """One home for the whole run: made by the controller, told to the workers."""
    worker_input = getattr(config, "workerinput", None)
    if worker_input is None:
        config.stash[HOME] = Path(tempfile.mkdtemp(prefix="modelkin-tests-"))
    else:
        config.stash[HOME] = Path(worker_input["modelkin_home"])
    # No test may come near the home, the database or the broker of the person who runs it.
    os.environ["MODELKIN_HOME"] = str(config.stash[HOME] / "home")
    for name in ("DATABASE_URL", "MODELKIN_DATABASE_URL", "BROKER_URL", "MODELKIN_BROKER_URL"):
        os.environ.pop(name, None)
    settings.cache_clear()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    node.workerinput["modelkin_home"] = str(node.config.stash[HOME])  # type: ignore[attr-defined]


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or HOME not in config.stash:
        return
    home = config.stash[HOME] / "home"
    try:
        localdb.remove(home)
    finally:
        shutil.rmtree(config.stash[HOME], ignore_errors=True)


@pytest.fixture(scope="session")
def server_url(pytestconfig: pytest.Config) -> str:
    """Of the run's server, with its migrated template made."""
    root = pytestconfig.stash[HOME]
    url = localdb.ensure_postgres(root / "home", fsync=False)
    with file_lock(root / "template.lock"):
        if not (root / "template.made").exists():
            _execute(url, f"drop database if exists {TEMPLATE}", f"create database {TEMPLATE}")
            engine = database.make_engine(str(_renamed(url, TEMPLATE)))
            try:
                database.migrate(engine)
            finally:
                engine.dispose()
            (root / "template.made").touch()
    return url


@pytest.fixture(scope="session")
def worker_engine(server_url: str, pytestconfig: pytest.Config) -> Iterator[Engine]:
    with _copy(server_url, pytestconfig.stash[HOME]) as url:
        engine = database.make_engine(url)
        yield engine
        engine.dispose()


@pytest.fixture
def session(worker_engine: Engine) -> Iterator[Session]:
    """A session whose commits are savepoints of a transaction that is rolled back."""
    with worker_engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as opened:
            yield opened
        outer.rollback()


@pytest.fixture
def database_url(server_url: str, pytestconfig: pytest.Config) -> Iterator[str]:
    """Of a migrated copy of its own, dropped afterwards."""
    with _copy(server_url, pytestconfig.stash[HOME]) as url:
        yield url


@pytest.fixture
def another_database(server_url: str, pytestconfig: pytest.Config) -> Iterator[str]:
    """A second copy, for what must come out the same twice."""
    with _copy(server_url, pytestconfig.stash[HOME]) as url:
        yield url


@pytest.fixture
def fresh_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """What `registry.database.engine()` and `session()` use in this test: a copy of its own."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    settings.cache_clear()
    engine = database.engine()
    yield engine
    engine.dispose()
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def modelkin_env(database_url: str, tmp_path: Path) -> dict[str, str]:
    """The environment for `modelkin` in a subprocess: a database, a home and a Hub cache of its own, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MODELKIN_", "PG"))}
    return kept | {
        "DATABASE_URL": database_url,
        "MODELKIN_HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }


class _copy:
    """A copy of the template, for as long as the block lasts."""

    def __init__(self, server_url: str, root: Path) -> None:
        self.server_url, self.root = server_url, root
        self.name = f"test_{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> str:
        # PostgreSQL copies a template only while nobody else is copying it.
        with file_lock(self.root / "template.lock"):
            _execute(self.server_url, f"create database {self.name} template {TEMPLATE} strategy file_copy")
        return _renamed(self.server_url, self.name)

    def __exit__(self, *_: object) -> None:
        # Forced: a test of crashes may have left a connection behind.
        _execute(self.server_url, f"drop database if exists {self.name} with (force)")


def _renamed(url: str, name: str) -> str:
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def _execute(url: str, *statements: str) -> None:
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
