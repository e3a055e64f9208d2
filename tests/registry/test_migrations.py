"""The migrations and the tables agree, and the way up and down is open on data."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import text

from registry import database


def test_tables_and_migrations_agree(fresh_database):
    assert database.schema_differences(fresh_database) == []


def test_up_down_up_on_data(fresh_database):
    with fresh_database.begin() as connection:
        connection.execute(
            text(
                "insert into models (kind, handle, revision, identity, source)"
                " values ('named', 'local/x', 'unknown', 'i', 'test')"
            )
        )
        connection.execute(text("insert into text_sets (content_hash, n_texts, n_prompts) values ('h', 1, 1)"))
    database.downgrade(fresh_database, "base")
    with fresh_database.connect() as connection:
        left = connection.scalars(
            text("select tablename from pg_tables where schemaname = 'public' and tablename <> 'alembic_version'")
        ).all()
    assert left == []
    database.migrate(fresh_database)
    assert database.current_revision(fresh_database) == database.head_revision()
    assert database.schema_differences(fresh_database) == []


def test_vector_columns_are_stored_uncompressed(fresh_database):
    with fresh_database.connect() as connection:
        external = connection.scalars(
            text(
                "select attrelid::regclass || '.' || attname from pg_attribute"
                " where attnum > 0 and attstorage = 'e' and attrelid in ('vectors'::regclass, 'shards'::regclass)"
            )
        ).all()
    assert len(external) == 6


def test_processes_and_threads_may_migrate_at_once(fresh_database, modelkin_env, database_url):
    database.downgrade(fresh_database, "base")
    migrate = [sys.executable, "-c", "from registry import database; database.migrate()"]
    others = [subprocess.Popen(migrate, env=modelkin_env | {"DATABASE_URL": database_url}) for _ in range(2)]
    engines = [database.make_engine(database_url) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(database.migrate, engines))
    finally:
        for engine in engines:
            engine.dispose()
    assert [process.wait(60) for process in others] == [0, 0]
    assert database.schema_differences(fresh_database) == []
