"""A registered model as an answer."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy.orm import Session

from registry.errors import NotFound
from registry.evidence import ModelRef
from registry.tables import Model

STATED = "stated_identities"
"""In the facts of a named row: the identities that the files stated for it."""


@dataclass(frozen=True)
class ModelInfo:
    """A row of `models` (each field is documented there), and how the question led to it."""

    id: int
    kind: str
    handle: str
    revision: str
    identity: str
    source: str
    file: str
    base_id: int | None
    resolved_to_id: int | None
    weights_hash: str | None
    status: str
    status_reason: str
    trust_remote_code: bool
    architecture: str | None
    model_type: str | None
    parameters: int | None
    dtype: str | None
    quantization: str | None
    vocabulary: int | None
    context_length: int | None
    licence: str | None
    base_model: str | None
    base_model_relation: str | None
    pipeline_tag: str | None
    template_hash: str | None
    size_bytes: int | None
    gated: str | None
    downloads: int | None
    likes: int | None
    facts: Mapping[str, Any]
    facts_at: datetime.datetime | None
    created_at: datetime.datetime
    found_by: str = "id"
    """id, handle, revision, ref (a branch or tag that was asked for at registration), alias, source, resolved."""
    other_revisions: int = 0
    """How many other revisions of the handle are registered; the answer was the newest of them."""
    resolved_from_id: int | None = None
    """The named row that led here; vectors imported under the name still belong to it."""

    @property
    def name(self) -> str:
        """Short and unambiguous: `owner/name@0123456789ab`, with `:FILE` for one GGUF among several."""
        return f"{self.handle}@{self.revision[:12]}" + (f":{self.file}" if self.file else "")


_ROW_FIELDS = [field.name for field in fields(ModelInfo)][:32]


def info_of(row: Model, **how: Any) -> ModelInfo:
    return ModelInfo(**{name: getattr(row, name) for name in _ROW_FIELDS}, **how)


def model_ref(model: ModelInfo | Model) -> ModelRef:
    """How an answer names it.  One file among several of a repo is named `owner/name:FILE`, which `find` reads."""
    handle = model.handle + (f":{model.file}" if model.file else "")
    return ModelRef(handle=handle, revision=model.revision, kind=model.kind, id=model.id, identity=model.identity)


def get(session: Session, model_id: int) -> ModelInfo:
    """Raises NotFound."""
    row = session.get(Model, model_id)
    if row is None:
        raise NotFound(f"no model has id {model_id}", hint="see `modelkin model list`")
    return info_of(row)
