"""Which models behave most like this one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import matrix
from registry.errors import Ambiguous, BadInput, Corrupt, NotFound, SpaceMismatch
from registry.evidence import Evidence
from registry.matrix import Matrix
from registry.matrix_search import search
from registry.methods import log_likelihood as method
from registry.queries import textsets, transforms, vectors
from registry.queries.divergence import Point, evidence_of
from registry.queries.model_names import unresolved_twins, written
from registry.queries.models import ModelInfo, model_ref
from registry.queries.vectors import Held
from registry.spaces import Space, log_likelihood_space
from registry.tables import Model

Array = np.ndarray[Any, np.dtype[Any]]

USUAL_PROFILE = "chat"


@dataclass(frozen=True)
class Mark:
    """Where a page ended.  By distance and id, so that a model added meanwhile makes no other appear twice or never."""

    rank: int
    """At the time; only says how far to look."""
    distance: float
    id: int

    @property
    def written(self) -> str:
        return f"{self.rank}_{self.distance.hex()}_{self.id}"

    @classmethod
    def read(cls, text: str) -> Mark:
        """Raises BadInput."""
        match = re.fullmatch(r"(\d{1,9})_(0x[01](?:\.[0-9a-f]{1,13})?p[+-]\d{1,4}|inf)_(\d{1,18})", text)
        if match is None:
            raise BadInput(f"{text!r} is not a page mark", hint="pass on the `next` of the page before")
        return cls(int(match[1]), float.fromhex(match[2]), int(match[3]))


@dataclass(frozen=True)
class Answer:
    items: list[Evidence]
    next: str | None
    """Pass it as `after` for the following page; None on the last."""
    text_set: str
    transform: str
    profile: str
    space: str
    candidates: int
    """Models in the space, the one asked about not counted."""


def nearest(
    session: Session,
    model: ModelInfo,
    *,
    text_set: str | None = None,
    transform: str = "base",
    profile: str | None = None,
    k: int = 10,
    after: str | None = None,
    among: Sequence[ModelInfo] | None = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> Answer:
    """The k models nearest to `model`, behind the mark `after`, as Evidence with an interval each.

    Without `text_set` or `profile` the only one the model has is meant (`chat` among several profiles).  Unclipped.

    Raises Ambiguous where the choice is not clear, NotFound where the model has no vector there, SpaceMismatch where it
    or one of `among` has vectors only in other spaces (naming both), BadInput for k < 1 or a mark
    that is none.
    """
    if k < 1:
        raise BadInput(f"k must be at least 1, not {k}")
    mark = Mark.read(after) if after is not None else None
    if bootstrap < 0:
        raise BadInput(f"a bootstrap needs a positive number of draws, not {bootstrap}")
    if seed < 0:
        raise BadInput(f"a seed is not negative, {seed} is")
    chosen, held = _choose(session, model, text_set, transform, profile)
    info = textsets.by_id(session, held.text_set_id)
    space = log_likelihood_space(info.content_hash, held.profile, held.unit)
    table = matrix.load(session, info, chosen, space)
    allowed = _allowed(session, table, model, info, among, chosen)
    try:
        found, following = _ranked(session, table, model, info, chosen, space, allowed, k, mark, bootstrap, seed)
    except Corrupt:
        # The cache is damaged, not the database: made anew it agrees, or the second attempt says what is wrong.
        matrix.discard(info, chosen, space)
        table = matrix.load(session, info, chosen, space)
        allowed = _allowed(session, table, model, info, among, chosen)
        found, following = _ranked(session, table, model, info, chosen, space, allowed, k, mark, bootstrap, seed)
    return Answer(
        items=found,
        next=following,
        text_set=info.name,
        transform=chosen.name,
        profile=held.profile,
        space=space.key,
        candidates=len(table.model_ids) - 1 if allowed is None else int(allowed.sum()),
    )


def _choose(
    session: Session, model: ModelInfo, text_set: str | None, transform: str, profile: str | None
) -> tuple[transforms.TransformInfo, Held]:
    """The one point of the model that the question means."""
    chosen = transforms.get(session, transform)
    points = vectors.held_by(session, model.id)
    if not points:
        raise _without_vectors(session, model, text_set)
    if text_set is not None:
        wanted = textsets.get(session, text_set)
        here = [point for point in points if point.text_set_id == wanted.id]
        if not here:
            asked = log_likelihood_space(wanted.content_hash, profile or USUAL_PROFILE, "nats")
            # An opaque set has no text to score.
            command = None if wanted.opaque else _scoring(model, text_set=text_set, profile=profile)
            raise _mismatch(session, model, asked, points, command)
        points = here
    sets = sorted({point.text_set_id for point in points})
    if len(sets) > 1:
        names = [textsets.by_id(session, one).name for one in sets]
        raise Ambiguous(
            f"{model.handle} has vectors on several text sets: {', '.join(names)}", hint="choose one with --text-set"
        )
    profiles = sorted({point.profile for point in points})
    if profile is None and len(profiles) > 1 and USUAL_PROFILE not in profiles:
        raise Ambiguous(
            f"{model.handle} has vectors under several profiles: {', '.join(profiles)}",
            hint="choose one with --profile",
        )
    profile = profile or (profiles[0] if len(profiles) == 1 else USUAL_PROFILE)
    if profile not in profiles:
        info = textsets.by_id(session, sets[0])
        asked = log_likelihood_space(info.content_hash, profile, points[0].unit)
        command = None if info.opaque else _scoring(model, text_set=info.name, profile=profile)
        raise _mismatch(session, model, asked, points, command)
    fitting = [one for one in points if one.profile == profile and one.transform_id == chosen.id]
    if not fitting:
        names = [one.name for one in transforms.get_many(session, sorted({p.transform_id for p in points}))]
        info = textsets.by_id(session, sets[0])
        command = None if info.opaque else _scoring(model, text_set=info.name, profile=profile, transform=transform)
        raise NotFound(
            f"{model.handle} was not scored under the transform {transform!r}, only under {', '.join(names)}",
            hint=(f"{command}, or " if command else "") + "choose one with --transform",
        )
    # Vectors of both units on one set are two spaces; nats are the ones that carry a KL.
    return chosen, next((one for one in fitting if one.unit == "nats"), fitting[0])


def _mismatch(
    session: Session, model: ModelInfo, asked: Space, points: Sequence[Held], command: str | None
) -> SpaceMismatch:
    """Names the space that was asked for and the spaces in which the model is."""
    spaces = []
    for point in points:
        info = textsets.by_id(session, point.text_set_id)
        key = log_likelihood_space(info.content_hash, point.profile, point.unit).key
        spaces.append(f"{key} (text set {info.name}, profile {point.profile})")
    have = "; ".join(dict.fromkeys(spaces))
    return SpaceMismatch(
        f"{model.handle} is not in the space {asked.key}; it has vectors in {have}",
        hint=(f"{command}, or " if command else "") + "ask within a space that it is in",
    )


def _without_vectors(session: Session, model: ModelInfo, text_set: str | None, profile: str | None = None) -> NotFound:
    command = _scoring(model, text_set=text_set, profile=profile)
    twins = [f"modelkin model resolve {written(one)} {model.name}" for one in unresolved_twins(session, model)]
    if twins:
        command = f"if that import is of this model: {' or '.join(twins)}" + (f"; else {command}" if command else "")
    return NotFound(f"{model.handle} has no vectors yet", hint=command or f"see modelkin model show {model.handle}")


def _scoring(
    model: ModelInfo, *, text_set: str | None = None, profile: str | None = None, transform: str = "base"
) -> str | None:
    """The command that gives the model a vector there, or says what it is where it is only a name.

    None where no scoring leads there: an import's profile, or chat for a model without a template.
    """
    if model.kind == "named":
        return f"modelkin model resolve {written(model)} org/repo@commit"
    if profile is None:
        profile = USUAL_PROFILE if model.template_hash else "plain"
    if profile not in ("chat", "plain") or (profile == "chat" and not model.template_hash):
        return None
    command = f"modelkin score {model.handle + (f':{model.file}' if model.file else '')}"
    command += f" --text-set {text_set}" if text_set is not None else ""
    command += f" --transforms {transform}" if transform != "base" else ""
    return command + (f" --profile {profile}" if profile != USUAL_PROFILE else "")


def _allowed(
    session: Session,
    table: Matrix,
    model: ModelInfo,
    info: textsets.TextSetInfo,
    among: Sequence[ModelInfo] | None,
    transform: transforms.TransformInfo,
) -> Array | None:
    """bool [K] of the rows that `among` admits; None for all."""
    if among is None:
        return None
    wanted = [one for one in among if one.id != model.id]
    for one in wanted:
        if table.row_of(one.id) is None:
            points = vectors.held_by(session, one.id)
            if not points:
                raise _without_vectors(session, one, info.name, table.space.profile)
            command = None
            if not info.opaque:
                command = _scoring(one, text_set=info.name, profile=table.space.profile, transform=transform.name)
            raise _mismatch(session, one, table.space, points, command)
    return np.isin(table.model_ids, [one.id for one in wanted])


def _ranked(
    session: Session,
    table: Matrix,
    model: ModelInfo,
    info: textsets.TextSetInfo,
    transform: transforms.TransformInfo,
    space: Space,
    allowed: Array | None,
    k: int,
    mark: Mark | None,
    bootstrap: int,
    seed: int,
) -> tuple[list[Evidence], str | None]:
    """Evidence for the k models behind `mark`, and the mark of the last if there are more."""
    row = table.row_of(model.id)
    if row is None:
        raise NotFound(f"{model.handle} has no vector here", hint=_scoring(model, text_set=info.name))
    nats_per_text = space.unit == "nats" and not info.opaque
    # One more than asked for: the last shown neighbour too is tested against the next.
    rows, distances, skipped = _behind(table, row, mark, k + 1, allowed, relative=not nats_per_text)
    models = _models(session, [int(table.model_ids[one]) for one in rows])
    query = _point(table, row, model_ref(model), transform.name)
    shown = [_point(table, at, models[int(table.model_ids[at])], transform.name) for at in rows]
    items = []
    for index, point in enumerate(shown[:k]):
        following = shown[index + 1] if index + 1 < len(shown) else None
        evidence = evidence_of(
            space,
            query,
            point,
            response_bytes=table.response_bytes,
            nats_per_text=nats_per_text,
            bootstrap=bootstrap,
            seed=seed,
            details={
                "rank": skipped + index + 1,
                "resolved_from_next": _resolved(query, point, following) if nats_per_text else None,
            },
        )
        items.append(evidence)
    if len(rows) <= k:
        return items, None
    return items, Mark(skipped + k, float(distances[k - 1]), int(table.model_ids[rows[k - 1]])).written


def _behind(
    table: Matrix, row: int, mark: Mark | None, count: int, allowed: Array | None, *, relative: bool
) -> tuple[Array, Array, int]:
    """The `count` rows behind the mark, their distances, and how many rows are before them."""
    wanted = count + (mark.rank if mark is not None else 0)
    while True:
        rows, distances = search(table, row, wanted, allowed, relative=relative)
        if mark is None:
            return rows, distances, 0
        ids = table.model_ids[rows]
        skipped = int(np.count_nonzero((distances < mark.distance) | ((distances == mark.distance) & (ids <= mark.id))))
        if len(rows) < wanted or len(rows) - skipped >= count:
            return rows[skipped : skipped + count], distances[skipped : skipped + count], skipped
        # Models were added before the mark since it was made.
        wanted = skipped + count


def _resolved(query: Point, near: Point, far: Point | None) -> bool | None:
    if far is None:
        return None
    common = query.valid & near.valid & far.valid
    return method.order_is_resolved(
        method.differences(query.values, near.values, common), method.differences(query.values, far.values, common)
    )


def _models(session: Session, ids: list[int]) -> dict[int, Any]:
    return {row.id: model_ref(row) for row in session.scalars(select(Model).where(Model.id.in_(ids)))}


def _point(table: Matrix, row: int, ref: Any, transform: str) -> Point:
    """Checked against the vector's checksum: the cache lies on a disk like any other."""
    member = table.members[int(table.model_ids[row])]
    values, statuses = np.asarray(table.raw[row]), np.asarray(table.statuses[row])
    if vectors.checksum(values.tobytes(), statuses.tobytes()) != member.checksum:
        raise Corrupt(f"the cached row of vector {member.vector_id} is damaged")
    return Point(ref, transform, member, values, vectors.is_valid(statuses))
