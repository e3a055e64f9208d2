"""What scoring a model would cost, from its facts alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from registry import database
from registry.errors import BadInput
from registry.queries import textsets, transforms

BYTES_PER_TOKEN = 3.1
"""UTF-8 bytes a token of SmolLM2's tokenizer on the whole starter set (3.7 on its English part)."""

TEMPLATE_TOKENS = 30
EFFICIENCY = 0.4
"""Share of the machine's best matrix product that scoring reaches: SmolLM2-135M on the starter set took 170 s on two
cores where the whole of it would have taken 66 s."""

PROCESS_BYTES = 250_000_000
"""Python with torch and transformers, before any model."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plan:
    model: str
    texts: int
    transforms: tuple[str, ...]
    tokens: int
    """Tokens through the model, all transforms together."""
    seconds: float
    memory_bytes: int
    """Weights in the chosen dtype, activations and logits of one batch."""
    download_bytes: int
    """Weight files; 0 for what lies on this disk already."""
    device: str
    dtype: str

    def as_row(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "texts": self.texts,
            "transforms": ",".join(self.transforms),
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "memory_gb": round(self.memory_bytes / 1e9, 2),
            "download_gb": round(self.download_bytes / 1e9, 2),
            "device": self.device,
            "dtype": self.dtype,
        }


def plan(reference: str, text_set: str, transform_names: list[str], *, device: str, dtype: str) -> Plan:
    """Estimates, good to a factor of about two.  Nothing is downloaded but a model's facts.

    Raises what registering the model would raise, and BadInput where its size is unknown.
    """
    from tasks import registration
    from tasks.devices import chosen_device

    device = chosen_device(device)
    facts = registration.facts_of(reference)
    if not facts.parameters:
        raise BadInput(f"the size of {reference} is not known", hint="register it first: modelkin model add")
    with database.session() as session:
        chosen = textsets.get(session, text_set)
        textsets.require_text(chosen)
        texts = textsets.texts(session, chosen.id)
        pipelines = [transforms.get(session, name) for name in transform_names]
    tokens = 0.0
    for one in pipelines:
        for text in texts:
            prompt, response = text.pair
            edited = one.pipeline.apply(prompt)
            size = len(f"{edited.system or ''}{edited.user}{response}".encode())
            tokens += size / BYTES_PER_TOKEN + TEMPLATE_TOKENS
    seconds = 2 * facts.parameters * tokens / (EFFICIENCY * _measured_flops(device, dtype))
    logits = 1024 * (facts.vocabulary or 50_000) * 4
    return Plan(
        model=reference,
        texts=len(texts),
        transforms=tuple(transform_names),
        tokens=round(tokens),
        seconds=seconds,
        memory_bytes=int(PROCESS_BYTES + facts.parameters * _ITEM_BYTES[dtype] * 1.1 + 3 * logits),
        download_bytes=facts.download_bytes,
        device=device,
        dtype=dtype,
    )


def _measured_flops(device: str, dtype: str) -> float:
    """The best of a few 1024³ products on this machine, now: operations a second."""
    import torch

    left = torch.randn(1024, 1024, device=device, dtype=getattr(torch, dtype))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        (left @ left).sum().item()
        best = min(best, time.perf_counter() - started)
    return 2 * 1024**3 / best
