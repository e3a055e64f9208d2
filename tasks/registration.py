"""From what a user typed to a candidate for the registry: every fact and the identity, nothing stored yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import HubUnavailable, NotFound, Refused
from registry.identity import Candidate
from tasks import hub, hub_models, local_models
from tasks.references import HubReference, parse


@dataclass(frozen=True)
class Size:
    """What a plan needs to know."""

    parameters: int | None
    vocabulary: int | None
    download_bytes: int
    """Still to be fetched."""


def candidate(
    reference: str, name: str | None = None, *, trust_remote_code: bool = False, base: str | None = None
) -> Candidate:
    """Reads everything that can be known without downloading weights.

    `name` is the handle of something local, and an alias of a Hub model; `base` replaces the base that an adapter
    names.  Raises BadInput, NotFound, Refused (with its reason), HubUnavailable, NoSpace.
    """
    place = parse(reference)
    if isinstance(place, HubReference):
        try:
            return hub_models.of_hub(place, name, trust_remote_code, base)
        except (Refused, HubUnavailable) as error:
            unknown = isinstance(error, HubUnavailable) or error.reason == "not_found_or_private"
            if unknown and Path(reference).exists():
                kind = "folder" if Path(reference).is_dir() else "file"
                error.hint = f"a {kind} of that name lies here: to register it write ./{reference}"
            raise
    if place.is_file():
        if place.suffix != ".gguf":
            raise Refused(
                "unsupported_format", f"{place} is not a GGUF file", hint="give a .gguf file or a model's folder"
            )
        return local_models.of_gguf(place, name)
    return local_models.of_folder(place, name, trust_remote_code, base)


def size_of(found: Candidate) -> Size:
    columns, files = found.columns, found.facts.get("files", {})
    sizes = {each: files[each]["size"] for each in found.facts.get("load", [])}
    missing = hub.missing_bytes(found.source, found.revision, sizes) if _is_on_hub(found.facts) else 0
    if found.base is not None:
        of_base = size_of(found.base)
        return Size(of_base.parameters, of_base.vocabulary, missing + of_base.download_bytes)
    return Size(columns.get("parameters"), columns.get("vocabulary"), missing)


def facts_of(reference: str) -> Size:
    """Of a registered model (by any of its names) or of one that could be registered."""
    from registry import database
    from registry.queries import models

    with database.session() as session:
        try:
            model = models.find(session, reference)
        except NotFound:
            model = None
    if model is None:
        return size_of(candidate(reference))
    files = model.facts.get("files", {})
    sizes = {each: files[each]["size"] for each in model.facts.get("load", [])}
    missing = hub.missing_bytes(model.source, model.revision, sizes) if _is_on_hub(model.facts) else 0
    return Size(model.parameters, model.vocabulary, missing)


def _is_on_hub(known: Mapping[str, Any]) -> bool:
    return known.get("place") == "hub"
