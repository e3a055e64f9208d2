"""Jobs that run models.  Thin: claim the row, call the engine, record the outcome.

`score` runs in the calling process; a Celery task will be another caller of the same functions.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from registry import database
from registry.errors import BadInput, ModelkinError
from registry.queries import jobs, models, textsets, transforms, vectors
from registry.queries.jobs import JobInfo, ScoreRequest, Slice
from registry.statuses import FIRST_WITHOUT_VALUE, Status
from tasks import leases

SHARD_TEXTS = 32
"""Texts a shard, each under all transforms of the job: what a kill can lose."""

MAX_NON_FINITE = 0.05
"""Above this share of non-finite texts a model is marked `unstable`."""

PROFILES = ("chat", "plain")

Progress = Callable[[int, int, int], None]
"""(texts done, texts in all, response tokens scored by this process)"""


@dataclass(frozen=True)
class Outcome:
    """What a score command did for one model."""

    job_id: int | None
    """None when everything had been scored before."""
    scored: tuple[str, ...]
    already: tuple[str, ...]
    n_texts: int
    statuses: dict[str, int]
    seconds: float
    tokens: int


def open_score(
    model: models.ModelInfo,
    text_set: str,
    transform_names: Sequence[str],
    profile: str,
    dtype: str,
) -> tuple[JobInfo | None, list[str]]:
    """Opens (or reopens) the job for what is not scored yet; returns it and the transforms already scored.

    Raises BadInput for an unknown profile, NotFound for an unknown text set or transform, Unsupported for a set
    without texts or a model that is only a name.
    """
    from tasks.scoring import ENGINE_VERSION

    if profile not in PROFILES:
        raise BadInput(f"there is no profile {profile!r}", hint="use one of: " + ", ".join(PROFILES))
    models.require_scorable(model)
    with database.session() as session:
        chosen = textsets.get(session, text_set)
        textsets.require_text(chosen)
        wanted = [transforms.get(session, name) for name in dict.fromkeys(transform_names)]
        have = vectors.scored_transforms(session, model.id, chosen.id, profile, dtype, ENGINE_VERSION)
        missing = [transform for transform in wanted if transform.id not in have]
        already = [transform.name for transform in wanted if transform.id in have]
        if not missing:
            return None, already
        request = ScoreRequest(model.id, chosen.id, profile, dtype, ENGINE_VERSION)
        return jobs.open_score_job(session, request, [one.id for one in missing], SHARD_TEXTS), already


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
        return Outcome(job.id, (), (), 0, {}, 0.0, 0)
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
    from registry.errors import Busy

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
    from tasks import loading, rendering, scoring

    arguments = job.arguments
    with database.session() as session:
        model = models.get(session, job.model_id)
        pipelines = {one.id: one for one in transforms.get_many(session, arguments["transform_ids"])}
        texts = textsets.texts(session, arguments["text_set_id"])
        finished = jobs.finished_slices(session, job.id)

    started = time.monotonic()
    step = arguments["shard_texts"]
    starts = range(0, len(texts), step)
    todo = {start: [one for one in arguments["transform_ids"] if (one, start) not in finished] for start in starts}
    described: dict[str, Any] = {}
    done = sum(min(step, len(texts) - start) for start in starts if not todo[start])
    tokens = 0
    if any(todo.values()):
        loaded = loading.load(model, device=device, dtype=arguments["dtype"], trust_remote_code=model.trust_remote_code)
        renderer = rendering.Renderer(loaded.tokenizer, arguments["profile"], loaded.context_length, loaded.vocabulary)
        described = _describe(loaded, renderer)
        if progress is not None:
            progress(done, len(texts), 0)
        for start, missing in todo.items():
            if not missing:
                continue
            part = texts[start : start + step]
            shard_started = time.monotonic()
            spans = [
                renderer.span(edited.system, edited.user, text.response)
                for one in missing
                for text in part
                for edited in [pipelines[one].pipeline.apply(text.prompt)]
            ]
            scores = scoring.score_spans(loaded, spans, batch_tokens=batch_tokens)
            notes = {
                "seconds": time.monotonic() - shard_started,
                "peak_memory_bytes": _peak_memory(loaded.device_class),
                "path": scores.path,
                "run": described,
            }
            slices = []
            for row, one in enumerate(missing):
                window = slice(row * len(part), (row + 1) * len(part))
                reasons = {
                    start + index: scores.reasons[row * len(part) + index]
                    for index in range(len(part))
                    if row * len(part) + index in scores.reasons
                }
                slices.append(
                    Slice(
                        one,
                        start,
                        start + len(part),
                        scores.log_likelihoods[window].astype("<f4"),
                        scores.statuses[window],
                        scores.token_counts[window],
                        {**notes, "reasons": {str(at): why for at, why in list(reasons.items())[:20]}},
                    )
                )
                tokens += int(scores.token_counts[window].sum())
            # A short transaction of its own: none stays open while the model computes.
            with database.session() as session:
                jobs.put_slices(session, job.id, holder, slices)
            done += len(part)
            if progress is not None:
                progress(done, len(texts), tokens)

    statuses = _write_vectors(job, holder, texts, pipelines)
    return Outcome(
        job.id,
        tuple(pipelines[one].name for one in arguments["transform_ids"]),
        (),
        len(texts),
        statuses,
        time.monotonic() - started,
        tokens,
    )


def _write_vectors(
    job: JobInfo, holder: str, texts: Sequence[textsets.StoredText], pipelines: dict[int, Any]
) -> dict[str, int]:
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
        "reasons": dict(list(reasons.items())[:50]),
    }


def _agreed(values: Sequence[str]) -> str:
    """One value where all shards agree, else all of them."""
    return " | ".join(dict.fromkeys(values))


def _describe(loaded: Any, renderer: Any) -> dict[str, Any]:
    import platform

    import tokenizers
    import torch
    import transformers

    return {
        "device_class": loaded.device_class,
        "attention": loaded.attention,
        "template_hash": renderer.template_hash,
        "tokenizer_hash": renderer.tokenizer_hash,
        "rendering": renderer.describe(),
        "loading": loaded.load_report,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def _peak_memory(device_class: str) -> int:
    """Bytes: the card's peak on CUDA, else this process's peak resident size."""
    if device_class.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
