"""The life of the embedded broker."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from registry.errors import Unavailable
from registry.localdb import ensure_valkey, stop, valkey
from registry.localdb.places import Place
from registry.localdb.processes import alive, start_detached, wait_gone

from .conftest import mode, root_only


def started(place: Place) -> int:
    pid = valkey.server_pid(place)
    assert pid is not None
    return pid


def kill(place: Place) -> int:
    pid = started(place)
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid, 10)
    return pid


def occupy(port: int | None) -> socket.socket:
    """Takes the port of a server that was just killed; the last of its threads may hold it for a moment."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_starts_is_found_again_and_keeps_its_queue_over_kill_9(kept_home: Path, kept_place: Place) -> None:
    url = ensure_valkey(kept_home)
    pid = started(kept_place)
    assert ensure_valkey(kept_home) == url
    assert started(kept_place) == pid
    with redis.Redis.from_url(url) as client:
        client.rpush("queue", "job")
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with pytest.raises(redis.AuthenticationError), redis.Redis(port=urlsplit(url).port) as client:
        client.ping()
    kill(kept_place)
    assert ensure_valkey(kept_home) == url
    assert started(kept_place) != pid
    with redis.Redis.from_url(url) as client:
        assert client.lrange("queue", 0, -1) == [b"job"]


def test_only_its_user_reads_its_files(kept_home: Path, kept_place: Place) -> None:
    ensure_valkey(kept_home)
    assert mode(kept_place.valkey) == 0o700
    assert mode(kept_place.valkey / "valkey.conf") == 0o600
    command_line = Path(f"/proc/{started(kept_place)}/cmdline")
    if command_line.exists():
        assert kept_place.password not in command_line.read_text()


@root_only
def test_as_root_it_is_not_root(kept_home: Path, kept_place: Place) -> None:
    ensure_valkey(kept_home)
    assert os.stat(f"/proc/{started(kept_place)}").st_uid == kept_place.account.uid != 0


def test_a_port_taken_meanwhile(kept_home: Path, kept_place: Place) -> None:
    url = ensure_valkey(kept_home)
    kill(kept_place)
    with occupy(urlsplit(url).port) as stranger:
        other = ensure_valkey(kept_home)
        assert urlsplit(other).port != urlsplit(url).port
        with redis.Redis.from_url(other) as client:
            assert client.ping()
        # Nobody came by to tell the stranger the password.
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_many_at_once_start_one_server(home: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ensure_valkey, [home] * 4))) == 1


def test_a_stale_pid_file_that_names_a_stranger(kept_home: Path, kept_place: Place) -> None:
    url = ensure_valkey(kept_home)
    kill(kept_place)
    stranger = start_detached(["sleep", "120"], log=kept_place.valkey / "log", account=kept_place.account)
    try:
        (kept_place.valkey / "data" / "valkey.pid").write_text(f"{stranger}\n")
        assert ensure_valkey(kept_home) == url
        assert stop(kept_home)
        assert alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_server_that_hangs_gets_no_rival_on_its_data(
    kept_home: Path, kept_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_valkey(kept_home)
    pid = started(kept_place)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(valkey, "START_SECONDS", 0.2)
    try:
        with pytest.raises(Unavailable, match="does not answer"):
            ensure_valkey(kept_home)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_no_program(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "find_spec", lambda name: None)
    monkeypatch.setattr(valkey, "SYSTEM_FOLDERS", ())
    with pytest.raises(Unavailable, match="no Valkey") as caught:
        ensure_valkey(home)
    assert "BROKER_URL" in str(caught.value.hint)
