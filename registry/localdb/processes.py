"""Processes that outlive the command that starts them, and the questions asked about them later."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.errors import Busy, DatabaseUnavailable
from registry.localdb.accounts import Account

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
"""What servers see of the environment: nothing of the caller's PG* variables, and messages in English, since some are
recognised."""


def start_detached(command: list[str], *, log: Path, account: Account) -> int:
    """Starts `command` for good and returns its pid.

    It has a session of its own (a Ctrl-C at the caller's terminal does not reach it), holds none of the caller's
    files or pipes, and is nobody's child, so that no zombie is left when it ends.
    """
    script = 'umask 077; exec 3>&1; "$@" </dev/null >>"$LOG" 2>&1 3>&- & echo $! >&3'
    try:
        ran = subprocess.run(
            ["/bin/sh", "-c", script, "sh", *command],
            env={**ENVIRONMENT, "LOG": str(log)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            check=True,
            **account.popen,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise cannot_switch(error) from error
    return int(ran.stdout)


def run_as(command: list[str], account: Account) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end as `account`; stderr is folded into stdout."""
    try:
        return subprocess.run(
            command,
            env=ENVIRONMENT,
            cwd="/",
            umask=0o077,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            **account.popen,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise cannot_switch(error) from error


def cannot_switch(error: Exception) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"cannot start a server process: {error}",
        hint="in a container without the right to change user, run modelkin as a normal user, or set DATABASE_URL",
    )


def alive(pid: int) -> bool:
    """Whether `pid` runs.  A zombie does not: where PID 1 reaps nobody, the dead stay listed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")


def works_in(pid: int, folder: Path) -> bool:
    """Whether process `pid` runs with `folder` as its working directory, as servers do with their data folder.

    This tells our server from a stranger that was given the pid of a dead one.  Where there is no /proc, the name of
    the program has to do.
    """
    if not alive(pid):
        return False
    if Path("/proc/self/cwd").exists():
        try:
            return os.path.samefile(f"/proc/{pid}/cwd", folder)
        except OSError:
            return False
    shown = subprocess.run(["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return any(name in shown for name in ("postgres", "valkey"))


def wait_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def file_lock(path: Path, *, seconds: float = 180.0) -> Iterator[None]:
    """Holds `path` against every other process; the system lets go when the holder dies.

    Raises Busy when somebody else holds it for longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(
                        f"another process has been starting or stopping the server for {seconds:.0f} s ({path})",
                        hint="wait for it, or end it",
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
