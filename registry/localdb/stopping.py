"""Stopping what `ensure_postgres` and `ensure_valkey` started, and deleting it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

from registry.errors import Busy
from registry.localdb import places, postgres, valkey
from registry.localdb.processes import file_lock, wait_gone

SECONDS = 60.0


def stop(home: Path) -> list[str]:
    """Stops the embedded servers of `home` and says which were running.  Data stays.

    Open connections are cut and their transactions rolled back.  Raises Busy when a server does not end in a minute.
    """
    place = places.locate(home)
    if not place.state.exists():
        return []
    stopped = []
    with places.explained(place.home), file_lock(place.lock):
        # SIGINT is PostgreSQL's fast shutdown: a checkpoint, so that the next start has nothing to recover.
        running = (
            ("PostgreSQL", postgres.server_pid(place), signal.SIGINT),
            ("Valkey", valkey.server_pid(place), signal.SIGTERM),
        )
        for name, pid, how in running:
            if pid is None:
                continue
            os.kill(pid, how)
            if not wait_gone(pid, SECONDS):
                raise Busy(f"{name} (pid {pid}) is still shutting down", hint="wait, then run `modelkin down` again")
            stopped.append(f"{name} (pid {pid})")
    return stopped


def remove(home: Path) -> None:
    """Stops the embedded servers of `home` and deletes their data for good, with all the folders made for them."""
    stop(home)
    place = places.locate(home)
    for folder in (place.state, place.socket_folder):
        if folder.exists():
            shutil.rmtree(folder)
    (place.home / places.POINTER).unlink(missing_ok=True)
    if place.account.switch:
        # Stays while other homes' servers live there.
        with contextlib.suppress(OSError):
            places.ROOT_STATE.rmdir()
