"""Holding a job: who we are, whether another holder on this machine is dead, and the heartbeat while we work."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError

from registry import database
from registry.errors import Busy, ModelkinError
from registry.queries import jobs

HEARTBEAT_SECONDS = 10


def new_holder() -> str:
    """machine:pid:random.  The machine part tells apart hosts, their boots and containers with pids of their own."""
    return f"{_machine()}:{os.getpid()}:{secrets.token_hex(4)}"


def is_dead(holder: str) -> bool:
    """Whether this holder was a process of this machine that no longer runs.  When in doubt it lives."""
    try:
        machine, pid, _random = holder.rsplit(":", 2)
        process = int(pid)
    except ValueError:
        return False
    if machine != _machine():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Killed, but not yet waited for by its parent: it will never write again."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rsplit(b") ", 1)[1][:1] == b"Z"
    except (OSError, IndexError):
        return False


def _machine() -> str:
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip()[:8])
        parts.append(os.readlink("/proc/self/ns/pid").strip("pid:[]"))
    except OSError:
        pass
    return "/".join(parts)


class Heartbeat:
    """Renews the lease in a thread of its own until the work is done; `lost` says that somebody else took it."""

    def __init__(self, job_id: int, holder: str) -> None:
        self._job_id, self._holder = job_id, holder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of job {job_id}", daemon=True)
        self.lost = False

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                with database.session() as session:
                    jobs.renew(session, self._job_id, self._holder)
            except Busy:
                self.lost = True
                return
            except (ModelkinError, SQLAlchemyError, OSError):
                # The database may come back before the lease runs out; if not, the next shard's own check fails.
                continue

    @contextmanager
    def beating(self) -> Iterator[Heartbeat]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(timeout=HEARTBEAT_SECONDS)
