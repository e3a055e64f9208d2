"""A07, A10, A19 and A22 for every template: y is scored whole, and nothing but y."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from registry.errors import Refused
from registry.statuses import HAS_VALUE, Status
from tasks import loading
from tasks.rendering import Renderer
from tests.tasks import test_rendering as known
from tests.tasks.test_rendering import metaspace, tokenizer
from tests.tiny_models import edit_json

TEMPLATES = {
    name: getattr(known, name)
    for name in (
        "CHATML",
        "QWEN3",
        "DEEPSEEK_R1",
        "LLAMA3",
        "GEMMA",
        "DATED",
        "DEFAULT_SYSTEM",
        "PARTS",
        "SKIP_EMPTY",
        "RAISE_EMPTY",
        "PLAIN_ROLES",
    )
}
# What is trimmed here is replaced by a mark of the same length: a span by length alone would score the mark.
TEMPLATES["TRIM_AND_MARK"] = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}!<|im_end|>{% endfor %}"
)
RESPONSES = {
    "plain": "The answer is here.",
    "blanks on both sides": "  code block\n\n",  # A07
    "merges with a line feed before it": "\n\nis: 42",  # A10
    "one token with what follows": "The answer\n",  # A10
    "one character": "T",
    "a blank and one character": " T",  # A07
    "the end of a turn, written out": "The answer<|im_end|>",
}
ENDS = {"<|im_end|>", "</s>"}


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_scored_is_the_response(name: str, response: str) -> None:
    made = tokenizer(TEMPLATES[name])
    span = Renderer(made, "chat", None, 10_000).span(None, "Hello", response)
    assert span.status in HAS_VALUE
    assert made.decode(span.response_ids) == response
    # A22: neither the end of the turn nor the line feed behind it, unless the text itself holds them.
    own = made(response, add_special_tokens=False)["input_ids"]
    assert 0 < len(span.response_ids) <= len(own) + 1
    if span.status == Status.SPLIT:
        assert span.response_ids == own
    marks = {made.convert_tokens_to_ids(one) for one in ENDS}
    assert [one for one in span.response_ids if one in marks] == [one for one in own if one in marks]
    # The context is what the template writes before it, to the last token.
    before = Renderer(made, "chat", None, 10_000)._chat.render_around(None, "Hello", "zzz")[0]  # type: ignore[union-attr]
    assert made.decode(span.context_ids) == before


@pytest.mark.parametrize("response", ["the answer\n", " is: 42", "日本\n", "\nis", "t"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_dummy_blank_is_scored(name: str, response: str) -> None:
    """A19: this tokenizer puts a blank before whatever it is given alone."""
    made = metaspace()
    made.chat_template = TEMPLATES[name]
    span = Renderer(made, "chat", None, 10_000).span(None, "Hello", response)
    assert span.status in HAS_VALUE
    whole = made.decode(span.context_ids + span.response_ids)
    context = made.decode(span.context_ids)
    assert whole.startswith(context)
    assert whole[len(context) :] == response
    pieces = made.convert_ids_to_tokens(span.response_ids)
    assert pieces[0].startswith("▁") == response.startswith(" ")


def code_llama(folder: Path) -> None:
    """A byte-level tokenizer under the class name that transformers 5 rebuilds as SentencePiece."""
    Tokenizer.from_str(known.RAW).save(str(folder / "tokenizer.json"))
    changes: dict[str, Any] = {"tokenizer_class": "CodeLlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    edit_json(folder / "tokenizer_config.json", **changes)


def test_a_model_whose_tokenizer_is_rebuilt_wrongly_is_not_loaded(tiny_llama: Path, stored: Any) -> None:
    """A18."""
    from tasks import registration

    code_llama(tiny_llama)
    rebuilt = AutoTokenizer.from_pretrained(tiny_llama)
    raw = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    text = "Hello world"
    assert rebuilt(text, add_special_tokens=False)["input_ids"] != raw.encode(text, add_special_tokens=False).ids, (
        "transformers reads it rightly now: this case is over"
    )
    with pytest.raises(Refused, match="disagree") as caught:
        loading.load(stored(registration.candidate(str(tiny_llama))), device="cpu")
    assert caught.value.reason == "bad_tokenizer"


@pytest.mark.parametrize("where", ["list", "dict", "file", "beside"])
def test_which_of_several_templates_is_meant(where: str, tiny_llama: Path) -> None:
    """A11: what is hashed at registration is what renders, wherever it stands."""
    from registry.canonical import sha256_hex
    from tasks import registration

    (tiny_llama / "chat_template.jinja").unlink(missing_ok=True)
    config = tiny_llama / "tokenizer_config.json"
    template = TEMPLATES["CHATML"]
    other = [{"name": "tool_use", "template": TEMPLATES["QWEN3"]}]
    if where == "list":
        edit_json(config, chat_template=[*other, {"name": "default", "template": template}])
    elif where == "dict":  # no default among several
        edit_json(config, chat_template=other)
    elif where == "file":  # beats the config
        edit_json(config, chat_template=TEMPLATES["QWEN3"])
        (tiny_llama / "chat_template.jinja").write_text(template)
    else:  # transformers passes it over beside a plain tokenizer
        edit_json(config, chat_template=None)
        (tiny_llama / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    made = AutoTokenizer.from_pretrained(tiny_llama)
    registered = registration.candidate(str(tiny_llama)).columns["template_hash"]
    if where in ("dict", "beside"):
        with pytest.raises(Refused) as caught:
            Renderer(made, "chat", None, 10_000)
        assert (caught.value.reason, registered) == ("no_template", None)
    else:
        assert Renderer(made, "chat", None, 10_000).template_hash == registered == sha256_hex(template)
