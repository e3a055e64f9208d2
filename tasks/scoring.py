"""Log-likelihoods of responses: sums over the response's own tokens, in nats.

One path so far, and it is exact on every causal architecture: rows sorted by length and padded on the right, without a
mask and without a cache.  Nothing that stands to the right of a token reaches it, be it through attention or through a
recurrent state, so the padding needs no hiding.  Log-softmax in float32 whatever the model's dtype, sums in float64.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from registry.errors import BadInput, Unavailable
from registry.statuses import HAS_VALUE, Status
from tasks.quiet import quiet
from tasks.rendering import Span
from tasks.tokenization import require_ids

ENGINE_VERSION = 1
"""Raised whenever the same model, text and settings could give another number beyond the tolerance."""

PADDED = "right-padded"

Progress = Callable[[int, int], None]
"""(texts done, tokens through the model), both since the call began."""

_CHUNK_FLOATS = 1 << 24
"""float32 numbers of log-softmax held at once: 64 MB, whatever the vocabulary and the batch."""

_PAD_ID = 0
"""Any valid id will do: nothing reads what stands there."""


@dataclass
class Scores:
    """One entry a span, in the spans' order."""

    log_likelihoods: np.ndarray
    """float64 nats; NaN where there is no value."""
    statuses: np.ndarray
    """uint8, `registry.statuses.Status`."""
    token_counts: np.ndarray
    """int32, response tokens; 0 where nothing could be rendered."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why, by position, for every status but OK."""
    path: str = PADDED


@dataclass(frozen=True)
class _Row:
    """A sequence for one forward pass: the tail of `ids`, `scored` long, is what is scored."""

    at: int
    """Position of the span."""
    first: int
    """Which of the span's response tokens the tail begins with."""
    ids: list[int]
    scored: int

    @property
    def length(self) -> int:
        """The last token is predicted, never fed."""
        return len(self.ids) - 1

    @property
    def start(self) -> int:
        """The position whose logits predict the first scored token."""
        return self.length - self.scored


def score_spans(
    loaded: Any, spans: Sequence[Span], *, batch_tokens: int | None = None, progress: Progress | None = None
) -> Scores:
    """Scores spans with a `tasks.loading.LoadedModel`.

    `batch_tokens` bounds rows × length of a batch (default by device and size of the model); a longer text is a batch
    of its own.  When memory runs out the bound is halved and the work goes on; the result stays within rounding.  The
    same spans and bound give the same bytes on the same machine.

    Raises BadInput for a span with a value but nothing to condition on or to score, Refused("bad_tokenizer") for ids
    beyond the embedding, Unavailable when memory does not suffice for a single text.
    """
    scores, rows = _prepared(loaded, spans)
    budget = batch_tokens or default_batch_tokens(loaded)
    if budget < 1:
        raise BadInput(f"batch_tokens must be positive, not {budget}")
    # Where a faster path will stand, once a canary has shown that it agrees: it returns the same per-token arrays.
    with quiet():  # transformers would warn of padding without a mask, which is the point here
        per_token = _padded(loaded, rows, budget, progress)
    _sum_up(scores, per_token)
    return scores


def score_one_at_a_time(loaded: Any, spans: Sequence[Span]) -> Scores:
    """The reference: one sequence a pass, all logits, nothing padded, chunked or kept back."""
    import torch

    scores, rows = _prepared(loaded, spans)
    scores.path = "one-at-a-time"
    per_token: dict[int, np.ndarray] = {}
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor([row.ids], device=loaded.device)
            logits = _logits_of(loaded.model(input_ids=ids[:, :-1], use_cache=False))[0]
            table = torch.log_softmax(logits[row.start :].float(), dim=-1)
            targets = ids[0, -row.scored :].to(table.device)
            per_token[row.at] = table.gather(1, targets[:, None])[:, 0].double().cpu().numpy()
    _sum_up(scores, per_token)
    return scores


def default_batch_tokens(loaded: Any) -> int:
    """Tokens a batch, from what does not change between runs, so that a resumed run makes the same batches.

    On the CPU 512 tokens were best for a model of 135 M parameters (logits and activations stay in the caches); smaller
    models need wider batches to outweigh the cost of a call.  On a card: a quarter of what the weights leave, in logits
    (the model's dtype) and activations.
    """
    parameters = sum(one.numel() for one in loaded.model.parameters())
    if loaded.device.type != "cuda":
        return int(min(max(7e10 / max(parameters, 1), 512), 4096))
    import torch

    weights = sum(one.numel() * one.element_size() for one in loaded.model.parameters())
    total = torch.cuda.get_device_properties(loaded.device).total_memory
    hidden = getattr(loaded.model.config.get_text_config(), "hidden_size", 4096)
    bytes_per_token = 4 * loaded.vocabulary + 64 * hidden
    return int(min(max((total - weights) / 4 / bytes_per_token, 2048), 32768))


