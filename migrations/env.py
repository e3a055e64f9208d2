"""Runs the migrations: under an advisory lock, with time limits, one transaction each."""

from alembic import context
from sqlalchemy import text

from registry.database import MIGRATION_LOCK, engine
from registry.tables import Base

bind = context.config.attributes.get("engine") or engine()

with bind.connect() as connection:
    # A session lock on a connection of its own, since each migration commits its transaction.
    connection.execute(text("select pg_advisory_lock(:key)"), {"key": MIGRATION_LOCK})
    # A migration that waits for a lock blocks every reader behind it: better to fail and be run again.
    connection.execute(text("set lock_timeout = '4s'"))
    connection.execute(text("set statement_timeout = '60s'"))
    connection.commit()
    try:
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            compare_type=True,
            compare_server_default=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    finally:
        connection.rollback()
        connection.execute(text("select pg_advisory_unlock(:key)"), {"key": MIGRATION_LOCK})
        connection.execute(text("reset lock_timeout"))
        connection.execute(text("reset statement_timeout"))
        connection.commit()
