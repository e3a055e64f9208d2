"""What is context and what is scored, with real tokenizers and the templates that are known to go wrong."""

from __future__ import annotations

import json
from datetime import datetime as real_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from registry.errors import BadInput, Refused
from registry.statuses import HAS_VALUE, Status
from tasks import chat_template
from tasks.rendering import Renderer, Span, verify_tokenizer

LINES = [
    "Hello world, the answer is here.",
    "user assistant system\n\nThe answer\n\n\n\nis: 42\n",
    "日本語 text 😀 and a blank 😀 more 😀",
    "  indented\n\tcode block\n\n",
] * 12
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<unk>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set c = m['content'] %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}<|Assistant|>{{ c }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '01 Jan 1999' %}{% endif %}"
    "<|im_start|>system\nToday Date: {{ date_string }}<|im_end|>"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
)
DATED = "<|im_start|>system\nToday Date: {{ strftime_now('%d %b %Y') }}<|im_end|>\n" + CHATML
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}" + CHATML
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
SKIP_EMPTY = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['content'] %}")
RAISE_EMPTY = (
    "{% for m in messages %}{% if m['role'] == 'user' and not m['content'] %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}{% endfor %}" + CHATML
)
PLAIN_ROLES = "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}"


def _byte_level(trim_offsets: bool = True, bos: bool = True) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    raw.post_processor = processors.Sequence(steps)
    return raw


RAW = _byte_level().to_str()


def tokenizer(template: Any = None, bos: str | None = "<s>", eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(RAW), bos_token=bos, eos_token=eos)
    made.chat_template = template
    return made


def renderer(template: Any = CHATML, profile: str = "chat", **options: Any) -> Renderer:
    limits = {"context_length": options.pop("context_length", None), "vocabulary": options.pop("vocabulary", 10_000)}
    return Renderer(tokenizer(template, **options), profile, **limits)


def texts(span: Span) -> tuple[str, str]:
    """Context and response, as strings."""
    made = tokenizer()
    return tuple(made.decode(ids, clean_up_tokenization_spaces=False) for ids in (span.context_ids, span.response_ids))


# ---- templates ------------------------------------------------------------------------------------------------------


# A22
def test_a_response_is_scored_whole_and_nothing_else() -> None:
    span = renderer().span(None, "Hello", "The answer is 42.")
    assert span.status == Status.OK
    assert texts(span) == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "The answer is 42.")


# A01, A22
def test_ids_are_those_of_the_whole_conversation_tokenised_once() -> None:
    made = tokenizer(CHATML)
    span = Renderer(made, "chat", None, 10_000).span(None, "Hello", "The answer.")
    whole = made.apply_chat_template(
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The answer."}], return_dict=False
    )
    ids = span.context_ids + span.response_ids
    assert ids == whole[: len(ids)]
    assert made.decode(whole[len(ids) :]) == "<|im_end|>\n"  # the end of the turn is not scored
    assert all(type(one) is int for one in ids)


# A05
@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1])
def test_a_thinking_scaffold_is_not_part_of_the_response(template: str) -> None:
    span = renderer(template).span(None, "Hello", "The answer is 42.")
    context, response = texts(span)
    assert span.status == Status.OK
    assert response == "The answer is 42."
    if template is QWEN3:
        assert context.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    else:
        assert context.endswith("<|User|>Hello<|Assistant|>")


# A05
def test_a_response_that_the_template_would_cut_is_scored_as_it_is() -> None:
    span = renderer(QWEN3).span(None, "Hello", "<think>hm</think>\nThe answer")
    assert span.status == Status.SPLIT
    assert texts(span)[1] == "<think>hm</think>\nThe answer"


# A07
def test_a_trimming_template_does_not_shorten_the_response() -> None:
    span = renderer(LLAMA3).span(None, " Hello ", "code block\n\n")
    context, response = texts(span)
    assert (span.status, span.reason) == (Status.SPLIT, "the template altered the response")
    assert response == "code block\n\n"
    assert context.endswith("<|im_start|>user\n\nHello<|im_end|><|im_start|>assistant\n\n")
    assert renderer(LLAMA3).span(None, "Hello", "code block").status == Status.OK


