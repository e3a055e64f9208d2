"""The bundled texts: enough of them, mixed, clean, and spread from the first line on."""

import json
from collections import Counter
from importlib import resources

import pytest

TOPICS = {
    "instruction", "reasoning", "maths", "code", "multilingual",
    "dialogue", "safety", "knowledge", "writing", "summarisation",
}  # fmt: skip
FIELDS = {"id", "prompt", "response", "language", "topic", "source", "licence"}
DEMO = 32  # pairs that the demo takes


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    text = resources.files("registry.data").joinpath("starter.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_row_has_every_field_filled(rows):
    assert len(rows) >= 320
    for row in rows:
        assert set(row) == FIELDS
        assert all(isinstance(value, str) and value for value in row.values()), row["id"]
        assert row["licence"] == "Apache-2.0"


def test_ids_and_pairs_are_unique_and_few_prompts_have_two_responses(rows):
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({(row["prompt"], row["response"]) for row in rows}) == len(rows)
    repeated = {prompt: n for prompt, n in Counter(row["prompt"] for row in rows).items() if n > 1}
    assert 1 <= len(repeated) <= 8
    assert set(repeated.values()) == {2}


def test_no_text_begins_or_ends_with_whitespace(rows):
    for row in rows:
        assert row["prompt"] == row["prompt"].strip(), row["id"]
        assert row["response"] == row["response"].strip(), row["id"]


def test_topics_and_languages_are_covered(rows):
    topics = Counter(row["topic"] for row in rows)
    assert set(topics) == TOPICS
    assert min(topics.values()) >= 20
    languages = Counter(row["language"] for row in rows)
    assert sum(n >= 4 for n in languages.values()) >= 12
    assert all(row["language"] != "en" for row in rows if row["topic"] == "multilingual")


def test_the_first_pairs_are_short_and_of_every_topic(rows):
    first = rows[:DEMO]
    assert {row["topic"] for row in first} == TOPICS
    assert len({row["prompt"] for row in first}) == DEMO
    assert max(len(row["prompt"].split()) for row in first) <= 60
    assert max(len(row["response"].split()) for row in first) <= 80


@pytest.mark.parametrize("n", [64, 128, 256])
def test_any_longer_prefix_is_a_fair_mixture(rows, n):
    """Of each topic, the prefix holds its share of the whole file within eight points."""
    part, whole = Counter(row["topic"] for row in rows[:n]), Counter(row["topic"] for row in rows)
    for topic in TOPICS:
        assert abs(part[topic] / n - whole[topic] / len(rows)) <= 0.08, topic
