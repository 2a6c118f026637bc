"""Ranks and sizes of a model."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bayestrain.layers import TTLayer


def tt_layers(model: nn.Module) -> dict[str, TTLayer]:
    """Every TT layer by name; a layer used twice appears once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TTLayer)}


def ranks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """``{layer name: (1, R_1, .., 1)}`` for every TT layer."""
    return {name: layer.ranks for name, layer in tt_layers(model).items()}


def count_parameters(model: nn.Module) -> int:
    """Numbers to be stored, counted as the paper does: parameters and batch norm's running vectors, not lambda."""
    running = (
        buffer.numel()
        for module in model.modules()
        if isinstance(module, _NormBase)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    )
    return sum(parameter.numel() for parameter in model.parameters()) + sum(running)
