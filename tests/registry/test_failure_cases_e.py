"""Failure cases of PostgreSQL, SQLAlchemy and Alembic, by their numbers in docs/failure-cases.md."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from sqlalchemy import Float, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from registry import database
from registry.errors import BadInput
from registry.queries import jobs, models, textsets, transforms, vectors
from registry.queries.vectors import NewVector
from registry.statuses import Status
from registry.tables import Base
from registry.textsets import Pair, freeze


def new_vector(session, **changes):
    text_set = textsets.add(session, "four", freeze([Pair(f"p{n}", f"r{n}") for n in range(4)]))
    fields = {
        "model_id": models.register_named(session, "org/m", "test").id,
        "text_set_id": text_set.id,
        "transform_id": transforms.get(session, "base").id,
        "profile": "chat",
        "dtype": "float32",
        "engine_version": 1,
        "path": "test",
        "log_likelihoods": np.array([-590.5, -20503.7119, -0.0078679, -1], np.float32),
        "statuses": np.zeros(4, np.uint8),
        "token_counts": np.arange(1, 5, dtype=np.int32),
    }
    return NewVector(**fields | changes)


# E02
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_value_that_is_none_is_stored_as_one(session, bad):
    values = np.array([-1, bad, -1, -1], np.float32)
    with pytest.raises(BadInput, match="text 1"):
        vectors.insert_many(session, [new_vector(session, log_likelihoods=values)])
    masked = np.array([0, Status.NON_FINITE, 0, 0], np.uint8)
    vectors.insert_many(session, [new_vector(session, log_likelihoods=values, statuses=masked)])
    assert session.execute(text("select n_ok, sum_value from vectors")).one() == (3, -3)


# E02
@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity"])
def test_the_database_itself_refuses_figures_that_are_none(session, bad):
    """NaN sorts above everything: `order by … desc` would put it first."""
    vectors.insert_many(session, [new_vector(session)])
    for column in ("sum_value", "noise_floor_nats"):
        with pytest.raises(IntegrityError), session.begin_nested():
            session.execute(text(f"update vectors set {column} = '{bad}'"))


# E02
def test_every_figure_has_a_bound_or_a_reason_for_none(session):
    derived = {
        "vectors.mean_value",  # sum_value / n_ok, in the same statement
        "evidence.p_value",  # none is stored yet
    }
    checks = session.execute(
        text(
            "select conrelid::regclass::text, pg_get_constraintdef(oid) from pg_constraint"
            " where contype = 'c' and connamespace = 'public'::regnamespace"
        )
    ).all()
    figures = {
        f"{table.name}.{column.name}"
        for table in Base.metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, Float)
    }
    bounded = {
        figure
        for figure in figures
        for table, definition in checks
        if figure.startswith(table + ".") and re.search(rf"\b{figure.split('.')[1]} < 'Infinity'", definition)
    }
    assert figures - bounded == derived


# E05
def test_log_likelihoods_keep_every_bit(session):
    """Half precision would store −20503.7 as −20504, and −590.5 is the mean of a real model."""
    given = new_vector(session)
    vectors.insert_many(session, [given])
    (row,) = session.scalars(text("select id from vectors"))
    (found,) = vectors.read(session, [row])
    assert found.log_likelihoods.tobytes() == given.log_likelihoods.astype("<f4").tobytes()


# E01, E07
def test_no_column_is_a_pgvector_yet(session):
    """So no index can exceed its dimensions, and no migration needs the import that autogenerate forgets."""
    kinds = {type(column.type).__module__.split(".")[0] for t in Base.metadata.tables.values() for column in t.columns}
    assert "pgvector" not in kinds
    assert session.scalar(text("select count(*) from pg_attribute where atttypid = 'vector'::regtype")) == 0


# E08
def test_drift_of_any_index_is_seen(fresh_database):
    with fresh_database.connect() as connection:
        names = connection.scalars(
            text(
                "select indexname from pg_indexes where schemaname = 'public' and indexname not in"
                " (select conname from pg_constraint) and tablename <> 'alembic_version'"
            )
        ).all()
    assert {"ix_models_handle_key", "uq_jobs_active_key"} <= set(names)
    for name in names:
        with fresh_database.begin() as connection:
            made = connection.scalar(text("select pg_get_indexdef(to_regclass(:name))"), {"name": name})
            connection.execute(text(f"drop index {name}"))
        differences = database.schema_differences(fresh_database)
        assert any(name in one for one in differences), f"nobody would miss {name}"
        with fresh_database.begin() as connection:
            connection.execute(text(made))
    # Of an expression, too: nothing is "assumed equal".
    with fresh_database.begin() as connection:
        connection.execute(text("drop index ix_models_handle_key"))
        connection.execute(text("create index ix_models_handle_key on models (upper(handle))"))
    assert any("ix_models_handle_key" in one for one in database.schema_differences(fresh_database))


# E09
def test_choices_are_text_with_a_check_and_no_enum(session):
    assert session.scalar(text("select count(*) from pg_type where typtype = 'e'")) == 0
    vectors.insert_many(session, [new_vector(session)])
    for statement in ("update vectors set unit = 'furlongs'", "update models set kind = 'teapot'"):
        with pytest.raises(IntegrityError), session.begin_nested():
            session.execute(text(statement))


# E10
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_processes_open_connections_of_their_own(fresh_database):
    with database.session() as opened:
        parents = opened.scalar(text("select pg_backend_pid()"))
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            right = False
            with contextlib.suppress(BaseException):
                for _ in range(20):
                    with database.session() as opened:
                        own = opened.scalar(text("select pg_backend_pid()"))
                right = own != parents
            os._exit(0 if right else 1)
        children.append(child)
    for _ in range(20):
        with database.session() as opened:
            assert opened.scalar(text("select pg_backend_pid()")) == parents
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


# E11
def test_two_bulk_writers_in_opposite_order_do_not_wait_in_a_circle(fresh_database):
    names = [f"org/model-{n}" for n in range(3000)]
    together = Barrier(2)

    def write(order):
        with database.session() as opened:
            together.wait()
            return len(models.register_named_many(opened, order, "test"))

    with ThreadPoolExecutor(2) as pool:
        for written in [pool.submit(write, names), pool.submit(write, names[::-1])]:
            assert written.result(120) == 3000
    with database.session() as opened:
        assert opened.scalar(text("select count(*) from models")) == 3000


# E13
def test_no_advisory_lock_outlives_its_transaction(fresh_database, database_url):
    held = text("select count(*) from pg_locks where locktype = 'advisory'")
    with database.session() as opened:
        text_set = textsets.add(opened, "one", freeze([Pair("p", "r")]))
        model = models.register_named(opened, "org/m", "test")
        base = transforms.get(opened, "base").id
    # Two connections: whoever unlocks on another one than it locked on unlocks nothing.
    narrow = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"), pool_size=2, max_overflow=0)
    try:
        with Session(narrow) as opened:
            request = jobs.ScoreRequest(model.id, text_set.id, "chat", "float32", 1)
            jobs.open_score_job(opened, request, [base], 32)
            assert opened.scalar(held) == 1
            opened.commit()
            assert opened.scalar(held) == 0
        database.migrate(narrow)
        with narrow.connect() as connection:
            assert connection.scalar(held) == 0
    finally:
        narrow.dispose()


# E16
def test_numpy_scalars_arrive_as_the_numbers_they_are(session):
    given = new_vector(
        session, noise_floor_nats=np.float64(0.1), response_bytes=np.int64(12), engine_version=np.int32(3)
    )
    vectors.insert_many(session, [given])
    row = session.execute(text("select noise_floor_nats, response_bytes, engine_version from vectors")).one()
    assert tuple(row) == (0.1, 12, 3)
