"""What `modelkin doctor` looks at.  A check never raises: whatever goes wrong is its answer."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from registry.errors import ModelkinError
from registry.settings import settings

if TYPE_CHECKING:
    from sqlalchemy import URL

HUB_SECONDS = 5.0
LOW_CACHE_BYTES = 10 * 2**30
LOW_HOME_BYTES = 2**30


@dataclass(frozen=True)
class Check:
    check: str
    state: Literal["ok", "warn", "fail"]
    """`fail` only where modelkin cannot work without it."""
    detail: str
    advice: str = ""


def all_checks() -> list[Check]:
    sources: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("python", python_version),
        ("packages", packages),
        ("home", home),
        ("database", database),
        ("broker", broker),
        ("device", device),
        ("hub", hub),
        ("cache", cache),
    )
    return [check for name, source in sources for check in _never_raising(name, source)]


def _never_raising(name: str, source: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from source()
    except ModelkinError as error:
        yield Check(name, "fail", error.message, error.hint or "")
    except Exception as error:
        yield Check(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0])


def python_version() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


SHOWN = ("modelkin", "torch", "transformers", "huggingface_hub", "sqlalchemy", "psycopg")


def packages() -> Iterator[Check]:
    """Every requirement of the installed modelkin, by the metadata alone: nothing is imported."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    if found("modelkin") is None:
        yield Check("packages", "warn", "modelkin is not installed, only on the path", "pip install -e .")
        return
    needs = [Requirement(line) for line in requires("modelkin") or []]
    needs = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    missing = [need.name for need in needs if found(need.name) is None]
    odd = [
        f"{need.name} {found(need.name)} (wanted {need.specifier})"
        for need in needs
        if (have := found(need.name)) and not need.specifier.contains(have, prereleases=True)
    ]
    shown = ", ".join(f"{name} {found(name)}" for name in SHOWN if found(name))
    if missing:
        yield Check("packages", "fail", f"not installed: {', '.join(missing)}", "pip install modelkin")
    if odd:
        yield Check("packages", "warn", "; ".join(odd), "pip install --upgrade modelkin")
    if not missing and not odd:
        yield Check("packages", "ok", shown)


def home() -> Iterator[Check]:
    folder = settings().home
    yield _space("home", folder, LOW_HOME_BYTES, "free some space, or set MODELKIN_HOME to a folder on another disk")
    orphans = _orphaned_states()
    if orphans:
        yield Check(
            "home",
            "warn",
            f"databases of homes that no longer exist: {', '.join(map(str, orphans))}",
            "delete those folders if their data is not wanted",
        )


def _orphaned_states() -> list[Path]:
    from registry.localdb.places import ROOT_STATE, owner_of

    if os.geteuid() != 0 or not ROOT_STATE.is_dir():
        return []
    owners = {state: owner_of(state) for state in sorted(ROOT_STATE.iterdir())}
    return [state for state, owner in owners.items() if owner is not None and not owner.exists()]


def database() -> Iterator[Check]:
    if settings().database_url is None and (unmade := _embedded_not_made()):
        yield unmade
        return
    from sqlalchemy import text

    from registry import database

    engine = database.engine()
    current, head = database.current_revision(engine), database.head_revision()
    with engine.connect() as connection:
        version = connection.scalar(text("show server_version"))
        fsync = connection.scalar(text("show fsync"))
        vector = connection.scalar(text("select extversion from pg_extension where extname = 'vector'"))
        offered = connection.scalar(text("select default_version from pg_available_extensions where name = 'vector'"))
    yield Check("database", "ok", f"PostgreSQL {version}, {database_shown(engine.url)}")
    if fsync == "off":
        yield Check(
            "database", "warn", "fsync is off: a crash may lose data", "unset MODELKIN_POSTGRES_FSYNC, restart it"
        )
    if current == head:
        yield Check("migrations", "ok", f"at {current}")
    elif current is None:
        yield Check("migrations", "warn", "the database is empty", "modelkin init")
    elif current < head:
        yield Check("migrations", "fail", f"at {current}, this version needs {head}", "modelkin init")
    else:
        yield Check("migrations", "fail", f"at {current}, newer than this version's {head}", "upgrade modelkin")
    if vector or offered:
        yield Check("pgvector", "ok", vector or f"{offered}, to be created by `modelkin init`")
    else:
        yield Check("pgvector", "fail", "this server has no pgvector", "install it there, or unset DATABASE_URL")


