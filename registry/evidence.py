"""The one form in which every comparison of two models is answered."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    level: float
    """Coverage, e.g. 0.95."""
    kind: str
    """How it was made: `fourth-moment` or `bootstrap`."""


@dataclass(frozen=True)
class ModelRef:
    """A model at its revision, as an answer names it."""

    handle: str
    revision: str
    kind: str
    id: int
    """The row, for joins; not stable across registries."""
    identity: str

    def __str__(self) -> str:
        return f"{self.handle}@{self.revision[:12]}"


@dataclass(frozen=True)
class Evidence:
    """One statistic about two models, with what it rests on and what it does not show."""

    method: str
    version: str
    a: ModelRef
    b: ModelRef
    statistic: str
    value: float | None
    reason: str
    """Why `value` is null; empty otherwise."""
    unit: str
    closer: Literal["lower", "higher", "none"]
    """Which direction means more alike."""
    symmetric: bool
    interval: Interval | None
    p_value: float | None
    n: int
    """Observations the statistic rests on, e.g. texts valid in both."""
    space: str
    """The space key."""
    inputs_hash: str
    """sha256 over the checksums of the inputs and the arguments: recomputing from the same gives the same."""
    not_shown: str
    """One sentence on what this does not show."""
    details: dict[str, Any] = field(default_factory=dict)
    """What only this method has to say, e.g. bits per byte, noise floor, whether the rank is resolved."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: no NaN, no numpy scalars."""
        return asdict(self)
