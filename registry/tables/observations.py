"""What models gave: log-likelihoods, raw, float32, never rewritten; and which code path may make them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Computed,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from registry.tables.base import Base, bigid, created


class Vector(Base):
    """log p(response | transformed prompt) for every text of a set, by one model.

    The bytea columns are STORAGE EXTERNAL (set by the migration): compression saves nothing on floats and costs two
    thirds of the write speed.  Bulk reads and writes go through `registry.queries.vectors`, not through this class.
    """

    __tablename__ = "vectors"
    __table_args__ = (
        UniqueConstraint(
            "model_id",
            "text_set_id",
            "transform_id",
            "profile",
            "dtype",
            "engine_version",
            name="uq_vectors_point",
        ),
        CheckConstraint("octet_length(log_likelihoods) = 4 * octet_length(statuses)", name="lengths"),
        CheckConstraint("octet_length(token_counts) = 4 * octet_length(statuses)", name="token_lengths"),
        CheckConstraint("unit in ('nats', 'bits_per_byte')", name="unit"),
        CheckConstraint("n_ok >= 0 and n_ok <= octet_length(statuses)", name="n_ok"),
        # NaN = NaN is true in PostgreSQL, and NaN sorts above infinity.
        CheckConstraint("sum_value > '-Infinity' and sum_value < 'Infinity'", name="sum_finite"),
        CheckConstraint(
            "noise_floor_nats is null or (noise_floor_nats >= 0 and noise_floor_nats < 'Infinity')",
            name="noise",
        ),
        Index("ix_vectors_space", "text_set_id", "transform_id", "profile", "unit", "id"),
    )

    id: Mapped[bigid]
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    text_set_id: Mapped[int] = mapped_column(ForeignKey("text_sets.id"))
    transform_id: Mapped[int] = mapped_column(ForeignKey("transforms.id"))
    profile: Mapped[str]
    """`chat`, `plain`, or `imported:<who>` for vectors made under somebody else's policy."""
    dtype: Mapped[str]
    """float32, bfloat16, float16, or `unknown` for imports."""
    engine_version: Mapped[int]
    """`tasks.scoring.ENGINE_VERSION` at the time; 0 for imports."""
    unit: Mapped[str] = mapped_column(server_default="nats")
    log_likelihoods: Mapped[bytes] = mapped_column(LargeBinary)
    """float32 little-endian, one a text; NaN where the status carries no value."""
    statuses: Mapped[bytes] = mapped_column(LargeBinary)
    """uint8 a text, see `registry.statuses`."""
    token_counts: Mapped[bytes] = mapped_column(LargeBinary)
    """int32 little-endian: scored tokens a text."""
    checksum: Mapped[bytes] = mapped_column(LargeBinary)
    """sha256(log_likelihoods ‖ statuses)."""
    n_texts: Mapped[int] = mapped_column(Computed("octet_length(statuses)", persisted=True))
    n_ok: Mapped[int]
    """Texts that carry a value (status ok or split)."""
    sum_value: Mapped[float] = mapped_column(Float(53))
    mean_value: Mapped[float | None] = mapped_column(Float(53))
    """Over the texts that carry a value; null where none does."""
    tokens: Mapped[int] = mapped_column(BigInteger)
    """Scored response tokens."""
    response_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Of the texts that carry a value; null on opaque sets."""
    noise_floor_nats: Mapped[float | None] = mapped_column(Float(53))
    """KL of this vector with a re-scoring of itself; null where it was not measured."""
    path: Mapped[str]
    """Which code path made it: `right-padded`, or `import:<format>`."""
    device_class: Mapped[str]
    attention: Mapped[str]
    template_hash: Mapped[str | None]
    tokenizer_hash: Mapped[str | None]
    provenance: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    """Library versions, device name, batch budget, seconds, peak memory, job id, counts by status."""
    created_at: Mapped[created]


class Canary(Base):
    """Whether the fast path agrees with one text at a time, for one model under one set of versions.

    Most fast paths fail silently on some architectures, so none is trusted before it was tried; see `tasks.canary`.
    """

    __tablename__ = "canaries"
    __table_args__ = (
        UniqueConstraint(
            "model_id", "engine_version", "transformers", "torch", "dtype", "device_class", name="uq_canaries_case"
        ),
        CheckConstraint("worst_nats is null or (worst_nats >= 0 and worst_nats < 'Infinity')", name="worst"),
    )

    id: Mapped[bigid]
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"))
    engine_version: Mapped[int]
    transformers: Mapped[str]
    """Version: its models and masks are what the fast path relies on."""
    torch: Mapped[str]
    dtype: Mapped[str]
    device_class: Mapped[str]
    path: Mapped[str]
    """The path to use from now on."""
    worst_nats: Mapped[float | None] = mapped_column(Float(53))
    """The fast path's largest difference from one text at a time; null where it could not run."""
    reason: Mapped[str] = mapped_column(server_default="")
    """Why the fast path is not used; empty when it is."""
    created_at: Mapped[created]
