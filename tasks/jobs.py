"""Jobs that run models.  Thin: claim the row, call the engine, record the outcome.

`score` runs in the calling process; a Celery task will be another caller of the same functions.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from registry import database
from registry.errors import BadInput, Busy, ModelkinError
from registry.methods.log_likelihood import kl_nats
from registry.queries import jobs, models, textsets, transforms, vectors
from registry.queries.jobs import JobInfo, ScoreRequest, Slice
from registry.statuses import FIRST_WITHOUT_VALUE, Status
from tasks import leases
from tasks.model_scorer import ModelScorer, Part

SHARD_TEXTS = 32
"""Texts a shard, each under all transforms of the job: what a kill can lose."""

MAX_NON_FINITE = 0.05
"""Above this share of non-finite texts a model is marked `unstable`."""

NOISE_TEXTS = 16
"""Texts of a run that are scored a second time, in other batches."""

PROFILES = ("chat", "plain")

Progress = Callable[[int, int, int], None]
"""(texts done, texts in all, response tokens scored by this process)"""


@dataclass(frozen=True)
class Outcome:
    """What was done for one model."""

    scored: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    """Transforms whose vectors were there before."""
    n_texts: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    """Texts by status, all transforms together."""
    seconds: float = 0.0
    tokens: int = 0
    """Response tokens scored by this call."""


def score_model(
    model: models.ModelInfo,
    text_set: str,
    transform_names: Sequence[str],
    profile: str,
    dtype: str,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    batch_tokens: int | None = None,
    wait: bool = False,
) -> Outcome:
    """Scores what is missing, and first finishes what an interrupted run of the same model left.

    Raises what `open_score` and `score` raise.
    """
    if batch_tokens is not None and batch_tokens < 1:
        raise BadInput(f"a batch needs at least one token, not {batch_tokens}", hint="leave --batch-tokens out")
    before: list[str] | None = None
    outcome = Outcome()
    while True:
        job, have = open_score(model, text_set, transform_names, profile, dtype)
        before = have if before is None else before
        if job is None:
            return replace(outcome, already=tuple(before))
        done = score(job, device=device, progress=progress, batch_tokens=batch_tokens, wait=wait)
        outcome = Outcome(
            scored=outcome.scored + done.scored,
            n_texts=max(outcome.n_texts, done.n_texts),
            statuses=dict(Counter(outcome.statuses) + Counter(done.statuses)),
            seconds=outcome.seconds + done.seconds,
            tokens=outcome.tokens + done.tokens,
        )


def open_score(
    model: models.ModelInfo,
    text_set: str,
    transform_names: Sequence[str],
    profile: str,
    dtype: str,
) -> tuple[JobInfo | None, list[str]]:
    """Opens (or reopens) the next job for what is not scored yet; returns it and the transforms already scored.

    Raises BadInput for an unknown profile or no transform, NotFound for an unknown text set or transform, Unsupported
    for a set without texts or a model that is only a name.
    """
    from tasks.scoring import ENGINE_VERSION

    if profile not in PROFILES:
        raise BadInput(f"there is no profile {profile!r}", hint="use one of: " + ", ".join(PROFILES))
    if not transform_names:
        raise BadInput("no transform was named", hint="use base for the prompt as it is; see modelkin transform list")
    models.require_scorable(model)
    with database.session() as session:
        chosen = textsets.get(session, text_set)
        textsets.require_text(chosen)
        wanted = {one.id: one for one in (transforms.get(session, name) for name in transform_names)}
        request = ScoreRequest(model.id, chosen.id, profile, dtype, ENGINE_VERSION)
        job, have = jobs.open_score_job(session, request, list(wanted), SHARD_TEXTS)
        return job, [wanted[one].name for one in wanted if one in have]


def score(
    job: JobInfo,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    batch_tokens: int | None = None,
    wait: bool = False,
) -> Outcome:
    """Claims a score job and works it to the end; safe to call again after any interruption.

    Raises Busy while another process holds the job (unless `wait`), Refused when the model cannot be loaded or has no
    chat template.  An interruption leaves the job queued with its finished shards; an error leaves it failed with
    the reason, and the next call goes on from the shards too.
    """
    holder = leases.new_holder()
    job = _claim(job.id, holder, wait)
    if job.state != "running":
        # Another worker finished it while this one waited.
        return Outcome()
    try:
        with leases.Heartbeat(job.id, holder).beating():
            return _work(job, holder, device, progress, batch_tokens)
    except ModelkinError as error:
        _release(job.id, holder, "failed", f"{error.slug}: {error.message}")
        raise
    except (KeyboardInterrupt, SystemExit):
        _release(job.id, holder, "queued", "interrupted")
        raise
    except Exception as error:
        _release(job.id, holder, "failed", f"{type(error).__name__}: {error}")
        raise


def _claim(job_id: int, holder: str, wait: bool) -> JobInfo:
    while True:
        try:
            with database.session() as session:
                other = jobs.lease_holder(session, job_id)
                dead = other if other is not None and leases.is_dead(other) else None
                return jobs.claim(session, job_id, holder, taking_over=dead)
        except Busy:
            if not wait:
                raise
            time.sleep(2)


def _release(job_id: int, holder: str, state: str, reason: str) -> None:
    """Best effort: when the database is gone too, the lease runs out by itself."""
    try:
        with database.session() as session:
            jobs.release(session, job_id, holder, state, reason)
    except Exception as error:
        sys.stderr.write(f"modelkin: job {job_id} could not be released ({error}); its lease will run out\n")


def _work(job: JobInfo, holder: str, device: str, progress: Progress | None, batch_tokens: int | None) -> Outcome:
    """Scores every missing slice, then turns the slices into vectors."""
    started = time.monotonic()
    step, transform_ids = job.arguments["shard_texts"], job.arguments["transform_ids"]
    with database.session() as session:
        model = models.get(session, job.model_id)
        chosen = {one.id: one for one in transforms.get_many(session, transform_ids)}
        texts = textsets.texts(session, job.arguments["text_set_id"])
        finished = jobs.finished_slices(session, job.id)
    missing = {
        start: [one for one in transform_ids if (one, start) not in finished] for start in range(0, len(texts), step)
    }
    missing = {start: wanted for start, wanted in missing.items() if wanted}
    tokens = 0
    if missing:
        done = len(texts) - sum(len(texts[start : start + step]) for start in missing)
        scorer = ModelScorer(model, job.arguments["profile"], job.arguments["dtype"], device, batch_tokens)
        if progress is not None:
            progress(done, len(texts), 0)
        again = set(np.linspace(0, len(texts) - 1, min(NOISE_TEXTS, len(texts))).round().astype(int).tolist())
        parts = [
            Part(
                start,
                texts[start : start + step],
                {one: chosen[one].pipeline for one in wanted},
                [at for at in range(len(texts[start : start + step])) if start + at in again],
            )
            for start, wanted in missing.items()
        ]
        with scorer.scored(parts) as shards:
            for slices in shards:
                # A short transaction of its own: none stays open while the model computes.
                with database.session() as session:
                    jobs.put_slices(session, job.id, holder, slices)
                done += slices[0].stop - slices[0].start
                tokens += sum(int(one.token_counts.sum()) for one in slices)
                if progress is not None:
                    progress(done, len(texts), tokens)
    statuses = _write_vectors(job, holder, texts)
    scored = tuple(chosen[one].name for one in transform_ids)
    return Outcome(scored, (), len(texts), statuses, time.monotonic() - started, tokens)


def _write_vectors(job: JobInfo, holder: str, texts: Sequence[textsets.StoredText]) -> dict[str, int]:
    """The slices become vectors, the shards go, the job is done: one transaction."""
    counts: Counter[str] = Counter()
    response_bytes = np.array([text.response_bytes for text in texts], dtype=np.int64)
    with database.session() as session:
        by_transform: dict[int, list[Slice]] = {}
        for part in jobs.take_slices(session, job.id, holder):
            by_transform.setdefault(part.transform_id, []).append(part)
        rows = []
        for transform_id in job.arguments["transform_ids"]:
            parts = by_transform[transform_id]
            statuses = np.concatenate([part.statuses for part in parts])
            counts.update(Status(code).name.lower() for code in statuses.tolist())
            run = parts[-1].notes["run"]
            rows.append(
                vectors.NewVector(
                    model_id=job.model_id,
                    text_set_id=job.arguments["text_set_id"],
                    transform_id=transform_id,
                    profile=job.arguments["profile"],
                    dtype=job.arguments["dtype"],
                    engine_version=job.arguments["engine_version"],
                    unit="nats",
                    log_likelihoods=np.concatenate([part.log_likelihoods for part in parts]),
                    statuses=statuses,
                    token_counts=np.concatenate([part.token_counts for part in parts]),
                    path=_agreed([part.notes["path"] for part in parts]),
                    device_class=_agreed([part.notes["run"]["device_class"] for part in parts]),
                    attention=_agreed([part.notes["run"]["attention"] for part in parts]),
                    template_hash=run["template_hash"],
                    tokenizer_hash=run["tokenizer_hash"],
                    noise_floor_nats=_noise_floor(parts),
                    provenance=_provenance(job, parts),
                    response_bytes=int(response_bytes[statuses < FIRST_WITHOUT_VALUE].sum()),
                )
            )
        vectors.insert_many(session, rows)
        share = counts[Status.NON_FINITE.name.lower()] / max(1, sum(counts.values()))
        if share > MAX_NON_FINITE:
            models.mark_unstable(
                session,
                job.model_id,
                f"{share:.1%} of the texts gave a non-finite log-probability in {job.arguments['dtype']}",
            )
        jobs.release(session, job.id, holder, "done")
    return dict(counts)


def _noise_floor(parts: Sequence[Slice]) -> float | None:
    """KL of the vector with its own re-scoring in other batches, nats; None with fewer than two texts to compare."""
    first = {
        part.start + at: float(value)
        for part in parts
        for at, value in enumerate(part.log_likelihoods)
        if np.isfinite(value)
    }
    again = {int(at): value for part in parts for at, value in part.notes["rescored"].items()}
    common = sorted(first.keys() & again.keys())
    if len(common) < 2:
        return None
    return kl_nats(np.array([first[at] for at in common]) - np.array([again[at] for at in common])).value


def _provenance(job: JobInfo, parts: Sequence[Slice]) -> dict[str, Any]:
    """Everything about the run that is not a column; a resumed job lists each environment it ran in."""
    environments: list[dict[str, Any]] = []
    for part in parts:
        if part.notes["run"] not in environments:
            environments.append(part.notes["run"])
    reasons: dict[str, str] = {}
    for part in parts:
        reasons.update(part.notes["reasons"])
    return {
        "job_id": job.id,
        "attempts": job.attempts,
        "shard_texts": job.arguments["shard_texts"],
        # A shard is scored under all its transforms at once: its seconds are shared among them.
        "seconds": sum(part.notes["seconds"] for part in parts) / len(job.arguments["transform_ids"]),
        "peak_memory_bytes": max(part.notes["peak_memory_bytes"] for part in parts),
        "runs": environments,
        "rescored_texts": sum(len(part.notes["rescored"]) for part in parts),
        "reasons": dict(list(reasons.items())[:50]),
    }


def _agreed(values: Sequence[str]) -> str:
    """One value where all shards agree, else all of them."""
    return " | ".join(dict.fromkeys(values))
