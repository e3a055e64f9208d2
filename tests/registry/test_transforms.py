from __future__ import annotations

import pytest

from registry.errors import BadInput, Conflict, NotFound
from registry.queries import transforms as queries
from registry.transforms import BUILT_IN, EditedPrompt, Pipeline, System, check_name, parse


@pytest.mark.parametrize(
    ("name", "user"),
    [
        ("base", "x"),
        ("cot", "x\nLet's think step by step."),
        ("repeat", "x\n\nx"),
        ("repeat+cot", "x\n\nx\nLet's think step by step."),
        ("empty", ""),
    ],
)
def test_the_papers_bytes(name, user):
    assert BUILT_IN[name].apply("x") == EditedPrompt(None, user)


def test_the_built_ins_are_pinned():
    """Their hashes are in people's databases: other bytes need another name."""
    assert {name: pipeline.spec_hash[:16] for name, pipeline in BUILT_IN.items()} == PINNED


PINNED = {
    "base": "4f53cda18c2baa0c",
    "cot": "a574c18f6c335b9c",
    "repeat": "6746ed0fd815535a",
    "repeat+cot": "1767a43aa64b21d0",
    "empty": "81f2aae9d7da668f",
}


def test_canonical_json_has_every_field():
    assert BUILT_IN["repeat+cot"].spec == [
        {"edit": "repeat", "separator": "\n\n", "times": 2},
        {"edit": "append", "text": "\nLet's think step by step."},
    ]


@pytest.mark.parametrize("pipeline", BUILT_IN.values())
def test_spec_reads_back(pipeline):
    assert parse(pipeline.spec).edits == pipeline.edits


def test_a_composite_names_its_parts_and_expands_them():
    composed = parse("repeat+cot")
    assert composed.parts == ("repeat", "cot")
    assert composed.spec_hash == BUILT_IN["repeat+cot"].spec_hash
    assert parse("cot+repeat").spec_hash != composed.spec_hash


def test_all_edits_by_json_and_by_calls():
    as_json = parse(
        '[{"edit": "prepend", "text": "A"}, {"edit": "wrap", "before": "<", "after": ">"},'
        ' {"edit": "repeat", "separator": "|", "times": 3}, {"edit": "append", "text": "Z"},'
        ' {"edit": "system", "text": "S"}]'
    )
    as_calls = parse('prepend("A") + wrap("<", after=">") + repeat("|", times=3) + append("Z") + system("S")')
    assert as_json == as_calls
    assert as_json.apply("x") == EditedPrompt("S", "<Ax>|<Ax>|<Ax>Z")


def test_calls_may_name_transforms_and_texts_may_hold_any_sign():
    assert parse('cot + append(" + (x)")').apply("x").user == "x\nLet's think step by step. + (x)"


def test_wrap_with_one_side_is_append_or_prepend():
    assert parse('wrap("", "b")').spec_hash == parse('append("b")').spec_hash
    assert parse('wrap("a", "")').spec_hash == parse('prepend("a")').spec_hash


def test_an_unknown_edit_lists_the_kinds():
    for spec in ('[{"edit": "translate", "to": "de"}]', 'translate("de")'):
        with pytest.raises(BadInput, match="unknown kind 'translate'; there are append, prepend, repeat, wrap, system"):
            parse(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "[",
        "[1]",
        "[{}]",
        '[{"edit": 3}]',
        '{"edit": "append"}',
        '{"edit": "append", "text": 3}',
        '{"edit": "append", "text": ""}',
        '{"edit": "append", "text": "a", "more": "b"}',
        '{"edit": "append", "text": "a\\u0000"}',
        '{"edit": "append", "text": "\\ud800"}',
        '{"edit": "repeat", "separator": "", "times": 1}',
        '{"edit": "repeat", "separator": "", "times": 65}',
        '{"edit": "repeat", "separator": "", "times": 2.0}',
        '{"edit": "repeat", "separator": "", "times": true}',
        'wrap("", "")',
        'append("a", "b", "c")',
        "append(open('x'))",
        'append("a") - append("b")',
        'append("a"',
        "append(*['a'])",
        "append(**{'text': 'a'})",
        '__import__("os").system("true")',
        "(" * 5000,
        '[{"edit": "system", "text": "a"}, {"edit": "system", "text": "b"}]',
        'append("' + "x" * 70_000 + '")',
    ],
)
def test_specs_that_are_none(spec):
    with pytest.raises(BadInput):
        parse(spec)


def test_an_unknown_field_is_named():
    with pytest.raises(BadInput, match="append has no txt; it takes text"):
        parse('append("a", txt="b")')


def test_an_unknown_name_lists_the_known():
    with pytest.raises(NotFound, match="no transform is named 'cto'; there are base, cot, empty, repeat"):
        parse("repeat+cto")


def test_names():
    plain = parse('append("x")')
    assert check_name("my-own_2.1", plain) == "my-own_2.1"
    for bad in ("", "A", "a b", "+a", "a+", "ä", "x" * 101, "-a"):
        with pytest.raises(BadInput):
            check_name(bad, plain)
    with pytest.raises(BadInput, match="says that it is composed of a and b"):
        check_name("a+b", plain)


def test_stored_and_read_back(session):
    assert [info.name for info in queries.list_all(session)] == ["base", "cot", "repeat", "repeat+cot", "empty"]
    info = queries.get(session, "repeat+cot")
    assert info.parts == ("repeat", "cot")
    assert info.pipeline == BUILT_IN["repeat+cot"]
    assert info.spec_hash == BUILT_IN["repeat+cot"].spec_hash
    ids = [queries.get(session, name).id for name in ("empty", "base")]
    assert [one.name for one in queries.get_many(session, ids)] == ["empty", "base"]
    with pytest.raises(NotFound):
        queries.get_many(session, [10**9])


def test_own_transforms_compose(session):
    queries.add(session, "polite", 'prepend("Please: ")')
    both = queries.add(session, "repeat+polite", "repeat+polite")
    assert both.parts == ("repeat", "polite")
    assert queries.get(session, "repeat+polite").pipeline.apply("x").user == "Please: x\n\nx"


def test_a_second_name_for_a_spec_is_refused_and_named(session):
    with pytest.raises(Conflict, match="already there, named 'cot'"):
        queries.add(session, "step", 'append("\\nLet\'s think step by step.")')
    with pytest.raises(Conflict, match="already there, named 'repeat\\+cot'"):
        queries.add(session, "both", "repeat+cot")


def test_a_name_never_changes_its_spec(session):
    first = queries.add(session, "short", 'append(" Be brief.")')
    assert queries.add(session, "short", 'append(" Be brief.")') == first
    with pytest.raises(Conflict, match="'short' exists with another spec"):
        queries.add(session, "short", 'append(" Be long.")')
    with pytest.raises(Conflict, match="'base' exists with another spec"):
        queries.add(session, "base", 'append(" Be long.")')


def test_unknown_names_get_a_hint(session):
    with pytest.raises(NotFound) as caught:
        queries.get(session, "repeat_cot")
    assert caught.value.hint == "did you mean 'repeat+cot'?"


def test_the_system_prompt_is_kept_apart():
    assert Pipeline((System("s"),)).apply("x") == EditedPrompt("s", "x")
    assert BUILT_IN["base"].apply("x").system is None
