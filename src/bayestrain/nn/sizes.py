"""Ranks and sizes of a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bayestrain.nn.factorized import FactorizedWeight


def factorized_weights(model: nn.Module) -> dict[str, FactorizedWeight]:
    """Every factorised weight by the name of its layer; a weight used twice appears once."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, FactorizedWeight))
    return {layer_name(name): weight for name, weight in found}


def layer_name(name: str) -> str:
    """The name of the layer that holds a factorised weight; a bare one keeps its own."""
    parent, _, own = name.rpartition(".")
    return parent if own == "factorized" else name


def ranks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """``{layer name: (rank of every bond)}``, bonds in order of appearance in the layer's equation."""
    return {name: weight.ranks for name, weight in factorized_weights(model).items()}


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model stores: parameters and batch norm's running vectors, without lambda."""
    running = (
        buffer.numel()
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    )
    return sum(parameter.numel() for parameter in model.parameters()) + sum(running)


def dense_parameters(model: nn.Module) -> int:
    """What the model would store with ordinary layers, counted as `count_parameters` does."""
    saved = sum(weight.dense_numel - weight.numel for weight in factorized_weights(model).values())
    return count_parameters(model) + saved
