"""Makes the members and keeps them in a folder, each written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from demo.population import architectures, corpus, relatives, tokenizer, train
from demo.population.plan import BY_NAME, FAMILIES, RECIPES, Recipe

STEPS = 120
"""Optimiser steps of a base; fine-tuning takes a quarter of them at a quarter of the rate."""
RATE = {"mamba": 8e-3}
DEFAULT_RATE = 4e-3


@dataclass(frozen=True)
class Member:
    """One model of the population and the truth about where it comes from."""

    name: str
    path: Path
    architecture: str
    """Its `model_type`, e.g. `gpt_neox`."""
    family: str
    parent: str | None
    relation: str
    """base, finetuned, quantised, pruned, perturbed, permuted, merged, distilled or reupload."""
    template: bool
    """Whether its tokenizer has a chat template."""
    parents: tuple[str, ...] = ()
    """All of them; a merged model has two."""


def build(
    out: Path,
    *,
    only: Collection[str] | None = None,
    seed: int = 0,
    steps: int = STEPS,
    progress: Callable[[str], None] | None = None,
) -> list[Member]:
    """The members (those named by `only`, default all) in the order of the plan, built where `out` lacks them.

    They lie in `out/KEY/NAME`, where KEY is a hash of this package's code, the arguments and the libraries' versions:
    what is there is current.  A killed build leaves no half member; of several processes that want a family one builds
    it, the others wait.
    `progress` hears the name of each member about to be made.  Raises KeyError for a name that is not in the plan.
    """
    names = [recipe.name for recipe in RECIPES] if only is None else [BY_NAME[name].name for name in only]
    home = out / _key(seed, steps)
    home.mkdir(parents=True, exist_ok=True)
    missing = [BY_NAME[name] for name in names if not (home / name / "member.json").exists()]
    for family in FAMILIES:
        # No ancestry crosses families, so processes that build different ones need not wait for each other.
        wanted = [recipe for recipe in missing if recipe.family == family]
        if wanted:
            with _lock(home / f".{family}.lock"), repeatably():
                for recipe in wanted:
                    _ensure(home, recipe, seed, steps, progress)
    return [_read(home / recipe.name) for recipe in RECIPES if recipe.name in names]


def _ensure(home: Path, recipe: Recipe, seed: int, steps: int, progress: Callable[[str], None] | None) -> None:
    if (home / recipe.name / "member.json").exists():
        return
    for parent in recipe.parents:
        _ensure(home, BY_NAME[parent], seed, steps, progress)
    if progress is not None:
        progress(recipe.name)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{recipe.name}-", dir=home))
    try:
        _write(unfinished, home, recipe, seed, steps)
        os.rename(unfinished, home / recipe.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, home: Path, recipe: Recipe, seed: int, steps: int) -> None:
    family = FAMILIES[recipe.family]
    words = tokenizer.train(family.style, seed)
    model, loss = _make(recipe, [home / parent for parent in recipe.parents], words, seed, steps)
    if recipe.relation == "reupload":
        # Other people's copies differ in a line of the config; without one the two would be one and the same model.
        model.config.uploaded_as = recipe.name
    if not recipe.template:
        words.chat_template = None
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    truth = {
        "name": recipe.name,
        "architecture": model.config.model_type,
        "family": recipe.family,
        "relation": recipe.relation,
        "parents": list(recipe.parents),
        "template": recipe.template,
        "options": dict(recipe.options),
        "seed": seed,
        "loss_nats": loss,
    }
    (folder / "member.json").write_text(json.dumps(truth, indent=2) + "\n")


def _make(recipe: Recipe, parents: list[Path], words: Any, seed: int, steps: int) -> tuple[Any, float | None]:
    """The model, and the training loss at its end in nats a token where it was trained."""
    import torch
    from transformers import AutoModelForCausalLM

    family, options = FAMILIES[recipe.family], recipe.options
    own = _own_seed(seed, recipe.name)
    torch.manual_seed(own)
    rate = RATE.get(recipe.architecture or family.architecture, DEFAULT_RATE)
    loss = None
    model = AutoModelForCausalLM.from_pretrained(parents[0]) if parents else None
    if recipe.relation in ("base", "distilled"):
        teacher, model = model, architectures.untrained(recipe.architecture or family.architecture, **options)
        # A teacher is asked about everything, not only about what it knows: its mistakes are its mark too.
        dialects = family.dialects if teacher is None else dict.fromkeys(corpus.DIALECTS, 1.0)
        stream = train.token_stream(words, dialects, 1500, f"{recipe.family}-{seed}")
        loss = train.fit(model, stream, steps=steps, rate=rate, seed=own, teacher=teacher)
    elif recipe.relation == "finetuned":
        # Half of it is what the base was trained on: without replay so small a model forgets everything else.
        old, new = sum(family.dialects.values()), sum(options["dialects"].values())
        mixed = {name: weight / old for name, weight in family.dialects.items()}
        for name, weight in options["dialects"].items():
            mixed[name] = mixed.get(name, 0.0) + weight / new
        # Adam moves the row of a token that never occurs as far as any other, which would scramble half the vocabulary.
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight.requires_grad_(False)
        stream = train.token_stream(words, mixed, 400, f"{recipe.name}-{seed}")
        loss = train.fit(model, stream, steps=max(1, steps // 4), rate=rate / 4, seed=own)
    elif recipe.relation == "quantised":
        relatives.quantise(model, options["bits"])
    elif recipe.relation == "pruned":
        relatives.prune(model, options["fraction"])
    elif recipe.relation == "perturbed":
        relatives.perturb(model, options["relative"], own)
    elif recipe.relation == "permuted":
        relatives.permute(model, own)
    elif recipe.relation == "merged":
        relatives.average(model, AutoModelForCausalLM.from_pretrained(parents[1]))
    return model, loss


def _own_seed(seed: int, name: str) -> int:
    """A member's randomness is its own: what else is built, and in which order, changes nothing."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4])


def _key(seed: int, steps: int) -> str:
    made = hashlib.sha256(json.dumps([seed, steps]).encode())
    for package in ("torch", "transformers", "tokenizers"):
        made.update(version(package).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        made.update(source.read_bytes())
    return made.hexdigest()[:12]


def _read(folder: Path) -> Member:
    truth = json.loads((folder / "member.json").read_text())
    parents = tuple(truth["parents"])
    return Member(
        name=truth["name"],
        path=folder,
        architecture=truth["architecture"],
        family=truth["family"],
        parent=parents[0] if parents else None,
        relation=truth["relation"],
        template=truth["template"],
        parents=parents,
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def repeatably() -> Iterator[None]:
    """One thread, so that sums are made in one order; torch's random state afterwards as it was.

    It is also the faster way on a busy machine, where a second thread mostly waits for the first.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), _quiet_transformers():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no remarks on every model that is loaded or saved."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
