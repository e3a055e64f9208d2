"""Starting the embedded PostgreSQL, or finding it running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from registry.errors import DatabaseUnavailable, ModelkinError, NoSpace
from registry.localdb import places
from registry.localdb.binaries import HINT, Binaries, find_postgres, reachable_postgres
from registry.localdb.places import Place, explained
from registry.localdb.processes import alive, file_lock, run_as, start_detached, wait_gone, works_in

NAME = "modelkin"
"""Of the role and of the database."""
PORT = 5432
"""Only part of the socket's name: there is no TCP."""
START_SECONDS = 120.0
ORPHAN_SECONDS = 30.0
LOG_LIMIT = 16 * 2**20
# What initdb and the first write-ahead log file take.
NEW_DATA_BYTES = 80 * 2**20

SAFE_TO_LOSE = ["-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off"]


def ensure_postgres(home: Path, *, bin_dir: Path | None = None, fsync: bool = True) -> str:
    """The SQLAlchemy URL of the embedded server of `home`, which is started (and made) unless it is running.

    Any number of processes may call this at once.  The server stays up when they end.  `fsync=False` is for data that
    may be lost.  Raises DatabaseUnavailable or NoSpace, each with what to do.
    """
    place = places.locate(home)
    if places.is_prepared(place) and _answers(place):
        return url(place)
    places.prepare(place)
    with places.explained(place.home), file_lock(place.lock):
        places.ensure_password(place)
        if not _answers(place):
            binaries = _prepare_data(place, bin_dir, fsync=fsync)
            _start_until_ready(place, binaries, fsync=fsync)
            _ensure_database(place)
    return url(place)


def url(place: Place) -> str:
    from sqlalchemy import URL

    made = URL.create(
        "postgresql+psycopg",
        username=NAME,
        password=place.password,
        database=NAME,
        query={"host": str(place.socket_folder), "port": str(PORT)},
    )
    return made.render_as_string(hide_password=False)


