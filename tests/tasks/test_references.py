from __future__ import annotations

from pathlib import Path

import pytest

from registry.errors import BadInput, NotFound
from tasks.references import HubReference, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubReference("org/name")),
        ("gpt2", HubReference("gpt2")),
        ("org/name@v1.0", HubReference("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubReference("org/name", "refs/pr/3")),
        ("org/name:a.Q4_K_M.gguf", HubReference("org/name", None, "a.Q4_K_M.gguf")),
        ("org/name@abc:sub/a.gguf", HubReference("org/name", "abc", "sub/a.gguf")),
        ("https://huggingface.co/org/name", HubReference("org/name")),
        ("https://huggingface.co/org/name/", HubReference("org/name")),
        ("huggingface.co/org/name/tree/main", HubReference("org/name", "main")),
        ("https://hf.co/org/name/tree/refs%2Fpr%2F3", HubReference("org/name", "refs/pr/3")),
        ("https://huggingface.co/org/name/tree/refs/pr/3", HubReference("org/name", "refs/pr/3")),
        ("https://huggingface.co/org/name/blob/main/x.gguf?download=1", HubReference("org/name", "main", "x.gguf")),
        ("https://huggingface.co/gpt2/tree/main", HubReference("gpt2", "main")),
        ("hf://org/name", HubReference("org/name")),
    ],
)
def test_hub_references(text: str, expected: HubReference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "org/name/more",
        "a b",
        "org/na me",
        "https://example.com/org/name",
        "https://huggingface.co/datasets/org/name",
        "https://huggingface.co/org/name/blob/main/config.json",
        "org/../name",
    ],
)
def test_what_is_no_reference_says_what_one_is(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(text)
    assert caught.value.hint


def test_paths_begin_with_a_dot_a_slash_or_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse("./models/llama") == tmp_path / "models" / "llama"
    assert parse(str(tmp_path)) == tmp_path
    # Also a Hub id: the folder of that name is not taken silently.
    assert parse("models/llama") == HubReference("models/llama")
    with pytest.raises(NotFound, match="nothing lies"):
        parse("./absent")
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    with pytest.raises(BadInput) as caught:
        parse("a/b/c")
    assert caught.value.hint == "write ./a/b/c"
