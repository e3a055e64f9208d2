"""Work in flight.  The row is the truth; a broker only ever carries its id."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from registry.tables.base import Base, bigid, created, instant

STATES = ("queued", "running", "done", "failed", "cancelled")


class Job(Base):
    """One request for work on one model; at most one active job a key."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint(f"state in {STATES!r}", name="state"),
        Index("uq_jobs_active_key", "key", unique=True, postgresql_where=text("state in ('queued', 'running')")),
    )

    id: Mapped[bigid]
    kind: Mapped[str]
    """`score`."""
    key: Mapped[str] = mapped_column(index=True)
    """sha256 of what makes two requests the same work."""
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"), index=True)
    arguments: Mapped[dict[str, Any]] = mapped_column(JSONB)
    state: Mapped[str] = mapped_column(server_default="queued")
    reason: Mapped[str] = mapped_column(server_default="")
    attempts: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[created]
    started_at: Mapped[instant | None]
    finished_at: Mapped[instant | None]


class Lease(Base):
    """Who works on a job, until when.  A lease past `expires_at` may be taken over."""

    __tablename__ = "leases"

    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    holder: Mapped[str]
    """host:pid:random, so that a restarted process never takes itself for its predecessor."""
    heartbeat_at: Mapped[created]
    expires_at: Mapped[instant]


class Shard(Base):
    """A finished slice of a vector; the last one writes the vector and drops them all in one transaction."""

    __tablename__ = "shards"
    __table_args__ = (CheckConstraint("start >= 0 and stop > start", name="slice"),)

    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    transform_id: Mapped[int] = mapped_column(ForeignKey("transforms.id"), primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True)
    stop: Mapped[int]
    log_likelihoods: Mapped[bytes] = mapped_column(LargeBinary)
    statuses: Mapped[bytes] = mapped_column(LargeBinary)
    token_counts: Mapped[bytes] = mapped_column(LargeBinary)
    notes: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    """Seconds, peak memory, and the first reasons for texts without a value."""
    created_at: Mapped[created]
