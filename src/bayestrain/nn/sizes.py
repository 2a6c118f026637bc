"""Ranks and sizes of a model."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bayestrain.nn.factorized import FactorizedWeight


def factorized_weights(model: nn.Module) -> dict[str, FactorizedWeight]:
    """Every factorised weight by the name of its layer, or its own; a weight used twice appears once."""
    modules = model.named_modules()
    return {layer_name(path): module for path, module in modules if isinstance(module, FactorizedWeight)}


def layer_name(path: str) -> str:
    """The name of the layer that holds the weight at this path; a bare weight is its own layer."""
    return f".{path}".removesuffix(".factorized").removeprefix(".")


def ranks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """``{layer name: (rank of every bond)}``, bonds in order of appearance in the layer's equation."""
    return {name: weight.ranks for name, weight in factorized_weights(model).items()}


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model stores: parameters and batch norm's running vectors, without lambda."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    stored = [*model.parameters(), *(norm.running_mean for norm in norms), *(norm.running_var for norm in norms)]
    return sum(tensor.numel() for tensor in stored if tensor is not None and not nn.parameter.is_lazy(tensor))


def dense_parameters(model: nn.Module) -> int:
    """What the model would store with ordinary layers, counted as `count_parameters` does."""
    saved = sum(weight.dense_numel - weight.numel for weight in factorized_weights(model).values())
    return count_parameters(model) + saved
