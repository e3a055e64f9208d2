"""Evidence about two points of one space, from their stored values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from registry.canonical import hash_json
from registry.errors import NotFound
from registry.evidence import Evidence, Interval, ModelRef
from registry.methods import log_likelihood as method
from registry.queries import textsets, transforms, vectors
from registry.queries.models import ModelInfo, model_ref
from registry.queries.vectors import Member
from registry.spaces import Space

Array = np.ndarray[Any, np.dtype[Any]]

NOT_SHOWN = (
    "Alike on these texts is not common ancestry, and does not mean the same errors on other tasks: "
    "the estimate is local to the text set."
)
SAME_MODEL_NOT_SHOWN = "A change of the model's distribution under another prompt says nothing about its quality."


@dataclass(frozen=True)
class Point:
    """A model's vector under one transform, with the values."""

    model: ModelRef
    transform: str
    member: Member
    values: Array
    """float32 [N]"""
    valid: Array
    """bool [N]"""


def evidence_of(
    space: Space,
    a: Point,
    b: Point,
    *,
    response_bytes: Array | None,
    nats_per_text: bool,
    bootstrap: int = 0,
    seed: int = 0,
    details: dict[str, Any] | None = None,
) -> Evidence:
    """The distance of two points with everything it rests on.

    `nats_per_text` is False where there is no KL (bits per byte, opaque texts); the statistic is then the relative
    squared distance.  Below the larger noise floor of the two vectors the value is null, `unresolved`.
    """
    common = a.valid & b.valid
    shown: dict[str, Any] = {
        "transform_a": a.transform,
        "transform_b": b.transform,
        "dtype_a": a.member.dtype,
        "dtype_b": b.member.dtype,
        "engine_a": a.member.engine_version,
        "engine_b": b.member.engine_version,
        "templates_differ": a.member.template_hash != b.member.template_hash,
        "clip": "none: no catalog",
        **(details or {}),
    }
    if nats_per_text:
        r = method.differences(a.values, b.values, common)
        estimate, statistic, unit = method.kl_nats(r), "kl_nats", "nats"
        interval = _interval(estimate, r, bootstrap, seed)
        if estimate.value is not None and response_bytes is not None:
            mean_bytes = float(response_bytes[common].mean())
            shown["kl_bits_per_byte"] = method.bits_per_byte(estimate.value, mean_bytes)
            shown["mean_response_bytes"] = mean_bytes
        estimate, interval = _above_noise(estimate, interval, a.member, b.member, shown)
    else:
        estimate = method.relative_squared_distance(a.values, b.values, common)
        statistic, unit, interval = "relative_squared_distance", "1", None
    return Evidence(
        method=method.METHOD,
        version=method.VERSION,
        a=a.model,
        b=b.model,
        statistic=statistic,
        value=estimate.value,
        reason=estimate.reason,
        unit=unit,
        closer="lower",
        symmetric=True,
        interval=interval,
        p_value=None,
        n=estimate.n,
        space=space.key,
        inputs_hash=_inputs_hash(a, b, bootstrap, seed),
        not_shown=SAME_MODEL_NOT_SHOWN if a.model.id == b.model.id else NOT_SHOWN,
        details=shown,
    )


def _interval(estimate: method.Estimate, r: Array, bootstrap: int, seed: int) -> Interval | None:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return None
    if bootstrap:
        low, high = method.bootstrap_interval(r, bootstrap, seed)
        return Interval(low, high, method.LEVEL, "bootstrap")
    return Interval(estimate.low, estimate.high, method.LEVEL, "fourth-moment")


def _above_noise(
    estimate: method.Estimate, interval: Interval | None, a: Member, b: Member, shown: dict[str, Any]
) -> tuple[method.Estimate, Interval | None]:
    """Null below the floor: what re-scoring the same model gives cannot tell two models apart."""
    floors = [one.noise_floor_nats for one in (a, b) if one.noise_floor_nats is not None]
    shown["noise_floor_nats"] = max(floors, default=None)
    shown["estimate"] = estimate.value
    if estimate.value is None or not floors or estimate.value >= max(floors):
        return estimate, interval
    reason = f"unresolved: the estimate of {estimate.value:.3g} nats lies below the noise floor of {max(floors):.3g}"
    return replace(estimate, value=None, reason=reason), None


def _inputs_hash(a: Point, b: Point, bootstrap: int, seed: int) -> str:
    """Of the values themselves: the same values give the same evidence, wherever they are stored."""
    pair = [[one.member.checksum.hex(), one.transform] for one in (a, b)]
    return hash_json([method.METHOD, method.VERSION, *pair, bootstrap, seed if bootstrap else 0])


def compare_points(
    session: Session,
    space: Space,
    text_set: textsets.TextSetInfo,
    a: tuple[ModelInfo, str],
    b: tuple[ModelInfo, str],
    *,
    bootstrap: int = 0,
    seed: int = 0,
) -> Evidence:
    """Evidence about (model, transform) against (model, transform), both in `space`.

    The two may be one model under two transforms: the size of a prompt shift.  Raises NotFound where one was not
    scored.
    """
    points = [_point(session, space, text_set, model, name) for model, name in (a, b)]
    counts = textsets.response_byte_counts(session, text_set.id)
    return evidence_of(
        space,
        *points,
        response_bytes=None if counts is None else np.array(counts, dtype=np.int64),
        nats_per_text=space.unit == "nats" and not text_set.opaque,
        bootstrap=bootstrap,
        seed=seed,
    )


def _point(
    session: Session, space: Space, text_set: textsets.TextSetInfo, model: ModelInfo, transform_name: str
) -> Point:
    transform = transforms.get(session, transform_name)
    chosen = [
        member
        for member in vectors.members(session, text_set.id, transform.id, space.profile, space.unit)
        if member.model_id == model.id
    ]
    if not chosen:
        raise NotFound(
            f"{model.handle} has no vector on {text_set.name!r} under {transform_name!r} in profile {space.profile!r}",
            hint=f"modelkin score {model.handle} --text-set {text_set.name} --transforms {transform_name}",
        )
    (values,) = vectors.read(session, [chosen[0].vector_id])
    return Point(model_ref(model), transform_name, chosen[0], values.log_likelihoods, values.valid)
