"""Training for seconds: next-token loss on the corpus, and distillation from a teacher's distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from demo.population import corpus
from demo.population.architectures import TRAINING_LENGTH
from demo.population.tokenizer import EOS_ID

BATCH = 16
LENGTH = 64
SMOOTHING = 0.05
"""Share of the target spread over the whole vocabulary.  Without it the tokens that a small corpus lacks are driven
towards probability 0, and a few texts full of them outweigh all others in every distance."""


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
    """Trains what of `model` requires gradients, in place, on random crops of `stream`.

    Returns the mean loss of the last ten steps, in nats a token, unsmoothed.

    With a `teacher` the target is its next-token distribution instead of the token.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    length = TRAINING_LENGTH.get(model.config.model_type, LENGTH)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learning, lr=rate, weight_decay=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    model.train()
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(stream) - length, (BATCH,), generator=generator)
        batch = torch.stack([stream[start : start + length] for start in starts.tolist()])
        loss, plain = _loss(model, batch, teacher, generator)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimiser.step()
        schedule.step()
        losses.append(plain)
    model.eval()
    return sum(losses[-10:]) / len(losses[-10:])


def _loss(model: Any, batch: Any, teacher: Any, generator: Any) -> tuple[Any, float]:
    """What to minimise, and the loss in nats a token."""
    import torch

    inputs = {"input_ids": batch, "use_cache": False}
    if model.config.model_type == "gpt2":
        # Learned positions beyond the crop would never be trained: slide the crop over the whole context.
        offset = torch.randint(model.config.n_positions - batch.shape[1], (1,), generator=generator).item()
        inputs["position_ids"] = torch.arange(batch.shape[1])[None] + offset
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    entropy = torch.nn.functional.cross_entropy
    if teacher is None:
        wanted = batch[:, 1:].flatten()
        smoothed = entropy(logits, wanted, label_smoothing=SMOOTHING)
        return smoothed, entropy(logits.detach(), wanted).item()
    with torch.no_grad():
        wanted = teacher(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1).softmax(-1)
    loss = entropy(logits, wanted)
    return loss, loss.item()
