"""Which code path a model may be scored on, as tried before."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.tables import Canary


@dataclass(frozen=True)
class Case:
    """What a verdict holds for: change one of these, and the fast path has to be tried again."""

    model_id: int
    """A model is a revision."""
    engine_version: int
    transformers: str
    torch: str
    dtype: str
    device_class: str


@dataclass(frozen=True)
class Verdict:
    path: str
    """The path to use."""
    worst_nats: float | None
    """Largest difference of the fastest path that ran from one text at a time; null where none ran."""
    reason: str
    """Why not the fast path; empty where it is the one."""


def find(session: Session, case: Case) -> Verdict | None:
    row = session.execute(select(Canary.path, Canary.worst_nats, Canary.reason).filter_by(**asdict(case))).one_or_none()
    return Verdict(*row) if row is not None else None


def keep(session: Session, case: Case, verdict: Verdict) -> Verdict:
    """Stores it and returns what is stored: the first of two workers that tried at once decides for both."""
    session.execute(insert(Canary).values(**asdict(case), **asdict(verdict)).on_conflict_do_nothing())
    kept = find(session, case)
    assert kept is not None
    return kept
