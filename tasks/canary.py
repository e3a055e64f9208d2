"""May a model be scored on the fast path?  Tried before the first text, since most fast paths fail without a word.

A few texts as the engine meets them (pairs under five conditions, sharing what conditions share), and one pair longer
than any window of the model, go down each path in turn and are compared with one text at a time.  The first path that
agrees is the model's, until another version of transformers or torch, another dtype or another device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from registry import database
from registry.errors import Unavailable
from registry.queries import canaries
from registry.queries.canaries import Verdict
from registry.statuses import Status
from tasks import scoring
from tasks.rendering import Span

TOLERANCE_NATS, TOLERANCE_RELATIVE = 2e-3, 1e-5
"""In float32: rounding of other matrix shapes gives up to 1.3e-3 on sums of a few hundred nats."""

HALF_STEPS = 32
"""In half precision: this many unit roundings times the root of a text's tokens.  SmolLM2's log-probabilities in
bfloat16 are off by nine a token."""

LONGEST_WINDOW = 8192
"""Tokens.  A model with a longer window takes the padded path: a text that showed its edge would take all memory."""

STOCK = (
    "In the morning the harbour lies still, and the boats are tied where the tide has left them. Seven of them were "
    "built here in 1962; two came later, from Łódź and 東京. def area(r): return 3.14159 * r ** 2  # square units\n"
    "“Who keeps the keys?” she asked. Nobody knew, so they walked on to the next door and knocked again, twice."
)
"""Text, not random ids: among ids there are those that announce an image."""


def verdict(loaded: Any, model_id: int, dtype: str) -> Verdict:
    """The stored one for this model, these versions and this device; tried and stored where there is none.

    Raises what `choose` raises.
    """
    import torch
    import transformers

    case = canaries.Case(
        model_id, scoring.ENGINE_VERSION, transformers.__version__, torch.__version__, dtype, loaded.device_class
    )
    with database.session() as session:
        known = canaries.find(session, case)
    if known is not None:
        return known
    found = choose(loaded)
    with database.session() as session:
        return canaries.keep(session, case, found)


def choose(loaded: Any) -> Verdict:
    """The first path that agrees with one text at a time.

    Raises Unavailable where memory does not suffice for the texts.
    """
    spans = list(_spans(loaded))
    half = loaded.model.dtype.itemsize < 4
    if half:
        # With the float32 head, as all paths have it where the halves can be told apart.
        reference, noise = _half_reference(loaded, spans)
    else:
        reference, noise = scoring.score_one_at_a_time(loaded, spans), np.zeros(len(spans))
    limits = _limits(loaded, reference, noise, half)
    fastest = _uncovered(loaded)
    worst: float | None = None
    for path in _candidates(loaded):
        if fastest and path in scoring.TREES:
            continue
        try:
            found = scoring.score_spans(loaded, spans, path=path)
        except Unavailable:
            raise
        except Exception as error:  # a model's code, called as nobody else calls it, may raise anything
            fastest = fastest or f"{path}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        off = np.abs(found.log_likelihoods - reference.log_likelihoods)
        comparable = np.isfinite(off)
        largest = float(off[comparable].max()) if comparable.any() else None
        worst = largest if worst is None else worst
        if (found.statuses == reference.statuses).all() and (off[comparable] <= limits[comparable]).all():
            return Verdict(path, largest, fastest[:300])
        fastest = fastest or f"{path}: off by {largest:.2g} nats" if largest is not None else f"{path}: not finite"
    return Verdict(scoring.ONE_AT_A_TIME, worst, fastest[:300])


def _candidates(loaded: Any) -> Iterator[str]:
    if loaded.device.type == "cuda":
        yield "token-tree-flex"
        yield "token-tree-dense"
    else:
        yield scoring.TREE
    yield scoring.PADDED
    yield scoring.PADDED_WHOLE


def _half_reference(loaded: Any, spans: Sequence[Span]) -> tuple[scoring.Scores, np.ndarray]:
    """One row a batch, and how far other batches of the same path are from it: noise that no path can be blamed for."""
    try:
        alone = scoring.score_spans(loaded, spans, path=scoring.PADDED, batch_tokens=1)
        together = scoring.score_spans(loaded, spans, path=scoring.PADDED)
    except ValueError:  # no halves
        alone = scoring.score_one_at_a_time(loaded, spans)
        together = scoring.score_spans(loaded, spans, path=scoring.PADDED_WHOLE)
    return alone, np.nan_to_num(np.abs(alone.log_likelihoods - together.log_likelihoods))


def _limits(loaded: Any, reference: scoring.Scores, noise: np.ndarray, half: bool) -> np.ndarray:
    import torch

    if not half:
        expected = np.abs(np.nan_to_num(reference.log_likelihoods))
        return np.asarray(np.maximum(TOLERANCE_NATS, TOLERANCE_RELATIVE * expected))
    rounding = torch.finfo(loaded.model.dtype).eps / 2
    return np.asarray(np.maximum(HALF_STEPS * rounding * np.sqrt(reference.token_counts), 3 * noise.max()))


def _spans(loaded: Any) -> Iterator[Span]:
    """Two pairs under base, cot, repeat, repeat+cot and empty behind one template, and two texts that part late."""
    stock = _stock(loaded)
    length = loaded.context_length or LONGEST_WINDOW

    def take(count: int, first: int) -> list[int]:
        return [stock[at % len(stock)] for at in range(first, first + count)]

    head, joint = take(3, 0), take(1, 40)
    for prompt, response, suffix in (
        (take(17, 5), take(9, 30), take(4, 50)),
        (take(23, 11), take(14, 60), take(4, 50)),
    ):
        for user in ([], prompt, prompt + suffix, prompt + joint + prompt, prompt + joint + prompt + suffix):
            context = [*head, *user, *joint]
            if len(context) + len(response) <= length:
                yield Span(context, response, Status.OK, "")
    edge = max(_windows(loaded), default=0)
    if edge:
        response = take(12, 20)
        context = take(min(edge + 24, length - len(response) - 6), 1)
        yield Span(context, response, Status.OK, "")
        yield Span([*context, *take(5, 70)], response, Status.OK, "")


def _stock(loaded: Any) -> list[int]:
    ids = [one for one in loaded.tokenizer(STOCK, add_special_tokens=False)["input_ids"] if one < loaded.vocabulary]
    # A toy tokenizer may make next to nothing of it.
    return ids if len(ids) >= 40 else [*ids, *itertools.islice(itertools.cycle(range(loaded.vocabulary)), 80)]


def _windows(loaded: Any) -> list[int]:
    """Distances at which attention of some layers ends, in tokens, by whatever name the config gives them."""
    stated = loaded.model.config.get_text_config().to_dict()
    length = loaded.context_length or LONGEST_WINDOW + 1
    return [
        value
        for name, value in stated.items()
        if ("window" in name or "chunk" in name) and type(value) is int and 1 < value < min(length, LONGEST_WINDOW + 1)
    ]


def _uncovered(loaded: Any) -> str:
    """Why no text can show whether the tree is right: a window beyond what is tried."""
    stated = loaded.model.config.get_text_config().to_dict()
    for name in ("sliding_window", "attention_chunk_size"):
        value = stated.get(name)
        if type(value) is int and LONGEST_WINDOW < value < (loaded.context_length or value + 1):
            return f"{scoring.TREE}: not tried, its window of {value} tokens is longer than the canary's texts"
    return ""
