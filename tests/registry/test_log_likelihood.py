"""The formulas against numbers computed by hand, and their uncertainty against the bootstrap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from registry.methods import log_likelihood as method

L = np.array([[-10, -12, -14, -16], [-11, -12, -15, -18], [-9, -13, -13, -17]], dtype=np.float32)
ALL = np.ones(4, dtype=bool)


def kl(i, j, valid=ALL):
    return method.kl_nats(method.differences(L[i], L[j], valid)).value


def test_centring():
    assert method.center(L).tolist() == [[3, 1, -1, -3], [3, 2, -1, -4], [4, 0, 0, -4]]


@pytest.mark.parametrize(("i", "j", "expected"), [(0, 1, 0.25), (0, 2, 0.5), (1, 2, 0.75)])
def test_kl_by_hand(i, j, expected):
    assert kl(i, j) == pytest.approx(expected, abs=1e-12)
    assert kl(j, i) == pytest.approx(expected, abs=1e-12)


def test_a_masked_text_is_left_out_and_the_rest_centred_anew():
    valid = np.array([True, True, True, False])
    assert kl(0, 1, valid) == pytest.approx(1 / 9, abs=1e-12)


def test_exact_kl_of_two_categoricals():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), texts from p0 = (3/8, 3/8, 1/4): the estimate is 1.0397 × the exact KL.
    r = np.repeat(np.log([2.0, 0.5, 1.0]), [3, 3, 2])
    estimate = method.kl_nats(r).value
    assert estimate == pytest.approx(0.18016988, abs=1e-8)
    assert estimate / (math.log(2) / 4) == pytest.approx(1.0397, abs=1e-4)


def test_bits_per_byte():
    assert method.bits_per_byte(134.79200697 / 2, 972.3188) == pytest.approx(0.1, abs=1e-9)
    assert method.bits_per_byte(590.1384971457811, 972.3188) == pytest.approx(0.87562833, abs=1e-8)


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_texts_give_null_and_a_reason(n):
    estimate = method.kl_nats(np.zeros(n))
    assert estimate.value is None
    assert f"only {n}" in estimate.reason
    assert method.relative_squared_distance(L[0], L[1], np.arange(4) < n).value is None


@pytest.mark.parametrize("tail", ["normal", "laplace"])
def test_the_interval_agrees_with_the_bootstrap(tail):
    r = getattr(np.random.default_rng(3), tail)(2, 7, size=4000)
    estimate = method.kl_nats(r)
    low, high = method.bootstrap_interval(r, 2000, seed=1)
    assert (high - low) == pytest.approx(estimate.high - estimate.low, rel=0.06)
    assert low == pytest.approx(estimate.low, rel=0.02)
    assert high == pytest.approx(estimate.high, rel=0.02)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        estimate = method.kl_nats(generator.normal(0, 2, size=500))
        covered += estimate.low <= 2.0 <= estimate.high
    # 95 % of 400, give or take three standard deviations.
    assert 367 <= covered <= 393


def test_the_bootstrap_is_repeatable():
    r = np.random.default_rng(0).normal(size=50)
    assert method.bootstrap_interval(r, 300, seed=4) == method.bootstrap_interval(r, 300, seed=4)
    assert method.bootstrap_interval(r, 300, seed=4) != method.bootstrap_interval(r, 300, seed=5)
    with pytest.raises(ValueError, match="two texts"):
        method.bootstrap_interval(r[:1], 300)


def test_order_is_resolved_only_where_the_texts_say_so():
    generator = np.random.default_rng(0)
    near, far = generator.normal(0, 1, 2000), generator.normal(0, 2, 2000)
    assert method.order_is_resolved(near, far) is True
    assert method.order_is_resolved(near[:8], near[:8] + generator.normal(0, 0.3, 8)) is False
    assert method.order_is_resolved(near, near) is False
    assert method.order_is_resolved(near[:1], far[:1]) is None


def test_the_error_of_the_paired_test_is_five_percent():
    generator = np.random.default_rng(9)
    found = [method.order_is_resolved(generator.normal(size=400), generator.normal(size=400)) for _ in range(600)]
    assert 12 <= sum(found) <= 50


def test_relative_squared_distance():
    same = method.relative_squared_distance(L[0], L[0] + 5, ALL)
    opposite = method.relative_squared_distance(L[0], -L[0], ALL)
    assert (same.value, opposite.value) == (pytest.approx(0, abs=1e-12), pytest.approx(4, abs=1e-12))
    constant = method.relative_squared_distance(np.full(4, 3.0), np.full(4, 1.0), ALL)
    assert constant.value is None
    assert "constant" in constant.reason


reals = st.floats(-2000, 0, width=32)


@given(arrays.arrays(np.float32, (3, 20), elements=reals), arrays.arrays(np.bool_, (3, 20)))
def test_the_masked_batch_agrees_with_one_pair_at_a_time(values, valid):
    squared, counts = method.masked_squared_distances(values[0], valid[0], values[1:], valid[1:])
    for row in (0, 1):
        common = valid[0] & valid[row + 1]
        assert counts[row] == common.sum()
        estimate = method.kl_nats(method.differences(values[row + 1], values[0], common))
        if estimate.value is not None:
            assert squared[row] / (2 * counts[row]) == pytest.approx(estimate.value, rel=1e-9, abs=1e-9)


@given(arrays.arrays(np.float32, (2, 12), elements=reals), st.floats(-100, 100))
def test_a_constant_offset_changes_nothing(values, offset):
    r = values[0].astype(float) - values[1]
    assert method.kl_nats(r + offset).value == pytest.approx(method.kl_nats(r).value, rel=1e-9, abs=1e-6)
