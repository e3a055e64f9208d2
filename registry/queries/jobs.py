"""Jobs, leases and shards: who does which work, and what of it is already done.

A job is a row.  A worker claims it through its lease (one conditional statement by the database's clock), proves that
it still holds the lease in the transaction of every shard, and the last shard turns the slices into vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from registry.canonical import hash_json
from registry.errors import Busy, NotFound
from registry.queries import vectors
from registry.tables import Job, Lease, Shard

LEASE_SECONDS = 60
"""A worker that has not renewed for this long is taken for dead."""

ACTIVE = ("queued", "running")


@dataclass(frozen=True)
class ScoreRequest:
    """What makes two requests the same work, but for the transforms."""

    model_id: int
    text_set_id: int
    profile: str
    dtype: str
    engine_version: int

    @property
    def key(self) -> str:
        return hash_json(["score", self.model_id, self.text_set_id, self.profile, self.dtype, self.engine_version])


@dataclass(frozen=True)
class JobInfo:
    id: int
    kind: str
    model_id: int
    arguments: dict[str, Any]
    state: str
    reason: str
    attempts: int


@dataclass(frozen=True)
class Slice:
    """One transform's values for the texts [start, stop)."""

    transform_id: int
    start: int
    stop: int
    log_likelihoods: np.ndarray[Any, np.dtype[np.float32]]
    statuses: np.ndarray[Any, np.dtype[np.uint8]]
    token_counts: np.ndarray[Any, np.dtype[np.int32]]
    notes: dict[str, Any]


def open_score_job(
    session: Session, request: ScoreRequest, transform_ids: Sequence[int], shard_texts: int
) -> tuple[JobInfo | None, set[int]]:
    """The job to work on next for this request, and the transforms of it that have their vectors already.

    An unfinished job with one of the missing transforms is opened again, failed or not, so that its finished shards
    count.  It keeps the transforms it was opened with: another mixture would change the batches, and with them the last
    bits of a resumed run.  None when nothing is left to do.
    """
    _take_turns(session, request.key)
    have = vectors.scored_transforms(
        session, request.model_id, request.text_set_id, request.profile, request.dtype, request.engine_version
    )
    missing = set(transform_ids) - have
    unfinished = session.scalars(
        select(Job).where(Job.key == request.key, Job.state.in_((*ACTIVE, "failed"))).order_by(Job.id.desc())
    ).all()
    chosen = None
    for job in unfinished:
        if have.intersection(job.arguments["transform_ids"]):
            # Another job has stored vectors of it since: this one could never be finished.
            session.execute(delete(Shard).where(Shard.job_id == job.id))
            job.state, job.reason = "cancelled", "another job stored its vectors"
        elif missing.intersection(job.arguments["transform_ids"]):
            chosen = chosen or job
    active = next((job for job in unfinished if job.state in ACTIVE), None)
    if missing and active is not None and active is not chosen:
        if lease_holder(session, active.id) is not None:
            chosen = active
        else:
            active.state, active.reason = "failed", "set aside for other transforms; the same command goes on with it"
    session.flush()
    if missing and chosen is None:
        chosen = Job(
            kind="score",
            key=request.key,
            model_id=request.model_id,
            arguments={
                "text_set_id": request.text_set_id,
                "transform_ids": sorted(missing),
                "profile": request.profile,
                "dtype": request.dtype,
                "engine_version": request.engine_version,
                "shard_texts": shard_texts,
            },
        )
        session.add(chosen)
    elif chosen is not None and chosen.state == "failed":
        chosen.state, chosen.reason, chosen.finished_at = "queued", "", None
    session.flush()
    return (None if chosen is None else _info(chosen)), have & set(transform_ids)


def _take_turns(session: Session, key: str) -> None:
    """Whoever opens a job of this work and whoever finishes one wait for each other, until the transaction ends: else
    a job could be opened between the moment its vectors were looked for and the moment they are there."""
    session.execute(text("select pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": key})


