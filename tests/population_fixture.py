"""The tiny models of known ancestry as fixtures, built once and kept between runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from demo.population import Member, build


@pytest.fixture(scope="session")
def population_folder(pytestconfig: pytest.Config) -> Path:
    """Kept in pytest's cache: the members' key tells old builds from current ones."""
    return pytestconfig.cache.mkdir("population")


@pytest.fixture(scope="session")
def population_member(population_folder: Path) -> Callable[[str], Member]:
    """`population_member("llama-base")`: builds that one and its ancestors only."""
    return lambda name: build(population_folder, only=[name])[0]


@pytest.fixture(scope="session")
def population(population_folder: Path) -> dict[str, Member]:
    """All members by name: about forty seconds on one core the first time, nothing after."""
    return {member.name: member for member in build(population_folder)}