def server_pid(place: Place) -> int | None:
    """The pid of the running postmaster, by its pid file and by what that process really is."""
    try:
        pid = int((place.data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None
    return pid if works_in(pid, place.data) else None


def connect(place: Place, database: str = NAME) -> Any:
    """An autocommitting psycopg connection.  Raises psycopg.OperationalError."""
    import psycopg

    return psycopg.connect(
        host=str(place.socket_folder),
        port=PORT,
        user=NAME,
        password=place.password,
        dbname=database,
        connect_timeout=10,
        autocommit=True,
    )


def _answers(place: Place, database: str = NAME) -> bool:
    """Whether the server of this place takes connections now.  Raises DatabaseUnavailable when it refuses us."""
    import psycopg

    try:
        connect(place, database).close()
    except psycopg.OperationalError as error:
        said = str(error)
        if "authentication failed" in said:
            raise DatabaseUnavailable(
                f"the embedded database does not accept the password in {place.state / 'password'}",
                hint="restore that file, or set DATABASE_URL",
            ) from error
        if "too many clients" in said or "remaining connection slots" in said:
            raise DatabaseUnavailable(
                "the embedded database has no free connection",
                hint="end some of the modelkin processes that are using it",
            ) from error
        return False
    return True


def _prepare_data(place: Place, bin_dir: Path | None, *, fsync: bool) -> Binaries:
    """Folders and data, made if missing; the programs that fit the data."""
    places.private_folder(place.postgres, place.account)
    places.private_folder(place.socket_folder, place.account)
    version_file = place.data / "PG_VERSION"
    if not place.data.exists():
        binaries = reachable_postgres(place, find_postgres(bin_dir))
        _init_data(place, binaries, fsync=fsync)
        return binaries
    if not version_file.exists():
        raise DatabaseUnavailable(
            f"{place.data} is there but holds no PostgreSQL data",
            hint="move it away to start with an empty database, or restore it from a backup",
        )
    major = version_file.read_text().strip()
    binaries = find_postgres(bin_dir, major=major)
    if binaries.major != major:
        raise DatabaseUnavailable(
            f"the data in {place.data} was made by PostgreSQL {major}; the programs in {binaries.bin} "
            f"are {binaries.version}",
            hint=f"set MODELKIN_POSTGRES_BIN to the bin folder of a PostgreSQL {major} and move the data with pg_dump, "
            "or move the folder away to start with an empty database",
        )
    return reachable_postgres(place, binaries)


def _init_data(place: Place, binaries: Binaries, *, fsync: bool) -> None:
    """initdb, into a folder that gets its name only when it is whole: a kill half-way leaves nothing to trip over."""
    with explained(place.state):
        free = shutil.disk_usage(place.postgres).free
        if free < NEW_DATA_BYTES:
            raise _full(place, f"{free / 2**20:.0f} MiB are free, {NEW_DATA_BYTES / 2**20:.0f} are needed")
        part, password_file = place.postgres / "data.part", place.postgres / "password.part"
        shutil.rmtree(part, ignore_errors=True)
        places.private_folder(part, place.account)
        password_file.unlink(missing_ok=True)
        password_file.touch(mode=0o600)
        place.account.own(password_file)
        password_file.write_text(place.password)
    options = ["--encoding=UTF8", "--auth=scram-sha-256", f"--username={NAME}", *_locale(binaries)]
    if not fsync:
        options.append("--no-sync")
    command = [str(binaries.bin / "initdb"), "-D", str(part), f"--pwfile={password_file}", *options]
    try:
        ran = run_as(command, place.account)
    finally:
        password_file.unlink(missing_ok=True)
    if ran.returncode:
        shutil.rmtree(part, ignore_errors=True)
        raise _explain(place, ran.stdout, "initdb could not make the data folder")
    part.rename(place.data)


def _locale(binaries: Binaries) -> list[str]:
    """Order by code point, the same on every machine, with indexes that no libc upgrade breaks; and where PostgreSQL
    can (17 and later), a `lower()` that knows more letters than ASCII's."""
    modern = binaries.major.isdigit() and int(binaries.major) >= 17
    return ["--locale=C", *(["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if modern else [])]


def _start_until_ready(place: Place, binaries: Binaries, *, fsync: bool) -> None:
    """Call it holding the lock."""
    deadline = time.monotonic() + START_SECONDS
    orphans_until = time.monotonic() + ORPHAN_SECONDS
    while True:
        _end_unreachable(place)
        pid = server_pid(place)
        if pid is None:
            _clear_stale(place)
        said_from = _log_size(place)
        if pid is None:
            command, log = _command(place, binaries, fsync=fsync), place.postgres / "log"
            pid = start_detached(command, log=log, account=place.account)
        if _wait_ready(place, pid, deadline):
            return
        said = _log_since(place, said_from)
        if alive(pid):
            raise DatabaseUnavailable(
                f"the embedded database (pid {pid}) has not become ready in {START_SECONDS:.0f} s: {_last(said)}",
                hint=f"after a crash it may be recovering: wait and try again; its log is {place.postgres / 'log'}",
            )
        # The backends of a killed postmaster live on until they notice.
        orphaned = "pre-existing shared memory block" in said or "lock file" in said
        if not orphaned or time.monotonic() > orphans_until:
            raise _explain(place, said, "the embedded database did not start")
        time.sleep(0.3)


def _command(place: Place, binaries: Binaries, *, fsync: bool) -> list[str]:
    options = {
        "listen_addresses": "",
        "port": str(PORT),
        "unix_socket_directories": str(place.socket_folder),
        "unix_socket_permissions": "0700",
        "logging_collector": "off",
        "log_destination": "stderr",
    }
    settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return [str(binaries.bin / "postgres"), "-D", str(place.data), *settings, *([] if fsync else SAFE_TO_LOSE)]


def _clear_stale(place: Place) -> None:
    """Takes away the lock files of a dead postmaster.  PostgreSQL does so itself unless its pid has been given to
    another process of the same user.  (Its own guard against a second postmaster, the shared memory block keyed by
    the data folder, stays.)"""
    for path in (place.data / "postmaster.pid", place.socket_folder / f"{places.SOCKET_NAME}.lock"):
        path.unlink(missing_ok=True)
    log = place.postgres / "log"
    if _log_size(place) > LOG_LIMIT:
        log.replace(log.with_name("log.old"))


def _end_unreachable(place: Place) -> None:
    """Ends a server whose socket was deleted under it, as cleaners of /tmp do: nobody could reach it any more."""
    pid = server_pid(place)
    if pid is None or (place.socket_folder / places.SOCKET_NAME).exists():
        return
    if "ready" in (place.data / "postmaster.pid").read_text():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        wait_gone(pid, ORPHAN_SECONDS)


def _wait_ready(place: Place, pid: int, deadline: float) -> bool:
    """False when the process ended, or when the time is up."""
    while time.monotonic() < deadline:
        if _answers(place, "postgres"):
            return True
        if not alive(pid):
            return False
        time.sleep(0.05)
    return False


def _ensure_database(place: Place) -> None:
    """The database, and the proof that pgvector works in it."""
    import psycopg

    try:
        with connect(place, "postgres") as connection:
            if connection.execute("select 1 from pg_database where datname = %s", [NAME]).fetchone() is None:
                connection.execute(f"create database {NAME}")
        with connect(place) as connection:
            connection.execute("create extension if not exists vector")
            connection.execute("select '[1,2]'::vector <-> '[1,3]'::vector")
    except psycopg.errors.DiskFull as error:
        raise _full(place, str(error)) from error
    except psycopg.Error as error:
        raise DatabaseUnavailable(
            f"the embedded PostgreSQL started, but pgvector does not work in it: {str(error).strip()}", hint=HINT
        ) from error


def _explain(place: Place, said: str, what: str) -> ModelkinError:
    # A full disk has no room for the log line that says so.
    if "No space left on device" in said or "quota exceeded" in said or shutil.disk_usage(place.state).free < 2**20:
        return _full(place, _last(said))
    if "incompatible with server" in said:
        hint = "set MODELKIN_POSTGRES_BIN to the bin folder of the PostgreSQL that made the data"
    elif "pre-existing shared memory block" in said:
        hint = "a query of the killed server is still running: end the `postgres` processes of this data folder"
    elif "Permission denied" in said or "wrong ownership" in said:
        hint = f"everything in {place.postgres} should belong to uid {place.account.uid}; see {place.postgres / 'log'}"
    else:
        hint = f"its log is {place.postgres / 'log'}; DATABASE_URL replaces the embedded database"
    return DatabaseUnavailable(f"{what}: {_last(said)}", hint=hint)


def _full(place: Place, detail: str) -> NoSpace:
    return NoSpace(
        f"no space left for the embedded database in {place.state}: {detail}",
        hint="free some space, or set MODELKIN_HOME to a folder on another disk",
    )


def _last(said: str) -> str:
    """The lines that say why, else the last lines."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    signs = ("FATAL", "PANIC", "ERROR", "error:", "could not")
    telling = [line for line in lines if any(sign in line for sign in signs)]
    return " | ".join((telling or lines)[-3:]) or "it said nothing"


def _log_size(place: Place) -> int:
    try:
        return (place.postgres / "log").stat().st_size
    except FileNotFoundError:
        return 0


def _log_since(place: Place, start: int) -> str:
    try:
        with (place.postgres / "log").open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
