"""The connection to PostgreSQL: one engine a process, sessions that commit at the edge, migrations."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.orm import Session

from registry.errors import BadInput, Conflict, DatabaseUnavailable
from registry.settings import settings

# Any fixed number: every process that migrates this database takes this advisory lock first.
MIGRATION_LOCK = 7_265_677_001

# Alembic's context is one global of the process; other processes wait at the advisory lock.
_alembic = threading.Lock()

_engines: dict[tuple[int, str], Engine] = {}


def database_url() -> str:
    """`DATABASE_URL`, or the embedded server's, started if it is not running."""
    configured = settings().database_url
    if configured is not None:
        return configured
    from registry.localdb import ensure_postgres

    return ensure_postgres(settings().home, bin_dir=settings().postgres_bin, fsync=settings().postgres_fsync)


def engine() -> Engine:
    """The engine of this process.  Keyed by process id, so that a forked child never shares a socket."""
    url = database_url()
    key = (os.getpid(), url)
    if key not in _engines:
        _engines[key] = make_engine(url)
    return _engines[key]


def shown(url: URL) -> str:
    """For people: no password, wherever in the URL it stands."""
    hidden = {name: "***" if "pass" in name.lower() else value for name, value in url.query.items()}
    return url.set(query=hidden).render_as_string(hide_password=True)


def make_engine(url: str) -> Engine:
    """Raises BadInput for what is not the URL of a PostgreSQL, without repeating it: it may hold a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise BadInput("DATABASE_URL is not a URL", hint="postgresql://user:password@host:port/database") from error
    if parsed.drivername != "postgresql+psycopg":
        raise BadInput(
            f"DATABASE_URL names {parsed.drivername}, and modelkin speaks to PostgreSQL through psycopg",
            hint="postgresql://user:password@host:port/database",
        )
    made = create_engine(
        parsed,
        pool_pre_ping=True,
        pool_size=4,
        connect_args={"connect_timeout": 10, "application_name": "modelkin"},
    )

    @event.listens_for(made, "connect")
    def _timestamps_in_utc(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("set time zone 'UTC'")
        connection.commit()

    return made


@contextmanager
def session(bind: Engine | None = None) -> Iterator[Session]:
    """A session that commits when the block ends well and rolls back when it raises.

    Raises DatabaseUnavailable when no connection can be made, Conflict when the schema is not the one this version
    of modelkin was built for.
    """
    bind = bind or engine()
    _require_current_schema(bind)
    with Session(bind, expire_on_commit=False) as opened:
        try:
            yield opened
            opened.commit()
        except BaseException:
            opened.rollback()
            raise


def migrations_folder() -> Path:
    """Inside the package in a wheel, beside it in a checkout."""
    packaged = Path(__file__).parent / "_migrations"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "migrations"


def alembic_config(bind: Engine) -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["engine"] = bind
    return config


def migrate(bind: Engine | None = None, revision: str = "head") -> None:
    """Brings the schema to `revision`; concurrent callers wait for one another.

    Raises DatabaseUnavailable, also where the server has no pgvector.
    """
    from alembic import command

    bind = bind or engine()
    _require_not_newer(current_revision(bind))
    try:
        with _alembic:
            command.upgrade(alembic_config(bind), revision)
    except DBAPIError as error:
        if "vector" not in str(error.orig):
            raise
        raise DatabaseUnavailable(
            f"pgvector cannot be set up in {shown(bind.url)}: {str(error.orig).splitlines()[0]}",
            hint="install pgvector on that server and run `create extension vector` there as a superuser, or unset "
            "DATABASE_URL to use the embedded database",
        ) from error
    _checked.add(str(bind.url))


def downgrade(bind: Engine, revision: str) -> None:
    from alembic import command

    _checked.discard(str(bind.url))
    with _alembic:
        command.downgrade(alembic_config(bind), revision)


def schema_differences(bind: Engine) -> list[str]:
    """What autogenerate would still change: empty when tables and migrations agree."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from registry.tables import Base

    with bind.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return [str(difference) for difference in compare_metadata(context, Base.metadata)]


def head_revision() -> str:
    """The newest migration that this version carries."""
    # Read from the file names, since Alembic's script directory takes a tenth of a second to import.
    return max(path.name.split("_", 1)[0] for path in (migrations_folder() / "versions").glob("[0-9]*_*.py"))


def current_revision(bind: Engine) -> str | None:
    """What the database is at; None when it was never migrated."""
    _probe(bind)
    with bind.connect() as connection:
        if connection.scalar(text("select to_regclass('alembic_version')")) is None:
            return None
        found: str | None = connection.scalar(text("select version_num from alembic_version"))
        return found


_checked: set[str] = set()


def _require_current_schema(bind: Engine) -> None:
    if str(bind.url) in _checked:
        return
    current, head = current_revision(bind), head_revision()
    if current is None:
        if settings().database_url is not None:
            # Perhaps not the database that was meant: a question must not fill it with tables.
            raise Conflict(
                f"{shown(bind.url)} holds no registry yet", hint="check DATABASE_URL, then run `modelkin init`"
            )
        migrate(bind)
    elif current < head:
        raise Conflict(
            f"the database is at migration {current}, this version of modelkin needs {head}",
            hint="run `modelkin init` to migrate it (take a backup first)",
        )
    _require_not_newer(current)
    _checked.add(str(bind.url))


def _require_not_newer(current: str | None) -> None:
    if current is not None and current > head_revision():
        raise Conflict(
            f"the database is at migration {current}, newer than this version of modelkin knows ({head_revision()})",
            hint="upgrade modelkin",
        )


def _probe(bind: Engine) -> None:
    try:
        bind.connect().close()
    except OperationalError as error:
        raise DatabaseUnavailable(
            f"cannot connect to {shown(bind.url)}: {str(error.orig).strip()}",
            hint="check DATABASE_URL, or unset it to use the embedded database",
        ) from error
