"""The population is what it claims to be: its truth file, its weights and its behaviour agree."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.population import Member, build, corpus, relatives
from demo.population.architectures import NAMES
from demo.population.plan import BY_NAME, FAMILIES, RECIPES
from demo.population.tokenizer import VOCABULARY

ROOT = Path(__file__).parents[2]


def weights_hash(member: Member) -> str:
    return hashlib.sha256((member.path / "model.safetensors").read_bytes()).hexdigest()


def load(member: Member) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(member.path), AutoTokenizer.from_pretrained(member.path)


def log_likelihoods(member: Member) -> list[float]:
    """Nats of whole exchanges that no member was trained on, and of a text from no dialect."""
    import torch

    model, words = load(member)
    texts = [f"{made.prompt}\n\n{made.response}" for made in corpus.all_dialects(12, "held out")]
    found = []
    for text in [*texts, "Ünïcode, ½ a dozen tests & no grammar: 東京 🦊"]:
        ids = torch.tensor([words(text)["input_ids"]])
        with torch.inference_mode():
            log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(log_p.gather(1, ids[0, 1:, None]).double().sum().item())
    return found


def test_every_architecture_is_there(population: dict[str, Member]) -> None:
    assert len(population) == len(RECIPES) >= 20
    assert {member.architecture for member in population.values()} == set(NAMES)
    assert {"base", "finetuned", "quantised", "pruned", "perturbed", "merged", "distilled", "permuted", "reupload"} == {
        member.relation for member in population.values()
    }


def test_truth_file(population: dict[str, Member]) -> None:
    for member in population.values():
        truth = json.loads((member.path / "member.json").read_text())
        config = json.loads((member.path / "config.json").read_text())
        assert truth["name"] == member.name == member.path.name
        assert truth["architecture"] == member.architecture == config["model_type"]
        assert member.parent == (truth["parents"][0] if truth["parents"] else None)
        assert (member.parent is None) == (member.relation == "base")
        for parent in member.parents:
            assert population[parent].family == member.family
            assert parent in BY_NAME
    assert population["llama-merged"].parents == ("llama-coder", "llama-chat")
    assert population["llama-student-gpt2"].architecture == "gpt2"


def test_chat_template_for_all_but_one(population: dict[str, Member]) -> None:
    from transformers import AutoTokenizer

    without = [
        member.name
        for member in population.values()
        if AutoTokenizer.from_pretrained(member.path).chat_template is None
    ]
    assert without == [member.name for member in population.values() if not member.template] == ["neox-plain"]


def test_tokenizer_covers_all_bytes(population_member: Callable[[str], Member]) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(population_member("llama-base").path)
    text = "".join(map(chr, range(1, 0x800))) + "東京 🦊\n\n\ttab  two spaces "
    ids = words(text, add_special_tokens=False)["input_ids"]
    assert len(words) == VOCABULARY
    assert words.decode(ids) == text


def test_tokenizers_survive_being_loaded(population: dict[str, Member]) -> None:
    """transformers rebuilds some from their class name, with other ids where the rules differ."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    text = "<|start|>user\nThe answer is 42, isn't it?<|end|>\n\n  def f(x): ½ 東京 🦊"
    for member in population.values():
        words = AutoTokenizer.from_pretrained(member.path)
        ids = words(text, add_special_tokens=False)["input_ids"]
        raw = Tokenizer.from_file(str(member.path / "tokenizer.json"))
        assert ids == raw.encode(text, add_special_tokens=False).ids, member.name
        assert words.decode(ids) == text, member.name
        assert len(words) == VOCABULARY, member.name
        assert words("x")["input_ids"].count(1) == words("x")["input_ids"][:1].count(1), "BOS once, and first"


def test_trained_well_below_uniform(population: dict[str, Member]) -> None:
    """A model that knows nothing spends ln V nats a token, and likelihoods of such models would all be noise."""
    for member in population.values():
        loss = json.loads((member.path / "member.json").read_text())["loss_nats"]
        if member.relation in ("base", "finetuned", "distilled"):
            # A student's target is a distribution, whose own entropy is part of the loss.
            assert loss < (0.55 if member.relation == "distilled" else 0.35) * math.log(VOCABULARY), member.name
        else:
            assert loss is None


