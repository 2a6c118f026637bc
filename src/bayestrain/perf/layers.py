"""The fast forward passes of linear layers and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.nn import TensorConv2d, TensorLayer, TensorLinear
from bayestrain.nn.precision import autocasts, own_precision, product_dtype
from bayestrain.perf import chain, planner, together
from bayestrain.perf.planner import Plan
from bayestrain.perf.weights import Halves, Kept, Paired, asked, kept_for, materialised, transformed, use_of

FILTERS_ON_CUDA = 8
"""A GPU's convolutions want a multiple of so many channels; two thin ones get filters of zeros up to the next."""


def multiply(layer: TensorLayer, x: Tensor) -> Tensor | None:
    """The layer's output, or None where only the readable way will do."""
    if isinstance(layer, TensorLinear):
        return linear(layer, x)
    return conv2d(layer, x) if isinstance(layer, TensorConv2d) else None


def linear(layer: TensorLinear, x: Tensor) -> Tensor | None:
    """The layer's output, or None where only the readable way will do."""
    use, cores = use_of(layer)
    if use is None or cores is None:
        return None
    kept = kept_for(layer, cores)
    if kept is None:
        run = _linear_run(layer, x, use, cores, None)
        return None if run is None else run(x)
    kind = (x.shape[:-1], x.dtype, product_dtype(x))
    return kept.get(kind, lambda: _linear_run(layer, x, use, cores, kept) or layer.multiply)(x)


def _linear_run(
    layer: TensorLinear, x: Tensor, use: Paired | Halves, cores: Collection[Tensor], kept: Kept | None
) -> Callable[[Tensor], Tensor] | None:
    """How to run inputs like this one, with everything merged that depends on the cores alone."""
    dtype = product_dtype(x)
    if not x.numel() or not (x.dtype == next(iter(cores)).dtype or autocasts(x)):
        return None
    plan = planner.best(use.shape(cores), *asked(layer, x, cores, kept is not None))
    if plan.kind == "whole weight":
        weight = _weight(layer, x, use, cores, kept)
        return lambda x: _by_weight(x, weight, layer.bias)
    if isinstance(use, Halves):
        inner, outer = _kept(kept, plan, x, lambda: use.factors(cores))
        return lambda x: F.linear(F.linear(x, inner), outer, layer.bias)
    factors = _kept(kept, (plan, dtype), x, lambda: use.factors(cores, plan, dtype))
    few = x.numel() // x.shape[-1] < planner.FEW_ROWS
    padded = (math.prod(use.outs), math.prod(use.ins)) != use.features
    if few and x.ndim == 2 and x.dtype == dtype and not padded and not autocasts(x):
        return lambda x: _few_rows(x, factors, layer.bias)
    return lambda x: _by_chain(layer, x, plan, factors, few)


def _weight(
    layer: TensorLayer, x: Tensor, use: Paired | Halves, cores: Collection[Tensor], kept: Kept | None
) -> Tensor:
    """The whole weight: kept, materialised together with those of other layers, or by itself."""
    if kept is not None:
        return kept.get("whole weight", lambda: materialised(use, cores, x))
    weight = together.weight(layer, use, cores)
    return materialised(use, cores, x) if weight is None else weight


def _kept(kept: Kept | None, name: object, x: Tensor, make: Callable[[], Any]) -> Any:
    """What `make` returns without autocast, kept if that may be."""
    with own_precision(x):
        return make() if kept is None else kept.get(name, make)


def _by_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.ndim == 2 and x.device.type == "cpu" and weight.numel() >= x.numel() and transformed():
        # Many networks at once (`torch.vmap`) get the gradient of a large weight in its own order.
        y = (weight @ x.mT).mT.contiguous()
        return y if bias is None else y + bias.to(y.dtype)
    return F.linear(x, weight, bias)


def _few_rows(x: Tensor, factors: list[chain.Factor], bias: Tensor | None) -> Tensor:
    """In as little time as Python allows."""
    y = chain.multiply(x, factors)
    return y if bias is None else y + bias


def _by_chain(layer: TensorLinear, x: Tensor, plan: Plan, factors: list[chain.Factor], few: bool) -> Tensor:
    batch_shape, dtype, outputs, bias = x.shape[:-1], product_dtype(x), layer.out_features, layer.bias
    x = x.reshape(-1, layer.in_features).to(dtype)
    if (inside := math.prod(layer.in_modes)) > layer.in_features:
        x = F.pad(x, (0, inside - layer.in_features))
    with own_precision(x):
        if few or transformed():
            y = chain.multiply(x, factors)[:, :outputs]
            y = y if bias is None else y + bias.to(dtype)
        else:
            y = chain.multiply_blocks(x, factors, bias, outputs, plan.block)
    return y.reshape(*batch_shape, outputs)


def conv2d(layer: TensorConv2d, x: Tensor) -> Tensor | None:
    """The layer's output, or None where only the readable way will do."""
    use, cores = use_of(layer)
    if not isinstance(use, Halves) or cores is None:
        return None
    kept = kept_for(layer, cores)
    if kept is None:
        return layer.run(x, _kernels(layer, x, use, cores, None))
    kind = (x.shape, x.dtype, product_dtype(x), _channels_last(x))
    return layer.run(x, kept.get(kind, lambda: _kernels(layer, x, use, cores, kept)))


def _kernels(layer: TensorConv2d, x: Tensor, use: Halves, cores: Collection[Tensor], kept: Kept | None) -> list[Tensor]:
    """The whole kernel, or two thin ones, in the memory format of the input."""
    if planner.best(use.shape(cores), *asked(layer, x, cores, kept is not None)).kind == "whole weight":
        return [_in_format(x, _weight(layer, x, use, cores, kept))]
    first, second = _kept(kept, "two factors", x, lambda: use.factors(cores))
    if x.is_cuda and (missing := -len(first) % FILTERS_ON_CUDA):
        first, second = F.pad(first, (0, 0, 0, missing)), F.pad(second, (0, missing))
    return [_in_format(x, use.as_kernel(first)), _in_format(x, second[:, :, None, None])]


def _in_format(x: Tensor, kernel: Tensor) -> Tensor:
    """The kernel in the memory format of the input, which decides that of the output."""
    # A 1x1 kernel is contiguous in both formats; only its strides tell them apart.
    return kernel if _channels_last(x) else kernel.reshape(len(kernel), -1).view(kernel.shape)


def _channels_last(x: Tensor) -> bool:
    if x.ndim != 4 or transformed():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def expect(layer: TensorLayer, x: Tensor, training: bool) -> tuple[str, float, float, float] | None:
    """The plan for this input, its multiplications relative to dense, its seconds, and those of the dense layer.

    Predicted; None where there is no prediction.
    """
    use, cores = use_of(layer)
    if use is None or cores is None:
        return None
    with torch.set_grad_enabled(training):
        task, machine = asked(layer, x, cores, merged=not training)
    found = use.shape(cores).costs(task, machine)[0]
    outputs, *inputs = layer.factorized.shape
    dense = planner.dense_cost(outputs, math.prod(inputs), task, machine)
    thin = isinstance(layer, TensorConv2d) and found.plan.kind == "two factors"
    kind = "two convolutions" if thin else found.plan.kind
    return kind, found.operations / dense.operations, found.seconds, dense.seconds
