"""Spaces: a distance exists only between two points of one space."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from registry.canonical import canonical_json
from registry.errors import SpaceMismatch


@dataclass(frozen=True)
class Space:
    """What two points must share to be compared.

    Coordinates (model, revision, transform) and provenance (template hash, dtype, device, engine version) are not
    part of it: prompt shifts, families with different templates and bf16 against float32 are comparisons inside one
    space.
    """

    method: str
    version: str
    inputs: str
    """Hash of the text set, probes, genes or items."""
    profile: str
    """A policy that is the same for all models: what is rendered, scored or decoded."""
    unit: str
    encoder: str | None = None

    @property
    def key(self) -> str:
        """Canonical JSON: the spelling that is stored and compared."""
        return canonical_json(asdict(self))

    def require(self, other: Space) -> None:
        """Raises SpaceMismatch, naming both keys, unless `other` is this space."""
        if self != other:
            differing = [name for name, value in asdict(self).items() if asdict(other)[name] != value]
            raise SpaceMismatch(
                f"no distance exists between two spaces (they differ in {', '.join(differing)}): "
                f"{self.key} and {other.key}",
                hint="compare points that share the text set, profile and unit",
            )


def log_likelihood_space(text_set_hash: str, profile: str, unit: str) -> Space:
    return Space(method="log-likelihood", version="1", inputs=f"sha256:{text_set_hash}", profile=profile, unit=unit)