def database_shown(url: URL) -> str:
    """Of the embedded one its folder: its URL is the path of a socket, percent-encoded, that nobody types."""
    if settings().database_url is not None:
        from registry.database import shown

        return f"DATABASE_URL: {shown(url)}"
    from registry.localdb.places import locate

    return f"embedded (under {locate(settings().home).state})"


def _embedded_not_made() -> Check | None:
    """The answer when there is no embedded database yet: a doctor makes none, but sees whether one can be made."""
    from registry.localdb.binaries import find_postgres
    from registry.localdb.places import is_prepared, locate

    if is_prepared(locate(settings().home)):
        return None
    binaries = find_postgres(settings().postgres_bin)
    return Check("database", "warn", f"not made yet; PostgreSQL {binaries.version} is at hand", "modelkin init")


def broker() -> Iterator[Check]:
    """Only workers need one, so nothing here fails."""
    from registry.localdb import valkey
    from registry.localdb.places import locate

    if configured := settings().broker_url:
        import redis

        shown = configured.rpartition("@")[2].removeprefix("redis://")
        try:
            with redis.Redis.from_url(configured, socket_connect_timeout=HUB_SECONDS) as client:
                client.ping()
        except (redis.RedisError, ValueError, OSError) as error:
            yield Check("broker", "warn", f"{shown}: {error}", "check BROKER_URL, or unset it to use the embedded one")
        else:
            yield Check("broker", "ok", f"BROKER_URL: {shown}")
        return
    try:
        program = valkey.find_program()
        running = valkey.server_pid(locate(settings().home))
    except ModelkinError as error:
        yield Check("broker", "warn", error.message, error.hint or "")
        return
    yield Check("broker", "ok", f"embedded, running (pid {running})" if running else f"embedded ({program.name}), idle")


def device() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:
        advice = "install the torch wheel for this machine (see the README)"
        yield Check("device", "fail", f"torch cannot be imported: {error}".splitlines()[0], advice)
        return
    cpu = f"CPU, {torch.get_num_threads()} threads, {_memory_gib()}"
    if not torch.cuda.is_available():
        gpu_wanted = torch.version.cuda is not None or Path("/proc/driver/nvidia").exists()
        advice = "a GPU or a CUDA build of torch is there without the other" if gpu_wanted else ""
        yield Check("device", "warn" if gpu_wanted else "ok", cpu, advice)
        return
    for index in range(torch.cuda.device_count()):
        facts: Any = torch.cuda.get_device_properties(index)
        yield Check("device", "ok", f"cuda:{index} {facts.name}, {facts.total_memory / 2**30:.0f} GiB")


def _memory_gib() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory"
    except (ValueError, OSError):
        return "memory unknown"


def hub() -> Iterator[Check]:
    """Local models and everything already scored work without it, so nothing here fails."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        yield Check("hub", "warn", "offline by HF_HUB_OFFLINE", "unset it to register and pull Hub models")
        return
    try:
        answer = get_session().get(f"{constants.ENDPOINT}/api/models", params={"limit": 1}, timeout=HUB_SECONDS)
        answer.raise_for_status()
    except Exception as error:
        advice = "check the network, HF_ENDPOINT and proxies; local folders and GGUF files work without the Hub"
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        yield Check("hub", "warn", f"{constants.ENDPOINT} does not answer: {detail}", advice)
    else:
        yield Check("hub", "ok", constants.ENDPOINT)


def cache() -> Iterator[Check]:
    from huggingface_hub import constants

    advice = "free some space (`hf cache prune`), or set HF_HOME to a folder on another disk"
    yield _space("cache", Path(constants.HF_HUB_CACHE), LOW_CACHE_BYTES, advice, low="warn")


def _space(name: str, folder: Path, wanted: int, advice: str, *, low: Literal["warn", "fail"] = "fail") -> Check:
    """Free space at `folder`, or where it will be made, and whether it can be written."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    detail = f"{free / 2**30:.1f} GiB free at {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{there} cannot be written", f"make {there} yours, or choose another folder")
    return Check(name, "ok", detail) if free >= wanted else Check(name, low, detail, advice)
