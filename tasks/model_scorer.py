"""A loaded model with its renderer and its path: slices of a text set in, values out."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from registry.queries.jobs import Slice
from registry.queries.models import ModelInfo
from registry.queries.textsets import StoredText
from registry.transforms import Pipeline


@dataclass(frozen=True)
class Part:
    """Texts from position `start` on, under transforms by id: what one shard holds."""

    start: int
    texts: Sequence[StoredText]
    pipelines: Mapping[int, Pipeline]
    again: Sequence[int]
    """Which of the texts, counted from 0, are scored a second time in other batches, for the noise floor."""


class ModelScorer:
    """Loads the model, tries its fast path where that was not done, and scores parts.

    Raises what `tasks.loading.load`, `tasks.rendering.Renderer` and `tasks.canary.verdict` raise.
    """

    def __init__(self, model: ModelInfo, profile: str, dtype: str, device: str, batch_tokens: int | None) -> None:
        from tasks import canary, loading, rendering, scoring

        self._loaded = loading.load(model, device=device, dtype=dtype, trust_remote_code=model.trust_remote_code)
        self._renderer = rendering.Renderer(
            self._loaded.tokenizer, profile, self._loaded.context_length, self._loaded.vocabulary
        )
        verdict = canary.verdict(self._loaded, model.id, dtype)
        self._path = verdict.path
        self._batch_tokens = batch_tokens
        budget = scoring.default_budget(self._loaded)
        # The texts of one pair fill a batch in both cases where texts are long: half of one makes other batches.
        self._other_batch_tokens = max(1, (batch_tokens or budget.comfort) // 2)
        self._run = _describe(self._loaded, self._renderer) | {
            "batch_tokens": batch_tokens or [budget.comfort, budget.limit],
            "canary": {"worst_nats": verdict.worst_nats, "reason": verdict.reason},
        }

    @contextmanager
    def scored(self, parts: Sequence[Part]) -> Iterator[Iterator[list[Slice]]]:
        """The slices of each part in turn.  While one part is in the model, the next is rendered and tokenised.

        Rendering stays in the caller's thread, for only there can a template that hangs be interrupted.  Whoever leaves
        the block early waits for no more than the batch at work.
        """
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            try:
                yield self._one_ahead(pool, parts, stop)
            finally:
                stop.set()

    def _one_ahead(
        self, pool: ThreadPoolExecutor, parts: Sequence[Part], stop: threading.Event
    ) -> Iterator[list[Slice]]:
        running: Future[list[Slice]] | None = None
        for part in parts:
            spans = self._render(part)
            if running is not None:
                yield running.result()
            running = pool.submit(self._slices, part, spans, stop)
        if running is not None:
            yield running.result()

    def _render(self, part: Part) -> list[Any]:
        """Spans, transform by transform."""
        spans = []
        for pipeline in part.pipelines.values():
            for text in part.texts:
                prompt, response = text.pair
                edited = pipeline.apply(prompt)
                spans.append(self._renderer.span(edited.system, edited.user, response))
        return spans

    def _slices(self, part: Part, spans: list[Any], stop: threading.Event) -> list[Slice]:
        """One slice a transform; all transforms of a text go together, since they share most of their tokens."""
        from tasks import scoring

        def go_on(_texts: int, _tokens: int) -> None:
            if stop.is_set():
                raise _LeftEarly

        started = time.monotonic()
        n = len(part.texts)
        scores = scoring.score_spans(
            self._loaded, spans, path=self._path, batch_tokens=self._batch_tokens, progress=go_on
        )
        chosen = [row * n + at for row in range(len(part.pipelines)) for at in part.again]
        again = scoring.score_spans(
            self._loaded,
            [spans[one] for one in chosen],
            path=self._path,
            batch_tokens=self._other_batch_tokens,
            progress=go_on,
        )
        rescored = dict(zip(chosen, again.log_likelihoods.astype("<f4").tolist(), strict=True))
        # Weights are mapped from the disk: whoever writes to the file has changed the model under these numbers.
        self._loaded.still_unchanged()
        notes = {
            "seconds": time.monotonic() - started,
            "peak_memory_bytes": _peak_memory(self._loaded.device_class),
            "path": scores.path,
            "tokens": scores.tokens,
            "run": self._run,
        }
        return [
            self._slice(transform_id, part, slice(row * n, (row + 1) * n), scores, rescored, notes)
            for row, transform_id in enumerate(part.pipelines)
        ]

    def _slice(
        self,
        transform_id: int,
        part: Part,
        window: slice,
        scores: Any,
        rescored: dict[int, float],
        notes: dict[str, Any],
    ) -> Slice:
        def position(at: int) -> str:
            return str(part.start + at - window.start)

        mine = range(window.start, window.stop)
        return Slice(
            transform_id,
            part.start,
            part.start + len(part.texts),
            scores.log_likelihoods[window].astype("<f4"),
            scores.statuses[window],
            scores.token_counts[window],
            {
                **notes,
                "reasons": {position(at): why for at, why in sorted(scores.reasons.items()) if at in mine},
                "rescored": {
                    position(at): value for at, value in rescored.items() if at in mine and np.isfinite(value)
                },
            },
        )


class _LeftEarly(Exception):
    """Nobody waits for the rest."""


def _describe(loaded: Any, renderer: Any) -> dict[str, Any]:
    import platform

    import tokenizers
    import torch
    import transformers

    return {
        "device_class": loaded.device_class,
        "attention": loaded.attention,
        "template_hash": renderer.template_hash,
        "tokenizer_hash": renderer.tokenizer_hash,
        "rendering": renderer.describe(),
        "loading": loaded.load_report,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def _peak_memory(device_class: str) -> int:
    """Bytes: the card's peak on CUDA, else this process's peak resident size."""
    if device_class.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
