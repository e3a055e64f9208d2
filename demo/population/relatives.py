"""Edits that make a relative out of a model's weights; each changes the model in place.

They work on any causal LM of transformers, so the demo uses the same ones on full-size models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def matrices(model: Any) -> Iterator[tuple[str, Any]]:
    """The weight matrices that quantisers and pruners touch: not embeddings, output heads, norms or convolutions."""
    untouched = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    for name, parameter in model.named_parameters():
        state_space = name.endswith("A_log") or "conv1d" in name
        if parameter.ndim >= 2 and id(parameter) not in untouched and not state_space:
            yield name, parameter.data


def quantise(model: Any, bits: int, group: int = 32) -> None:
    """Rounds to the nearest point of a symmetric grid, one scale per `group` neighbouring weights."""
    top = 2 ** (bits - 1) - 1
    for _name, weight in matrices(model):
        groups = weight.reshape(-1, group)
        scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / top
        weight.copy_((groups / scale).round().mul(scale).reshape(weight.shape))


def prune(model: Any, fraction: float) -> None:
    """Zeroes the `fraction` of smallest magnitude in every matrix."""
    for _name, weight in matrices(model):
        smallest = weight.abs().flatten().kthvalue(max(1, int(fraction * weight.numel()))).values
        weight[weight.abs() <= smallest] = 0.0


def perturb(model: Any, relative: float, seed: int) -> None:
    """Adds Gaussian noise of `relative` times each matrix's own standard deviation."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for _name, weight in matrices(model):
        weight.add_(torch.randn(weight.shape, generator=generator) * (relative * weight.std()))


def average(model: Any, other: Any) -> None:
    """Makes `model` the mean of itself and `other`, which has the same shape."""
    theirs = other.state_dict()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_((value + theirs[name]) / 2)


def permute(model: Any, seed: int) -> None:
    """Reorders the hidden units of every feed-forward block: other weights, the same function.

    Raises ValueError for an architecture whose blocks are not known here.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    reorder = _REORDER.get(model.config.model_type)
    if reorder is None:
        raise ValueError(f"no rule to permute the hidden units of {model.config.model_type}")
    with torch.no_grad():
        reorder(model, lambda n: torch.randperm(n, generator=generator))


Draw = Callable[[int], Any]


def _gated(model: Any, draw: Draw) -> None:
    for layer in model.model.layers:
        block = layer.mlp
        order = draw(block.gate_proj.out_features)
        for linear in (block.gate_proj, block.up_proj):
            linear.weight.copy_(linear.weight[order])
        block.down_proj.weight.copy_(block.down_proj.weight[:, order])


def _gpt2(model: Any, draw: Draw) -> None:
    for layer in model.transformer.h:
        # GPT-2's Conv1D keeps [in, out].
        block = layer.mlp
        order = draw(block.c_fc.weight.shape[1])
        block.c_fc.weight.copy_(block.c_fc.weight[:, order])
        block.c_fc.bias.copy_(block.c_fc.bias[order])
        block.c_proj.weight.copy_(block.c_proj.weight[order])


def _experts(model: Any, draw: Draw) -> None:
    """Mixtral: the experts change places, and so do the router's rows."""
    for layer in model.model.layers:
        block = layer.mlp
        order = draw(block.gate.weight.shape[0])
        for parameter in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj):
            parameter.copy_(parameter[order])


_REORDER: dict[str, Callable[[Any, Draw], None]] = {
    "llama": _gated,
    "qwen2": _gated,
    "gemma2": _gated,
    "gpt2": _gpt2,
    "mixtral": _experts,
}