# A02
def test_bos_stands_once_whoever_writes_it() -> None:
    for template in (LLAMA3, DEEPSEEK_R1):
        assert renderer(template).span(None, "Hello", "The answer").context_ids.count(0) == 1
    assert renderer().span(None, "Hello", "The answer").context_ids.count(0) == 0  # the template is the model's own
    for user in ("Hello", ""):
        assert renderer(profile="plain").span(None, user, "The answer").context_ids.count(0) == 1


# A03, A11
def test_without_a_template_the_refusal_says_what_to_do() -> None:
    for template in (None, {"tool_use": CHATML}):
        with pytest.raises(Refused) as caught:
            renderer(template)
        assert caught.value.reason == "no_template"
        assert "--profile plain" in str(caught.value.hint)
    assert renderer(None, profile="plain").span(None, "Hello", "you").status == Status.OK


# A11
def test_of_several_templates_the_default_is_used_and_hashed() -> None:
    assert renderer({"default": CHATML, "tool_use": QWEN3}).template_hash == renderer(CHATML).template_hash
    assert renderer(QWEN3).template_hash != renderer(CHATML).template_hash


# A04
def test_a_template_that_raises_costs_only_its_text() -> None:
    made = renderer(GEMMA)
    refused = made.span("Be brief.", "Hello", "The answer")
    assert refused == Span([], [], Status.TEMPLATE_ERROR, "TemplateError: System role not supported")
    assert made.span(None, "Hello", "The answer").status == Status.OK
    assert "Be brief." in texts(renderer().span("Be brief.", "Hello", "The answer"))[0]


# A04
def test_a_template_that_cannot_hold_a_conversation_is_refused() -> None:
    for template in ("{{ undefined_function() }}", "{% if %}", "no messages", "{{ raise_exception('no') }}"):
        with pytest.raises(Refused) as caught:
            renderer(template)
        assert caught.value.reason == "bad_template"


# A08
@pytest.mark.parametrize("template", [DATED, LLAMA3])
def test_the_date_never_moves(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []
    for year in (2025, 2031):

        class Clock(real_datetime):
            @classmethod
            def now(cls, tz: Any = None, year: int = year) -> real_datetime:
                return real_datetime(year, 3, 1, tzinfo=tz)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        spans.append(renderer(template).span(None, "Hello", "you"))
    assert spans[0] == spans[1]
    assert "Today Date: 26 Jul 2024" in texts(spans[0])[0]


# A09
def test_no_system_message_is_sent_unless_the_transform_has_one() -> None:
    made = renderer(DEFAULT_SYSTEM)
    assert texts(made.span(None, "Hello", "you"))[0].startswith("<|im_start|>system\nYou are Qwen.<|im_end|>\n")
    assert texts(renderer(CHATML).span(None, "Hello", "you"))[0].startswith("<|im_start|>user")


# A13
def test_a_template_that_wants_parts_gets_parts() -> None:
    made = renderer(PARTS)
    assert made.describe()["content_form"] == "parts"
    assert texts(made.span(None, "Hello", "The answer")) == texts(renderer(CHATML).span(None, "Hello", "The answer"))
    assert renderer(CHATML).describe()["content_form"] == "string"


# A13
def test_the_repr_of_parts_is_never_the_prompt() -> None:
    """Strings are refused by this template, and a list it would print as Python does."""
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ raise_exception('parts, please') }}{% endif %}"
        "<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(Refused, match="verbatim"):
        renderer(template)


# A16
@pytest.mark.parametrize(
    ("template", "behaviour"),
    [(CHATML, "rendered"), (LLAMA3, "rendered"), (SKIP_EMPTY, "skipped"), (RAISE_EMPTY, "raises")],
)
def test_the_empty_user_turn_is_what_the_template_makes_of_it(template: str, behaviour: str) -> None:
    made = renderer(template)
    assert made.empty_behaviour == made.describe()["empty_prompt"] == behaviour
    span = made.span(None, "", "The answer")
    if behaviour == "raises":
        assert span.status == Status.TEMPLATE_ERROR
        assert "No user query" in span.reason
    else:
        context, response = texts(span)
        assert response == "The answer"
        assert ("<|im_start|>user" in context) == (behaviour == "rendered")


