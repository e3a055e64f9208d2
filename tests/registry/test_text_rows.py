"""Files as strangers write them."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from registry.errors import BadInput, NotFound, Unparseable, Unsupported
from registry.exchange.text_layouts import MAX_COLUMNS_BYTES
from registry.exchange.text_rows import open_rows
from registry.textsets import Pair, Unusable, freeze


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows, raw=None, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(raw if raw is not None else "".join(json.dumps(row) + "\n" for row in rows).encode())
        return path

    return write


@pytest.fixture
def parquet(tmp_path):
    def write(columns, name="rows.parquet", schema=None):
        path = tmp_path / name
        pq.write_table(pa.table(columns, schema=schema), path)
        return path

    return write


def one(path, **fields):
    (row,) = open_rows(path, **fields)
    return row


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "response": "y"},
        {"prompt": "x", "completion": "y"},
        {"instruction": "x", "output": "y"},
        {"instruction": "x", "input": "", "output": "y"},
        {"instruction": "x", "context": None, "response": "y"},
        {"question": "x", "answer": "y"},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        {"messages": '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]'},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "model", "content": [{"type": "text", "text": "y"}]},
            ]
        },
    ],
)
def test_common_layouts_are_recognised(jsonl, parquet, row):
    for path in (jsonl(row), parquet({name: [value] for name, value in row.items()})):
        found = one(path)
        assert (found.prompt, found.response, found.notes) == ("x", "y", ())


def test_what_was_understood_can_be_told(jsonl):
    assert str(open_rows(jsonl({"instruction": "a", "input": "b", "output": "c"})).layout) == (
        'prompt = instruction + "\\n\\n" + input (where there is one), response = output'
    )
    assert "first user turn" in str(open_rows(jsonl({"messages": []})).layout)


def test_an_instructions_input_is_part_of_the_prompt(jsonl):
    assert one(jsonl({"instruction": "Add.", "input": "1 2", "output": "3"})).prompt == "Add.\n\n1 2"


def test_fields_may_be_named_and_reach_into_objects(jsonl):
    path = jsonl({"data": {"q": "x", "as": [{"text": "y"}]}, "prompt": "no", "response": "no"})
    found = one(path, prompt_field="data.q", response_field="data.as.0.text")
    assert (found.prompt, found.response) == ("x", "y")


def test_a_name_with_a_dot_counts_before_the_way_into_an_object(jsonl):
    path = jsonl({"a.b": "x", "a": {"b": "no"}, "y": "y"})
    assert one(path, prompt_field="a.b", response_field="y").prompt == "x"


def test_one_field_alone_or_both_kinds_are_refused(jsonl):
    path = jsonl({"prompt": "x", "response": "y"})
    with pytest.raises(BadInput, match="the response field is not given"):
        open_rows(path, prompt_field="prompt")
    with pytest.raises(BadInput, match="excludes"):
        open_rows(path, prompt_field="prompt", response_field="response", messages_field="m")


def test_unrecognised_columns_are_named(jsonl, parquet):
    for path in (jsonl({"text": "x", "label": 3}), parquet({"text": ["x"], "label": [3]})):
        with pytest.raises(BadInput, match="the columns are text, label"):
            open_rows(path)


def test_a_field_that_no_row_has_is_refused(jsonl, parquet):
    for path in (jsonl({"a": "x", "b": "y"}), parquet({"a": ["x"], "b": ["y"]})):
        with pytest.raises(BadInput, match="'c'; the columns are a, b"):
            open_rows(path, prompt_field="a", response_field="c")


def conversation(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_several_turns_become_the_first_exchange(jsonl):
    row = conversation(("user", "x"), ("assistant", "y"), ("user", "more"), ("assistant", "z"))
    found = one(jsonl(row))
    assert (found.prompt, found.response, found.notes) == ("x", "y", ("turns_left_out",))


def test_the_answer_is_the_first_after_the_first_user_turn(jsonl):
    row = conversation(("assistant", "hello"), ("user", "x"), ("tool", "t"), ("assistant", "y"))
    found = one(jsonl(row))
    assert (found.prompt, found.response, found.notes) == ("x", "y", ("turns_left_out",))


def test_system_turns_stay_out_of_the_prompt_and_are_kept(jsonl):
    found = one(jsonl(conversation(("system", "s"), ("user", "x"), ("assistant", "y"))))
    assert (found.prompt, found.notes, found.columns) == ("x", ("system_left_out",), {"system_turn": "s"})
    assert freeze([found]).report.altered == {"system_left_out": [1]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (conversation(("assistant", "y")), "no_user_turn"),
        (conversation(("assistant", "y"), ("user", "x")), "no_assistant_turn"),
        (conversation(("user", "x"), ("assistant", None)), "not_text"),
        (conversation(("user", [{"type": "image"}]), ("assistant", "y")), "not_text"),
        ({"messages": "no json"}, "not_text"),
        ({"messages": ["x", "y"]}, "not_text"),
        ({"messages": None}, "missing"),
    ],
)
def test_conversations_that_give_no_pair(jsonl, row, reason):
    good = conversation(("user", "x"), ("assistant", "y"))
    assert list(open_rows(jsonl(good, row)))[1] == Unusable(2, reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x"}, "missing"),
        ({"prompt": None, "response": "y"}, "missing"),
        ({"prompt": "x", "response": float("nan")}, "missing"),
        ({"prompt": "x", "response": 3}, "not_text"),
        ({"prompt": ["x"], "response": "y"}, "not_text"),
    ],
)
def test_rows_that_give_no_pair(jsonl, row, reason):
    assert list(open_rows(jsonl({"prompt": "a", "response": "b"}, row)))[1] == Unusable(2, reason)


def test_columns_tags_and_ids(jsonl):
    row = {
        "id": 7,
        "prompt": "x",
        "response": "y",
        "lang": "de",
        "license": "cc0",
        "category": "maths",
        "source": "web",
        "score": float("nan"),
        "rating": float("inf"),
        "more": {"a": [1, None, "\0"]},
    }
    found = one(jsonl(row))
    assert found.source_id == "7"
    assert found.tags == {"language": "de", "licence": "cc0", "topic": "maths", "source": "web"}
    assert found.columns == {"rating": None, "more": {"a": [1, None, "\ufffd"]}}


def test_an_object_of_tags_gives_tags(jsonl):
    row = {"prompt": "x", "response": "y", "tags": {"lang": "de", "level": 2}}
    assert one(jsonl(row)).tags == {"language": "de", "level": 2}


def test_columns_are_bounded_and_the_omitted_are_named(jsonl):
    found = one(jsonl({"prompt": "x", "response": "y", "big": "z" * MAX_COLUMNS_BYTES, "small": 1}))
    assert found.columns == {"small": 1, "_omitted": ["big"]}
    assert found.notes == ("columns_cut",)


def test_a_column_nested_too_deeply_is_omitted(jsonl):
    deep = "[" * 900 + "]" * 900
    found = one(jsonl(raw=b'{"prompt": "x", "response": "y", "deep": %s}\n' % deep.encode()))
    assert found.columns in ({"_omitted": ["deep"]}, {"deep": json.loads(deep)})


def test_whatever_was_read_can_be_stored(jsonl, session):
    from registry.queries import textsets

    row = {"id": "\0\ud800", "prompt": "x", "response": "y", "\0k": "\ud800", "lang": "\0", "tags": {"\0": "\ud800"}}
    info = textsets.add(session, "odd", freeze(open_rows(jsonl(row))))
    assert textsets.texts(session, info.id)[0].source_id == "\ufffd?"


def test_bom_blank_lines_and_line_numbers(jsonl):
    path = jsonl(raw=b'\xef\xbb\xbf\r\n{"prompt": "x", "response": "y"}\r\n\n  \n{"prompt": "", "response": "y"}\n\n')
    rows = list(open_rows(path))
    assert rows[0] == Pair("x", "y", row=2)
    assert freeze(rows).report.refused == {"empty_prompt": [5]}


def test_only_a_newline_ends_a_line(jsonl):
    path = jsonl(raw='{"prompt": "a\u2028b\x85c", "response": "y"}\n'.encode())
    assert one(path).prompt == "a\u2028b\x85c"


def test_a_last_line_without_newline_is_whole(jsonl):
    assert one(jsonl(raw=b'{"prompt": "x", "response": "y"}')).prompt == "x"


GOOD = b'{"prompt": "x", "response": "y"}\n'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GOOD + b'{"prompt": "x", "resp', "line 2: the last line is cut off"),
        (GOOD + b"{'prompt'}\n" + GOOD, "line 2: not JSON"),
        (GOOD + b"3\n", "line 2: int, not an object"),
        (GOOD + b'{"prompt": ' + b"[" * 200_000 + b"\n", "line 2: nested too deeply"),
        (GOOD + b'{"n": ' + b"9" * 5000 + b"}\n", "line 2: not JSON"),
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'[{"prompt": "x"}]', "one JSON list"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
    ],
)
def test_files_that_are_not_json_lines(jsonl, raw, message):
    with pytest.raises(Unparseable, match=message):
        list(open_rows(jsonl(raw=raw)))


def test_a_line_without_end_does_not_fill_the_memory(jsonl, monkeypatch):
    monkeypatch.setattr("registry.exchange.text_rows.MAX_LINE_BYTES", 100)
    with pytest.raises(Unparseable, match="line 2: longer than 100 bytes"):
        list(open_rows(jsonl(raw=GOOD + b'{"prompt": "' + b"x" * 100 + b'"}\n')))


def test_a_line_that_is_not_utf8_is_reported_and_the_rest_kept(jsonl):
    path = jsonl(
        raw=GOOD + '{"prompt": "é", "response": "y"}\n'.encode("latin-1") + b'{"prompt": "z", "response": "y"}\n'
    )
    frozen = freeze(open_rows(path))
    assert frozen.report.refused == {"invalid_utf8": [2]}
    assert frozen.report.kept == 2


def test_a_lone_surrogate_is_reported(jsonl):
    frozen = freeze(open_rows(jsonl(raw=GOOD + b'{"prompt": "\\ud800", "response": "y"}\n')))
    assert frozen.report.refused == {"invalid_utf8": [2]}


@pytest.mark.parametrize(
    ("raw", "name", "error"),
    [
        (b"\x1f\x8b\x08", "a.jsonl.gz", Unsupported),
        (b"a,b\n1,2\n", "a.csv", Unsupported),
        (b"hello", "a.parquet", Unparseable),
        (b"PAR1 but not for long", "a.parquet", Unparseable),
    ],
)
def test_other_files_are_refused(jsonl, raw, name, error):
    with pytest.raises(error):
        open_rows(jsonl(raw=raw, name=name))


def test_no_file_and_no_hub_yet(tmp_path):
    with pytest.raises(NotFound, match="does not exist"):
        open_rows(tmp_path / "none.jsonl")
    with pytest.raises(NotFound, match="is a folder"):
        open_rows(tmp_path)
    with pytest.raises(Unsupported, match="does not read yet"):
        open_rows("hub:allenai/tulu-3-sft-mixture")


def test_parquet_dictionaries_nulls_and_other_columns(parquet):
    table = {
        "prompt": pa.array(["x", None, "x"]).dictionary_encode(),
        "response": pa.array(["y", "y", "z"], pa.large_string()),
        "when": pa.array([0, 1, 2], pa.timestamp("s")),
        "raw": pa.array([b"\xff", b"", b""]),
    }
    rows = list(open_rows(parquet(table)))
    assert rows[1] == Unusable(2, "missing")
    assert rows[0].columns == {"when": "1970-01-01 00:00:00", "raw": "b'\\xff'"}


def test_parquet_columns_of_another_type_are_refused(parquet):
    for values in (pa.array([1]), pa.array([b"x"]), pa.array([["x"]])):
        with pytest.raises(BadInput, match=r"column 'prompt' of .* holds"):
            open_rows(parquet({"prompt": values, "response": ["y"]}))
    with pytest.raises(BadInput, match="not conversations"):
        open_rows(parquet({"messages": [1]}))


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "double.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 3, names=["prompt", "prompt", "response"]), path)
    with pytest.raises(BadInput, match="2 columns named 'prompt'"):
        open_rows(path)


def test_parquet_text_that_is_not_utf8_is_reported(parquet):
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc"))
    frozen = freeze(open_rows(parquet({"prompt": bad, "response": ["y", "y", "y"]})))
    assert frozen.report.refused == {"invalid_utf8": [2]}
    assert [pair.prompt for pair in frozen.pairs] == ["a", "c"]


def test_a_damaged_parquet_file_says_where(parquet):
    path = parquet({"prompt": [f"p{i}" for i in range(5000)], "response": ["y"] * 5000})
    data = bytearray(path.read_bytes())
    data[100:2000] = b"\xff" * 1900
    path.write_bytes(data)
    with pytest.raises(Unparseable, match="damaged"):
        list(open_rows(path))


def test_provenance_names_the_file_but_no_folder(jsonl, tmp_path):
    rows = open_rows(jsonl({"prompt": "x", "response": "y"}))
    provenance = rows.provenance()
    assert provenance["file"] == "rows.jsonl"
    assert len(provenance["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(provenance)
