"""Frozen lists of (prompt, response), and the edits that may be made to a prompt."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ARRAY, CheckConstraint, ForeignKey, LargeBinary, String, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from registry.tables.base import Base, bigid, created


class TextSet(Base):
    """Frozen and content-hashed: the same content is the same set, one other byte makes another."""

    __tablename__ = "text_sets"
    __table_args__ = (UniqueConstraint("content_hash"), CheckConstraint("n_texts > 0", name="not_empty"))

    id: Mapped[bigid]
    content_hash: Mapped[str]
    """sha256 hex over the ordered per-text sha256(prompt ‖ 0x00 ‖ response); opaque sets hash their ids."""
    n_texts: Mapped[int]
    n_prompts: Mapped[int]
    opaque: Mapped[bool] = mapped_column(server_default="false")
    """Only ordered ids, no text: vectors can be imported on it, nothing can be scored."""
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("text_sets.id"))
    derivation: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    """How it was made from its parent, e.g. {"shuffle_prompts": 3, "seed": 0}."""
    source: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    """Where it came from and the creation report: counts of stripped, duplicate and refused rows."""
    created_at: Mapped[created]


class TextSetName(Base):
    """Names of sets; a second name for the same content is an alias of it."""

    __tablename__ = "text_set_names"

    name: Mapped[str] = mapped_column(primary_key=True)
    text_set_id: Mapped[int] = mapped_column(ForeignKey("text_sets.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[created]


class Text(Base):
    """One pair of a set.  `position` is the index into every vector over the set."""

    __tablename__ = "texts"
    __table_args__ = (
        UniqueConstraint("text_set_id", "text_hash"),
        CheckConstraint("(prompt is null) = (response is null)", name="pair_or_opaque"),
    )

    text_set_id: Mapped[int] = mapped_column(ForeignKey("text_sets.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    text_hash: Mapped[bytes] = mapped_column(LargeBinary)
    """32 bytes: sha256(prompt ‖ 0x00 ‖ response), or of the id in an opaque set."""
    prompt_id: Mapped[int]
    """Dense, by first appearance; responses to one prompt share it."""
    prompt: Mapped[str | None]
    response: Mapped[str | None]
    response_bytes: Mapped[int | None]
    """UTF-8 bytes: the denominator of bits per byte."""
    source_id: Mapped[str | None]
    """The row's id where it came from; the id itself in an opaque set."""
    columns: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    tags: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}")
    """language, topic, source, licence: outside the hash, for slices."""


class Transform(Base):
    """A named pipeline of prompt edits; `base` edits nothing, `empty` removes the prompt."""

    __tablename__ = "transforms"
    __table_args__ = (UniqueConstraint("name"), UniqueConstraint("spec_hash"))

    id: Mapped[bigid]
    name: Mapped[str]
    spec: Mapped[list[dict[str, Any]]] = mapped_column(JSONB)
    """Canonical list of edits, composites already expanded."""
    spec_hash: Mapped[str]
    parts: Mapped[list[str]] = mapped_column(ARRAY(String), server_default="{}")
    """For a composite, the names it was composed of in order: repeat+cot → [repeat, cot]."""
    created_at: Mapped[created]
