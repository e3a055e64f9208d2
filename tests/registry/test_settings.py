"""Settings are documented, and forgiving where people spell one thing two ways."""

from pathlib import Path

import pytest

from registry.settings import Settings

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented(name):
    alias = Settings.model_fields[name].validation_alias
    variable = alias.choices[0] if alias is not None else f"MODELKIN_{name.upper()}"
    assert f"`{variable}`" in DOCUMENTED


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_a_database_url(scheme, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", f"{scheme}://me@host/db")
    assert Settings().database_url == "postgresql+psycopg://me@host/db"


def test_an_empty_database_url_is_none(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "")
    assert Settings().database_url is None


def test_home_is_absolute(monkeypatch):
    monkeypatch.setenv("MODELKIN_HOME", "~/somewhere")
    assert Settings().home == Path.home() / "somewhere"
