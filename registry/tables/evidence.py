"""Stored comparisons, each reproducible from its inputs' hashes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, Float, ForeignKey, Index, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from registry.tables.base import Base, bigid, created


class EvidenceRow(Base):
    """`registry.evidence.Evidence` as a row; the models by id."""

    __tablename__ = "evidence"
    __table_args__ = (
        UniqueConstraint("method", "version", "statistic", "a_id", "b_id", "inputs_hash", name="uq_evidence_inputs"),
        CheckConstraint("value is not null or reason <> ''", name="null_has_reason"),
        CheckConstraint("value is null or (value > '-Infinity' and value < 'Infinity')", name="value_finite"),
        CheckConstraint("closer in ('lower', 'higher', 'none')", name="closer"),
        Index("ix_evidence_b_id", "b_id"),
    )

    id: Mapped[bigid]
    method: Mapped[str]
    version: Mapped[str]
    a_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    b_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    statistic: Mapped[str]
    value: Mapped[float | None] = mapped_column(Float(53))
    reason: Mapped[str] = mapped_column(server_default="")
    unit: Mapped[str]
    closer: Mapped[str]
    symmetric: Mapped[bool]
    interval: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    p_value: Mapped[float | None] = mapped_column(Float(53))
    n: Mapped[int]
    space: Mapped[str]
    inputs_hash: Mapped[str]
    not_shown: Mapped[str]
    details: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    created_at: Mapped[created]
