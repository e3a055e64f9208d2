"""The token tree: what sequences have in common goes through the model once.

The five conditions of a pair begin alike, and so do all texts under one chat template.  Sorted by their ids, neighbours
share the longest prefixes; so a batch is a run of that order, and its *tree* is what is left when each sequence adds
only what its predecessor does not have:

    <user> What is 2+2? <assistant> 4            7 tokens
    <user> What is 2+2? Think. <assistant> 4     3 more, after the first five of the line above

All of it lies flat in one row without padding.  A token attends to the tokens on its own path alone, and its position
is its depth, so every number is the one it would be in a row of its own; a response is never shared, since what stands
before it differs.  `plan` chooses the batches, `Batch` lays one out, `attention` makes a transformers model honour it.

Not every architecture can (a recurrent state runs through the row as it stands), and those that cannot mostly do not
say so: `tasks.canary` finds out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAME = "modelkin_tree"
"""Under which the attention is known to transformers."""

BATCH_COST = 24
"""Tokens that a further batch has to save: what a call costs beside its arithmetic."""

SLOWDOWN = 0.035
"""What a token costs more for each further `comfort` of its batch, once activations no longer fit the caches."""


def plan(sequences: Sequence[list[int]], comfort: int, limit: int) -> list[list[int]]:
    """Indices of `sequences`, in batches whose trees hold at most `limit` tokens (or a single sequence).

    The cheapest way of cutting the sorted order, exactly, by dynamic programming: cuts fall where neighbours have
    little in common, and a batch grows beyond `comfort` only where sharing pays for it.  Batches come largest first,
    so that memory that runs out does so at once.
    """

    def cost(tokens: int) -> float:
        return tokens * (1 + SLOWDOWN * max(0, tokens - comfort) / comfort) + BATCH_COST

    order = sorted(range(len(sequences)), key=lambda at: sequences[at])
    lengths = [len(sequences[at]) for at in order]
    shared = [0] + [_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]
    added = np.cumsum([length - common for length, common in zip(lengths, shared, strict=True)]).tolist()
    best, begin = [0.0] * (len(order) + 1), [0] * (len(order) + 1)
    for stop in range(1, len(order) + 1):
        best[stop] = float("inf")
        for start in range(stop - 1, -1, -1):
            tokens = lengths[start] + added[stop - 1] - added[start]
            if tokens > limit and start < stop - 1:
                break
            if best[start] + cost(tokens) < best[stop]:
                best[stop], begin[stop] = best[start] + cost(tokens), start
    batches: list[tuple[int, int]] = []
    stop = len(order)
    while stop:
        batches.append((begin[stop], stop))
        stop = begin[stop]
    batches.sort(key=lambda one: (-(lengths[one[0]] + added[one[1] - 1] - added[one[0]]), one))
    return [order[start:stop] for start, stop in batches]


@dataclass(frozen=True)
class Run:
    """The tokens that one sequence adds: flat positions `start` to `stop`, at the end of `path`."""

    start: int
    stop: int
    path: np.ndarray
    """int64: flat positions of the whole sequence, the run's own last."""

    @property
    def before(self) -> int:
        """Tokens of the path that were there already."""
        return len(self.path) - (self.stop - self.start)


@dataclass
class Batch:
    """Sequences laid out flat, depth first.  Give them in an order of `plan`'s, or next to nothing is shared."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Of each flat token in its own sequence, from 0: its position id."""
    runs: list[Run] = field(default_factory=list)
    paths: list[np.ndarray] = field(default_factory=list)
    """For each sequence, in the order given, the flat positions of its tokens."""

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Batch:
        batch = cls()
        previous: Sequence[int] = ()
        path = np.empty(0, dtype=np.int64)
        for ids in sequences:
            common, start = _common(previous, ids), len(batch.ids)
            batch.ids.extend(ids[common:])
            batch.depths.extend(range(common, len(ids)))
            path = np.concatenate([path[:common], np.arange(start, len(batch.ids), dtype=np.int64)])
            if len(batch.ids) > start:
                batch.runs.append(Run(start, len(batch.ids), path))
            batch.paths.append(path)
            previous = ids
        return batch

    def __len__(self) -> int:
        return len(self.ids)

    def ends(self) -> np.ndarray:
        """int64 per flat token: where its subtree ends.  k is on the path of q exactly if k ≤ q < ends[k]."""
        ends = np.full(len(self.ids), len(self.ids), dtype=np.int64)
        path = np.empty(0, dtype=np.int64)
        for run in self.runs:
            ends[path[run.before :]] = run.start
            path = run.path
        return ends


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    limit = min(len(left), len(right))
    return next((at for at in range(limit) if left[at] != right[at]), limit)


