"""Small configurations of the architectures in the population."""

from __future__ import annotations

from typing import Any

from demo.population import tokenizer
from demo.population.tokenizer import CONTEXT

_TOKENS = {
    "vocab_size": tokenizer.VOCABULARY,
    "pad_token_id": tokenizer.PAD_ID,
    "bos_token_id": tokenizer.BOS_ID,
    "eos_token_id": tokenizer.EOS_ID,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}

_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160, **_ATTENTION},
    "qwen2": {"intermediate_size": 160, "tie_word_embeddings": True, **_ATTENTION},
    "gpt2": {"n_head": 4, "n_positions": CONTEXT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"intermediate_size": 192, "num_attention_heads": 4, "max_position_embeddings": CONTEXT},
    # A window shorter than the texts, so that the sliding layers really differ from the full ones.
    "gemma2": {
        "intermediate_size": 160, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64, **_ATTENTION,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mixtral": {
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        **_ATTENTION,
    },
}  # fmt: skip

# On a CPU without the Mamba kernels time goes step by step through every token: half the width, shorter batches.
WIDTH = {"mamba": 48}
TRAINING_LENGTH = {"mamba": 40}

NAMES = tuple(_SHAPES)


def untrained(architecture: str, *, width: int | None = None, layers: int = 2) -> Any:
    """A freshly initialised causal LM; draws from torch's global generator.

    `width` is the residual stream's, 64 (Mamba 48) by default.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    width = width or WIDTH.get(architecture, 64)
    sizes = (
        {"n_embd": width, "n_layer": layers}
        if architecture == "gpt2"
        else {"hidden_size": width, "num_hidden_layers": layers}
    )
    config = AutoConfig.for_model(architecture, **_SHAPES[architecture], **sizes, **_TOKENS)
    return AutoModelForCausalLM.from_config(config).eval()
