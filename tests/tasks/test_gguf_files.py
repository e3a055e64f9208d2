"""GGUF: facts from the header alone, and one conversion that a kill cannot spoil."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.errors import NoSpace, Refused
from registry.identity import hash_files
from tasks import gguf_files, loading, registration

Stored = Callable[[Any], Any]
REPOSITORY = Path(__file__).parents[2]


def write_gguf(path: Path, *, architecture: str = "llama", seed: int = 0) -> Path:
    """A two-layer model with a byte-level tokenizer, matrices in Q8_0."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(seed)
    tokens = ["<s>", "</s>", *_byte_letters(), "th", "the"]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("Tiny")
    writer.add_license("mit")
    writer.add_context_length(96)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), 32)
    for layer in range(2):
        for name, *shape in (
            ("attn_norm", 32), ("attn_q", 32, 32), ("attn_k", 16, 32), ("attn_v", 16, 32), ("attn_output", 32, 32),
            ("ffn_norm", 32), ("ffn_gate", 64, 32), ("ffn_up", 64, 32), ("ffn_down", 32, 64),
        ):  # fmt: skip
            add(f"blk.{layer}.{name}.weight", *shape)
    add("output_norm.weight", 32)
    add("output.weight", len(tokens), 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_letters() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


def test_facts_of_the_header(gguf_path: Path) -> None:
    found = registration.candidate(str(gguf_path))
    assert (found.kind, found.handle) == ("gguf", "local/tiny.Q8_0")
    columns = found.columns
    assert (columns["architecture"], columns["quantization"]) == ("LlamaForCausalLM", "Q8_0")
    assert (columns["context_length"], columns["vocabulary"], columns["licence"]) == (96, 260, "mit")
    assert columns["parameters"] == 2 * 260 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    assert columns["template_hash"]


def test_a_copy_is_the_same_model_and_one_changed_byte_another(gguf_path: Path, tmp_path: Path) -> None:
    found = registration.candidate(str(gguf_path))
    copy = tmp_path / "renamed.gguf"
    data = bytearray(gguf_path.read_bytes())
    copy.write_bytes(data)
    assert registration.candidate(str(copy)).identity == found.identity
    data[-1] ^= 1
    copy.write_bytes(data)
    assert registration.candidate(str(copy)).identity != found.identity


def test_the_converted_model_is_the_one_transformers_reads(gguf_path: Path, stored: Stored) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = loading.load(stored(registration.candidate(str(gguf_path))), device="cpu")
    direct = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert loaded.model(input_ids=ids).logits.equal(direct(input_ids=ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    text = "the thing, ünïcode"
    assert loaded.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    assert (loaded.context_length, loaded.vocabulary) == (96, 260)


def test_it_is_converted_once(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hash_files(gguf_path.parent, [gguf_path.name])[gguf_path.name]
    first = gguf_files.converted(gguf_path, digest, tmp_path)
    monkeypatch.setattr(gguf_files, "_convert", lambda *_: pytest.fail("converted again"))
    assert gguf_files.converted(gguf_path, digest, tmp_path) == first


def test_a_kill_while_converting_leaves_nothing_half_made(gguf_path: Path, tmp_path: Path) -> None:
    digest = hash_files(gguf_path.parent, [gguf_path.name])[gguf_path.name]
    script = (
        "import sys, time; from pathlib import Path; from tasks import gguf_files\n"
        "def half(path, out):\n"
        "    (out / 'config.json').write_text('{}'); print('half', flush=True); time.sleep(60)\n"
        "gguf_files._convert = half\n"
        "gguf_files.converted(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(gguf_path), digest, str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    place = tmp_path / "converted"
    assert not (place / digest).exists()
    assert list(place.glob(f".{digest}-*"))
    done = gguf_files.converted(gguf_path, digest, tmp_path)
    assert (done / "model.safetensors").is_file()
    assert not list(place.glob(f".{digest}-*")), "the half-made folder was not cleared away"


def test_two_processes_convert_once(gguf_path: Path, tmp_path: Path) -> None:
    digest = hash_files(gguf_path.parent, [gguf_path.name])[gguf_path.name]
    script = (
        "import sys; from pathlib import Path; from tasks import gguf_files\n"
        "real = gguf_files._convert\n"
        "def told(path, out):\n    print('converts', flush=True); real(path, out)\n"
        "gguf_files._convert = told\n"
        "gguf_files.converted(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(gguf_path), digest, str(tmp_path)],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    said = "".join(process.communicate(timeout=120)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said.count("converts") == 1


def test_no_room_for_the_unpacked_weights(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = gguf_files.shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoSpace, match="unpacked"):
        gguf_files.converted(gguf_path, "0" * 64, tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 20, 500, -100])
def test_a_cut_file(gguf_path: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_path.read_bytes()[:keep])
    with pytest.raises(Refused) as caught:
        registration.candidate(str(cut))
    assert caught.value.reason == "bad_weights"


def test_noise_is_never_more_than_a_refusal(gguf_path: Path, tmp_path: Path) -> None:
    import random

    data, broken = gguf_path.read_bytes()[:9000], tmp_path / "broken.gguf"
    chance = random.Random(0)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(3):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        broken.write_bytes(changed)
        started = time.monotonic()
        with pytest.raises(Refused):
            gguf_files.columns(gguf_files.read_header(broken), str(broken), len(data))
        assert time.monotonic() - started < 5


def test_an_architecture_nobody_can_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "new.gguf", architecture="bert")
    with pytest.raises(Refused) as caught:
        registration.candidate(str(path))
    assert caught.value.reason == "unsupported_architecture"
