"""A database of its own on the embedded server, for benchmarks that write a lot."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, text

from registry import database, localdb
from registry.settings import settings


@contextmanager
def scratch_database() -> Iterator[Engine]:
    """An engine on a migrated, empty database that `registry.database` and the caches use too.  Removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="modelkin-benchmark-") as folder:
        os.environ["MODELKIN_HOME"] = folder
        os.environ.pop("DATABASE_URL", None)
        settings.cache_clear()
        try:
            engine = database.engine()
            database.migrate(engine)
            yield engine
            engine.dispose()
        finally:
            localdb.remove(settings().home)


def settle(engine: Engine) -> None:
    """After a bulk load: nothing of its clean-up should run inside the next measurement."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum analyze"))
        connection.execute(text("checkpoint"))
