"""The fast forward passes of linear layers and convolutions whose weight is a train."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from bayestrain.nn import FactorizedWeight, TensorConv2d, TensorLayer, TensorLinear
from bayestrain.nn.precision import autocasts, own_precision, product_dtype
from bayestrain.perf import planner, together, trains
from bayestrain.perf.planner import Machine, Task
from bayestrain.perf.trains import Halves, Use

Made = TypeVar("Made")

MOST_KEPT = 256
"""Kinds of inputs for which a layer keeps how it runs them."""

FILTERS_ON_CUDA = 8
"""A GPU's convolutions want a multiple of so many channels; two thin ones get filters of zeros up to the next."""


def multiply(layer: TensorLayer, x: Tensor) -> Tensor | None:
    """The layer's output, or None where only the readable code applies."""
    if isinstance(layer, TensorLinear):
        return linear(layer, x)
    return conv2d(layer, x) if isinstance(layer, TensorConv2d) else None


def linear(layer: TensorLinear, x: Tensor) -> Tensor | None:
    """The layer's output, or None."""
    use, cores = used(layer)
    if use is None or not x.numel() or not (x.dtype == next(iter(cores)).dtype or autocasts(x)):
        return None
    kept = _kept_for(layer, cores)
    if kept is None:
        return _linear(layer, x, use, cores, None)(x)
    kind = (x.shape[:-1], x.dtype, product_dtype(x))
    return kept.get(kind, lambda: _linear(layer, x, use, cores, kept))(x)


def _linear(
    layer: TensorLinear, x: Tensor, use: Use, cores: Collection[Tensor], kept: Kept | None
) -> Callable[[Tensor], Tensor]:
    """How to run inputs like this one, with everything merged that depends on the cores alone."""
    task, machine = _asked(layer, x, cores, kept is not None)
    plan, dtype, bias = planner.cheapest(use.shape(cores), task, machine).plan, product_dtype(x), layer.bias
    if plan.kind == "whole weight":
        weight = _weight(layer, x, use, cores, kept)
        if x.ndim == 2 and x.device.type == "cpu" and weight.numel() >= x.numel() and transformed():
            return lambda x: _transposed(x, weight, bias)
        return lambda x: F.linear(x, weight, bias)
    if isinstance(use, Halves):
        inner, outer = _made(kept, "two factors", x, lambda: use.factors(cores))
        return lambda x: F.linear(F.linear(x, inner), outer, bias)
    chain = _made(kept, (plan, dtype), x, lambda: use.factors(cores, plan, dtype))
    inside, outputs = math.prod(use.ins), layer.out_features
    batch_first = task.rows < trains.FEW_ROWS or transformed()
    if x.ndim == 2 and x.dtype == dtype and (math.prod(use.outs), inside) == use.features and not autocasts(x):
        if bias is None:
            return lambda x: trains.multiply(x, chain, batch_first)
        return lambda x: trains.multiply(x, chain, batch_first) + bias

    def run(x: Tensor) -> Tensor:
        batch, x = x.shape[:-1], x.reshape(-1, x.shape[-1]).to(dtype)
        with own_precision(x):
            y = trains.multiply(F.pad(x, (0, inside - x.shape[1])), chain, batch_first)[:, :outputs]
            y = y if bias is None else y + bias.to(dtype)
        return y.reshape(*batch, outputs)

    return run


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Many networks at once (`torch.vmap`) get the gradient of a large weight in its own order."""
    y = (weight @ x.mT).mT.contiguous()
    return y if bias is None else y + bias.to(y.dtype)


def conv2d(layer: TensorConv2d, x: Tensor) -> Tensor | None:
    """The layer's output, or None."""
    use, cores = used(layer)
    if not isinstance(use, Halves):
        return None
    kept = _kept_for(layer, cores)
    if kept is None:
        return layer.run(x, _kernels(layer, x, use, cores, None))
    kind = (x.shape, x.dtype, product_dtype(x), _channels_last(x))
    return layer.run(x, kept.get(kind, lambda: _kernels(layer, x, use, cores, kept)))


def _kernels(layer: TensorConv2d, x: Tensor, use: Halves, cores: Collection[Tensor], kept: Kept | None) -> list[Tensor]:
    """The whole kernel, or two thin ones, in the memory format of the input."""
    if planner.cheapest(use.shape(cores), *_asked(layer, x, cores, kept is not None)).plan.kind == "whole weight":
        return [_in_format(x, _weight(layer, x, use, cores, kept))]
    first, second = _made(kept, "two factors", x, lambda: use.factors(cores))
    if x.is_cuda and (missing := -len(first) % FILTERS_ON_CUDA):
        first, second = F.pad(first, (0, 0, 0, missing)), F.pad(second, (0, missing))
    return [_in_format(x, use.as_kernel(first)), _in_format(x, second[:, :, None, None])]


def _in_format(x: Tensor, kernel: Tensor) -> Tensor:
    """The kernel in the memory format of the input, which decides that of the output."""
    # A 1x1 kernel is contiguous in both formats; only its strides distinguish them.
    return kernel if _channels_last(x) else kernel.reshape(len(kernel), -1).view(kernel.shape)


