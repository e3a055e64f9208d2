"""Byte-level BPE tokenizers trained on the corpus, in the three styles that the Hub's families have.

All 256 bytes are in every vocabulary: any text can be encoded and decoded back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from demo.population import corpus

VOCABULARY = 768
CONTEXT = 1024
"""Long enough for nearly every text of the starter set at two bytes a token."""
PAD, BOS, EOS, START, END = "<|pad|>", "<|bos|>", "<|eos|>", "<|start|>", "<|end|>"
SPECIAL = [PAD, BOS, EOS, START, END]
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True)
class Style:
    """How one maker's tokenizer behaves; the three cover what real templates are known to do."""

    adds_bos: bool
    """The tokenizer writes BOS before plain text (and the template writes it by itself: once, not twice)."""
    template: str
    qwen2: bool = False
    """transformers rebuilds the tokenizer of a Qwen2 model with rules of its own: it has to be made with them."""


# Mamba, GPT-NeoX and GPT-2 style: ChatML, no BOS, a system turn is accepted.
CHATML = Style(
    adds_bos=False,
    template=(
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ),
)

# Qwen2 style: a default system prompt appears when none is given.
DEFAULT_SYSTEM = Style(
    adds_bos=False,
    qwen2=True,
    template=(
        "{% if messages[0]['role'] != 'system' %}<|start|>system\nYou are a helpful model.<|end|>\n{% endif %}"
        + CHATML.template
    ),
)

# Gemma style: BOS, the assistant is called model, contents are trimmed, a system turn is refused.
STRICT = Style(
    adds_bos=True,
    template=(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "<|start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
    ),
)

# Llama style: BOS, and two line feeds after the header, which a response that starts with one could merge with.
HEADERS = Style(
    adds_bos=True,
    template=(
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] }}<|eos|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
    ),
)


def train(style: Style, seed: int) -> Any:
    """A tokenizer of transformers; `style.template` is its chat template."""
    made = _like_qwen2(seed) if style.qwen2 else _generic(style, seed)
    made.chat_template = style.template
    return made


def _generic(style: Style, seed: int) -> Any:
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(_trained(seed))
    if style.adds_bos:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS if style.adds_bos else None,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _like_qwen2(seed: int) -> Any:
    """The same vocabulary and merges under Qwen2's normalisation and splitting."""
    from transformers import Qwen2Tokenizer

    learnt = json.loads(_trained(seed))["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=EOS,
        extra_special_tokens=[BOS, START, END],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


@lru_cache(maxsize=4)
def _trained(seed: int) -> str:
    """The vocabulary and merges that all styles share, as the JSON of `tokenizers`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        [text for made in corpus.all_dialects(1500, f"tokenizer-{seed}") for text in (made.prompt, made.response)],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return raw.to_str()
