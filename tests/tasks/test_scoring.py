"""Scores against a loop written out here: one text at a time, all logits, float32."""

from __future__ import annotations

import functools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from demo.population import architectures, tokenizer
from registry.errors import BadInput, Refused, Unavailable
from registry.statuses import Status
from tasks import scoring, split_model
from tasks.rendering import Span
from tasks.scoring import ONE_AT_A_TIME, PADDED, PADDED_WHOLE, TREE, score_one_at_a_time, score_spans

V = tokenizer.VOCABULARY


def load(architecture: str, factor: float = 12.0, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Random weights, enlarged: near-uniform models hide padding and masking faults."""
    torch.manual_seed(0)
    model = architectures.untrained(architecture)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "conv" not in name and "A_log" not in name:
                weight.mul_(factor)
    return SimpleNamespace(model=model.to(dtype).eval(), device=torch.device("cpu"), vocabulary=V)


def spans(lengths: list[tuple[int, int]], seed: int = 0) -> list[Span]:
    draw = random.Random(seed)
    return [Span(*([draw.randrange(V) for _ in range(n)] for n in pair), Status.OK, "") for pair in lengths]


MIXED = spans([(20, 14), (1, 9), (55, 30), (3, 1), (8, 70), (1, 1), (40, 40), (90, 5), (12, 12), (2, 33)])


def plain_loop(model: torch.nn.Module, some: list[Span]) -> np.ndarray:
    values = []
    for span in some:
        ids = torch.tensor([span.context_ids + span.response_ids])
        with torch.no_grad():
            table = torch.log_softmax(model(ids).logits[0].float(), -1)
        total = 0.0
        for at in range(len(span.context_ids), ids.shape[1]):
            total += table[at - 1, ids[0, at]].double().item()
        values.append(total)
    return np.array(values)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    assert (np.abs(found - expected) <= np.maximum(2e-3, 1e-5 * np.abs(expected))).all(), found - expected


@functools.lru_cache
def case(architecture: str) -> tuple[SimpleNamespace, np.ndarray]:
    loaded = load(architecture)
    return loaded, plain_loop(loaded.model, MIXED)


@pytest.mark.parametrize("architecture", architectures.NAMES)
@pytest.mark.parametrize("budget", [1, 100, 200, 1000, 64 * 95])
@pytest.mark.parametrize("path", [TREE, PADDED, PADDED_WHOLE])
def test_any_batch_gives_the_one_at_a_time_value(architecture: str, budget: int, path: str) -> None:
    if (architecture, path) == ("mamba", TREE):
        pytest.skip("a recurrent state runs along the row, whatever the tree: the canary's business")
    loaded, expected = case(architecture)
    scores = score_spans(loaded, MIXED, path=path, batch_tokens=budget)
    assert scores.path == path
    assert_close(scores.log_likelihoods, expected)
    assert (scores.statuses == Status.OK).all()
    assert scores.token_counts.tolist() == [len(span.response_ids) for span in MIXED]


@pytest.mark.parametrize("architecture", architectures.NAMES)
def test_our_reference_is_the_plain_loop(architecture: str) -> None:
    loaded, expected = case(architecture)
    assert_close(score_one_at_a_time(loaded, MIXED).log_likelihoods, expected)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64])
def test_copies_of_one_text_in_a_batch_get_its_value(rows: int) -> None:
    loaded, expected = case("llama")
    scores = score_spans(loaded, [MIXED[0]] * rows, batch_tokens=rows * 33)
    assert_close(scores.log_likelihoods, np.full(rows, expected[0]))


@pytest.mark.parametrize("architecture", architectures.NAMES)
def test_the_random_models_would_show_a_padding_fault(architecture: str) -> None:
    """Padding on the left, unmasked, moves values far beyond the tolerance: the models above are sharp enough."""
    loaded, expected = case(architecture)
    padded = [Span([0] * 7 + span.context_ids, span.response_ids, span.status, "") for span in MIXED]
    assert np.abs(plain_loop(loaded.model, padded) - expected).max() > 0.5


def test_padding_and_end_ids_inside_a_text_are_ordinary_tokens() -> None:
    loaded = load("llama")
    loaded.model.config.pad_token_id = loaded.model.config.eos_token_id = 0
    some = [
        Span([0, 5, 0, 9], [7, 0, 0, 3, 0], Status.OK, ""),
        Span([1], [0] * 20, Status.OK, ""),
        Span([0] * 4, [0, 8], Status.OK, ""),
    ]
    assert_close(score_spans(loaded, some).log_likelihoods, plain_loop(loaded.model, some))


def test_the_first_response_token_is_scored() -> None:
    loaded = load("llama")
    (one,) = score_spans(loaded, [Span([1], [5], Status.OK, "")]).log_likelihoods
    with torch.no_grad():
        assert one == pytest.approx(
            torch.log_softmax(loaded.model(torch.tensor([[1]])).logits[0, 0], -1)[5].item(), abs=1e-4
        )


def test_spans_without_a_value_keep_their_status_and_reason() -> None:
    loaded, expected = case("llama")
    some = [
        MIXED[0],
        Span([], [], Status.TOO_LONG, "900 tokens"),
        MIXED[1],
        Span(*([3], [4]), Status.SPLIT, "straddles"),
    ]
    scores = score_spans(loaded, some)
    assert scores.statuses.tolist() == [Status.OK, Status.TOO_LONG, Status.OK, Status.SPLIT]
    assert scores.reasons == {1: "900 tokens", 3: "straddles"}
    assert math.isnan(scores.log_likelihoods[1])
    assert np.isfinite(scores.log_likelihoods[[0, 2, 3]]).all()
    assert_close(scores.log_likelihoods[[0, 2]], expected[:2])
    assert scores.path == "right-padded"


def overflowing(dtype: torch.dtype) -> SimpleNamespace:
    """Finite in float32 and bfloat16, beyond float16's range in the first MLP."""
    torch.manual_seed(0)
    model = architectures.untrained("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(3e3)
            layer.mlp.down_proj.weight.mul_(2e3)
    return SimpleNamespace(model=model.to(dtype).eval(), device=torch.device("cpu"), vocabulary=V)


def test_half_precision_overflow_is_invalid_not_a_perfect_score() -> None:
    some = MIXED[:3]
    for dtype in (torch.float32, torch.bfloat16):
        assert (score_spans(overflowing(dtype), some).statuses == Status.OK).all()
    for score in (score_spans, score_one_at_a_time):
        scores = score(overflowing(torch.float16), some)
        assert (scores.statuses == Status.NON_FINITE).all()
        assert np.isnan(scores.log_likelihoods).all()
        assert "tokens without a finite log-probability" in scores.reasons[0]


def wrap_forward(module: torch.nn.Module, around) -> None:
    """`around(forward, ids, kwargs)` stands in for the module's forward, under the same signature."""
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(input_ids=None, **kwargs):
        return around(forward, input_ids, kwargs)

    module.forward = wrapped


@pytest.mark.parametrize("path", [TREE, PADDED, PADDED_WHOLE, ONE_AT_A_TIME])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_one_bad_token_invalidates_its_text_alone(bad: float, path: str) -> None:
    loaded = load("llama")
    expected = plain_loop(loaded.model, MIXED)
    marked = MIXED[2].response_ids[4]
    assert sum(marked in span.response_ids for span in MIXED) >= 1

    def around(forward, ids, kwargs):
        output = forward(input_ids=ids, **kwargs)
        output.logits[..., marked] = bad if math.isnan(bad) or bad > 0 else output.logits[..., marked]
        if bad == float("-inf"):
            output.logits[..., marked] = bad
        return output

    hit = np.array([marked in span.response_ids for span in MIXED])
    wrap_forward(loaded.model, around)
    scores = score_spans(loaded, MIXED, path=path)
    assert (scores.statuses[hit] == Status.NON_FINITE).all()
    assert np.isnan(scores.log_likelihoods[hit]).all()
    if bad == float("-inf"):  # a token that cannot occur takes its mass away; the texts without it stay valid
        assert (scores.statuses[~hit] == Status.OK).all()
        assert (scores.log_likelihoods[~hit] >= expected[~hit] - 1e-3).all()


@pytest.mark.parametrize("path", [TREE, PADDED, PADDED_WHOLE])
def test_running_out_of_memory_once_halves_the_batch_and_changes_nothing(path: str) -> None:
    loaded, expected = load("qwen2"), case("qwen2")[1]
    seen: list[int] = []

    def around(forward, ids, kwargs):
        seen.append(ids.numel())
        if len(seen) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(ids, **kwargs)

    wrap_forward(loaded.model if path == PADDED_WHOLE else loaded.model.model, around)
    scores = score_spans(loaded, MIXED, path=path, batch_tokens=4000)
    assert_close(scores.log_likelihoods, expected)
    assert max(seen[1:]) <= seen[0] / 2 + 1


def test_a_text_whose_logits_do_not_fit_is_scored_in_pieces() -> None:
    loaded, expected = load("gemma2"), case("gemma2")[1]

    def around(forward, ids, kwargs):
        if ids.shape[0] * kwargs["logits_to_keep"] > 8:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 9 bytes")
        return forward(ids, **kwargs)

    wrap_forward(loaded.model, around)
    done: list[tuple[int, int]] = []
    scores = score_spans(loaded, MIXED, path=PADDED_WHOLE, progress=lambda *counts: done.append(counts))
    assert_close(scores.log_likelihoods, expected)
    assert done[-1][0] == len(MIXED)


@pytest.mark.parametrize("path", [TREE, PADDED, PADDED_WHOLE, ONE_AT_A_TIME])
def test_memory_for_not_even_one_token_is_an_error_not_a_value(path: str) -> None:
    loaded = load("llama")

    def around(forward, ids, kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    wrap_forward(loaded.model.model, around)
    with pytest.raises(Unavailable, match="memory does not suffice for one text"):
        score_spans(loaded, MIXED, path=path)


@pytest.mark.parametrize("path", [TREE, PADDED, PADDED_WHOLE, ONE_AT_A_TIME])
def test_another_error_of_the_model_is_not_taken_for_memory(path: str) -> None:
    loaded = load("llama")

    def around(forward, ids, kwargs):
        raise RuntimeError("CUDA error: device-side assert triggered")

    wrap_forward(loaded.model.model, around)
    with pytest.raises(RuntimeError, match="device-side assert"):
        score_spans(loaded, MIXED, path=path)
    # The attention that a tree needs does not outlive the call.
    assert loaded.model.config._attn_implementation == "sdpa"


def test_ids_beyond_the_embedding_never_reach_the_model() -> None:
    loaded = load("llama")
    called = []
    wrap_forward(loaded.model, lambda forward, ids, kwargs: called.append(1) or forward(ids, **kwargs))
    for bad in (Span([V + 3], [1], Status.OK, ""), Span([1], [V], Status.OK, ""), Span([-1], [1], Status.OK, "")):
        with pytest.raises(Refused, match="no row among the 768 embeddings") as caught:
            score_spans(loaded, [MIXED[0], bad])
        assert caught.value.reason == "bad_tokenizer"
    assert not called


def test_nothing_to_condition_on_or_to_score_is_an_error() -> None:
    loaded = load("llama")
    for span, what in ((Span([], [3], Status.OK, ""), "context"), (Span([3], [], Status.OK, ""), "response")):
        with pytest.raises(BadInput, match=f"no {what} tokens"):
            score_spans(loaded, [span])
    assert score_spans(loaded, []).log_likelihoods.shape == (0,)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_model_that_cannot_keep_back_logits_gives_the_same(accepts: bool) -> None:
    loaded, expected = load("llama"), case("llama")[1]
    forward = loaded.model.forward

    def ignores(input_ids, use_cache=False, logits_to_keep=0):
        return forward(input_ids, use_cache=use_cache)

    def lacks(input_ids, use_cache=False):
        return (forward(input_ids, use_cache=use_cache).logits,)  # a plain tuple, as older remote code returns

    loaded.model.forward = ignores if accepts else lacks
    assert_close(score_spans(loaded, MIXED, path=PADDED_WHOLE, batch_tokens=1).log_likelihoods, expected)


@pytest.mark.parametrize("path", [TREE, PADDED, PADDED_WHOLE])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_an_unmerged_adapter_is_scored_with_its_base(path: str) -> None:
    from peft import LoraConfig, get_peft_model

    loaded = load("llama")
    plain = plain_loop(loaded.model, MIXED)
    loaded.model = get_peft_model(loaded.model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    loaded.model.eval()
    scores = score_spans(loaded, MIXED, path=path, batch_tokens=200)
    expected = plain_loop(loaded.model, MIXED)
    assert_close(scores.log_likelihoods, expected)
    assert np.abs(expected - plain).max() > 0.1


@pytest.mark.parametrize("path", [TREE, PADDED])
def test_only_the_logits_that_are_needed_are_made(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head sees the positions of responses alone, a chunk at a time."""
    loaded, expected = load("llama"), case("llama")[1]
    chunks: list[int] = []

    def around(forward, ids, kwargs):
        output = forward(input_ids=ids, **kwargs)
        chunks.append(output.logits.shape[1])
        return output

    wrap_forward(loaded.model, around)
    monkeypatch.setattr(split_model, "CHUNK_FLOATS", 5 * V)
    assert_close(score_spans(loaded, MIXED, path=path).log_likelihoods, expected)
    assert sum(chunks) == sum(len(span.response_ids) for span in MIXED)
    assert max(chunks) == 5


def test_a_model_that_keeps_back_logits_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, expected = load("llama"), case("llama")[1]
    kept, chunks = [], []
    wrap_forward(
        loaded.model,
        lambda forward, ids, kwargs: kept.append((ids.shape[1], kwargs["logits_to_keep"])) or forward(ids, **kwargs),
    )
    real = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, **k: chunks.append(x.numel()) or real(x, **k))
    monkeypatch.setattr(scoring, "CHUNK_FLOATS", 5 * V)
    assert_close(score_spans(loaded, MIXED, path=PADDED_WHOLE, batch_tokens=1).log_likelihoods, expected)
    assert sorted(kept) == sorted(
        (len(span.context_ids) + len(span.response_ids) - 1, len(span.response_ids)) for span in MIXED
    )
    assert max(chunks) == 5 * V


def test_half_precision_logits_are_normalised_and_summed_in_wider_floats() -> None:
    loaded = load("llama", dtype=torch.bfloat16)
    some = spans([(5, 400)])
    with torch.no_grad():
        ids = torch.tensor([some[0].context_ids + some[0].response_ids])
        logits = loaded.model(ids).logits[0, 4:-1]
    expected = torch.log_softmax(logits.double(), -1).gather(1, ids[0, 5:, None]).sum().item()
    rough = torch.log_softmax(logits, -1).gather(1, ids[0, 5:, None]).sum().item()
    for path in (PADDED_WHOLE, ONE_AT_A_TIME):
        assert score_spans(loaded, some, path=path).log_likelihoods[0] == pytest.approx(expected, abs=2e-3)
    assert abs(rough - expected) > 0.1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("path", [TREE, PADDED])
def test_the_head_runs_in_float32_whatever_the_dtype_of_the_body(path: str, tied: bool) -> None:
    loaded = load("llama", dtype=torch.bfloat16)
    model = loaded.model
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    some = spans([(5, 100)])
    with torch.no_grad():
        ids = torch.tensor([some[0].context_ids + some[0].response_ids])
        hidden = model.model(ids[:, :-1]).last_hidden_state[0, 4:]
        logits = hidden.double() @ model.lm_head.weight.double().T
        narrow = model(ids[:, :-1]).logits[0, 4:].double()
    expected, rounded = (
        torch.log_softmax(one, -1).gather(1, ids[0, 5:, None]).sum().item() for one in (logits, narrow)
    )
    # The tree's attention may round the body otherwise: as much as its own noise, and less than a narrow head costs.
    assert score_spans(loaded, some, path=path).log_likelihoods[0] == pytest.approx(expected, abs=2e-3)
    assert abs(rounded - expected) > 0.01
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_the_same_call_gives_the_same_bytes_whatever_came_before() -> None:
    loaded, _ = case("mixtral")
    first = score_spans(loaded, MIXED, batch_tokens=300)
    score_spans(loaded, MIXED[3:], batch_tokens=64)
    second = score_spans(loaded, MIXED, batch_tokens=300)
    assert first.log_likelihoods.tobytes() == second.log_likelihoods.tobytes()


def test_values_stay_with_their_spans_in_any_order() -> None:
    loaded, expected = case("llama")
    order = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    scores = score_spans(loaded, [MIXED[at] for at in order], batch_tokens=150)
    assert_close(scores.log_likelihoods, expected[order])


def test_progress_counts_texts_and_tokens_to_the_end() -> None:
    loaded, _ = case("llama")
    seen: list[tuple[int, int]] = []
    score_spans(loaded, MIXED, batch_tokens=150, progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1] == (len(MIXED), sum(len(s.context_ids) + len(s.response_ids) - 1 for s in MIXED))


def test_small_models_get_wide_batches_and_large_ones_narrow() -> None:
    loaded, _ = case("llama")
    assert scoring.default_budget(loaded).comfort == 4096
    large = SimpleNamespace(parameters=lambda: [torch.empty(10**9, device="meta")])
    budget = scoring.default_budget(SimpleNamespace(model=large, device=torch.device("cpu")))
    assert (budget.comfort, budget.limit) == (512, 4096)


def test_an_unknown_path_is_an_error() -> None:
    loaded, _ = case("llama")
    with pytest.raises(BadInput, match="no path 'fastest'"):
        score_spans(loaded, MIXED, path="fastest")
