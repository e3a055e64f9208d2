from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from registry.errors import BadInput
from registry.shuffles import shuffle_prompts


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=20, unique=True), st.integers(0, 9)
)
def test_every_response_gets_another_prompt_and_no_pair_twice(pairs, draw):
    prompts = [prompt for prompt, _ in pairs]
    responses = [response for _, response in pairs]
    try:
        order = shuffle_prompts(prompts, responses, seed=0, draw=draw)
    except BadInput:
        # Only crowded sets may fail: with all pairs of a small grid taken, or one prompt in half of the rows.
        assume(False)
        return
    assert sorted(order) == list(range(len(pairs)))
    made = [(prompts[order[s]], responses[s]) for s in range(len(pairs))]
    assert len(set(made)) == len(made)
    assert all(given_prompt != prompts[s] for s, (given_prompt, _) in enumerate(made))


@given(st.integers(2, 60), st.integers(0, 99))
def test_distinct_prompts_can_always_be_shuffled(n, draw):
    order = shuffle_prompts(range(n), ["same"] * n, seed=1, draw=draw)
    assert sorted(order) == list(range(n))
    assert all(order[s] != s for s in range(n))


def test_the_order_is_pinned_and_differs_by_draw_and_seed():
    order = shuffle_prompts(range(8), range(8), seed=0, draw=0)
    assert order == PINNED_ORDER
    assert order != shuffle_prompts(range(8), range(8), seed=0, draw=1)
    assert order != shuffle_prompts(range(8), range(8), seed=1, draw=0)


PINNED_ORDER = [4, 2, 6, 0, 7, 1, 5, 3]


def test_a_set_with_one_prompt_cannot_be_shuffled():
    with pytest.raises(BadInput, match="cannot be shuffled"):
        shuffle_prompts([0, 0, 0], [1, 2, 3], seed=0, draw=0)
    with pytest.raises(BadInput, match="cannot be shuffled"):
        shuffle_prompts([0], [1], seed=0, draw=0)