def _channels_last(x: Tensor) -> bool:
    if x.ndim != 4 or transformed():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def expect(layer: TensorLayer, x: Tensor, training: bool) -> tuple[str, float, float, float] | None:
    """The plan for this input, its multiplications relative to dense, its seconds, and those of the dense layer.

    Predicted; None where there is no prediction.
    """
    use, cores = used(layer)
    if use is None:
        return None
    with torch.set_grad_enabled(training):
        task, machine = _asked(layer, x, cores, merged=not training)
    found = planner.cheapest(use.shape(cores), task, machine)
    outputs, *inputs = layer.factorized.shape
    dense = planner.dense_cost(outputs, math.prod(inputs), task, machine)
    thin = isinstance(layer, TensorConv2d) and found.plan.kind == "two factors"
    kind = "two convolutions" if thin else found.plan.kind
    return kind, found.operations / dense.operations, found.seconds, dense.seconds


# --- weights ----------------------------------------------------------------------------------------------------------


def used(layer: TensorLayer) -> tuple[Use | None, Collection[Tensor]]:
    """How the layer's weight can be used, and its current cores; None if it is not a train."""
    weight: Any = layer._modules["factorized"]
    cores = weight._modules["cores"]._parameters.values()  # as attributes they would take longer to read
    if type(weight) is not FactorizedWeight or weight.format.name != "tt" or len(cores) != len(weight.equation.cores):
        return None, cores  # parametrised cores, for one, are no parameters
    return trains.use_of(weight.layout), cores


def _asked(layer: TensorLayer, x: Tensor, cores: Collection[Tensor], merged: bool) -> tuple[Task, Machine]:
    """What this input asks of a layer, and on which machine."""
    conv, kind, dtype = isinstance(layer, TensorConv2d), x.device.type, product_dtype(x)
    rows = x.numel() // layer.factorized.shape[1] // (math.prod(layer.stride) if conv else 1)  # type: ignore[arg-type]
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, layer.bias, *cores))
    tf32 = kind == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    task = Task(max(1, rows), dtype.itemsize, trains, merged)
    return task, _machine(kind, dtype, tf32, torch.get_num_threads(), conv)


@lru_cache(maxsize=64)
def _machine(kind: str, dtype: torch.dtype, tf32: bool, threads: int, conv: bool) -> Machine:
    if kind != "cuda":
        found = planner.CPU_THREAD_CONV if conv else planner.CPU_THREAD
        return found.faster(threads * (0.5 if dtype == torch.float64 else 1.0))
    half = dtype in (torch.bfloat16, torch.half)
    return (planner.CUDA_CONV if conv else planner.CUDA).faster(2.0 if half else 1.0 if tf32 else 0.15)


def transformed() -> bool:
    """Whether a transformation of `torch.func` or forward-mode differentiation is active: then plain operations run."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _weight(layer: TensorLayer, x: Tensor, use: Use, cores: Collection[Tensor], kept: Kept | None) -> Tensor:
    """The whole weight, in the precision of the cores: kept, materialised together with others, or by itself."""
    if kept is None and not transformed() and (weight := together.weight(layer, use, cores)) is not None:
        return weight
    return _made(kept, "whole weight", x, lambda: use.dense(cores))


# --- what inference keeps ---------------------------------------------------------------------------------------------


class Kept:
    """What inference made of cores that have not changed since; cores that have changed get a new one.

    A change shows in the addresses and version counters of the cores. Writing through ``core.data`` hides it from the
    counter, and so does a fused optimiser: a pass with gradients, and any call of ``train()`` or ``eval()``, forgets.
    Threads that share a layer may make the same twice, but never mix what belongs to different cores.
    """

    def __init__(self, key: list[int], cores: Collection[Tensor]) -> None:
        self.key = key
        self._held = [core.detach() for core in cores]  # so that no other tensor comes to lie at their addresses
        self._made: dict[object, Any] = {}

    def get(self, name: object, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once for each name."""
        found = self._made.get(name)
        if found is None:
            if len(self._made) >= MOST_KEPT:
                self._made.clear()
            found = self._made[name] = make()
        return found


_KEPT: WeakKeyDictionary[TensorLayer, Kept] = WeakKeyDictionary()


def forget(layer: TensorLayer) -> None:
    """Drop what inference keeps for a layer."""
    _KEPT.pop(layer, None)


def _kept_for(layer: TensorLayer, cores: Collection[Tensor]) -> Kept | None:
    """What may be used again and added to; None where nothing may be kept."""
    if layer.training or torch.is_grad_enabled() or transformed():
        forget(layer)
        return None
    key: list[int] = []
    for core in cores:
        if core.is_inference():  # made in inference mode, which counts no changes
            return None
        key += (core.data_ptr(), core._version)
    kept = _KEPT.get(layer)
    if kept is None or kept.key != key:
        kept = _KEPT[layer] = Kept(key, cores)
    return kept


def _made(kept: Kept | None, name: object, x: Tensor, make: Callable[[], Made]) -> Made:
    """What `make` returns without autocast, kept if that may be."""
    with own_precision(x):
        return make() if kept is None else kept.get(name, make)
