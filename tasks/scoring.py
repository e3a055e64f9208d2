"""Log-likelihoods of responses: sums over the response's own tokens, in nats.

Four paths to the same numbers, from the fastest to the plainest; `tasks.canary` chooses one for a model.

token-tree          what sequences share goes through the model once (`tasks.token_tree`)
right-padded        rows sorted by length and padded on the right, without a mask and without a cache.  Nothing that
                    stands to the right of a token reaches it, be it through attention or through a recurrent state,
                    so the padding needs no hiding: exact on every causal architecture
right-padded-whole  the same for a model whose body and head cannot be told apart (`tasks.split_model`)
one-at-a-time       the reference

Log-softmax in float32 whatever the model's dtype, sums in float64.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from registry.errors import BadInput, Unavailable
from registry.statuses import HAS_VALUE, Status
from tasks import token_tree
from tasks.quiet import quiet
from tasks.rendering import Span
from tasks.split_model import CHUNK_FLOATS, SplitModel
from tasks.tokenization import require_ids

ENGINE_VERSION = 2
"""Raised whenever the same model, text and settings could give another number beyond the tolerance.

2: the head runs in float32 for models in half precision."""

TREE, PADDED, PADDED_WHOLE, ONE_AT_A_TIME = "token-tree", "right-padded", "right-padded-whole", "one-at-a-time"
TREES = {TREE: "runs", "token-tree-flex": "flex", "token-tree-dense": "dense"}
"""The same tree, by the ways of `token_tree.attention`."""
PATHS = (*TREES, PADDED, PADDED_WHOLE, ONE_AT_A_TIME)

Progress = Callable[[int, int], None]
"""(texts done, tokens through the model), both since the call began."""

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
    tokens: int = 0
    """That went through the model, padding not counted; on the tree fewer than the texts have."""


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
    def fed(self) -> list[int]:
        """The last token is predicted, never fed."""
        return self.ids[:-1]

    @property
    def length(self) -> int:
        return len(self.ids) - 1

    @property
    def start(self) -> int:
        """The position whose logits predict the first scored token."""
        return self.length - self.scored

    @property
    def targets(self) -> list[int]:
        return self.ids[-self.scored :]


def score_spans(
    loaded: Any,
    spans: Sequence[Span],
    *,
    path: str = PADDED,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Scores spans with a `tasks.loading.LoadedModel` on one of `PATHS`.

    `batch_tokens` bounds the tokens of a batch, padding included (default by device and size of the model); a longer
    text is a batch of its own.  When memory runs out the bound is halved and the work goes on; the result stays within
    rounding.  The same spans, path and bound give the same bytes on the same machine.

    Raises BadInput for a span with a value but nothing to condition on or to score, Refused("bad_tokenizer") for ids
    beyond the embedding, Unavailable when memory does not suffice for a single text; ValueError where the model cannot
    take this path.
    """
    scores, rows = _prepared(loaded, spans)
    scores.path = path
    if batch_tokens is not None and batch_tokens < 1:
        raise BadInput(f"batch_tokens must be positive, not {batch_tokens}")
    budget = Budget(batch_tokens, batch_tokens) if batch_tokens else default_budget(loaded)
    with ExitStack() as open_until_done:
        import torch

        open_until_done.enter_context(quiet())  # transformers would warn of padding without a mask, which is the point
        open_until_done.enter_context(torch.inference_mode())
        forward: _Forward
        if path in TREES:
            split = split_of(loaded)
            attention = open_until_done.enter_context(token_tree.attention(split.whole, TREES[path]))
            forward = _Tree(loaded, split, attention)
        elif path == PADDED:
            forward = _Padded(loaded, split_of(loaded))
        elif path == PADDED_WHOLE:
            forward = _PaddedWhole(loaded)
        elif path == ONE_AT_A_TIME:
            forward = _OneAtATime(loaded)
        else:
            raise BadInput(f"there is no path {path!r}", hint="use one of: " + ", ".join(PATHS))
        per_token, scores.tokens = _through(forward, rows, budget, progress)
    _sum_up(scores, per_token)
    return scores