def get(session: Session, job_id: int) -> JobInfo:
    job = session.get(Job, job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    return _info(job)


def _info(job: Job) -> JobInfo:
    return JobInfo(job.id, job.kind, job.model_id, dict(job.arguments), job.state, job.reason, job.attempts)


def lease_holder(session: Session, job_id: int) -> str | None:
    """Who holds a lease that has not run out."""
    return session.scalar(select(Lease.holder).where(Lease.job_id == job_id, Lease.expires_at > func.now()))


def claim(session: Session, job_id: int, holder: str, *, taking_over: str | None = None) -> JobInfo:
    """Takes the job's lease and marks it running.

    `taking_over` names a holder known to be dead, whose lease need not run out first.  Raises Busy while somebody
    else holds it, NotFound when the job is gone.
    """
    fresh = insert(Lease).values(job_id=job_id, holder=holder, expires_at=_expiry())
    free = Lease.expires_at <= func.now()
    if taking_over is not None:
        free = free | (Lease.holder == taking_over)
    try:
        with session.begin_nested():
            won = session.execute(
                fresh.on_conflict_do_update(
                    index_elements=[Lease.job_id],
                    set_={"holder": holder, "heartbeat_at": func.now(), "expires_at": _expiry()},
                    where=free,
                ).returning(Lease.holder)
            ).scalar()
    except IntegrityError as error:
        raise NotFound(f"there is no job {job_id}") from error
    if won is None:
        other = lease_holder(session, job_id)
        raise Busy(
            f"job {job_id} is being worked on by {other}",
            hint=f"wait for it, or try again {LEASE_SECONDS} seconds after that process has died",
        )
    claimed = session.execute(
        update(Job)
        .where(Job.id == job_id, Job.state.in_(ACTIVE))
        .values(
            state="running", attempts=Job.attempts + 1, started_at=func.coalesce(Job.started_at, func.now()), reason=""
        )
        .returning(Job.id)
    ).scalar()
    if claimed is None:
        # Somebody finished it between our opening and our claim.
        session.execute(delete(Lease).where(Lease.job_id == job_id, Lease.holder == holder))
    session.expire_all()
    return get(session, job_id)


def renew(session: Session, job_id: int, holder: str) -> None:
    """Moves the lease's end; raises Busy if the lease is no longer ours, and then nothing more may be written."""
    kept = session.execute(
        update(Lease)
        .where(Lease.job_id == job_id, Lease.holder == holder)
        .values(heartbeat_at=func.now(), expires_at=_expiry())
        .returning(Lease.job_id)
    ).scalar()
    if kept is None:
        raise Busy(f"the lease of job {job_id} was lost: it ran out and another worker took the job")


def release(session: Session, job_id: int, holder: str, state: str, reason: str = "") -> None:
    """Gives the lease back and leaves the job `queued` (go on later), `done` or `failed`."""
    held = session.execute(
        delete(Lease).where(Lease.job_id == job_id, Lease.holder == holder).returning(Lease.job_id)
    ).scalar()
    if held is None:
        return
    finished = func.now() if state in ("done", "failed", "cancelled") else None
    session.execute(
        update(Job)
        .where(Job.id == job_id, Job.state.in_(ACTIVE))
        .values(state=state, reason=reason[:2000], finished_at=finished)
    )


def put_slices(session: Session, job_id: int, holder: str, slices: Sequence[Slice]) -> None:
    """Stores finished slices, in the transaction that proves the lease is still ours."""
    renew(session, job_id, holder)
    session.execute(
        insert(Shard).on_conflict_do_nothing(),
        [
            {
                "job_id": job_id,
                "transform_id": part.transform_id,
                "start": part.start,
                "stop": part.stop,
                "log_likelihoods": part.log_likelihoods.astype("<f4").tobytes(),
                "statuses": part.statuses.astype(np.uint8).tobytes(),
                "token_counts": part.token_counts.astype("<i4").tobytes(),
                "notes": part.notes,
            }
            for part in slices
        ],
    )


def finished_slices(session: Session, job_id: int) -> set[tuple[int, int]]:
    """(transform id, start) of every stored slice."""
    rows = session.execute(select(Shard.transform_id, Shard.start).where(Shard.job_id == job_id))
    return {(row.transform_id, row.start) for row in rows}


def take_slices(session: Session, job_id: int, holder: str) -> list[Slice]:
    """Every slice of the job, removed from the table: whoever takes them writes the vectors in this transaction."""
    key = session.scalar(select(Job.key).where(Job.id == job_id))
    if key is None:
        raise NotFound(f"there is no job {job_id}")
    _take_turns(session, key)
    renew(session, job_id, holder)
    rows = session.execute(select(Shard).where(Shard.job_id == job_id).order_by(Shard.transform_id, Shard.start))
    slices = [
        Slice(
            shard.transform_id,
            shard.start,
            shard.stop,
            np.frombuffer(shard.log_likelihoods, "<f4"),
            np.frombuffer(shard.statuses, np.uint8),
            np.frombuffer(shard.token_counts, "<i4"),
            dict(shard.notes),
        )
        for shard in rows.scalars()
    ]
    session.execute(delete(Shard).where(Shard.job_id == job_id))
    return slices


def _expiry() -> Any:
    return func.now() + text(f"interval '{LEASE_SECONDS} seconds'")
