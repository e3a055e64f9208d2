"""Untrained models of a few thousand weights, for tests of files rather than of behaviour."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def save_tokenizer(folder: Path) -> int:
    """A byte-level BPE with a chat template; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the cat sat on the mat, the dog did not"], trainer)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_llama(
    folder: Path, *, seed: int = 0, shard_bytes: int | None = None, dtype: str = "float32", **config: Any
) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": save_tokenizer(folder)}
    model = LlamaForCausalLM(LlamaConfig(**(settings | config))).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # Small random weights are so near uniform that faults do not show.
    options = {"max_shard_size": shard_bytes} if shard_bytes else {}
    model.save_pretrained(folder, **options)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    content |= changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}), "utf-8")


@pytest.fixture(scope="session")
def _tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def tiny_llama(_tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(_tiny_llama, tmp_path / "tiny-llama"))


@pytest.fixture
def stored() -> Callable[[Any], Any]:
    """A candidate as the row that registering it would make, without a database."""
    import datetime

    from registry.queries.model_info import _ROW_FIELDS, ModelInfo

    def row(candidate: Any) -> ModelInfo:
        values = dict.fromkeys(_ROW_FIELDS) | dict(candidate.columns)
        for name in ("kind", "handle", "revision", "identity", "source", "file", "weights_hash", "trust_remote_code"):
            values[name] = getattr(candidate, name)
        values |= {"id": 1, "facts": json.loads(json.dumps(dict(candidate.facts))), "status": "active"}
        values |= {"status_reason": "", "created_at": datetime.datetime.now(datetime.UTC)}
        return ModelInfo(**values)

    return row
