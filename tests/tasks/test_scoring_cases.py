"""Failure cases of scoring, by their numbers in docs/failure-cases.md."""

from __future__ import annotations

import functools
import gc
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig

from demo.population import architectures, corpus
from registry.errors import BadInput, Refused
from registry.methods import log_likelihood
from registry.statuses import FIRST_WITHOUT_VALUE, Status
from registry.transforms import BUILT_IN
from tasks import loading, registration
from tasks.rendering import Renderer, Span
from tasks.scoring import score_one_at_a_time, score_spans
from tests.tasks.test_rendering import CHATML, tokenizer
from tests.tiny_models import edit_json, save_llama

Stored = Callable[[Any], Any]
VOCABULARY = 300
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def sharp(model: torch.nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu") -> SimpleNamespace:
    """Random weights, enlarged: near-uniform models hide padding and masking faults."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model = model.to(device=device, dtype=dtype).eval()
    return SimpleNamespace(model=model, device=torch.device(device), vocabulary=model.config.vocab_size)


def small(config: type, **changes: Any) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    return config(**shape | changes)


def model_of(config: Any, attention: str = "sdpa", seed: int = 0) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]


def text_of(context: int, response: int, seed: int = 0) -> Span:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, context + response).tolist()
    return Span(ids[:context], ids[context:], Status.OK, "")


MIXED = [text_of(*lengths, seed=n) for n, lengths in enumerate([(9, 5), (1, 30), (40, 8), (3, 1), (20, 20)])]


def by_hand(model: Any, span: Span) -> float:
    """One text, all logits, float64 from there on."""
    ids = torch.tensor([span.context_ids + span.response_ids], device=model.device)
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0].double(), -1)
    first = len(span.context_ids)
    return sum(table[at - 1, ids[0, at]].item() for at in range(first, ids.shape[1]))


def close(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    return bool((np.abs(found - expected) <= np.maximum(2e-3, 1e-5 * np.abs(expected))).all())


# B01
def test_an_overflow_is_no_value_and_never_the_best_one() -> None:
    model = model_of(small(LlamaConfig))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(3e3)
            layer.mlp.down_proj.weight.mul_(2e3)
    wide = SimpleNamespace(model=model.eval(), device=torch.device("cpu"), vocabulary=VOCABULARY)
    assert (score_spans(wide, MIXED).statuses == Status.OK).all()
    wide.model.to(torch.float16)
    wide.split = None
    scores = score_spans(wide, MIXED)
    assert (scores.statuses == Status.NON_FINITE).all()
    assert np.isnan(scores.log_likelihoods).all(), "a sum that passes NaN over is 0: the best log-likelihood there is"


# B02, B03
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_padding_is_on_the_right_and_moves_nothing(name: str) -> None:
    torch.manual_seed(1)
    loaded = sharp(architectures.untrained(name))
    fed: list[tuple[torch.Tensor, Any]] = []
    score_spans(loaded, MIXED[:1])  # its halves are tried, once
    body = loaded.model.base_model
    forward = body.forward

    @functools.wraps(forward)
    def seen(input_ids: Any = None, **options: Any) -> Any:
        fed.append((input_ids, options.get("position_ids")))
        return forward(input_ids=input_ids, **options)

    body.forward = seen
    scores = score_spans(loaded, MIXED, batch_tokens=5 * 60)
    body.forward = forward
    assert any(len(ids) > 1 for ids, _ in fed), "nothing was padded"
    starts = {tuple(one.context_ids[:1]) for one in MIXED}
    assert all(tuple(row[:1].tolist()) in starts for ids, _ in fed for row in ids)
    assert close(scores.log_likelihoods, [by_hand(loaded.model, one) for one in MIXED])
    # What is refuted here: the same rows padded on the left, without a mask.
    left = [Span([0] * 9 + one.context_ids, one.response_ids, one.status, "") for one in MIXED]
    assert not close([by_hand(loaded.model, one) for one in left], scores.log_likelihoods)


# B05
def test_an_end_token_inside_a_text_is_a_token_like_any_other() -> None:
    config = small(LlamaConfig, pad_token_id=0, eos_token_id=0)
    loaded = sharp(model_of(config))
    some = [Span([0, 5, 0, 9], [7, 0, 0, 3, 0], Status.OK, ""), Span([1], [0] * 20, Status.OK, ""), MIXED[2]]
    assert close(score_spans(loaded, some).log_likelihoods, [by_hand(loaded.model, one) for one in some])


# B06
def test_half_precision_is_left_before_the_softmax_and_the_sum() -> None:
    loaded = sharp(model_of(small(LlamaConfig, max_position_embeddings=512)), torch.bfloat16)
    long = text_of(5, 400)
    ids = torch.tensor([long.context_ids + long.response_ids])
    with torch.no_grad():
        hidden = loaded.model.model(ids[:, :-1]).last_hidden_state[0, 4:]
        logits = hidden.double() @ loaded.model.lm_head.weight.double().T
        rough = torch.log_softmax(loaded.model(ids).logits[0, 4:-1], -1).gather(1, ids[0, 5:, None])
    exact = torch.log_softmax(logits, -1).gather(1, ids[0, 5:, None]).sum().item()
    assert score_spans(loaded, [long]).log_likelihoods[0] == pytest.approx(exact, abs=2e-2)
    assert abs(rough.sum(dtype=torch.bfloat16).item() - exact) > 1, "a sum in bfloat16 is off by more than a nat"


# B07
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_copies_of_one_text_in_bfloat16_agree_within_rounding(name: str, device: str) -> None:
    torch.manual_seed(0)
    loaded = sharp(architectures.untrained(name), torch.bfloat16, device)
    one = text_of(20, 24)
    length = len(one.context_ids) + len(one.response_ids)
    alone = score_one_at_a_time(loaded, [one]).log_likelihoods[0]
    limit = 32 * torch.finfo(torch.bfloat16).eps / 2 * math.sqrt(24)
    for copies in range(1, 33):
        values = score_spans(loaded, [one] * copies, batch_tokens=copies * length).log_likelihoods
        again = score_spans(loaded, [one] * copies, batch_tokens=copies * length).log_likelihoods
        assert values.tobytes() == again.tobytes()
        # One at a time the head runs in bfloat16, in batches in float32.
        assert np.ptp(values) <= limit
        assert np.abs(values - alone).max() <= 4 * limit


# B09
def test_memory_that_runs_out_costs_time_and_no_text() -> None:
    loaded = sharp(model_of(small(LlamaConfig)))
    expected = score_one_at_a_time(loaded, MIXED).log_likelihoods
    body = loaded.model.model
    forward, sizes = body.forward, []

    @functools.wraps(forward)
    def narrow(input_ids: Any = None, **options: Any) -> Any:
        sizes.append(input_ids.numel())
        if input_ids.numel() > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(input_ids=input_ids, **options)

    body.forward = narrow
    scores = score_spans(loaded, MIXED, batch_tokens=1000)
    assert max(sizes) > 60
    assert (scores.statuses == Status.OK).all()
    assert close(scores.log_likelihoods, expected)


# B23
def test_an_id_without_a_row_is_refused_before_the_model_sees_it() -> None:
    loaded = sharp(model_of(small(LlamaConfig)))
    loaded.model.forward = lambda *_, **__: pytest.fail("on a card this is a device-side assert")
    loaded.model.model.forward = loaded.model.forward
    with pytest.raises(Refused) as caught:
        score_spans(loaded, [Span([1], [VOCABULARY + 3], Status.OK, "")])
    assert caught.value.reason == "bad_tokenizer"


# B25
def test_what_is_too_long_under_one_transform_is_left_out_of_both() -> None:
    """Nothing is cut; a shift compares the texts that carry a value under both transforms."""
    made = Renderer(tokenizer(CHATML), "chat", 200, VOCABULARY * 2)
    names = ("base", "cot", "repeat", "repeat+cot")
    pipelines = {name: BUILT_IN[name] for name in names}
    texts = [("Hello world " * words, "The answer is here.") for words in (1, 3, 60, 5, 120)]
    loaded = sharp(model_of(small(LlamaConfig, vocab_size=VOCABULARY * 2, max_position_embeddings=200)))
    scores = {}
    for name, pipeline in pipelines.items():
        spans = []
        for prompt, response in texts:
            edited = pipeline.apply(prompt)
            spans.append(made.span(edited.system, edited.user, response))
        for span in spans:
            assert (span.status == Status.TOO_LONG) == (not span.response_ids)
            if span.response_ids:
                assert tokenizer().decode(span.response_ids) == "The answer is here."
                assert span.context_ids[0] == spans[0].context_ids[0], "nothing is cut off the front"
        scores[name] = score_spans(loaded, spans)
    valid = {name: one.statuses < FIRST_WITHOUT_VALUE for name, one in scores.items()}
    assert valid["base"].tolist() == [True, True, True, True, False]
    assert valid["repeat"].tolist() == [True, True, False, True, False]
    common = valid["base"] & valid["repeat"]
    shift = log_likelihood.differences(scores["repeat"].log_likelihoods, scores["base"].log_likelihoods, common)
    assert (len(shift), bool(np.isfinite(shift).all())) == (3, True)


# B26
def test_a_sliding_window_is_seen_by_every_way_to_compute_attention() -> None:
    spans = [text_of(20, 20, seed=n) for n in range(3)] + [text_of(2, 6)]
    eager, sdpa = (sharp(model_of(small(MistralConfig, sliding_window=8), way)) for way in ("eager", "sdpa"))
    assert (eager.model.config._attn_implementation, sdpa.model.config._attn_implementation) == ("eager", "sdpa")
    expected = [by_hand(eager.model, one) for one in spans]
    for loaded in (eager, sdpa):
        for batch_tokens in (1, 200):
            assert close(score_spans(loaded, spans, batch_tokens=batch_tokens).log_likelihoods, expected)
            assert close(score_spans(loaded, spans, path="token-tree").log_likelihoods, expected)
    # The window is there: without it, and with one that is off by one, the values are others.
    for window in (None, 9):
        other = sharp(model_of(small(MistralConfig, sliding_window=window)))
        assert np.abs(score_spans(other, spans[:3]).log_likelihoods - expected[:3]).min() > 0.05


# B27
def test_capped_scores_are_computed_where_sdpa_was_forced(tmp_path: Path, stored: Stored) -> None:
    from tests.tiny_models import save_tokenizer

    folder = tmp_path / "gemma"
    size = save_tokenizer(folder)
    config = small(Gemma2Config, vocab_size=size, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=1.0)
    sharp(model_of(config, "eager")).model.save_pretrained(folder)
    row = stored(registration.candidate(str(folder)))
    forced, chosen = (loading.load(row, device="cpu", attention=way) for way in ("sdpa", None))
    assert (forced.attention, chosen.attention) == ("eager", "eager")
    assert forced.load_report["attention_fallback"] == "sdpa → eager"
    spans = [Span([1, 7, 9, 30, 31], [5, 8, 13, 21], Status.OK, "")]
    expected = by_hand(chosen.model, spans[0])
    assert close(score_spans(forced, spans).log_likelihoods, [expected])
    chosen.model.config.attn_logit_softcapping = None
    for layer in chosen.model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert abs(by_hand(chosen.model, spans[0]) - expected) > 0.05, "the cap does nothing here"


# B29
def test_every_token_of_a_response_counts_and_none_of_nothing() -> None:
    loaded = sharp(model_of(small(LlamaConfig)))
    first = score_spans(loaded, [Span([1], [5], Status.OK, "")])
    assert first.log_likelihoods[0] == pytest.approx(by_hand(loaded.model, Span([1], [5], Status.OK, "")), abs=2e-3)
    for empty in (Span([], [5], Status.OK, ""), Span([1], [], Status.OK, "")):
        with pytest.raises(BadInput, match="tokens"):
            score_spans(loaded, [empty])
    for bos in ("<s>", None):
        made = Renderer(tokenizer(None, bos=bos), "plain", None, 10_000)
        span = made.span(None, "", "The answer is here.")
        assert len(span.context_ids) == 1, "without a token before it the first one would not be scored"
        assert span.response_ids == tokenizer()("The answer is here.", add_special_tokens=False)["input_ids"]


# B12, B11
def test_code_of_a_repo_that_draws_its_weights_anew_is_seen(
    population_member: Any, tmp_path: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No key is missing, no error is raised: only that it predicts no better than chance tells."""
    import random
    import shutil

    # Of what this little model has read; of English at large it knows nothing.
    monkeypatch.setattr(loading, "PROBE", corpus.story(random.Random(5)).response)
    folder = Path(shutil.copytree(population_member("llama-base").path, tmp_path / "own"))
    trained = loading.load(stored(registration.candidate(str(folder))), device="cpu")
    assert trained.load_report["sanity"]["plausible"] is True
    (folder / "modeling.py").write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_thing'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, *arguments, **options):\n"
        "        model, info = super().from_pretrained(*arguments, **options)\n"
        "        for weight in model.parameters():\n"
        "            torch.nn.init.normal_(weight.data, std=0.5)\n"
        "        return model, info\n"
    )
    auto_map = {"AutoConfig": "modeling.OwnConfig", "AutoModelForCausalLM": "modeling.OwnForCausalLM"}
    edit_json(folder / "config.json", model_type="own_thing", architectures=["OwnForCausalLM"], auto_map=auto_map)
    with pytest.raises(Refused) as caught:
        registration.candidate(str(folder))
    assert caught.value.reason == "remote_code"
    row = stored(registration.candidate(str(folder), trust_remote_code=True))
    assert loading.load(row, device="cpu").load_report["sanity"]["plausible"] is False


# B30
def test_twenty_models_after_one_another_leave_nothing_behind(tmp_path: Path, stored: Stored) -> None:
    folder = save_llama(tmp_path / "m", hidden_size=512, intermediate_size=2048, num_hidden_layers=2)
    row = stored(registration.candidate(str(folder)))
    sizes = []
    for _ in range(20):
        loaded = loading.load(row, device="cpu", dtype="bfloat16")  # another dtype: a copy, not a mapped file
        span = Renderer(loaded.tokenizer, "chat", loaded.context_length, loaded.vocabulary).span(None, "the cat", "sat")
        assert math.isfinite(score_spans(loaded, [span]).log_likelihoods[0])
        weights = sum(one.numel() * one.element_size() for one in loaded.model.parameters())
        del loaded
        gc.collect()
        sizes.append(int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * resource.getpagesize())
    assert weights > 15e6
    assert sizes[-1] - sizes[4] < 2 * weights, "fifteen more models, not one of them kept"
