"""Distances between log-likelihood vectors.

ℓ_is = log p_i(y_s | x_s) in nats; ξ_i = ℓ_i − mean_s(ℓ_is).  With r = ℓ_i − ℓ_j over the N texts valid in both,

    KL(i, j) ≈ ‖ξ_i − ξ_j‖² / (2N) = Var_s(r_s) / 2          (arXiv 2603.18593, eq. 7; ddof = 0)

to second order: half the Jeffreys divergence, symmetric.  Beware the factor: some of the literature prints ‖·‖²/N.
Everything is float64: |ξ|² is of the order of 10⁸ and the distances that matter are of the order of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

METHOD = "log-likelihood"
VERSION = "1"

Z_95 = 1.959963984540054
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A distance with its uncertainty over texts.  `value` is None where it is undefined; `reason` then says why."""

    value: float | None
    n: int
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


def center(values: Array) -> Array:
    """ξ: each row of `values` [..., N] minus its own mean over texts, float64."""
    exact: Array = np.asarray(values, dtype=np.float64)
    centered: Array = exact - exact.mean(axis=-1, keepdims=True)
    return centered


def differences(a: Array, b: Array, valid: Array) -> Array:
    """r = ℓ_a − ℓ_b [n] in float64 over the texts where `valid` [N]."""
    return np.asarray(a, dtype=np.float64)[valid] - np.asarray(b, dtype=np.float64)[valid]


def kl_nats(r: Array) -> Estimate:
    """Half the variance of r [n], with the 95 % normal interval from the fourth moment.

    var(s²) ≈ (m₄ − m₂²)/n (Cramér, *Mathematical Methods of Statistics*, 27.4), hence the standard error of s²/2.  The
    interval is cut at 0.  Undefined for n < 2.
    """
    n = len(r)
    if n < 2:
        return Estimate(None, n, reason=f"only {n} texts carry a value in both vectors")
    squared = np.square(r - r.mean())
    second = float(squared.mean())
    fourth = float(np.square(squared).mean())
    error = math.sqrt(max(fourth - second * second, 0.0) / n) / 2
    value = second / 2
    return Estimate(value, n, error, max(value - Z_95 * error, 0.0), value + Z_95 * error)


def bootstrap_interval(r: Array, draws: int, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of `kl_nats` over `draws` resamples of the texts, in nats.

    Raises ValueError for fewer than 2 texts or 1 draw.
    """
    r = np.asarray(r, dtype=np.float64)
    if len(r) < 2 or draws < 1:
        raise ValueError("a bootstrap needs at least two texts and one draw")
    r = r - r.mean()
    # Multinomial counts instead of indices: one matrix product a block, whatever the draws.
    generator = np.random.default_rng(seed)
    powers = np.stack([r, r * r], axis=1)
    values = np.empty(draws)
    for start in range(0, draws, 256):
        stop = min(start + 256, draws)
        counts = generator.multinomial(len(r), np.full(len(r), 1 / len(r)), size=stop - start)
        first, second = (counts @ powers / len(r)).T
        values[start:stop] = (second - first * first) / 2
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return max(float(low), 0.0), float(high)


def bits_per_byte(nats: float, mean_response_bytes: float) -> float:
    """A KL in nats a text → bits a byte: nats / (bytes · ln 2), bytes of the responses only."""
    return nats / (mean_response_bytes * math.log(2))


def order_is_resolved(near: Array, far: Array) -> bool | None:
    """Whether two neighbours' distances to one model differ beyond chance, 5 % two-sided.

    `near`, `far`: r [n] against the two, over the same texts.  A paired test: the difference of the texts'
    contributions (r − r̄)²/2 against its standard error, for the two distances share the query and most of their noise.
    None for n < 2.
    """
    if len(near) < 2:
        return None
    gap = (np.square(far - far.mean()) - np.square(near - near.mean())) / 2
    spread = float(gap.std(ddof=1))
    if spread == 0.0:
        return bool(gap.mean() != 0.0)
    return bool(abs(float(gap.mean())) > Z_95 * spread / math.sqrt(len(gap)))


def relative_squared_distance(a: Array, b: Array, valid: Array) -> Estimate:
    """‖ξ_a − ξ_b‖² / ½(‖ξ_a‖² + ‖ξ_b‖²), centred over the valid texts: 0 for equal, 2 for unrelated, 4 for opposite.

    For vectors that are not nats a text (bits per byte), or whose texts nobody knows: there the squared distance has no
    KL meaning.  Undefined where both are constant, or for n < 2.
    """
    n = int(np.count_nonzero(valid))
    if n < 2:
        return Estimate(None, n, reason=f"only {n} texts carry a value in both vectors")
    left, right = center(np.asarray(a)[valid]), center(np.asarray(b)[valid])
    scale = (float(left @ left) + float(right @ right)) / 2
    if scale == 0.0:
        return Estimate(None, n, reason="both vectors are constant over the texts valid in both")
    gap = left - right
    return Estimate(float(gap @ gap) / scale, n)


def masked_squared_distances(query: Array, query_valid: Array, rows: Array, rows_valid: Array) -> tuple[Array, Array]:
    """Exact ‖ξ_q − ξ_i‖² (float64 [K]) and the common count (int [K]), each pair centred over its own common texts.

    `query` [N], `rows` [K, N]; invalid entries may hold anything.  Two passes, so that a constant offset between two
    vectors cancels before anything is squared.
    """
    common = rows_valid & query_valid
    r = np.where(common, np.asarray(rows, dtype=np.float64) - np.asarray(query, dtype=np.float64), 0.0)
    counts = np.count_nonzero(common, axis=1)
    r -= (r.sum(axis=1) / np.maximum(counts, 1))[:, None]
    r[~common] = 0.0
    return np.einsum("ij,ij->i", r, r), counts