def test_a_prompt_that_holds_the_placeholder_is_rendered_all_the_same() -> None:
    prompt = chat_template._RESPONSE_PROBE
    context, response = texts(renderer().span(None, prompt, "The answer"))
    assert response == "The answer"
    assert prompt in context


def test_a_prompt_that_repeats_the_response_does_not_move_the_span() -> None:
    context, response = texts(renderer().span(None, "The answer. The answer.", "The answer."))
    assert response == "The answer."
    assert context.count("The answer.") == 2


# ---- tokens ---------------------------------------------------------------------------------------------------------


# A10
@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_token_over_the_boundary_splits(trim_offsets: bool) -> None:
    """The tokenizer merges the blank before the response with its first word; trimmed offsets would hide it."""
    made = PreTrainedTokenizerFast(tokenizer_object=_byte_level(trim_offsets), bos_token="<s>", eos_token="</s>")
    made.chat_template = PLAIN_ROLES
    assert any("Ġthe" in token for token in made.tokenize("Hello the answer"))
    span = Renderer(made, "chat", None, 10_000).span(None, "Hello", "the answer")
    assert (span.status, span.reason) == (Status.SPLIT, "a token straddles the response's boundary")
    assert texts(span) == ("USER: Hello\nASSISTANT: ", "the answer")


# A10
def test_a_token_over_the_end_splits() -> None:
    span = renderer(PLAIN_ROLES.replace(": ", ":\t")).span(None, "Hello", "The answer\n\n")
    assert span.status == Status.SPLIT  # three line feeds are one token here
    assert texts(span)[1] == "The answer\n\n"


# A10
def test_a_response_that_merges_with_the_separator_keeps_all_its_tokens() -> None:
    made = renderer(None, profile="plain")
    assert len(tokenizer()("\n\n\n", add_special_tokens=False)["input_ids"]) == 1
    span = made.span(None, "The answer", "\n\nis: 42")
    assert span.status == Status.SPLIT
    assert texts(span) == ("<s>The answer\n\n", "\n\nis: 42")


@pytest.mark.parametrize("response", ["😀", "😀 more", "日本語", "語😀", "é", "👩‍👩‍👧"])
@pytest.mark.parametrize("prompt", ["Hello", "日本", "😀", ""])
def test_characters_of_several_tokens_at_the_boundary(prompt: str, response: str) -> None:
    for made in (renderer(CHATML), renderer(QWEN3), renderer(None, profile="plain")):
        span = made.span(None, prompt, response)
        assert span.status == Status.OK
        assert texts(span)[1] == response
    after_a_blank = renderer(PLAIN_ROLES).span(None, prompt, response)
    assert after_a_blank.status in HAS_VALUE
    assert texts(after_a_blank)[1] == response
    if response.startswith("😀"):
        assert after_a_blank.status == Status.SPLIT  # " " and the first bytes of 😀 are one token here


text = st.text(alphabet=st.sampled_from("aeh Tn.\n\t42é日😀<>|"), max_size=24)
MADE = [renderer(t) for t in (CHATML, QWEN3, LLAMA3, PLAIN_ROLES)] + [renderer(None, profile="plain")]


@given(text, text.filter(bool), st.sampled_from(MADE))
@settings(max_examples=300, deadline=None)
def test_the_scored_tokens_are_the_response_for_any_text(prompt: str, response: str, made: Renderer) -> None:
    span = made.span(None, prompt, response)
    assert span.status in HAS_VALUE
    assert texts(span)[1] == response
    assert span.context_ids


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece does it: a blank is put before whatever is encoded."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=380, special_tokens=specials, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}{% endfor %}"
    )
    return made