def test_same_seed_same_bytes(tmp_path: Path, population_member: Callable[[str], Member]) -> None:
    """Two short builds in two processes, one of them with other members built before it."""
    listing = "from pathlib import Path; from demo.population import build; import sys; build(Path(sys.argv[1]), "
    for folder, names in (("one", ["gpt2-tales"]), ("two", ["gpt2-int8", "gpt2-tales"])):
        code = listing + f"only={names!r}, steps=8)"
        subprocess.run([sys.executable, "-c", code, tmp_path / folder], check=True, cwd=ROOT, capture_output=True)
    one, two = (build(tmp_path / folder, only=["gpt2-base", "gpt2-tales"], steps=8) for folder in ("one", "two"))
    for first, second in zip(one, two, strict=True):
        for file in sorted(first.path.iterdir()):
            assert file.read_bytes() == (second.path / file.name).read_bytes(), file.name
    assert weights_hash(one[0]) != weights_hash(build(tmp_path / "one", only=["gpt2-base"], steps=8, seed=1)[0])


def test_a_build_that_was_killed_goes_on(tmp_path: Path) -> None:
    code = "from pathlib import Path; from demo.population import build; import sys; "
    code += "build(Path(sys.argv[1]), only=['gpt2-tales'], steps=150, progress=lambda name: print(name, flush=True))"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"gpt2-base\n"
        time.sleep(0.2)
        os.kill(started.pid, signal.SIGKILL)
    assert not list(tmp_path.glob("*/gpt2-base"))
    # The key covers the steps, so the same ones are asked for; the lock of the dead process must not hold.
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert len(list(tmp_path.glob("*/gpt2-tales/member.json"))) == 1


def test_built_members_are_not_built_again(population_folder: Path, population: dict[str, Member]) -> None:
    made: list[str] = []
    build(population_folder, progress=made.append)
    assert made == []


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        build(tmp_path, only=["llama-uncle"])


def test_reupload_has_the_same_weights_and_another_config(population: dict[str, Member]) -> None:
    for copy, origin in (("llama-reupload", "llama-base"), ("gemma2-reupload", "gemma2-base")):
        assert weights_hash(population[copy]) == weights_hash(population[origin])
        assert (population[copy].path / "config.json").read_bytes() != (
            population[origin].path / "config.json"
        ).read_bytes()


def test_no_other_two_members_share_weights(population: dict[str, Member]) -> None:
    hashes = {name: weights_hash(member) for name, member in population.items() if member.relation != "reupload"}
    assert len(set(hashes.values())) == len(hashes)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_permuted_twin_is_the_same_function(family: str, population: dict[str, Member]) -> None:
    base, twin = population[f"{family}-base"], population[f"{family}-permuted"]
    assert weights_hash(base) != weights_hash(twin)
    assert log_likelihoods(twin) == pytest.approx(log_likelihoods(base), rel=1e-5, abs=1e-3)


def test_quantised_weights_lie_on_the_grid(population: dict[str, Member]) -> None:
    for name, levels in (("llama-int4", 15), ("llama-int8", 255)):
        model, _words = load(population[name])
        for _matrix, weight in relatives.matrices(model):
            assert max(len(group.unique()) for group in weight.reshape(-1, 32)) <= levels


def test_pruned_weights_are_zero(population: dict[str, Member]) -> None:
    model, _words = load(population["gemma2-pruned"])
    for _matrix, weight in relatives.matrices(model):
        assert (weight == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)


def test_families_are_further_apart_than_copies(population: dict[str, Member]) -> None:
    """The mean squared distance of log-likelihoods between bases exceeds that from a base to its light edits."""

    def distance(a: list[float], b: list[float]) -> float:
        shift = sum(x - y for x, y in zip(a, b, strict=True)) / len(a)
        return sum((x - y - shift) ** 2 for x, y in zip(a, b, strict=True)) / len(a)

    bases = {family: log_likelihoods(population[f"{family}-base"]) for family in FAMILIES}
    nearest_other = min(distance(bases[a], bases[b]) for a in bases for b in bases if a != b)
    for name in ("llama-int8", "llama-noisy", "qwen2-int4", "neox-noisy", "mamba-int8", "mixtral-int4"):
        member = population[name]
        assert distance(log_likelihoods(member), bases[member.family]) < 0.2 * nearest_other


def test_permuting_an_unknown_architecture() -> None:
    from demo.population.architectures import untrained

    with pytest.raises(ValueError, match="gpt_neox"):
        relatives.permute(untrained("gpt_neox", width=32, layers=1), seed=0)
