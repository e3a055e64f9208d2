"""Stored comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, aliased

from registry.evidence import Evidence, Interval
from registry.queries.models import model_ref
from registry.tables import EvidenceRow, Model


def record(session: Session, evidences: Sequence[Evidence]) -> int:
    """Stores evidence; returns how many rows are new.  What rests on the same inputs is stored once."""
    rows = [_row(one) for one in evidences]
    if not rows:
        return 0
    # In one order for everybody: two writers of the same rows must not wait for one another in a circle.
    rows.sort(key=lambda row: (row["statistic"], row["a_id"], row["b_id"], row["inputs_hash"]))
    written = session.execute(insert(EvidenceRow).on_conflict_do_nothing().returning(EvidenceRow.id), rows)
    return len(written.all())


def about(session: Session, a_id: int, b_id: int | None = None) -> list[Evidence]:
    """Stored evidence about a model, or a pair in either order, newest first."""
    first, second = aliased(Model), aliased(Model)
    query = (
        select(EvidenceRow, first, second)
        .join(first, first.id == EvidenceRow.a_id)
        .join(second, second.id == EvidenceRow.b_id)
        .order_by(EvidenceRow.id.desc())
    )
    if b_id is None:
        query = query.where((EvidenceRow.a_id == a_id) | (EvidenceRow.b_id == a_id))
    else:
        query = query.where(
            ((EvidenceRow.a_id == a_id) & (EvidenceRow.b_id == b_id))
            | ((EvidenceRow.a_id == b_id) & (EvidenceRow.b_id == a_id))
        )
    return [_evidence(row, a, b) for row, a, b in session.execute(query)]


def _row(evidence: Evidence) -> dict[str, Any]:
    details = {key: value for key, value in evidence.details.items() if key not in ("rank", "resolved_from_next")}
    return {
        "method": evidence.method,
        "version": evidence.version,
        "a_id": evidence.a.id,
        "b_id": evidence.b.id,
        "statistic": evidence.statistic,
        "value": evidence.value,
        "reason": evidence.reason,
        "unit": evidence.unit,
        "closer": evidence.closer,
        "symmetric": evidence.symmetric,
        "interval": asdict(evidence.interval) if evidence.interval is not None else None,
        "p_value": evidence.p_value,
        "n": evidence.n,
        "space": evidence.space,
        "inputs_hash": evidence.inputs_hash,
        "not_shown": evidence.not_shown,
        # A rank belongs to one list of candidates, not to the pair.
        "details": details,
    }


def _evidence(row: EvidenceRow, a: Model, b: Model) -> Evidence:
    return Evidence(
        method=row.method,
        version=row.version,
        a=model_ref(a),
        b=model_ref(b),
        statistic=row.statistic,
        value=row.value,
        reason=row.reason,
        unit=row.unit,
        closer=row.closer,  # type: ignore[arg-type]  # the table's check constraint holds it to the three words
        symmetric=row.symmetric,
        interval=Interval(**row.interval) if row.interval is not None else None,
        p_value=row.p_value,
        n=row.n,
        space=row.space,
        inputs_hash=row.inputs_hash,
        not_shown=row.not_shown,
        details=row.details,
    )
