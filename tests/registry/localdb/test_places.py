"""Where the servers live: as root, as a normal user, and when the two meet."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
from pathlib import Path

import pytest

from registry.errors import DatabaseUnavailable
from registry.localdb import accounts, ensure_postgres, places, postgres, remove, stop
from registry.localdb.places import Place

from .conftest import Runner, mode, query, root_only


@root_only
def test_root_from_a_private_checkout(home: Path, place: Place, copied_wheel: Path) -> None:
    """Neither the home nor the wheel can be entered by the server's user, and no mode may be loosened for it."""
    home.parent.chmod(0o700)
    private = [home.parent, home.parent / "private"]
    url = ensure_postgres(home, bin_dir=copied_wheel, fsync=False)
    assert query(url, "select 1") == 1
    assert [mode(folder) for folder in private] == [0o700, 0o700]
    pid = postgres.server_pid(place)
    assert pid is not None
    server = os.stat(f"/proc/{pid}").st_uid
    assert server == pwd.getpwnam("modelkin").pw_uid != 0
    program = Path(os.readlink(f"/proc/{pid}/exe"))
    assert program.is_relative_to(place.state)
    assert program.stat().st_uid == 0
    assert list(place.state.glob("server-*/*.libs"))
    for path in place.state.glob("server-*/**/*"):
        assert not path.is_dir() or mode(path) == 0o755
    assert mode(place.state) == 0o755
    assert json.loads((home / "localdb.json").read_text()) == {"state": str(place.state)}
    # What was not installed by root must not be what runs after an upgrade either.
    assert len(list(place.state.glob("server-*"))) == 1


@root_only
def test_root_leaves_nothing_behind(home: Path, place: Place) -> None:
    ensure_postgres(home, fsync=False)
    remove(home)
    assert not place.state.exists()
    assert list(home.iterdir()) == []


@root_only
def test_a_moved_home_keeps_its_database_and_a_copied_one_gets_its_own(home: Path) -> None:
    query(ensure_postgres(home, fsync=False), "create table kept (n int)")
    moved = home.with_name("moved")
    home.rename(moved)
    assert query(ensure_postgres(moved, fsync=False), "select count(*) from kept") == 0
    shutil.copytree(moved, home)
    try:
        assert query(ensure_postgres(home, fsync=False), "select to_regclass('kept')") is None
    finally:
        remove(home)
        remove(moved)


@root_only
def test_a_user_who_is_root_by_another_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "NAME", "root")
    with pytest.raises(DatabaseUnavailable, match="uid 0"):
        ensure_postgres(home)


@root_only
def test_no_way_to_make_the_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "NAME", "modelkin-absent")
    monkeypatch.setattr(accounts, "COMMANDS", (["no-such-useradd"],))
    with pytest.raises(DatabaseUnavailable, match="could not be made") as caught:
        ensure_postgres(home)
    assert caught.value.hint
    assert "DATABASE_URL" in caught.value.hint


def test_a_normal_users_data_is_in_the_home(home: Path, as_user: Runner) -> None:
    as_user("ensure_postgres(home, fsync=False)")
    data = home / "localdb" / "postgres" / "data"
    assert (data / "PG_VERSION").exists()
    assert mode(data) == 0o700
    assert mode(home) == 0o700
    assert mode(home / "localdb") == 0o700
    assert not (home / "localdb.json").exists()
    assert not list((home / "localdb").glob("server-*"))
    assert "PostgreSQL" in as_user("print(stop(home))").stdout


@root_only
def test_root_and_a_user_do_not_get_two_databases_of_one_home(home: Path, as_user: Runner) -> None:
    as_user("ensure_postgres(home, fsync=False)")
    with pytest.raises(DatabaseUnavailable, match="not by root"):
        ensure_postgres(home)
    as_user("remove(home)")
    home.chmod(0o755)
    ensure_postgres(home, fsync=False)
    code = "try: ensure_postgres(home)\nexcept DatabaseUnavailable as error: print(error)"
    assert "made by root" in as_user(code).stdout
    remove(home)


def test_a_long_home_with_odd_characters(home: Path, as_user: Runner) -> None:
    """A socket's path holds 107 bytes, and a comma in it would be read as two folders."""
    code = """
import stat
for name in ("long" * 30, "a, 'b' $c \\"é\\""):
    odd = home / name
    engine = create_engine(ensure_postgres(odd, fsync=False))
    with engine.connect() as connection:
        assert connection.scalar(text("select 1")) == 1
    engine.dispose()
    folder = places.locate(odd).socket_folder
    print(folder, oct(stat.S_IMODE(folder.stat().st_mode)))
    remove(odd)
    assert not folder.exists()
"""
    lines = as_user(code).stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("/tmp/modelkin-") and line.endswith("0o700") for line in lines)


def test_a_folder_in_tmp_that_somebody_else_made(tmp_path: Path) -> None:
    """Whoever owns the socket's folder could pose as the server."""
    account = accounts.Account(os.geteuid(), os.getegid(), switch=False)
    places.private_folder(tmp_path / "ours", account)
    places.private_folder(tmp_path / "ours", account)
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    for name in ("open", "link"):
        with pytest.raises(DatabaseUnavailable, match="only uid"):
            places.private_folder(tmp_path / name, account)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o755


def test_a_garbled_pointer(home: Path) -> None:
    home.mkdir()
    (home / "localdb.json").write_text("{")
    with pytest.raises(DatabaseUnavailable, match=r"localdb\.json"):
        ensure_postgres(home)
    (home / "localdb.json").unlink()
    assert stop(home) == []
