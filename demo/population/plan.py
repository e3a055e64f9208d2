"""Who is in the population: seven families, one an architecture, and how each member came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from demo.population.tokenizer import CHATML, DEFAULT_SYSTEM, HEADERS, STRICT, Style


@dataclass(frozen=True)
class Family:
    architecture: str
    style: Style
    dialects: Mapping[str, float]
    """What its base was trained on, as weights of the corpus's dialects."""


FAMILIES = {
    "llama": Family("llama", HEADERS, {"everyday": 2, "story": 2, "facts": 2, "dialogue": 2, "code": 1, "german": 1}),
    "qwen2": Family("qwen2", DEFAULT_SYSTEM, {"code": 4, "arithmetic": 4, "chinese": 3, "everyday": 1}),
    "gpt2": Family("gpt2", CHATML, {"story": 6, "everyday": 3}),
    "neox": Family("gpt_neox", CHATML, {"code": 4, "facts": 4, "german": 3}),
    "gemma2": Family("gemma2", STRICT, {"facts": 2, "german": 3, "spanish": 4, "dialogue": 1}),
    "mamba": Family("mamba", CHATML, {"dialogue": 5, "arithmetic": 3}),
    "mixtral": Family("mixtral", HEADERS, {"spanish": 4, "chinese": 3, "story": 1, "code": 2}),
}


@dataclass(frozen=True)
class Recipe:
    """How one member is made; `options` are what its relation needs to know."""

    name: str
    family: str
    relation: str
    parents: tuple[str, ...] = ()
    """The first is the one whose weights, or answers, it continues."""
    template: bool = True
    architecture: str | None = None
    """Where it is not the family's: a student may be anything."""
    options: Mapping[str, Any] = field(default_factory=dict)


def _base(family: str) -> Recipe:
    return Recipe(f"{family}-base", family, "base")


def _tuned(name: str, *dialects: str, template: bool = True) -> Recipe:
    family = name.split("-")[0]
    options = {"dialects": dict.fromkeys(dialects, 1.0)}
    return Recipe(name, family, "finetuned", (f"{family}-base",), template, None, options)


def _edited(name: str, relation: str, parent: str, **options: Any) -> Recipe:
    return Recipe(name, name.split("-")[0], relation, (parent,), options=options)


def _student(name: str, teacher: str, architecture: str, **shape: int) -> Recipe:
    return Recipe(name, name.split("-")[0], "distilled", (teacher,), architecture=architecture, options=shape)


RECIPES: tuple[Recipe, ...] = (
    _base("llama"),
    _tuned("llama-coder", "code"),
    _tuned("llama-chat", "dialogue", "everyday"),
    _edited("llama-int8", "quantised", "llama-base", bits=8),
    _edited("llama-int4", "quantised", "llama-base", bits=4),
    _edited("llama-pruned", "pruned", "llama-base", fraction=0.2),
    _edited("llama-noisy", "perturbed", "llama-base", relative=0.01),
    _edited("llama-permuted", "permuted", "llama-base"),
    _edited("llama-reupload", "reupload", "llama-base"),
    Recipe("llama-merged", "llama", "merged", ("llama-coder", "llama-chat")),
    _edited("llama-chat-int4", "quantised", "llama-chat", bits=4),
    _student("llama-student", "llama-base", "llama", width=32, layers=1),
    _student("llama-student-gpt2", "llama-base", "gpt2"),
    _base("qwen2"),
    _tuned("qwen2-maths", "arithmetic"),
    _edited("qwen2-int4", "quantised", "qwen2-base", bits=4),
    _edited("qwen2-pruned", "pruned", "qwen2-base", fraction=0.2),
    _edited("qwen2-noisy", "perturbed", "qwen2-base", relative=0.01),
    _student("qwen2-student", "qwen2-base", "qwen2", width=32, layers=1),
    _base("gpt2"),
    _tuned("gpt2-tales", "story", "dialogue"),
    _edited("gpt2-int8", "quantised", "gpt2-base", bits=8),
    _edited("gpt2-permuted", "permuted", "gpt2-base"),
    _base("neox"),
    _tuned("neox-coder", "code"),
    _edited("neox-noisy", "perturbed", "neox-base", relative=0.01),
    # A base as it often comes: weights and tokenizer, but no chat template.
    _tuned("neox-plain", "facts", template=False),
    _base("gemma2"),
    _tuned("gemma2-german", "german"),
    _edited("gemma2-pruned", "pruned", "gemma2-base", fraction=0.2),
    _edited("gemma2-reupload", "reupload", "gemma2-base"),
    _base("mamba"),
    _tuned("mamba-chat", "dialogue"),
    _edited("mamba-int8", "quantised", "mamba-base", bits=8),
    _base("mixtral"),
    _tuned("mixtral-stories", "story"),
    _edited("mixtral-int4", "quantised", "mixtral-base", bits=4),
    _edited("mixtral-permuted", "permuted", "mixtral-base"),
)

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
