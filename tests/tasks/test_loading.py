"""Loading: what is missing, foreign or changed is refused; nothing random is ever scored."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.errors import NotFound, Refused
from registry.settings import settings
from tasks import facts, loading, registration
from tests.tiny_models import edit_json, save_llama, save_tokenizer

Stored = Callable[[Any], Any]

# peft 0.21 still reads an attribute that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def load(stored: Stored, folder: Path, **options: Any) -> loading.LoadedModel:
    return loading.load(stored(registration.candidate(str(folder))), device="cpu", **options)


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def reason_of(stored: Stored, folder: Path) -> str:
    with pytest.raises(Refused) as caught:
        load(stored, folder)
    assert caught.value.hint
    return caught.value.reason


def test_a_whole_model(tiny_llama: Path, stored: Stored) -> None:
    loaded = load(stored, tiny_llama)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.dtype, loaded.device_class, loaded.device.type) == ("float32", "cpu", "cpu")
    assert (loaded.context_length, loaded.vocabulary) == (128, len(loaded.tokenizer))
    assert loaded.attention in ("sdpa", "eager")
    assert loaded.load_report["sanity"]["uniform"] == pytest.approx(-math.log(loaded.vocabulary))


# B10
def test_a_missing_tensor(tiny_llama: Path, stored: Stored) -> None:
    edit_weights(tiny_llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(Refused, match=r"1 tensors missing .*mlp\.up_proj") as caught:
        load(stored, tiny_llama)
    assert caught.value.reason == "bad_weights"


# B11
def test_a_missing_head_that_is_not_tied(tiny_llama: Path, stored: Stored) -> None:
    edit_weights(tiny_llama, lambda tensors: tensors.pop("lm_head.weight"))
    assert reason_of(stored, tiny_llama) == "bad_weights"
    # The same files say so themselves: then the head is the embedding.
    edit_json(tiny_llama / "config.json", tie_word_embeddings=True)
    first, second = load(stored, tiny_llama), load(stored, tiny_llama)
    head = first.model.get_output_embeddings().weight
    assert head.equal(first.model.get_input_embeddings().weight)
    assert head.equal(second.model.get_output_embeddings().weight)


# B10
def test_a_tensor_of_another_shape(tiny_llama: Path, stored: Stored) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    edit_weights(tiny_llama, cut)
    with pytest.raises(Refused, match=r"model\.norm\.weight is 31 in the files and 32 by config\.json") as caught:
        load(stored, tiny_llama)
    assert caught.value.reason == "bad_weights"
    assert "ignore_mismatched_sizes" not in f"{caught.value.message} {caught.value.hint}"


# B10
def test_a_tensor_that_nobody_asked_for(tiny_llama: Path, stored: Stored) -> None:
    def add(name: str) -> None:
        edit_weights(tiny_llama, lambda tensors: tensors.update({name: tensors["model.norm.weight"].clone()}))

    add("model.layers.0.self_attn.rotary_emb.inv_freq")
    load(stored, tiny_llama)
    add("model.layers.7.secret.weight")
    with pytest.raises(Refused, match=r"layers\.7\.secret") as caught:
        load(stored, tiny_llama)
    assert caught.value.reason == "bad_weights"


# B15
def test_shards(tmp_path: Path, stored: Stored) -> None:
    whole = save_llama(tmp_path / "whole")
    sharded = save_llama(tmp_path / "sharded", shard_bytes=40_000)
    assert load(stored, sharded).model.lm_head.weight.equal(load(stored, whole).model.lm_head.weight)
    known = stored(registration.candidate(str(sharded)))
    next(sharded.glob("model-00002-of-*")).unlink()
    with pytest.raises(Refused) as caught:
        loading.load(known, device="cpu")
    assert caught.value.reason == "changed"


# B16
def test_the_dtype_is_asked_for_and_stored(tmp_path: Path, stored: Stored) -> None:
    half = save_llama(tmp_path / "half", dtype="float16")
    edit_json(half / "config.json", dtype=None, torch_dtype=None)
    found = registration.candidate(str(half))
    assert found.columns["dtype"] == "float16"
    assert load(stored, half).dtype == "float32"
    loaded = load(stored, half, dtype="bfloat16")
    assert (loaded.dtype, loaded.load_report["requested_dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype_is_no_part_of_identity_but_the_files_are(tmp_path: Path, dtype: str) -> None:
    one = registration.candidate(str(save_llama(tmp_path / "one", dtype=dtype)))
    again = registration.candidate(str(save_llama(tmp_path / "another-name", dtype=dtype)))
    other = registration.candidate(str(save_llama(tmp_path / "other", dtype=dtype, seed=1)))
    assert one.identity == again.identity != other.identity
    assert one.handle == "local/one"
    assert registration.candidate(one.source, "me/mine").handle == "me/mine"


def test_a_readme_is_no_part_of_identity_and_a_template_is(tiny_llama: Path) -> None:
    before = registration.candidate(str(tiny_llama)).identity
    (tiny_llama / "README.md").write_text("---\nlicense: mit\nbase_model: org/base\n---\n# Hello\n")
    found = registration.candidate(str(tiny_llama))
    assert found.identity == before
    assert (found.columns["licence"], found.columns["base_model"]) == ("mit", "org/base")
    (tiny_llama / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert registration.candidate(str(tiny_llama)).identity != before


def test_files_that_changed_after_registration(tiny_llama: Path, stored: Stored) -> None:
    known = stored(registration.candidate(str(tiny_llama)))
    (tiny_llama / "config.json").touch()
    loading.load(known, device="cpu")
    edit_weights(tiny_llama, lambda tensors: tensors["model.norm.weight"].mul_(2))
    with pytest.raises(Refused, match="not the file that was registered") as caught:
        loading.load(known, device="cpu")
    assert caught.value.reason == "changed"
    tiny_llama.rename(tiny_llama.with_name("elsewhere"))
    with pytest.raises(NotFound, match="nothing lies"):
        loading.load(known, device="cpu")


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "added_tokens.json", "adapter_config.json", "model.safetensors"]
)
def test_files_that_were_added_after_registration(tmp_path: Path, stored: Stored, name: str) -> None:
    folder = save_llama(tmp_path / "sharded", shard_bytes=40_000)
    (folder / name).unlink(missing_ok=True)
    (folder / "pytorch_model.bin").write_bytes(b"not loaded, then and now")
    known = stored(registration.candidate(str(folder)))
    (folder / "README.md").write_text("no part of the model")
    loading.load(known, device="cpu")
    (folder / name).write_text("{}")
    with pytest.raises(Refused, match=rf"{re.escape(name)} was not there") as caught:
        loading.load(known, device="cpu")
    assert caught.value.reason == "changed"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors.index.json", b'{"weight_map": [1, 2]}', "bad_weights"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "bad_weights"),
        ("chat_template.jinja", b"{{ '\xff' }}", "bad_template"),
        ("config.json", b'{"a": "\xff"}', "unsupported_format"),
        ("config.json", b"[" * 100_000, "unsupported_format"),
        ("tokenizer_config.json", b"[]", "unsupported_format"),
    ],
)
def test_files_of_another_form(tiny_llama: Path, name: str, content: bytes, reason: str) -> None:
    (tiny_llama / name).write_bytes(content)
    with pytest.raises(Refused, match=name) as caught:
        registration.candidate(str(tiny_llama))
    assert caught.value.reason == reason
    assert caught.value.hint


@pytest.mark.parametrize("stated", ["many", -1, 0, [3], True, 2.5])
def test_a_vocabulary_that_is_no_number(tiny_llama: Path, stated: Any) -> None:
    edit_json(tiny_llama / "config.json", vocab_size=stated)
    with pytest.raises(Refused, match="vocab_size in config"):
        registration.candidate(str(tiny_llama))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": [2]},
        {"hidden_act": "no-such"},
        {"rope_parameters": {"rope_type": "no-such"}},
        {"num_attention_heads": 0},
        {"max_position_embeddings": "long"},
    ],
)
def test_a_config_that_transformers_cannot_use(tiny_llama: Path, stored: Stored, change: dict[str, Any]) -> None:
    edit_json(tiny_llama / "config.json", **change)
    known = stored(registration.candidate(str(tiny_llama)))
    with pytest.raises(Refused) as caught:
        loading.load(known, device="cpu")
    assert caught.value.reason in ("unloadable", "bad_weights")
    assert caught.value.hint
    assert "\n" not in caught.value.message


def _overwrite(path: Path, offset: int = -8) -> None:
    """In place, as large as before, with the old time of modification."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset, os.SEEK_END)
        stream.write(b"\x01\x02\x03\x04")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_restored_time_of_modification_hides_nothing(tiny_llama: Path, stored: Stored) -> None:
    known = stored(registration.candidate(str(tiny_llama)))
    _overwrite(tiny_llama / "model.safetensors")
    with pytest.raises(Refused, match="not the file that was registered") as caught:
        loading.load(known, device="cpu")
    assert caught.value.reason == "changed"


