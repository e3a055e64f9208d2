"""modelmap's JSON Lines."""

from __future__ import annotations

import json

import pytest

from registry.errors import BadInput, NotFound, Unparseable, Unsupported
from registry.exchange.vector_formats import open_vectors
from registry.statuses import Status


def line(index, each, **changes):
    entry = {"index": index, "num-tokens": len(each) + 1, "log-likelihood": sum(each), "token-log-probs": each}
    return json.dumps({**entry, **changes}) + "\n"


def written(folder, name, *lines):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(lines))
    return path


def test_a_folder_is_one_matrix(tmp_path):
    written(tmp_path, "org--a--b_float16.jsonl", line(1, [-1.0, -2.0]), "\n", line(0, [-4.0]))
    written(tmp_path, "org--c_bf16.jsonl", line(2, [-0.5]))
    written(tmp_path, "plain.jsonl", line(0, [-1.0]))
    (file,) = open_vectors([tmp_path])
    assert [(row.name, row.dtype) for row in file.rows] == [
        ("org/a--b", "float16"),
        ("org/c", "bfloat16"),
        ("plain", "unknown"),
    ]
    first, second, _ = file.rows
    assert first.values[:2].tolist() == [-4.0, -3.0]
    assert first.token_counts.tolist() == [1, 2, 0]
    assert first.statuses.tolist() == [0, 0, Status.NOT_SCORED]
    assert second.statuses.tolist() == [Status.NOT_SCORED, Status.NOT_SCORED, 0]
    assert file.heading.unit == "nats"


def test_the_folder_may_carry_the_name(tmp_path):
    path = written(tmp_path / "org--m_fp16", "pile.jsonl", line(0, [-1.0]))
    assert (open_vectors([path])[0].rows[0].name, open_vectors([path])[0].rows[0].dtype) == ("org/m", "float16")


def test_either_spelling_and_missing_fields(tmp_path):
    path = written(
        tmp_path,
        "m.jsonl",
        '{"index": 0, "log_likelihood": -2.5, "num_tokens": 4}\n',
        '{"index": 1, "token_log_probs": [-1, -2]}\n',
        '{"index": 2, "log-likelihood": NaN}\n',
        '{"index": 3, "log-likelihood": -Infinity}\n',
        '{"index": 4, "log-likelihood": null}',
    )
    (row,) = open_vectors([path])[0].rows
    assert row.values[:2].tolist() == [-2.5, -3.0]
    assert row.token_counts.tolist() == [3, 2, 0, 0, 0]
    missing = Status.NOT_SCORED
    assert row.statuses.tolist() == [0, 0, missing, Status.NON_FINITE, missing]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (line(0, [-1.0]) + line(1, [-1.0])[:20], "line 2: the line is cut off"),
        (line(0, [-1.0]) + "[]\n", "line 2: list, not an object"),
        (line(0, [-1.0]) + "\n" + line(0, [-2.0]), "line 3: the text 0 is there a second time"),
        (line(-1, [-1.0]), "its index is -1"),
        (line(True, [-1.0]), "its index is True"),
        (line("0", [-1.0]), "its index is '0'"),
        (line(10**9, [-1.0]), "its index is 1000000000"),
        ('{"index": 0}\n', "no log-likelihood; its keys are index"),
        (line(0, [-1.0], **{"log-likelihood": "x"}), "its log-likelihood is 'x'"),
        (line(0, [-1.0], **{"log-likelihood": -(10**400)}), "out of range"),
        (line(0, [-1.0], **{"token-log-probs": ["x"]}), "not a list of numbers"),
        ('{"index": 0, "log-likelihood": -1, "num-tokens": -3}\n', "its num-tokens is -3"),
        ("{" * 100_000 + "\n", "not JSON"),
        ('{"index": 0, "log-likelihood": 4.5}\n', "never above 0"),
    ],
)
def test_what_is_wrong_is_said_by_line(tmp_path, lines, message):
    with pytest.raises(BadInput, match=message):
        open_vectors([written(tmp_path, "m.jsonl", lines)])


def test_one_model_twice_in_one_dtype(tmp_path):
    paths = [written(tmp_path / name, "org--m_fp16.jsonl", line(0, [-1.0])) for name in "ab"]
    with pytest.raises(BadInput, match="'org/m' is there twice, in rows 0 and 1"):
        open_vectors(paths)
    other = written(tmp_path, "org--m_fp32.jsonl", line(0, [-1.0]))
    assert len(open_vectors([paths[0], other])[0].rows) == 2


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", Unparseable, "is empty"),
        (b"\n \n", Unparseable, "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", Unparseable, "Git LFS pointer"),
        (b"\x1f\x8b\x08", Unsupported, "is compressed"),
        (b"\x93NUMPY\x01\x00", Unsupported, "one bare array"),
        (b"hello", Unsupported, "no format"),
    ],
)
def test_other_files(tmp_path, content, error, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        open_vectors([path])


def test_absent_files(tmp_path):
    with pytest.raises(NotFound, match="does not exist"):
        open_vectors([tmp_path / "none.npz"])
    with pytest.raises(NotFound, match=r"holds no \.jsonl"):
        open_vectors([tmp_path])