# A19
@pytest.mark.parametrize("response", ["the answer\n", "日本\n", "\nis", "🙃\n"])
def test_no_blank_is_put_before_a_response_encoded_alone(response: str) -> None:
    made = metaspace()
    assert (
        made("the", add_special_tokens=False)["input_ids"] != made("\nthe", add_special_tokens=False)["input_ids"][-1:]
    )
    span = Renderer(made, "chat", None, 10_000).span(None, "Hello", response)
    assert span.status == Status.SPLIT  # this template trims
    pieces = made.convert_ids_to_tokens(span.response_ids)
    assert not pieces[0].startswith("▁")
    assert made.decode(span.context_ids + span.response_ids).endswith(response)


def test_a_tokenizer_without_offsets_splits() -> None:
    made = ByT5Tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    found = Renderer(made, "chat", None, 10_000)
    span = found.span(None, "Hi", "né 😀")
    assert (span.status, span.reason) == (Status.SPLIT, "no offsets")
    assert [one - 3 for one in span.response_ids] == list("né 😀".encode())
    assert bytes(one - 3 for one in span.context_ids).decode() == "user: Hi\nassistant: "
    assert found.describe()["offsets"] is False
    plain = Renderer(made, "plain", None, 1000).span(None, "", "é")
    assert (plain.context_ids, plain.status) == ([made.eos_token_id], Status.SPLIT)


