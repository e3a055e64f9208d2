"""Vectors in and out: byte-exact, all or nothing, and nothing that would poison a later sum."""

import numpy as np
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from registry.errors import BadInput, Conflict
from registry.queries import models, textsets, transforms, vectors
from registry.queries.vectors import NewVector
from registry.statuses import Status
from registry.textsets import Pair, freeze


@pytest.fixture
def point(session):
    text_set = textsets.add(session, "four", freeze([Pair(f"p{n}", f"r{n}") for n in range(4)]))
    return {
        "model_id": models.register_named(session, "org/m", "test").id,
        "text_set_id": text_set.id,
        "transform_id": transforms.get(session, "base").id,
        "profile": "chat",
        "dtype": "float32",
        "engine_version": 1,
        "path": "test",
    }


def vector(point, values=(-590.5, -20503.7119, -0.0078679, -1.0), statuses=(0, 0, 1, 0), **changes):
    return NewVector(
        **point
        | {
            "log_likelihoods": np.array(values, np.float32),
            "statuses": np.array(statuses, np.uint8),
            "token_counts": np.arange(1, len(values) + 1, dtype=np.int32),
        }
        | changes
    )


def test_round_trip_is_exact(session, point):
    assert vectors.insert_many(session, [vector(point, provenance={"ü": [1, None]})]) == 1
    row = session.execute(text("select * from vectors")).mappings().one()
    (values,) = vectors.read(session, [row["id"]])
    assert values.log_likelihoods.tobytes() == np.array([-590.5, -20503.7119, -0.0078679, -1.0], "<f4").tobytes()
    assert values.valid.tolist() == [True] * 4
    assert (row["n_ok"], row["n_texts"], row["tokens"]) == (4, 4, 10)
    assert row["sum_value"] == pytest.approx(-590.5 - 20503.7119 - 0.0078679 - 1, rel=1e-6)
    assert row["provenance"] == {"ü": [1, None]}


def test_what_has_no_value_is_nan_and_counts_for_nothing(session, point):
    vectors.insert_many(session, [vector(point, (-1, 7, -3, np.inf), (0, Status.TOO_LONG, 0, Status.NON_FINITE))])
    row = session.execute(text("select * from vectors")).mappings().one()
    (values,) = vectors.read(session, [row["id"]])
    assert np.isnan(values.log_likelihoods).tolist() == [False, True, False, True]
    assert (row["n_ok"], row["sum_value"], row["mean_value"], row["tokens"]) == (2, -4.0, -2.0, 4)


def test_a_vector_without_any_value_has_no_mean(session, point):
    vectors.insert_many(session, [vector(point, statuses=[Status.TEMPLATE_ERROR] * 4)])
    row = session.execute(text("select n_ok, sum_value, mean_value from vectors")).one()
    assert tuple(row) == (0, 0.0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"log_likelihoods": np.array([-1, np.nan, -1, -1], np.float32)},
        {"log_likelihoods": np.array([-1, -np.inf, -1, -1], np.float32)},
        {"log_likelihoods": np.array([-1.0], np.float32)},
        {"statuses": np.array([0, 0, 0, 99], np.uint8)},
        {"token_counts": np.array([1], np.int32)},
        {"log_likelihoods": np.empty(0, np.float32), "statuses": np.empty(0, np.uint8), "token_counts": np.empty(0)},
    ],
)
def test_bad_values_are_refused_and_nothing_is_written(session, point, changes):
    with pytest.raises(BadInput):
        vectors.insert_many(session, [vector(point), vector(point, engine_version=2, **changes)])
    assert session.scalar(text("select count(*) from vectors")) == 0


def test_a_taken_point_is_a_conflict_and_the_session_goes_on(session, point):
    vectors.insert_many(session, [vector(point)])
    with pytest.raises(Conflict, match="stored already"):
        vectors.insert_many(session, [vector(point, engine_version=2), vector(point)])
    assert session.scalar(text("select count(*) from vectors")) == 1
    with pytest.raises(Conflict, match="gone"):
        vectors.insert_many(session, [vector(point, engine_version=3, model_id=10**9)])


def test_what_was_scored_here_comes_before_what_was_imported(session, point):
    vectors.insert_many(session, [vector(point, dtype="bfloat16"), vector(point, (-9, -9, -8, -9), engine_version=0)])
    (member,) = vectors.members(session, point["text_set_id"], point["transform_id"], "chat", "nats")
    assert (member.dtype, member.engine_version) == ("bfloat16", 1)


@pytest.mark.parametrize(
    "statement",
    [
        "update vectors set sum_value = 'NaN'",
        "update vectors set sum_value = 'Infinity'",
        "update vectors set statuses = '\\x00'",
        "update vectors set unit = 'furlongs'",
        "update vectors set n_ok = 5",
        "update vectors set noise_floor_nats = -1",
    ],
)
def test_the_database_itself_holds_the_rules(session, point, statement):
    vectors.insert_many(session, [vector(point)])
    with pytest.raises(IntegrityError):
        session.execute(text(statement))
