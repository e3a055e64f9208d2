"""Where an embedded server keeps its things.

As a normal user everything is below `$MODELKIN_HOME/localdb`.  Root's servers run as a user who cannot enter a 0700
home, so theirs is below `/var/lib/modelkin/<hash of the home's path>`, and `$MODELKIN_HOME/localdb.json` says so:

    <state>/                0755 as root, else 0700
        home                the home this belongs to
        password            0600
        lock                held while a server is being started or stopped
        server-<hash>/      root only: a copy of the binaries, 0755
        postgres/           0700, the server's user: data/, run/ (the socket), log
        valkey/             0700, the server's user: data/, valkey.conf, log

No mode of a folder that the caller already had is ever changed.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from registry.canonical import sha256_hex
from registry.errors import DatabaseUnavailable, NoSpace
from registry.localdb.accounts import Account, server_account

ROOT_STATE = Path("/var/lib/modelkin")
POINTER = "localdb.json"
SOCKET_NAME = ".s.PGSQL.5432"
# sun_path holds 108 bytes with the closing NUL on Linux and 104 on macOS.
SOCKET_LIMIT = 103
PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-")


@dataclass(frozen=True)
class Place:
    home: Path
    state: Path
    account: Account

    @property
    def postgres(self) -> Path:
        return self.state / "postgres"

    @property
    def data(self) -> Path:
        return self.postgres / "data"

    @property
    def valkey(self) -> Path:
        return self.state / "valkey"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def socket_folder(self) -> Path:
        """Beside the data; in /tmp (0700, ours) when that path is too long for a socket or has characters in it that
        PostgreSQL reads as a list."""
        beside = self.postgres / "run"
        if len(os.fsencode(beside / SOCKET_NAME)) <= SOCKET_LIMIT and set(str(beside)) <= PLAIN:
            return beside
        return Path(f"/tmp/modelkin-{self.account.uid}-{_hash(self.state)}")

    @property
    def password(self) -> str:
        return (self.state / "password").read_text()


def _hash(path: Path, attempt: int = 0) -> str:
    return sha256_hex(os.fsencode(path) + (b"\0%d" % attempt if attempt else b""))[:16]


def locate(home: Path) -> Place:
    """Where the servers of `home` are or will be.  Raises DatabaseUnavailable when they belong to another user."""
    with explained(home):
        home = home.resolve()
        pointer = _read_pointer(home)
    own = home / "localdb"
    if os.geteuid() != 0:
        if pointer is not None:
            raise DatabaseUnavailable(
                f"the embedded database of {home} was made by root (it is in {pointer})",
                hint="run modelkin as root, or choose another MODELKIN_HOME",
            )
        return Place(home, own, server_account())
    if (own / "postgres").exists():
        raise DatabaseUnavailable(
            f"the embedded database of {home} was made by uid {own.stat().st_uid}, not by root",
            hint="run modelkin as that user, or choose another MODELKIN_HOME",
        )
    if pointer is not None and pointer.parent == ROOT_STATE and not _is_anothers(pointer, home):
        return Place(home, pointer, server_account())
    return Place(home, _state_of(home), server_account())


def _state_of(home: Path) -> Path:
    """Root's state folder of `home`: named after its path, unless that folder went with a home that was moved."""
    names = (ROOT_STATE / _hash(home, attempt) for attempt in range(1_000))
    return next(state for state in names if not _is_anothers(state, home))


def _is_anothers(state: Path, home: Path) -> bool:
    """Whether `state` belongs to another home that still exists.  When that home is gone, `home` may be it under a new
    name (its pointer came along); a pointer in a mere copy of a home names what belongs to the original."""
    marked = owner_of(state)
    return marked is not None and marked != home and marked.exists()


def owner_of(state: Path) -> Path | None:
    """The home that `state` was last used for."""
    try:
        return Path((state / "home").read_text())
    except FileNotFoundError:
        return None


def _read_pointer(home: Path) -> Path | None:
    try:
        return Path(json.loads((home / POINTER).read_text())["state"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DatabaseUnavailable(
            f"{home / POINTER} does not say where the embedded database is: {error}",
            hint=f"delete that file; the database is below {ROOT_STATE}",
        ) from error


def prepare(place: Place) -> None:
    """Makes the folders, the password and the pointer.  Raises DatabaseUnavailable or NoSpace."""
    with explained(place.home):
        # No asking first: another process may be making them at this moment.
        place.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place.account.switch:
            _root_folder(ROOT_STATE)
            _root_folder(place.state)
            replace_text(place.home / POINTER, json.dumps({"state": str(place.state)}) + "\n", 0o644)
        else:
            place.state.mkdir(mode=0o700, exist_ok=True)
        replace_text(place.state / "home", str(place.home), 0o600)


def _root_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    # Whatever the umask was: the servers' user has to pass.  Ours, so its mode is ours to set, as long as it is.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0:
        raise DatabaseUnavailable(
            f"{folder} is not a folder of root's", hint="move it away; it is where root's embedded database lives"
        )
    if stat.S_IMODE(status.st_mode) != 0o755:
        folder.chmod(0o755)


def private_folder(folder: Path, account: Account) -> None:
    """A 0700 folder of the servers' user.  Raises DatabaseUnavailable when somebody else's is in its place."""
    try:
        folder.mkdir(mode=0o700)
        account.own(folder)
    except FileExistsError:
        pass
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == account.uid and not status.st_mode & 0o077
    if not private:
        raise DatabaseUnavailable(
            f"{folder} should be a folder that only uid {account.uid} can enter, and is not "
            f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o})",
            hint="see who made it; delete it or give it back its owner and mode 0700",
        )


def is_prepared(place: Place) -> bool:
    """Whether the server of this place was made, and for this home."""
    with explained(place.home):
        return (place.state / "password").exists() and owner_of(place.state) == place.home


def ensure_password(place: Place) -> str:
    """The servers' password, made once.  Call it holding the lock."""
    try:
        if found := place.password:
            return found
    except FileNotFoundError:
        pass
    replace_text(place.state / "password", secrets.token_hex(24), 0o600)
    return place.password


def replace_text(path: Path, text: str, mode: int) -> None:
    """Replaces `path` in one step, so that no reader sees half of it; leaves it alone when it says so already."""
    try:
        if path.read_text() == text:
            return
    except FileNotFoundError:
        pass
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    part.replace(path)


@contextmanager
def explained(where: Path) -> Iterator[None]:
    """Turns the system's refusals into errors that say what to do."""
    try:
        yield
    except OSError as error:
        path, said = error.filename or where, error.strerror or str(error)
        if isinstance(error, shutil.Error):
            # Of a tree: a list of (from, to, what went wrong) without error numbers.
            _, path, said = error.args[0][0]
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in said:
            raise NoSpace(
                f"no space left for the embedded database ({path})",
                hint="free some space, or set MODELKIN_HOME to a folder on another disk",
            ) from error
        raise DatabaseUnavailable(
            f"cannot use {path} for the embedded database: {said}",
            hint="set MODELKIN_HOME to a folder that you can write to, or set DATABASE_URL",
        ) from error