def test_what_cannot_be_decoded_back_is_not_scored() -> None:
    """This tokenizer lower-cases, and its end token swallows the blanks before it: split, and then not y."""
    raw = Tokenizer.from_str(json.dumps({**json.loads(RAW), "normalizer": {"type": "Lowercase"}}))
    raw.add_special_tokens([AddedToken("<|end|>", lstrip=True, special=True)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    found = Renderer(made, "chat", None, 10_000)
    span = found.span(None, "Hello", "The answer ")
    assert (span.status, span.context_ids, span.response_ids) == (Status.UNALIGNABLE, [], [])
    assert "do not decode back" in span.reason
    lower = found.span(None, "Hello", "the answer ")
    assert (lower.status, made.decode(lower.response_ids)) == (Status.SPLIT, "the answer ")


def test_a_response_of_which_characters_get_lost_is_not_scored() -> None:
    """Without a byte alphabet and an unknown token, BPE drops what it has never seen, without a word."""
    raw = Tokenizer(models.BPE())
    raw.decoder = decoders.Fuse()
    raw.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>"], show_progress=False))
    found = Renderer(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>"), "plain", None, 10_000)
    assert found.span(None, "Hello", "the answer").status == Status.OK
    for response in ("the \u2603 answer", "the answer\u2603", "\u2603"):
        assert found.span(None, "Hello", response).status == Status.UNALIGNABLE


def test_an_end_token_that_swallows_blanks_does_not_swallow_the_response() -> None:
    raw = Tokenizer.from_str(RAW)
    raw.add_special_tokens([AddedToken("<|go|>", rstrip=True, special=True)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}<|go|>\n{{ m['content'] }}{% endfor %}"
    span = Renderer(made, "chat", None, 10_000).span(None, "Hello", "  code")
    assert span.status == Status.SPLIT
    assert made.decode(span.response_ids) == "  code"


# ---- the plain profile, contexts, limits ----------------------------------------------------------------------------


def test_plain_is_bos_prompt_two_line_feeds_response() -> None:
    made = renderer(CHATML, profile="plain")
    assert texts(made.span(None, "Hello", "The answer")) == ("<s>Hello\n\n", "The answer")
    assert texts(made.span("Be brief.", "Hello", "The answer")) == ("<s>Be brief.\n\nHello\n\n", "The answer")
    assert texts(made.span(None, "", "The answer")) == ("<s>", "The answer")


# B29
def test_without_bos_an_empty_context_is_the_end_token_so_that_every_token_is_scored() -> None:
    made = renderer(None, profile="plain", bos=None)
    assert made.describe()["bos_id"] is None
    assert made.describe()["prefix_id"] == 1
    span = made.span(None, "", "The answer")
    assert span.context_ids == [1]
    assert texts(span)[1] == "The answer"
    assert texts(made.span(None, "Hello", "The answer"))[0] == "Hello\n\n"
    headless = "{% for m in messages if m['content'] %}{{ m['content'] }}{% endfor %}"
    assert renderer(headless).span(None, "", "The answer").context_ids == [0]
    nothing = renderer(None, profile="plain", bos=None, eos=None).span(None, "", "The answer")
    assert nothing.status == Status.TEMPLATE_ERROR


# B25
def test_too_long_is_a_status_and_nothing_is_cut() -> None:
    whole = renderer().span(None, "Hello", "The answer is 42.")
    total = len(whole.context_ids) + len(whole.response_ids)
    assert renderer(context_length=total).span(None, "Hello", "The answer is 42.") == whole
    cut = renderer(context_length=total - 1).span(None, "Hello", "The answer is 42.")
    assert cut == Span([], [], Status.TOO_LONG, f"{total} tokens, the model's context has {total - 1}")


# B23
def test_an_id_beyond_the_embedding_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        renderer(vocabulary=50).span(None, "Hello", "The answer")
    assert caught.value.reason == "bad_tokenizer"


# B29
def test_empty_responses_and_unknown_profiles_are_refused() -> None:
    with pytest.raises(BadInput, match="empty response"):
        renderer().span(None, "Hello", "")
    with pytest.raises(BadInput, match="no profile 'chatty'"):
        renderer(profile="chatty")


def test_the_provenance_is_plain_json() -> None:
    for made in MADE:
        assert json.loads(json.dumps(made.describe()))["tokenizer_hash"] == made.tokenizer_hash


def test_the_tokenizer_hash_ignores_padding_and_sees_the_vocabulary() -> None:
    padded = tokenizer(CHATML, bos="<s>")
    padded.pad_token = "</s>"
    before = Renderer(padded, "plain", None, 10_000).tokenizer_hash
    padded(["a", "a b c"], padding=True, truncation=True, max_length=4)
    assert Renderer(padded, "plain", None, 10_000).tokenizer_hash == before
    padded.add_tokens(["extra"])
    assert Renderer(padded, "plain", None, 10_000).tokenizer_hash != before


# ---- is it the tokenizer of the files? ------------------------------------------------------------------------------


def saved(tmp_path: Path, tokenizer_class: str) -> Path:
    Tokenizer.from_str(RAW).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return tmp_path / "tokenizer.json"


# A18
def test_a_tokenizer_rebuilt_from_the_wrong_class_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "CodeLlamaTokenizerFast")
    with pytest.raises(Refused) as caught:
        verify_tokenizer(AutoTokenizer.from_pretrained(tmp_path), path)
    assert caught.value.reason == "bad_tokenizer"
    with pytest.raises(Refused):  # without the file, the lost text shows it
        verify_tokenizer(AutoTokenizer.from_pretrained(tmp_path), None)


def test_a_sound_tokenizer_passes(tmp_path: Path) -> None:
    path = saved(tmp_path, "PreTrainedTokenizerFast")
    verify_tokenizer(AutoTokenizer.from_pretrained(tmp_path), path)
    for made in (tokenizer(), metaspace(), ByT5Tokenizer()):
        verify_tokenizer(made, None)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = json.loads(RAW)
    other["model"]["merges"] = other["model"]["merges"][:10]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(Refused, match="disagree"):
        verify_tokenizer(tokenizer(), tmp_path / "tokenizer.json")


def test_lower_casing_is_a_documented_loss_and_dropped_characters_are_not() -> None:
    lower = Tokenizer.from_str(json.dumps({**json.loads(RAW), "normalizer": {"type": "Lowercase"}}))
    verify_tokenizer(PreTrainedTokenizerFast(tokenizer_object=lower), None)
    strip = {"type": "Replace", "pattern": {"String": " "}, "content": ""}
    lossy = Tokenizer.from_str(json.dumps({**json.loads(RAW), "normalizer": strip}))
    with pytest.raises(Refused, match="turns"):
        verify_tokenizer(PreTrainedTokenizerFast(tokenizer_object=lossy), None)
