"""Each rule of freezing has a test that fails without it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import BadInput
from registry.textsets import MAX_TEXT_BYTES, Pair, Unusable, check_name, freeze, freeze_ids, text_hash

usable = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20).filter(
    lambda text: text.strip()
)
pairs = st.lists(st.builds(Pair, prompt=usable, response=usable), min_size=1, max_size=8)


def test_the_hash_is_the_documented_one():
    frozen = freeze([Pair("x", "y"), Pair("ü", "日本")])
    first = hashlib.sha256(b"x\0y").digest()
    second = hashlib.sha256("ü".encode() + b"\0" + "日本".encode()).digest()
    assert frozen.text_hashes == (first, second)
    assert frozen.content_hash == hashlib.sha256(first + second).hexdigest()


@given(pairs, st.data())
def test_one_other_byte_makes_another_set(rows, data):
    place = data.draw(st.integers(0, len(rows) - 1))
    changed = list(rows)
    changed[place] = Pair(rows[place].prompt + "x", rows[place].response)
    before, after = freeze(rows), freeze(changed)
    assert (before.content_hash == after.content_hash) == (before.text_hashes == after.text_hashes)
    if freeze(rows).report.kept == len(rows):
        assert before.content_hash != after.content_hash


@given(pairs)
def test_order_matters(rows):
    forward, backward = freeze(rows), freeze(rows[::-1])
    assert (forward.content_hash == backward.content_hash) == (forward.text_hashes == backward.text_hashes)


@given(pairs)
def test_freezing_twice_changes_nothing(rows):
    once = freeze(rows)
    again = freeze(once.pairs)
    assert again.content_hash == once.content_hash
    assert again.report.refused == {}


@given(pairs)
def test_prompt_and_response_cannot_be_confused(rows):
    moved = [Pair(row.prompt + row.response[:1], row.response[1:] + "z") for row in rows]
    assert all(
        text_hash(a.prompt, a.response) != text_hash(b.prompt, b.response) for a, b in zip(rows, moved, strict=1)
    )


def test_no_normalisation():
    composed, decomposed = "é", "e\u0301"
    frozen = freeze([Pair(composed, "y"), Pair(decomposed, "y"), Pair("x", "a\r\nb"), Pair("x", "a\nb")])
    assert frozen.report.kept == 4


def test_columns_and_tags_are_outside_the_hash():
    bare = freeze([Pair("x", "y")])
    tagged = freeze([Pair("x", "y", "id", {"a": 1}, {"language": "de"})])
    assert bare.content_hash == tagged.content_hash


def test_outer_whitespace_of_responses_goes_and_is_reported():
    frozen = freeze([Pair(" x ", "\n y \u3000")])
    assert (frozen.pairs[0].prompt, frozen.pairs[0].response) == (" x ", "y")
    assert frozen.report.altered == {"stripped": [1]}


def test_keep_whitespace():
    frozen = freeze([Pair("x", " y\n")], keep_whitespace=True)
    assert frozen.pairs[0].response == " y\n"
    assert frozen.report.altered == {}


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (Pair("", "y"), "empty_prompt"),
        (Pair(" \n", "y"), "empty_prompt"),
        (Pair("x", ""), "empty_response"),
        (Pair("x", " \t"), "empty_response"),
        (Pair("x\0", "y"), "nul"),
        (Pair("x", "y\0y"), "nul"),
        (Pair("\ud800", "y"), "invalid_utf8"),
        (Pair("x", "\udfff"), "invalid_utf8"),
        (Pair("x" * (MAX_TEXT_BYTES + 1), "y"), "too_long"),
        (Pair("x", "é" * (MAX_TEXT_BYTES // 2 + 1)), "too_long"),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_refused_rows_are_reported_by_number(pair, reason, keep):
    frozen = freeze([Pair("a", "b"), pair], keep_whitespace=keep)
    assert frozen.report.refused == {reason: [2]}
    assert [kept.prompt for kept in frozen.pairs] == ["a"]
    assert "row 2" in frozen.report.sentences()[1]


def test_a_text_of_exactly_the_limit_stays():
    assert freeze([Pair("x" * MAX_TEXT_BYTES, "y")]).report.kept == 1


def test_duplicates_are_kept_once_the_first_and_after_stripping():
    frozen = freeze([Pair("x", "y", "first"), Pair("x", "z"), Pair("x", " y ", "second")])
    assert [pair.source_id for pair in frozen.pairs] == ["first", None]
    assert frozen.report.refused == {"duplicate": [3]}


def test_rows_keep_the_numbers_of_their_source():
    frozen = freeze([Pair("", "y", row=17), Unusable(40, "missing"), Pair("x", " y", row=41)])
    assert frozen.report.refused == {"empty_prompt": [17], "missing": [40]}
    assert frozen.report.altered == {"stripped": [41]}
    assert frozen.report.rows == 3


def test_nothing_usable_says_why():
    with pytest.raises(BadInput, match="row 1: the prompt is empty"):
        freeze([Pair("", "y")])
    with pytest.raises(BadInput, match="none of the 0 rows"):
        freeze([])


def test_prompts_are_numbered_densely_by_first_appearance():
    frozen = freeze([Pair("b", "1"), Pair("", "0"), Pair("a", "1"), Pair("b", "2"), Pair("c", "1")])
    assert frozen.prompt_ids == (0, 1, 0, 2)


def test_a_draw_is_deterministic_without_replacement_and_in_source_order():
    rows = [Pair(f"p{i}", "y") for i in range(50)]
    drawn = freeze(rows, n=10, seed=3)
    assert drawn.content_hash == freeze(rows, n=10, seed=3).content_hash
    assert drawn.content_hash != freeze(rows, n=10, seed=4).content_hash
    assert len({pair.prompt for pair in drawn.pairs}) == 10
    assert [pair.row for pair in drawn.pairs] == sorted(pair.row or 0 for pair in drawn.pairs)
    # Pinned: the draw must not change with Python or a library.
    assert [pair.row for pair in drawn.pairs] == PINNED_DRAW


PINNED_DRAW = [9, 11, 15, 16, 18, 24, 28, 32, 47, 50]


def test_a_draw_depends_on_the_texts_and_a_smaller_one_is_part_of_it():
    rows = [Pair(f"p{i}", "y") for i in range(50)]
    large = {pair.prompt for pair in freeze(rows, n=20).pairs}
    assert {pair.prompt for pair in freeze(rows[::-1], n=20).pairs} == large
    assert {pair.prompt for pair in freeze(rows, n=5).pairs} < large


def test_the_draw_comes_after_refusals_and_duplicates():
    rows = [Pair("x", "y")] * 30 + [Pair("", "y")] * 30 + [Pair("x", "z")]
    frozen = freeze(rows, n=2)
    assert (frozen.report.kept, frozen.report.sampled_from) == (2, 2)
    with pytest.raises(BadInput, match="only 2 of 61 rows are usable and distinct"):
        freeze(rows, n=3)


def test_a_draw_of_nothing_is_refused():
    with pytest.raises(BadInput):
        freeze([Pair("x", "y")], n=0)


def test_a_stored_report_is_bounded_but_counts_all():
    report = freeze([Pair("x", "y")] * 5000).report.to_dict()
    assert report["refused"]["duplicate"]["count"] == 4999
    assert len(report["refused"]["duplicate"]["rows"]) == 1000


@pytest.mark.parametrize("name", ["a", "tulu3-10k", "org/set", "x/shuffle-0", "A.b_c+d"])
def test_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", " a", "a b", "/a", "a/", "-a", "a\n", "ä", "x" * 201, "deadbeef", "0" * 64])
def test_names_that_are_none(name):
    with pytest.raises(BadInput):
        check_name(name)


def test_opaque_ids():
    hashes, content = freeze_ids(["a", "b"])
    assert hashes[0] == hashlib.sha256(b"a").digest()
    assert content == hashlib.sha256(b"".join(hashes)).hexdigest()
    for bad in ([], ["a", "a"], [""], ["a\0b"], ["\ud800"]):
        with pytest.raises(BadInput):
            freeze_ids(bad)
