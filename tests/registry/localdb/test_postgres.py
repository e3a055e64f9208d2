"""The life of the embedded PostgreSQL: started, found again, killed, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import make_url

from registry.localdb import ensure_postgres, postgres, remove, stop
from registry.localdb.places import Place
from registry.localdb.processes import alive, start_detached, wait_gone

from .conftest import PATH_OF_CHILDREN, mode, query

START = "import sys; from pathlib import Path; from registry.localdb import ensure_postgres; " + (
    "print(ensure_postgres(Path(sys.argv[1]), fsync=False))"
)


def started(place: Place) -> int:
    pid = postgres.server_pid(place)
    assert pid is not None
    return pid


def test_starts_and_is_found_again(kept_home: Path, kept_place: Place) -> None:
    stop(kept_home)
    url = ensure_postgres(kept_home)
    pid = started(kept_place)
    assert ensure_postgres(kept_home) == url
    assert started(kept_place) == pid
    # Data must survive a power cut unless somebody said that it need not.
    assert query(url, "show fsync") == "on"
    assert query(url, "select '[1,2]'::vector <-> '[1,4]'::vector") == 2
    assert query(url, "select lower('ÀÉ')") == "àé"


def test_nobody_else_can_reach_it(home: Path, place: Place) -> None:
    home.parent.chmod(0o755)
    home.mkdir(mode=0o755)
    before = [mode(folder) for folder in (home, *home.parents)]
    url = ensure_postgres(home, fsync=False)
    assert [mode(folder) for folder in (home, *home.parents)] == before
    assert query(url, "show listen_addresses") == ""
    assert query(url, "show fsync") == "off"
    assert mode(place.data) == 0o700
    assert mode(place.socket_folder) == 0o700
    assert mode(place.postgres) == 0o700
    assert mode(place.state / "password") == 0o600
    # Even who gets to the socket needs the password.
    without = make_url(url).set(password="wrong")
    with pytest.raises(Exception, match="authentication failed"):
        query(without.render_as_string(hide_password=False), "select 1")
    command_line = Path(f"/proc/{started(place)}/cmdline")
    if command_line.exists():
        assert place.password not in command_line.read_text()


def test_the_servers_folders_do_not_depend_on_the_umask(home: Path, place: Place) -> None:
    for mask in (0o077, 0o000):
        before = os.umask(mask)
        try:
            ensure_postgres(home, fsync=False)
        finally:
            os.umask(before)
        assert mode(place.data) == 0o700
        assert mode(place.state / "password") == 0o600
        remove(home)


def test_many_processes_at_once_start_one_server(home: Path, place: Place) -> None:
    command = [sys.executable, "-c", START, str(home)]
    running = [subprocess.Popen(command, env=PATH_OF_CHILDREN, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    urls = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(urls) == 1
    log = (place.postgres / "log").read_text()
    assert log.count("database system is ready to accept connections") == 1


def test_committed_data_survives_kill_9(kept_home: Path, kept_place: Place) -> None:
    stop(kept_home)
    url = ensure_postgres(kept_home)
    query(url, "create table survivor (n int)")
    query(url, "insert into survivor values (42)")
    pid = started(kept_place)
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid, 10)
    assert (kept_place.data / "postmaster.pid").exists()
    assert ensure_postgres(kept_home) == url
    assert started(kept_place) != pid
    assert query(url, "select n from survivor") == 42


def test_waits_for_the_orphans_of_a_killed_server(kept_home: Path, kept_place: Place) -> None:
    """A backend that computes does not notice at once that its postmaster was killed, and holds the shared memory."""
    url = ensure_postgres(kept_home, fsync=False)

    def compute() -> None:
        with pytest.raises(Exception, match=r"closed|terminating"):
            query(url, "select count(*) from generate_series(1, 100000000) a, generate_series(1, 100) b")

    computing = threading.Thread(target=compute)
    computing.start()
    busy = "select pid from pg_stat_activity where query like 'select count%' and state = 'active'"
    while not (backend := query(url, busy)):
        time.sleep(0.05)
    os.kill(started(kept_place), signal.SIGKILL)
    threading.Timer(2, os.kill, (backend, signal.SIGKILL)).start()
    assert ensure_postgres(kept_home, fsync=False) == url
    computing.join()
    assert "pre-existing shared memory block" in (kept_place.postgres / "log").read_text()


def test_a_stale_pid_file_that_names_a_stranger(kept_home: Path, kept_place: Place) -> None:
    """The pid of the dead server was given to another process of the same user, which must not be harmed."""
    url = ensure_postgres(kept_home, fsync=False)
    pid = started(kept_place)
    content = (kept_place.data / "postmaster.pid").read_text()
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid, 10)
    stranger = start_detached(["sleep", "120"], log=kept_place.postgres / "log", account=kept_place.account)
    try:
        for path in (kept_place.data / "postmaster.pid", kept_place.socket_folder / ".s.PGSQL.5432.lock"):
            path.write_text(content.replace(str(pid), str(stranger), 1))
        assert postgres.server_pid(kept_place) is None
        assert ensure_postgres(kept_home, fsync=False) == url
        assert query(url, "select 1") == 1
        assert stop(kept_home)
        assert alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_socket_deleted_under_the_server(kept_home: Path, kept_place: Place) -> None:
    url = ensure_postgres(kept_home, fsync=False)
    (kept_place.socket_folder / ".s.PGSQL.5432").unlink()
    assert ensure_postgres(kept_home, fsync=False) == url
    assert query(url, "select 1") == 1


def test_an_initdb_that_was_killed_half_way(kept_home: Path, kept_place: Place) -> None:
    ensure_postgres(kept_home, fsync=False)
    stop(kept_home)
    kept_place.data.rename(kept_place.postgres / "data.part")
    (kept_place.postgres / "data.part" / "PG_VERSION").unlink()
    assert query(ensure_postgres(kept_home, fsync=False), "select 1") == 1


def test_stop(kept_home: Path, kept_place: Place) -> None:
    stop(kept_home)
    assert stop(kept_home) == []
    url = ensure_postgres(kept_home, fsync=False)
    query(url, "create table kept (n int)")
    pid = started(kept_place)
    assert stop(kept_home) == [f"PostgreSQL (pid {pid})"]
    assert not alive(pid)
    assert stop(kept_home) == []
    assert query(ensure_postgres(kept_home, fsync=False), "select count(*) from kept") == 0


def test_it_outlives_its_starter_and_a_ctrl_c(kept_home: Path, kept_place: Place) -> None:
    stop(kept_home)
    code = START + "; sys.stdout.flush(); import time; time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(kept_home)],
        env=PATH_OF_CHILDREN,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as starter:
        assert starter.stdout is not None
        url = starter.stdout.readline().strip()
        # As a terminal does it: to the whole foreground group.
        os.killpg(starter.pid, signal.SIGINT)
        # Ends only when nobody holds the pipe any more, so the server does not.
        starter.communicate(timeout=20)
    assert starter.returncode != 0
    pid = started(kept_place)
    assert query(url, "select 1") == 1
    assert os.getsid(pid) != starter.pid
    if Path(f"/proc/{pid}/fd").exists():
        open_files = {os.readlink(f"/proc/{pid}/fd/{n}") for n in (0, 1, 2)}
        assert open_files == {"/dev/null", str(kept_place.postgres / "log")}


def test_the_callers_environment_does_not_reach_it(kept_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "1", "PGHOST": "elsewhere", "PGDATA": "/nowhere", "PGUSER": "x"}.items():
        monkeypatch.setenv(name, value)
    stop(kept_home)
    assert query(ensure_postgres(kept_home, fsync=False), "select 1") == 1