def score_one_at_a_time(loaded: Any, spans: Sequence[Span]) -> Scores:
    """The reference: one sequence a pass, all logits, nothing padded, chunked or kept back."""
    return score_spans(loaded, spans, path=ONE_AT_A_TIME)


def split_of(loaded: Any) -> SplitModel:
    """The model's halves, made once.  Raises ValueError where it has none."""
    if getattr(loaded, "split", None) is None:
        loaded.split = SplitModel(loaded.model)
    split: SplitModel = loaded.split
    return split


@dataclass(frozen=True)
class Budget:
    """Tokens a batch, padding included.  From what does not change between runs, so that a resumed run makes the same
    batches."""

    comfort: int
    """Where a batch is cheapest a token; padded batches stop here, trees go on where that lets them share more."""
    limit: int
    """What memory allows."""


def default_budget(loaded: Any) -> Budget:
    """On the CPU 512 tokens were cheapest for a model of 135 M parameters (activations stay in the caches), and smaller
    models need wider batches to outweigh the cost of a call.  On a card: a quarter of what the weights leave, in
    activations and logits."""
    parameters = sum(one.numel() for one in loaded.model.parameters())
    if loaded.device.type != "cuda":
        return Budget(int(min(max(7e10 / max(parameters, 1), 512), 4096)), 4096)
    import torch

    weights = sum(one.numel() * one.element_size() for one in loaded.model.parameters())
    total = torch.cuda.get_device_properties(loaded.device).total_memory
    hidden = getattr(loaded.model.config.get_text_config(), "hidden_size", 4096)
    bytes_per_token = 4 * loaded.vocabulary + 64 * hidden
    fitting = int(min(max((total - weights) / 4 / bytes_per_token, 2048), 32768))
    return Budget(fitting, fitting)


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


