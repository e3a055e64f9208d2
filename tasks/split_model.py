"""A causal language model in two halves: the body, which makes hidden states, and the head, which makes logits of them.

Logits are the larger part of the memory (a row of them is a vocabulary long) and only those before a response token are
wanted.  So the body runs once, and the head on the hidden states that matter, a chunk at a time.  Both run the model's
own code, with its soft caps and scales, in float32 from the head on whatever the model's dtype: rounded logits are the
larger part of what half precision costs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

CHUNK_FLOATS = 1 << 23
"""float32 logits held at once: 32 MB, whatever the vocabulary and the batch, and as much again for the log-softmax."""


class SplitModel:
    """The halves of a transformers model (or of the one inside a PEFT adapter that was not merged).

    Raises ValueError where there is no telling them apart.  Whether they make the same logits as the whole is for
    `tasks.canary` to say.
    """

    def __init__(self, model: Any) -> None:
        # Through PEFT's own forward the halves could not be reached; its layers stand inside the body.
        self.whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._body = getattr(self.whole, "base_model", self.whole)
        if self._body is self.whole or self.whole.get_output_embeddings() is None:
            raise ValueError(f"{type(self.whole).__name__} has no body apart from its head")
        self._output: Any = None
        self._float32_head = self._wide_head()

    def hidden(self, input_ids: Any, **inputs: Any) -> Any:
        """Hidden states [B, T, d] of ids [B, T]."""
        self._output = self._body(input_ids=input_ids, use_cache=False, return_dict=True, **inputs)
        return self._output.last_hidden_state

    def log_probabilities(self, hidden: Any, rows: Any, targets: Any) -> np.ndarray:
        """float64 log p of `targets[i]` after the token whose hidden state is `hidden[rows[i]]`.

        hidden [n, d]; rows and targets int64 tensors [m], a row may come up several times.
        """
        import torch

        values = torch.empty(len(rows), dtype=torch.float64)
        wanted, inverse = torch.unique(rows, return_inverse=True)
        step = max(1, CHUNK_FLOATS // self.whole.get_output_embeddings().weight.shape[0])
        with self._in_float32():
            for start in range(0, len(wanted), step):
                chunk = wanted[start : start + step]
                logits = self._logits(hidden[chunk.to(hidden.device)])
                table = torch.log_softmax(logits.float(), dim=-1)
                mine = (inverse >= start) & (inverse < start + len(chunk))
                at, what = inverse[mine] - start, targets[mine]
                values[mine] = table[at.to(table.device), what.to(table.device)].double().cpu()
        return values.numpy()

    def _logits(self, hidden: Any) -> Any:
        """The model's own way from hidden states [n, d] to logits [n, V]: its forward, with these for the body's."""
        states = hidden[None].to(self._head_dtype())
        output = type(self._output)(**{**self._output, "last_hidden_state": states})
        with _standing_in(self._body, output):
            return self.whole(inputs_embeds=states, use_cache=False, return_dict=True).logits[0]

    def _head_dtype(self) -> Any:
        return self.whole.get_output_embeddings().weight.dtype

    def _wide_head(self) -> Any:
        import torch

        head = self.whole.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.weight.dtype not in (torch.bfloat16, torch.float16):
            return None
        return copy.deepcopy(head).float()

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        if self._float32_head is None:
            yield
            return
        narrow = self.whole.get_output_embeddings()
        self.whole.set_output_embeddings(self._float32_head)
        try:
            yield
        finally:
            self.whole.set_output_embeddings(narrow)


@contextmanager
def _standing_in(body: Any, output: Any) -> Iterator[None]:
    """While it lasts the body answers with `output`, whatever it is asked."""
    own = body.__dict__.get("forward")  # accelerate puts a forward of its own there
    body.forward = lambda *_, **__: output
    try:
        yield
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own
