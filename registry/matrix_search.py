"""The rows of a cached matrix that are nearest to one of them.

A float32 pass over the whole matrix chooses candidates; their distances are then computed again in float64 from the
stored values, which is what the answer rests on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from registry.matrix import Matrix
from registry.methods import log_likelihood as method

Array = np.ndarray[Any, np.dtype[Any]]

RERANKED_COMPLETE = 64
RERANKED_MASKED = 200
"""Candidates of the float32 pass whose distances are computed again, exactly: at least this many, or 4 × the count."""

ROUNDING = 4e-6
"""Error of a float32 product, relative to the two norms: some ten times what was seen at 10,000 texts."""

GATHERED_ROWS = 256
"""Rows a block when single texts are picked out of the matrix: what one block holds stays in the processor's cache."""


def search(
    table: Matrix, row: int, count: int, allowed: Array | None = None, *, relative: bool = False
) -> tuple[Array, Array]:
    """Rows by ascending exact distance to `row` (ties by model id), at most `count`, and ‖ξ − ξ'‖²/n of each.

    Distances are over the texts valid in both.  `allowed`, bool [K], admits rows.  With `relative`, all are ranked by
    the relative squared distance.
    """
    admitted = np.ones(len(table.model_ids), dtype=bool) if allowed is None else allowed.copy()
    admitted[row] = False
    candidates = np.flatnonzero(admitted)
    margin = max(RERANKED_COMPLETE if table.complete else RERANKED_MASKED, 4 * count)
    # One that float32 cannot hold is compared with everything.
    if len(candidates) > margin and not relative and np.isfinite(table.norms[row]):
        candidates = _candidates(table, row, admitted, count, margin)
    distances = _exact(table, row, candidates, relative)
    order = np.lexsort((table.model_ids[candidates], distances))[:count]
    return candidates[order], distances[order]


def _candidates(table: Matrix, row: int, admitted: Array, count: int, margin: int) -> Array:
    """The `margin` best rows of the float32 pass, and every other that its rounding may have pushed behind them.

    Where one wild value swallows the digits of all others, that is every row: slow, but right.
    """
    n = table.centered.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        approximate = approximate_distances(table, row)
        slack = ROUNDING * np.sqrt(table.norms) * np.sqrt(table.norms[row]) / n
    wild = ~np.isfinite(approximate) & (table.gap_counts < n)
    # They may be anywhere: candidates all, but none that shows how near the nearest are.
    slack[~np.isfinite(slack)] = 0.0
    approximate[~admitted | wild] = np.inf
    reached = np.partition(approximate + slack, count - 1)[count - 1]
    approximate[admitted & wild] = -np.inf
    best = np.argpartition(approximate, margin)[:margin]
    chosen = np.union1d(best, np.flatnonzero(approximate - slack <= reached))
    return chosen[admitted[chosen]]


def approximate_distances(table: Matrix, row: int) -> Array:
    """‖ξ − ξ'‖²/n of every row to `row`, over the texts valid in both, to about float32 precision [K].

    With m the masks, c the stored rows (0 where there is no value) and S the sum of the differences,
    ‖ξ − ξ'‖² = Σ mm'(c − c')² − S²/n.  Filling the gaps and leaving it there would be wrong where they have a pattern:
    the texts that a short context leaves out are the long ones, which carry most of every distance.
    """
    query = np.asarray(table.centered[row])
    products = (table.centered @ query).astype(np.float64)
    n = table.centered.shape[1]
    if table.complete:
        return np.asarray((table.norms + table.norms[row] - 2 * products) / n)
    valid = table.valid(row)
    squares, sums = table.norms.copy(), table.sums.copy()
    for lost, total in zip(_at_texts(table, np.flatnonzero(~valid)), (squares, sums), strict=True):
        total -= lost
    own = np.stack([np.square(query, dtype=np.float64), query, valid])
    own_squares, own_sums, common = own.sum(axis=1)[:, None] - _at_gaps(table, own)
    with np.errstate(divide="ignore", invalid="ignore"):
        squared = squares + own_squares - 2 * products - np.square(sums - own_sums) / common
        return np.where(common > 1, squared / common, np.inf)


def _at_texts(table: Matrix, texts: Array) -> tuple[Array, Array]:
    """Σc² and Σc of every row over the given texts."""
    squares, sums = np.zeros(len(table.model_ids)), np.zeros(len(table.model_ids))
    if texts.size:
        for start in range(0, len(sums), GATHERED_ROWS):
            part = slice(start, start + GATHERED_ROWS)
            picked = np.asarray(table.centered[part])[:, texts]
            squares[part] = np.einsum("ij,ij->i", picked, picked)
            sums[part] = picked.sum(axis=1)
    return squares, sums


def _at_gaps(table: Matrix, own: Array) -> Array:
    """Σ of each `own` [3, N] over the texts that a row has no value for [3, K]."""
    totals = np.zeros((len(own), len(table.model_ids)))
    # Only rows that have gaps: reduceat would count a text for a row that has none.
    gappy = np.flatnonzero(table.gap_counts)
    ends = np.cumsum(table.gap_counts[gappy], dtype=np.int64)
    starts = ends - table.gap_counts[gappy]
    for begin in range(0, len(gappy), GATHERED_ROWS):
        part = slice(begin, begin + GATHERED_ROWS)
        texts = np.asarray(table.gaps[starts[begin] : ends[part][-1]])
        for total, values in zip(totals, own, strict=True):
            total[gappy[part]] = np.add.reduceat(values.take(texts, mode="clip"), starts[part] - starts[begin])
    return totals


def _exact(table: Matrix, row: int, candidates: Array, relative: bool) -> Array:
    """float64, by direct differences of the stored values; infinite where fewer than two texts are common."""
    values, valid = np.asarray(table.raw[row]), table.valid(row)
    distances = np.full(len(candidates), np.inf)
    for begin in range(0, len(candidates), 32):
        part = candidates[begin : begin + 32]
        raw, ok = table.raw[part], table.valid(part)
        if relative:
            distances[begin : begin + 32] = [
                _or_infinity(method.relative_squared_distance(values, other, valid & good).value)
                for other, good in zip(raw, ok, strict=True)
            ]
        else:
            squared, common = method.masked_squared_distances(values, valid, raw, ok)
            distances[begin : begin + 32] = np.where(common > 1, squared / np.maximum(common, 1), np.inf)
    return distances


def _or_infinity(value: float | None) -> float:
    return np.inf if value is None else value
