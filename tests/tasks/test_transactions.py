"""E14: no transaction is open while a model computes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

from registry import database
from registry.queries import models, textsets
from registry.textsets import Pair, freeze
from tasks import jobs, registration, scoring


def test_scoring_survives_a_server_that_ends_idle_transactions(
    fresh_database: Engine, population_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.session() as session:
        model, _ = models.register(session, registration.candidate(str(population_member("llama-base").path)))
        textsets.add(session, "small", freeze([Pair(f"Question {n}?", f"Answer {n}.") for n in range(40)]))
        name = session.scalar(text("select current_database()"))
        session.execute(text(f"alter database {name} set idle_in_transaction_session_timeout = '300ms'"))
    fresh_database.dispose()  # so that connections are made anew, under the limit
    watcher = create_engine(fresh_database.url, poolclass=NullPool)
    seen: list[int] = []
    real = scoring.score_spans

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.6)
        with watcher.connect() as connection:
            seen.append(
                connection.scalar(
                    text(
                        "select count(*) from pg_stat_activity where datname = current_database()"
                        " and state like 'idle in transaction%'"
                    )
                )
                or 0
            )
        return real(*arguments, **options)

    monkeypatch.setattr(scoring, "score_spans", slowly)
    outcome = jobs.score_model(model, "small", ["base"], "plain", "float32", device="cpu")
    assert outcome.n_texts == 40
    assert len(seen) > 2
    assert set(seen) == {0}
