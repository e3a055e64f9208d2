"""Models with given vectors, for tests of what is asked of vectors."""

from __future__ import annotations

import numpy as np
import pytest

from registry.queries import models, textsets, transforms, vectors
from registry.queries.vectors import NewVector
from registry.settings import settings
from registry.statuses import Status
from registry.textsets import Pair, freeze

N = 300


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own for the cache; the database stays the test's."""
    monkeypatch.setenv("MODELKIN_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield tmp_path / "home"
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def texts(session, home):
    return textsets.add(session, "texts", freeze([Pair(f"Question {n}?", f"Answer {n}.") for n in range(N)]))


class Registry:
    """Adds models with given values."""

    def __init__(self, session, text_set):
        self.session, self.text_set = session, text_set

    def add(self, name, values, **changes):
        model = models.register_named(self.session, f"org/{name}", "test")
        self.vector(model, values, **changes)
        return model

    def vector(self, model, values, *, missing=(), transform="base", **changes):
        statuses = np.zeros(len(values), np.uint8)
        statuses[list(missing)] = Status.TOO_LONG
        fields = {
            "model_id": model.id,
            "text_set_id": self.text_set.id,
            "transform_id": transforms.get(self.session, transform).id,
            "profile": "chat",
            "dtype": "float32",
            "engine_version": 1,
            "log_likelihoods": np.asarray(values, np.float32),
            "statuses": statuses,
            "token_counts": np.full(len(values), 5, np.int32),
            "path": "test",
        }
        vectors.insert_many(self.session, [NewVector(**fields | changes)])


@pytest.fixture
def registry(session, texts):
    return Registry(session, texts)


@pytest.fixture
def family(registry):
    """A centre and models at growing distance; values at the scale of real ones."""
    generator = np.random.default_rng(0)
    centre = generator.normal(-590, 200, N)
    found = {"centre": registry.add("centre", centre)}
    for step in (1, 2, 4, 8, 16):
        found[step] = registry.add(f"m{step}", centre + generator.normal(0, step, N))
    found["values"] = centre
    return found


@pytest.fixture
def registry_on(session):
    """A registry on another text set."""
    return lambda text_set, opened=session: Registry(opened, text_set)
