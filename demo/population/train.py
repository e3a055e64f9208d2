"""Training for seconds: next-token loss on the corpus, and distillation from a teacher's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from demo.population import corpus
from demo.population.architectures import TRAINING_LENGTH
from demo.population.tokenizer import EOS_ID

BATCH = 16
LENGTH = 64


def token_stream(tokenizer: Any, weights: Mapping[str, float], n: int, seed: str) -> Any:
    """int64 [tokens]: `n` exchanges end to end.  Three in four stand in the chat template, the rest are plain."""
    import torch

    ids: list[int] = []
    for number, exchange in enumerate(corpus.exchanges(weights, n, seed)):
        if number % 4:
            turns = [
                {"role": "user", "content": exchange.prompt},
                {"role": "assistant", "content": exchange.response},
            ]
            ids += tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        else:
            ids += tokenizer(f"{exchange.prompt}\n\n{exchange.response}")["input_ids"]
        ids.append(EOS_ID)
    return torch.tensor(ids)


def fit(model: Any, stream: Any, *, steps: int, rate: float, seed: int, teacher: Any = None) -> float:
    """Trains `model` in place on random crops of `stream`; returns the mean loss of the last ten steps.

    With a `teacher` the target is its next-token distribution (cross-entropy in nats) instead of the token.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    length = TRAINING_LENGTH.get(model.config.model_type, LENGTH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    model.train()
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(stream) - length, (BATCH,), generator=generator)
        batch = torch.stack([stream[start : start + length] for start in starts.tolist()])
        loss = _loss(model, batch, teacher, generator)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return sum(losses[-10:]) / len(losses[-10:])


def _loss(model: Any, batch: Any, teacher: Any, generator: Any) -> Any:
    import torch

    inputs = {"input_ids": batch, "use_cache": False}
    if model.config.model_type == "gpt2":
        # Learned positions beyond the crop would never be trained: slide the crop over the whole context.
        offset = torch.randint(model.config.n_positions - batch.shape[1], (1,), generator=generator).item()
        inputs["position_ids"] = torch.arange(batch.shape[1])[None] + offset
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    if teacher is None:
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1).softmax(-1)
    return torch.nn.functional.cross_entropy(logits, wanted)
