"""A distance exists only inside one space."""

import json

import pytest

from registry.canonical import canonical_json, hash_json
from registry.errors import SpaceMismatch
from registry.spaces import log_likelihood_space


def test_the_key_is_canonical_json():
    key = log_likelihood_space("ab" * 32, "chat", "nats").key
    assert json.loads(key)["inputs"] == "sha256:" + "ab" * 32
    assert key == canonical_json(json.loads(key))


@pytest.mark.parametrize("other", [("cd" * 32, "chat", "nats"), ("ab" * 32, "plain", "nats"), ("ab" * 32, "chat", "x")])
def test_two_spaces_are_refused_with_both_keys(other):
    left, right = log_likelihood_space("ab" * 32, "chat", "nats"), log_likelihood_space(*other)
    with pytest.raises(SpaceMismatch) as caught:
        left.require(right)
    assert left.key in caught.value.message
    assert right.key in caught.value.message


def test_equal_values_hash_equal_whatever_their_order():
    assert hash_json({"b": 1, "a": [1, "ü"]}) == hash_json({"a": [1, "ü"], "b": 1})


def test_nan_has_no_canonical_form():
    with pytest.raises(ValueError, match="not JSON compliant"):
        hash_json({"x": float("nan")})