def _through(
    forward: _Forward, rows: Sequence[_Row], budget: Budget, progress: Progress | None
) -> tuple[dict[int, np.ndarray], int]:
    """Log-probabilities per response token, by span position, and the tokens that went through the model."""
    per_token = {row.at: np.full(row.scored, np.nan) for row in rows}
    left = {row.at: row.scored for row in rows}
    waiting = deque(forward.batches(rows, budget))
    tokens = 0
    while waiting:
        batch = waiting.popleft()
        try:
            values = forward(batch)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not _out_of_memory(error):
                raise
            failed = str(error).splitlines()[0]
        else:
            for row, part in zip(batch, np.split(values, np.cumsum([one.scored for one in batch])[:-1]), strict=True):
                per_token[row.at][row.first : row.first + row.scored] = part
                left[row.at] -= row.scored
            tokens += forward.tokens(batch)
            if progress is not None:
                progress(sum(not one for one in left.values()), tokens)
            continue
        # Outside the except clause, where the traceback would still hold the tensors that filled the memory.
        forward.free_cached()
        if len(batch) > 1:
            half = max(1, forward.tokens(batch) // 2)
            budget = Budget(min(budget.comfort, half), half)
        parts = batch if len(batch) > 1 else list(_halves(batch[0], failed))
        waiting = deque(forward.batches([*parts, *(row for one in waiting for row in one)], budget))
    return per_token, tokens


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


class _Forward:
    """One pass over a batch: log-probabilities of the scored tokens of its rows, one after the other, float64."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._device = loaded.device

    def batches(self, rows: Sequence[_Row], budget: Budget) -> list[list[_Row]]:
        """Longest first: memory that runs out does so at the beginning.  Ties in the order given."""
        waiting = sorted(rows, key=lambda row: -row.length)
        batches = []
        while waiting:
            # The first is the longest, so rows × its length is the padded size.
            count = max(1, budget.comfort // waiting[0].length)
            batches.append(waiting[:count])
            waiting = waiting[count:]
        return batches

    def tokens(self, batch: Sequence[_Row]) -> int:
        return sum(row.length for row in batch)

    def __call__(self, batch: Sequence[_Row]) -> np.ndarray:
        raise NotImplementedError

    def free_cached(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _tensor(self, values: Any) -> Any:
        import torch

        return torch.as_tensor(values, dtype=torch.long, device=self._device)


class _Tree(_Forward):
    def __init__(self, loaded: Any, split: SplitModel, attention: Any) -> None:
        super().__init__(loaded)
        self._split, self._attention = split, attention

    def batches(self, rows: Sequence[_Row], budget: Budget) -> list[list[_Row]]:
        batches = token_tree.plan([row.fed for row in rows], budget.comfort, budget.limit)
        return [[rows[at] for at in batch] for batch in batches]

    def tokens(self, batch: Sequence[_Row]) -> int:
        return len(token_tree.Batch.of([row.fed for row in batch]))

    def __call__(self, batch: Sequence[_Row]) -> np.ndarray:
        tree = token_tree.Batch.of([row.fed for row in batch])
        self._attention.set(tree, self._device)
        ids = self._tensor([tree.ids])
        hidden = self._split.hidden(
            ids,
            position_ids=self._tensor([tree.depths]),
            # All ones: without it transformers takes positions that begin anew for packed sequences.
            attention_mask=ids.new_ones(ids.shape),
        )
        rows = np.concatenate([path[row.start :] for row, path in zip(batch, tree.paths, strict=True)])
        targets = [one for row in batch for one in row.targets]
        return self._split.log_probabilities(hidden[0], self._tensor(rows), self._tensor(targets))


class _Padded(_Forward):
    def __init__(self, loaded: Any, split: SplitModel) -> None:
        super().__init__(loaded)
        self._split = split

    def __call__(self, batch: Sequence[_Row]) -> np.ndarray:
        ids = _right_padded(batch)
        hidden = self._split.hidden(self._tensor(ids))
        width = ids.shape[1]
        rows = [line * width + at for line, row in enumerate(batch) for at in range(row.start, row.length)]
        targets = [one for row in batch for one in row.targets]
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self._split.log_probabilities(flat, self._tensor(rows), self._tensor(targets))


class _PaddedWhole(_Forward):
    def __call__(self, batch: Sequence[_Row]) -> np.ndarray:
        ids = _right_padded(batch)
        keep = ids.shape[1] - min(row.start for row in batch)
        options = {"logits_to_keep": keep} if _keeps_logits(self._loaded.model) else {}
        logits = _logits_of(self._loaded.model(input_ids=self._tensor(ids), use_cache=False, **options))
        # A model that takes the argument and ignores it returns all positions.
        logits = logits[:, -keep:]
        offset = ids.shape[1] - keep
        lines = [line for line, row in enumerate(batch) for _ in range(row.scored)]
        places = [at - offset for row in batch for at in range(row.start, row.length)]
        return _gathered(logits, lines, places, [one for row in batch for one in row.targets])


class _OneAtATime(_Forward):
    def batches(self, rows: Sequence[_Row], budget: Budget) -> list[list[_Row]]:
        return [[row] for row in sorted(rows, key=lambda row: -row.length)]

    def __call__(self, batch: Sequence[_Row]) -> np.ndarray:
        import torch

        (row,) = batch
        logits = _logits_of(self._loaded.model(input_ids=self._tensor([row.fed]), use_cache=False))[0, row.start :]
        table = torch.log_softmax(logits.float(), dim=-1)
        targets = torch.tensor(row.targets, device=table.device)
        return np.asarray(table.gather(1, targets[:, None])[:, 0].double().cpu().numpy())


def _right_padded(batch: Sequence[_Row]) -> np.ndarray:
    ids = np.full((len(batch), max(row.length for row in batch)), _PAD_ID, dtype=np.int64)
    for line, row in enumerate(batch):
        ids[line, : row.length] = row.fed
    return ids


def _gathered(logits: Any, lines: list[int], places: list[int], targets: list[int]) -> np.ndarray:
    """float64 log-probabilities of `targets` [n] at `logits[lines, places]`, in chunks of float32."""
    import torch

    step = max(1, CHUNK_FLOATS // logits.shape[-1])
    line, place, target = (torch.tensor(one, device=logits.device) for one in (lines, places, targets))
    values = torch.empty(len(targets), dtype=torch.float64, device=logits.device)
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        table = torch.log_softmax(logits[line[part], place[part]].float(), dim=-1)
        values[part] = table.gather(1, target[part, None])[:, 0].double()
    return np.asarray(values.cpu().numpy())


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
