"""Every refusal, on the real Hub client, before any weight is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry.errors import Refused
from registry.settings import settings
from tasks import registration
from tests.fake_hub import FakeHub, files_of
from tests.tiny_models import edit_json, save_llama

TOKENIZER = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
WEIGHTS = {"model.safetensors": b"0123456789"}


def config(**content: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps(content).encode()}


LLAMA = config(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=32)


def refused(hub: FakeHub, files: dict[str, bytes], **extra: Any) -> Refused:
    hub.add("org/m", files, **extra)
    with pytest.raises(Refused) as caught:
        registration.candidate("org/m")
    asked = hub.files_asked()
    assert not [name for name in asked if name.endswith((".safetensors", ".gguf", ".bin"))], "weights were fetched"
    assert caught.value.hint
    return caught.value


# B22
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "encoder_only"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder_only"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "encoder_only"),
        ({"model_type": "xlm-roberta"}, "encoder_only"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "encoder_only"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder_decoder"),
        ({"model_type": "t5", "architectures": ["T5Model"], "is_encoder_decoder": True}, "encoder_decoder"),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
          "num_mel_bins": 80}, "encoder_decoder"),
        ({"model_type": "clip", "architectures": ["CLIPModel"], "vision_config": {}, "text_config": {}}, "vision_only"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224}, "vision_only"),
        ({"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}},
         "vision_language"),
        # In the causal mapping too, so that an order of checks would let it through.
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {},
          "text_config": {}}, "vision_language"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "unsupported_architecture"),
        ({"model_type": "mistral", "architectures": ["MistralModel"]}, "unsupported_architecture"),
        ({"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]}, "unsupported_architecture"),
        ({"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"],
          "auto_map": {"AutoModelForCausalLM": "modeling.BrandNewForCausalLM"}}, "remote_code"),
    ],
)  # fmt: skip
def test_architectures(fake_hub: FakeHub, content: dict[str, Any], reason: str) -> None:
    assert refused(fake_hub, config(**content) | WEIGHTS | TOKENIZER).reason == reason


@pytest.mark.parametrize(
    "extra", [{"pipeline_tag": "feature-extraction"}, {"library_name": "sentence-transformers"}, {}]
)
def test_embedding_models_on_a_decoder(fake_hub: FakeHub, extra: dict[str, Any]) -> None:
    files = LLAMA | WEIGHTS | TOKENIZER | ({} if extra else {"modules.json": b"[]"})
    assert refused(fake_hub, files, **extra).reason == "encoder_only"


def test_a_decoder_bert_is_not_an_encoder(fake_hub: FakeHub) -> None:
    decoder = config(model_type="bert", architectures=["BertLMHeadModel"], is_decoder=True)
    fake_hub.add("org/m", decoder | WEIGHTS | TOKENIZER, safetensors={"parameters": {"F32": 2}, "total": 2})
    assert registration.candidate("org/m").columns["architecture"] == "BertLMHeadModel"


# B17
def test_pickles_need_an_allowance(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LLAMA | {"pytorch_model.bin": b"0"} | TOKENIZER
    assert refused(fake_hub, files).reason == "pickle_only"
    monkeypatch.setenv("MODELKIN_ALLOW_PICKLE", "1")
    settings.cache_clear()
    try:
        assert registration.candidate("org/m").facts["load"].count("pytorch_model.bin") == 1
    finally:
        monkeypatch.undo()
        settings.cache_clear()


# B18
def test_gguf_only_names_real_files(fake_hub: FakeHub) -> None:
    error = refused(fake_hub, {"m.Q4_K_M.gguf": b"0", "m.Q8_0.gguf": b"0", "README.md": b"x"})
    commit = fake_hub.repos["org/m"].refs["main"]
    assert error.reason == "gguf_only"
    assert f"org/m@{commit[:12]}:m.Q4_K_M.gguf" in str(error.hint)


def test_gguf_only_with_a_config(fake_hub: FakeHub) -> None:
    assert refused(fake_hub, LLAMA | {"m.Q4_K_M.gguf": b"0"} | TOKENIZER).reason == "gguf_only"


def test_a_gguf_file_that_is_not_there(fake_hub: FakeHub) -> None:
    fake_hub.add("org/m", {"m.Q8_0.gguf": b"0"})
    with pytest.raises(Refused, match="has no file") as caught:
        registration.candidate("org/m:m.Q2_K.gguf")
    assert "m.Q8_0.gguf" in str(caught.value.hint)


# B15
@pytest.mark.parametrize(
    "files",
    [
        LLAMA | {"model-00001-of-00002.safetensors": b"0", "model-00002-of-00002.safetensors": b"0"},
        LLAMA
        | {"model-00001-of-00002.safetensors": b"0"}
        | {
            "model.safetensors.index.json": json.dumps(
                {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
            ).encode()
        },
    ],
    ids=["no index", "a shard is not there"],
)
def test_missing_shards(fake_hub: FakeHub, files: dict[str, bytes]) -> None:
    assert refused(fake_hub, files | TOKENIZER).reason == "missing_shards"


# B18
@pytest.mark.parametrize(
    "files",
    [
        LLAMA | {"flax_model.msgpack": b"0"},
        LLAMA | {"onnx/model.onnx": b"0"},
        LLAMA | {"consolidated.safetensors": b"0"},
        LLAMA,
        WEIGHTS,
        config(model_type="llama", architectures=["LlamaForCausalLM"], quantization={"bits": 4}) | WEIGHTS,
    ],
    ids=["flax", "onnx", "consolidated", "no weights", "no config", "mlx"],
)
def test_unsupported_formats(fake_hub: FakeHub, files: dict[str, bytes]) -> None:
    assert refused(fake_hub, files | TOKENIZER).reason == "unsupported_format"


def test_no_tokenizer(fake_hub: FakeHub) -> None:
    assert refused(fake_hub, LLAMA | WEIGHTS).reason == "bad_tokenizer"


REMOTE = config(
    model_type="brand_new",
    architectures=["BrandNewForCausalLM"],
    auto_map={"AutoModelForCausalLM": "modeling.BrandNewForCausalLM"},
)


# B12
def test_remote_code_is_allowed_for_one_commit(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = fake_hub.add("org/m", REMOTE | WEIGHTS | TOKENIZER | {"modeling.py": b"x = 1"}, safetensors=None)
    allowed = registration.candidate("org/m", trust_remote_code=True)
    assert allowed.trust_remote_code
    assert "modeling.py" in allowed.facts["load"]
    monkeypatch.setenv("MODELKIN_REMOTE_CODE_ALLOWED", f"org/other@1, org/m@{repo.refs['main']}")
    settings.cache_clear()
    try:
        assert registration.candidate("org/m").trust_remote_code
        repo.commit(REMOTE | WEIGHTS | TOKENIZER | {"modeling.py": b"x = 2"})
        with pytest.raises(Refused) as caught:
            registration.candidate("org/m")
        assert caught.value.reason == "remote_code"
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_remote_code_of_another_repo_is_never_fixed_by_the_commit(fake_hub: FakeHub) -> None:
    elsewhere = json.loads(REMOTE["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "evil/code--modeling.M"}}
    fake_hub.add("org/m", config(**elsewhere) | WEIGHTS | TOKENIZER)
    with pytest.raises(Refused, match="another repo"):
        registration.candidate("org/m", trust_remote_code=True)


# B12
def test_the_native_class_is_preferred_to_the_repo_s_code(fake_hub: FakeHub) -> None:
    both = json.loads(LLAMA["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "modeling.M"}}
    fake_hub.add("org/m", config(**both) | WEIGHTS | TOKENIZER)
    assert not registration.candidate("org/m", trust_remote_code=True).trust_remote_code


def test_a_tokenizer_of_the_repo_s_own_code(fake_hub: FakeHub) -> None:
    own = {
        "tokenizer.model": b"0",
        "tokenizer_config.json": b'{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["t.Mine", null]}}',
    }
    assert refused(fake_hub, LLAMA | WEIGHTS | own).reason == "remote_code"


# B19
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "/home/author/llama"}, "adapter_without_base"),
        ({"peft_type": "LORA"}, "adapter_without_base"),
        ({"peft_type": "LORA", "base_model_name_or_path": "org/gone"}, "not_found_or_private"),
        ({"peft_type": "PROMPT_TUNING", "base_model_name_or_path": "org/base"}, "unsupported_format"),
    ],
)
def test_adapters(fake_hub: FakeHub, content: dict[str, Any], reason: str) -> None:
    files = {"adapter_config.json": json.dumps(content).encode(), "adapter_model.safetensors": b"0"}
    assert refused(fake_hub, files).reason == reason


def test_a_pickled_adapter(fake_hub: FakeHub) -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    files = {"adapter_config.json": json.dumps(content).encode(), "adapter_model.bin": b"0"}
    assert refused(fake_hub, files).reason == "pickle_only"


def test_folders_obey_the_same_rules(tiny_llama: Path, tmp_path: Path) -> None:
    (tiny_llama / "model.safetensors").rename(tiny_llama / "pytorch_model.bin")
    with pytest.raises(Refused) as caught:
        registration.candidate(str(tiny_llama))
    assert caught.value.reason == "pickle_only"
    edit_json(tiny_llama / "config.json", model_type="bert", architectures=["BertModel"])
    with pytest.raises(Refused) as caught:
        registration.candidate(str(tiny_llama))
    assert caught.value.reason == "encoder_only"
    with pytest.raises(Refused) as caught:
        registration.candidate(str(tiny_llama / "config.json"))
    assert caught.value.reason == "unsupported_format"


# B15
def test_a_stale_index_of_a_folder(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "sharded", shard_bytes=40_000)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    assert len(shards) > 1
    registration.candidate(str(folder))
    content["weight_map"]["model.extra.weight"] = shards[0]
    index.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"promises model\.extra\.weight") as caught:
        registration.candidate(str(folder))
    assert caught.value.reason == "bad_weights"


# B15
def test_a_cut_weight_file(tiny_llama: Path) -> None:
    weights = tiny_llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Refused, match="not a whole safetensors file") as caught:
        registration.candidate(str(tiny_llama))
    assert caught.value.reason == "bad_weights"


def test_what_is_whole_is_registered(fake_hub: FakeHub, tiny_llama: Path) -> None:
    fake_hub.add("org/m", files_of(tiny_llama))
    found = registration.candidate("org/m")
    assert (found.kind, found.handle, found.source) == ("hub", "org/m", "org/m")
    assert found.columns["architecture"] == "LlamaForCausalLM"
