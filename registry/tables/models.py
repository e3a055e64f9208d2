"""Things that can be compared, and the names people give them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from registry.tables.base import Base, bigid, created, instant

KINDS = ("hub", "folder", "gguf", "adapter", "endpoint", "named")


class Model(Base):
    """One thing that can be compared: a Hub repo at a commit, a folder, a GGUF file, an adapter on a base, an
    endpoint, or a bare name known only from an import.  Never a moving branch."""

    __tablename__ = "models"
    __table_args__ = (
        UniqueConstraint("identity"),
        CheckConstraint(f"kind in {KINDS!r}", name="kind"),
        CheckConstraint("status in ('active', 'unstable', 'retired')", name="status"),
        CheckConstraint("handle ~ '^[^/[:space:]@]+/[^/[:space:]@]+$'", name="handle"),
        CheckConstraint("(kind = 'adapter') = (base_id is not null)", name="adapter_has_base"),
        CheckConstraint("resolved_to_id is null or kind = 'named'", name="only_names_resolve"),
        Index("ix_models_handle_key", func.lower(text("handle"))),
        Index("ix_models_weights_hash", "weights_hash"),
    )

    id: Mapped[bigid]
    kind: Mapped[str]
    handle: Mapped[str]
    """`owner/name` as its owner writes it; compared without case."""
    revision: Mapped[str]
    """hub, adapter: 40-hex commit (an adapter in a local folder: content sha256); folder, gguf: content sha256;
    named: `unknown`."""
    identity: Mapped[str]
    """sha256 of the canonical JSON that makes this thing itself; see `registry.identity`."""
    source: Mapped[str]
    """Where it is fetched from: canonical Hub id, absolute path, or the import that named it."""
    file: Mapped[str] = mapped_column(server_default="")
    """The GGUF file inside a Hub repo, else empty."""
    base_id: Mapped[int | None] = mapped_column(ForeignKey("models.id"))
    """An adapter's base, itself a registered model."""
    resolved_to_id: Mapped[int | None] = mapped_column(ForeignKey("models.id"))
    """A name that turned out to be this model; the record of the name stays."""
    weights_hash: Mapped[str | None]
    """sha256 over the weight files' own hashes: equal for a re-upload under another name."""
    status: Mapped[str] = mapped_column(server_default="active")
    status_reason: Mapped[str] = mapped_column(server_default="")
    trust_remote_code: Mapped[bool] = mapped_column(server_default="false")

    architecture: Mapped[str | None]
    model_type: Mapped[str | None]
    parameters: Mapped[int | None] = mapped_column(BigInteger)
    dtype: Mapped[str | None]
    """Of the checkpoint, e.g. `bfloat16`."""
    quantization: Mapped[str | None]
    """The checkpoint's own, e.g. `gptq-4bit` or `Q4_1`: part of identity, unlike `--dtype`."""
    vocabulary: Mapped[int | None]
    context_length: Mapped[int | None]
    licence: Mapped[str | None]
    base_model: Mapped[str | None]
    """As the card declares it, not checked."""
    base_model_relation: Mapped[str | None]
    pipeline_tag: Mapped[str | None]
    template_hash: Mapped[str | None]
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Of the weight files."""
    gated: Mapped[str | None]
    downloads: Mapped[int | None] = mapped_column(BigInteger)
    likes: Mapped[int | None] = mapped_column(BigInteger)
    facts: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    """All facts as read: file sizes and hashes, card data, warnings."""
    facts_at: Mapped[instant | None]
    created_at: Mapped[created]


class ModelAlias(Base):
    """A movable name for one model; what moved it is in `alias_events`."""

    __tablename__ = "model_aliases"

    alias: Mapped[str] = mapped_column(primary_key=True)
    """Lower case."""
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), index=True)
    kind: Mapped[str] = mapped_column(server_default="user")
    """`user`, or `renamed` for a Hub id that now redirects."""
    created_at: Mapped[created]


class AliasEvent(Base):
    """Append-only: where an alias pointed before and after, when, and who said so."""

    __tablename__ = "alias_events"

    id: Mapped[bigid]
    alias: Mapped[str] = mapped_column(index=True)
    from_model_id: Mapped[int | None] = mapped_column(BigInteger)
    to_model_id: Mapped[int | None] = mapped_column(BigInteger)
    actor: Mapped[str]
    at: Mapped[created]


class ModelTag(Base):
    """A free label; many models share one."""

    __tablename__ = "model_tags"

    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"), primary_key=True)
    tag: Mapped[str] = mapped_column(primary_key=True, index=True)