def test_weights_written_while_the_model_is_in_use(tiny_llama: Path, tmp_path: Path, stored: Stored) -> None:
    adapter = _lora(tiny_llama, tmp_path / "lora")
    models = [load(stored, tiny_llama), load(stored, adapter)]
    for loaded in models:
        loaded.still_unchanged()
    _overwrite(tiny_llama / "model.safetensors")
    for loaded in models:
        with pytest.raises(Refused, match="changed while") as caught:
            loaded.still_unchanged()
        assert caught.value.reason == "changed"
        assert caught.value.hint


# B20
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantised_without_its_package(
    tiny_llama: Path, stored: Stored, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    absent = ("gptqmodel", "awq", "bitsandbytes", "compressed_tensors")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else real(name, *a))
    edit_json(tiny_llama / "config.json", quantization_config={"quant_method": method, "bits": 4})
    found = registration.candidate(str(tiny_llama))
    assert found.columns["quantization"] == f"{method}-4bit"
    with pytest.raises(Refused) as caught:
        loading.load(stored(found), device="cpu")
    assert caught.value.reason == "missing_backend"


class _Evil:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/modelkin-pickle-ran", "w"))


# B17
def test_pickles(tiny_llama: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(tiny_llama / "model.safetensors")
    (tiny_llama / "model.safetensors").unlink()
    torch.save(tensors, tiny_llama / "pytorch_model.bin")
    monkeypatch.setenv("MODELKIN_ALLOW_PICKLE", "1")
    settings.cache_clear()
    try:
        known = stored(registration.candidate(str(tiny_llama)))
        loaded = loading.load(known, device="cpu")
        assert loaded.load_report["format"] == "pickle"
        assert loaded.model.lm_head.weight.equal(tensors["lm_head.weight"])
        monkeypatch.delenv("MODELKIN_ALLOW_PICKLE")
        settings.cache_clear()
        with pytest.raises(Refused) as caught:
            loading.load(known, device="cpu")
        assert caught.value.reason == "pickle_only"
        # Allowed pickles are still read by torch's restricted unpickler.
        monkeypatch.setenv("MODELKIN_ALLOW_PICKLE", "1")
        settings.cache_clear()
        torch.save({"lm_head.weight": _Evil()}, tiny_llama / "pytorch_model.bin", pickle_module=pickle)
        assert reason_of(stored, tiny_llama) == "bad_weights"
        assert not Path("/tmp/modelkin-pickle-ran").exists()
    finally:
        monkeypatch.undo()
        settings.cache_clear()


# B27
def test_forced_attention_falls_back_and_says_so(tmp_path: Path, stored: Stored) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = tmp_path / "gemma"
    size = save_tokenizer(folder)
    config = Gemma2Config(vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
    Gemma2ForCausalLM(config).save_pretrained(folder)
    assert load(stored, folder).attention == "eager"
    forced = load(stored, folder, attention="sdpa")
    assert forced.attention in ("eager", "sdpa")
    if forced.attention == "eager":
        assert forced.load_report["attention_fallback"] == "sdpa → eager"


# A21
def test_context_length_is_never_the_tokenizer_s(tiny_llama: Path, stored: Stored) -> None:
    edit_json(tiny_llama / "tokenizer_config.json", model_max_length=10**30)
    assert load(stored, tiny_llama).context_length == 128
    assert facts.context_length({"n_positions": 1024}) == 1024
    assert facts.context_length({"text_config": {"max_position_embeddings": 77}}) == 77
    assert facts.context_length({"seq_length": 2048, "max_position_embeddings": None}) == 2048
    assert facts.context_length({"model_type": "mamba"}) is None


def test_a_broken_tokenizer(tiny_llama: Path, stored: Stored) -> None:
    (tiny_llama / "tokenizer.json").write_text("{}")
    assert reason_of(stored, tiny_llama) == "bad_tokenizer"


# B12
def test_remote_code_needs_its_allowance_when_loading_too(tiny_llama: Path, stored: Stored) -> None:
    (tiny_llama / "modeling.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_thing'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "modeling.OwnConfig", "AutoModelForCausalLM": "modeling.OwnForCausalLM"}
    edit_json(tiny_llama / "config.json", model_type="own_thing", architectures=["OwnForCausalLM"], auto_map=auto_map)
    with pytest.raises(Refused) as caught:
        registration.candidate(str(tiny_llama))
    assert caught.value.reason == "remote_code"
    allowed = registration.candidate(str(tiny_llama), trust_remote_code=True)
    assert allowed.trust_remote_code
    row = stored(allowed)
    assert type(loading.load(row, device="cpu").model).__name__ == "OwnForCausalLM"
    import dataclasses

    with pytest.raises(Refused) as caught:
        loading.load(dataclasses.replace(row, trust_remote_code=False), device="cpu")
    assert caught.value.reason == "remote_code"
    # The code is part of what the model is.
    with (tiny_llama / "modeling.py").open("a") as stream:
        stream.write("# changed\n")
    assert registration.candidate(str(tiny_llama), trust_remote_code=True).identity != allowed.identity


def _lora(base: Path, out: Path, **config: Any) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(7)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | config
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(out)
    edit_json(out / "adapter_config.json", base_model_name_or_path=str(base))
    return out


def _logits(loaded: loading.LoadedModel) -> Any:
    import torch

    with torch.no_grad():
        return loaded.model(input_ids=torch.arange(5, 25)[None]).logits


# B19
def test_an_adapter_is_its_own_model_on_its_base(tiny_llama: Path, tmp_path: Path, stored: Stored) -> None:
    adapter = _lora(tiny_llama, tmp_path / "lora")
    found = registration.candidate(str(adapter))
    base = registration.candidate(str(tiny_llama))
    assert (found.kind, found.base.identity if found.base else None) == ("adapter", base.identity)
    assert found.columns["architecture"] == "LlamaForCausalLM"
    merged = loading.load(stored(found), device="cpu")
    apart = loading.load(stored(found), device="cpu", merge_adapter=False)
    assert (merged.load_report["adapter"]["merged"], apart.load_report["adapter"]["merged"]) == (True, False)
    assert _logits(merged).allclose(_logits(apart), atol=1e-3)
    assert not _logits(merged).allclose(_logits(loading.load(stored(base), device="cpu")), atol=1e-3)
    other = save_llama(tmp_path / "other", seed=5)
    assert registration.candidate(str(adapter), base=str(other)).identity != found.identity


# B19
def test_an_adapter_for_another_base(tiny_llama: Path, tmp_path: Path, stored: Stored) -> None:
    adapter = _lora(tiny_llama, tmp_path / "lora")
    wider = save_llama(tmp_path / "wider", hidden_size=64)
    with pytest.raises(Refused) as caught:
        loading.load(stored(registration.candidate(str(adapter), base=str(wider))), device="cpu")
    assert caught.value.reason == "bad_weights"


def test_an_adapter_without_some_of_its_tensors(tiny_llama: Path, tmp_path: Path, stored: Stored) -> None:
    from safetensors.torch import load_file, save_file

    adapter = _lora(tiny_llama, tmp_path / "lora")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(Refused, match="missing adapter keys") as caught:
        loading.load(stored(registration.candidate(str(adapter))), device="cpu")
    assert caught.value.reason == "bad_weights"


# B11
def test_sanity_tells_a_trained_model_from_a_broken_one(stored: Stored, tmp_path: Path) -> None:
    loaded = load(stored, save_llama(tmp_path / "wild"))
    assert loaded.load_report["sanity"]["plausible"] is False
    with_nan = loaded.model.lm_head.weight
    with_nan.fill_(math.nan)
    assert loading.sanity(loaded)["mean_log_p"] is None
    json.dumps(loading.sanity(loaded), allow_nan=False)


def test_a_folder_that_moved_is_the_same_model_in_its_new_place(
    tiny_llama: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from registry.queries import models

    first, _ = models.register(session, registration.candidate(str(tiny_llama)))
    moved = tiny_llama.rename(tiny_llama.with_name("moved"))
    (moved / "config.json").touch()
    again, created = models.register(session, registration.candidate(str(moved)))
    assert (created, again.id, again.handle, again.source) == (False, first.id, "local/tiny-llama", str(moved))
    monkeypatch.setattr(loading, "hash_files", lambda *_: pytest.fail("hashed again"))
    loading.load(again, device="cpu")