def _prepared(loaded: Any, spans: Sequence[Span]) -> tuple[Scores, list[_Row]]:
    """The answer with everything but the values, and the rows to run."""
    scores = Scores(
        np.full(len(spans), np.nan),
        np.array([span.status for span in spans], dtype=np.uint8),
        np.array([len(span.response_ids) for span in spans], dtype=np.int32),
        {at: span.reason for at, span in enumerate(spans) if span.status != Status.OK},
    )
    rows = []
    for at, span in enumerate(spans):
        if span.status not in HAS_VALUE:
            continue
        if not span.context_ids or not span.response_ids:
            raise BadInput(f"span {at} has no {'context' if not span.context_ids else 'response'} tokens")
        ids = span.context_ids + span.response_ids
        require_ids(ids, loaded.vocabulary)
        rows.append(_Row(at, 0, ids, len(span.response_ids)))
    return scores, rows


def _sum_up(scores: Scores, per_token: dict[int, np.ndarray]) -> None:
    """Fills the values in.  A token without a finite log-probability makes the whole text invalid: a sum that left it
    out would look better than every honest one."""
    for at, values in per_token.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            scores.statuses[at] = Status.NON_FINITE
            scores.reasons[at] = (
                f"{bad.size} of {values.size} tokens without a finite log-probability, the first at {bad[0]}"
            )
        else:
            scores.log_likelihoods[at] = math.fsum(values.tolist())


def _padded(loaded: Any, rows: Sequence[_Row], budget: int, progress: Progress | None) -> dict[int, np.ndarray]:
    """Log-probabilities per response token, by span position: right-padded batches under a token budget."""
    per_token = {row.at: np.full(row.scored, np.nan) for row in rows}
    # Longest first: memory that runs out does so at the beginning.  Ties in the order given.
    waiting = sorted(rows, key=lambda row: -row.length)
    tokens = 0
    left = {row.at: row.scored for row in rows}
    while waiting:
        batch = waiting[: _batch_rows(waiting, budget)]
        try:
            values = _forward(loaded, batch)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not _out_of_memory(error):
                raise
            failed = str(error).splitlines()[0]
        else:
            waiting = waiting[len(batch) :]
            for row, part in zip(batch, values, strict=True):
                per_token[row.at][row.first : row.first + row.scored] = part
                left[row.at] -= row.scored
                tokens += row.length
            if progress is not None:
                progress(sum(not one for one in left.values()), tokens)
            continue
        # Outside the except clause, where the traceback would still hold the tensors that filled the memory.
        _free_cached(loaded)
        if len(batch) > 1:
            budget = max(1, len(batch) * batch[0].length // 2)
        else:
            waiting = [*_halves(batch[0], failed), *waiting[1:]]
    return per_token


def _batch_rows(waiting: Sequence[_Row], budget: int) -> int:
    """How many rows from the front fit: the first is the longest, so rows × its length is the padded size."""
    return max(1, min(len(waiting), budget // waiting[0].length))


def _halves(row: _Row, failed: str) -> Iterator[_Row]:
    """One response in two passes, so that only half of its logits exist at a time."""
    if row.scored < 2:
        raise Unavailable(
            f"memory does not suffice for one text of {row.length} tokens ({failed})",
            hint="use --dtype bfloat16, a larger device, or fewer programs beside it",
        )
    half = row.scored // 2
    yield _Row(row.at, row.first + half, row.ids, row.scored - half)
    yield _Row(row.at, row.first, row.ids[: len(row.ids) - (row.scored - half)], half)


def _forward(loaded: Any, batch: Sequence[_Row]) -> list[np.ndarray]:
    """Log-probabilities of each row's scored tokens, from one pass."""
    import torch

    length = max(row.length for row in batch)
    ids = torch.full((len(batch), length), _PAD_ID, dtype=torch.long)
    for line, row in enumerate(batch):
        ids[line, : row.length] = torch.tensor(row.ids[:-1])
    keep = length - min(row.start for row in batch)
    options = {"logits_to_keep": keep} if _keeps_logits(loaded.model) else {}
    with torch.inference_mode():
        logits = _logits_of(loaded.model(input_ids=ids.to(loaded.device), use_cache=False, **options))
        # A model that takes the argument and ignores it returns all positions.
        logits = logits[:, -keep:]
        offset = length - keep
        lines = torch.tensor([line for line, row in enumerate(batch) for _ in range(row.scored)])
        places = torch.tensor([at - offset for row in batch for at in range(row.start, row.length)])
        targets = torch.tensor([one for row in batch for one in row.ids[-row.scored :]])
        values = _gathered(logits, lines, places, targets)
    return np.split(values, np.cumsum([row.scored for row in batch])[:-1])


def _gathered(logits: Any, lines: Any, places: Any, targets: Any) -> np.ndarray:
    """float64 log-probabilities of `targets` [n] at `logits[lines, places]`, in chunks of float32."""
    import torch

    step = max(1, _CHUNK_FLOATS // logits.shape[-1])
    lines, places, targets = (one.to(logits.device) for one in (lines, places, targets))
    values = torch.empty(len(targets), dtype=torch.float64, device=logits.device)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        table = torch.log_softmax(logits[lines[part], places[part]].float(), dim=-1)
        values[part] = table.gather(1, targets[part, None])[:, 0].double()
    return values.cpu().numpy()


def _logits_of(output: Any) -> Any:
    return output.logits if hasattr(output, "logits") else output[0]


def _keeps_logits(model: Any) -> bool:
    if hasattr(model, "get_base_model"):  # an adapter that was not merged passes it on, but does not name it
        model = model.get_base_model()
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _out_of_memory(error: RuntimeError) -> bool:
    import torch

    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def _free_cached(loaded: Any) -> None:
    if loaded.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