@contextmanager
def attention(model: Any, way: str) -> Iterator[_Attention]:
    """`model` (transformers) with attention along the tree; `set` a batch before each forward pass.

    One of three ways to the same numbers: `runs` calls the kernel once a run and skips what is not on its path: best
    on a CPU.  `flex` compiles torch's FlexAttention with a block mask, `dense` masks a whole square: on cards, where a
    call a run would cost more than it saves.  One model at a time in a process: transformers knows it by its name.

    Raises ValueError where the model does not let its attention be replaced.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    one = _Attention(way)
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, one.attend)
    AttentionMaskInterface.register(NAME, one.mask)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:  # it only warns
            raise ValueError(f"{type(model).__name__} does not let its attention be replaced")
        yield one
    finally:
        model.set_attn_implementation(before)


class _Attention:
    """The mask and the attention of the batch that is set; both in the forms that transformers calls."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._masks: dict[Any, Any] = {}

    def set(self, batch: Batch, device: Any) -> None:
        import torch

        self._batch = batch
        self._depths = torch.tensor(batch.depths, device=device)
        self._ends = torch.from_numpy(batch.ends()).to(device)
        self._paths = [torch.from_numpy(run.path).to(device) for run in batch.runs]
        self._masks.clear()

    def mask(self, *, mask_function: Any, device: Any, **_: Any) -> Any:
        """The rule of one kind of layer (causal, a sliding window, a chunk), asked at depths and not at flat positions,
        where the two tokens are on one path: a bool [1, 1, T, T], or the same as a block mask."""
        import torch

        zero = torch.zeros((), dtype=torch.long, device=device)

        def allowed(_b: Any, _h: Any, query: Any, key: Any) -> Any:
            on_path = (key <= query) & (query < self._ends[key])
            return on_path & mask_function(zero, zero, self._depths[query], self._depths[key])

        if self._way == "flex":
            from torch.nn.attention.flex_attention import create_block_mask

            return create_block_mask(allowed, None, None, len(self._batch), len(self._batch), device=device)
        flat = torch.arange(len(self._batch), device=device)
        return allowed(None, None, flat[:, None], flat[None, :])[None, None]

    def attend(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        **rest: Any,
    ) -> tuple[Any, None]:
        """query [1, H, T, d], key and value [1, H', T, d]; returns [1, T, H, d] as transformers wants it.

        `softcap` (Gemma 2) and `s_aux` (GPT-OSS's sinks) are the two additions to attention that a model may ask for.
        """
        if self._way == "flex":
            from transformers.integrations.flex_attention import flex_attention_forward

            if softcap is not None:
                rest["softcap"] = softcap
            if s_aux is not None:
                rest["s_aux"] = s_aux
            output, _ = flex_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
            return output, None
        if self._way == "dense":
            bias = _as_bias(attention_mask, query.dtype)
            return _one(query, key, value, bias, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        for run, path, bias in zip(self._batch.runs, self._paths, self._biases(attention_mask, query), strict=True):
            own = slice(run.start, run.stop)
            keys, values = key.index_select(2, path), value.index_select(2, path)
            output[:, :, own] = _one(query[:, :, own], keys, values, bias, scaling, softcap, s_aux)
        return output.transpose(1, 2).contiguous(), None

    def _biases(self, attention_mask: Any, query: Any) -> list[Any]:
        """What is added to the scores of each run, [run, path]; once a mask, not once a layer."""
        if attention_mask is None:  # the model makes no masks: plain causal is all that can be meant
            attention_mask = self._masks.get(None)
            if attention_mask is None:
                attention_mask = self.mask(mask_function=lambda b, h, q, k: k <= q, device=query.device)
                self._masks[None] = attention_mask
        key = (attention_mask.data_ptr(), tuple(attention_mask.shape), query.dtype)
        if key not in self._masks:
            cut = [
                _as_bias(attention_mask[..., run.start : run.stop, :].index_select(-1, path), query.dtype)
                for run, path in zip(self._batch.runs, self._paths, strict=True)
            ]
            # The mask is kept too, or its address could be given to the next one.
            self._masks[key] = (attention_mask, cut)
        biases: list[Any] = self._masks[key][1]
        return biases


def _as_bias(mask: Any, dtype: Any) -> Any:
    """0 where a bool mask allows, −∞ where not; what is a bias already stays."""
    import torch

    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _one(query: Any, key: Any, value: Any, bias: Any, scaling: float | None, softcap: Any, sinks: Any) -> Any:
    """Attention of q queries to k keys under a bias [.., q, k]."""
    import torch

    groups = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=scaling, enable_gqa=groups > 1
        )
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:  # a column that takes weight and gives nothing
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return weights.to(value.dtype) @ value
