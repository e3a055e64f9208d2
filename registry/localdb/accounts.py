"""The operating-system user that the servers run as when modelkin runs as root.

PostgreSQL refuses to run as root, and a server that root had started as root would give its powers to whoever can
send it SQL.  So root makes a system user of its own, `modelkin`, once.  `nobody` would not do: whatever else runs as
`nobody` could read the data.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import DatabaseUnavailable

NAME = "modelkin"


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    switch: bool
    """Whether a server must change to this user, i.e. whether we are root."""

    @property
    def popen(self) -> dict[str, Any]:
        """The arguments that make `subprocess` change to this user; none when we are this user already."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {}

    def own(self, path: Path) -> None:
        if self.switch:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def server_account() -> Account:
    """The user the servers run as: ourselves, or as root the system user `modelkin`, made if missing.

    Raises DatabaseUnavailable when the user cannot be made.
    """
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), switch=False)
    entry = _entry() or _made()
    if entry.pw_uid == 0:
        raise DatabaseUnavailable(
            f"the system user `{NAME}` has uid 0, and PostgreSQL refuses to run as root",
            hint=f"give `{NAME}` a uid of its own, or set DATABASE_URL",
        )
    return Account(entry.pw_uid, entry.pw_gid, switch=True)


def _entry() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(NAME)
    except KeyError:
        return None


# shadow-utils, then busybox.
COMMANDS = (
    ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/false"],
    ["adduser", "-S", "-D", "-H", "-h", "/nonexistent", "-s", "/bin/false"],
)
PATH = "/usr/sbin:/sbin:/usr/bin:/bin"


def _made() -> pwd.struct_passwd:
    said = "neither useradd nor adduser is installed"
    for command in COMMANDS:
        try:
            ran = subprocess.run([*command, NAME], capture_output=True, text=True, env={"PATH": PATH}, check=False)
        except OSError:
            continue
        # Two processes may have tried at once; what counts is whether the user is there.
        if entry := _entry():
            return entry
        said = ran.stderr.strip() or f"{command[0]} ended with {ran.returncode}"
    raise DatabaseUnavailable(
        f"root needs the system user `{NAME}` to run the embedded database as, and it could not be made: {said}",
        hint=f"create a system user named `{NAME}`, or run modelkin as a normal user, or set DATABASE_URL",
    )
