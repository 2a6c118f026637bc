"""What `perf` knows of a layer's weight: how its cores merge, which plan is fastest, and what inference keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bayestrain.nn import FactorizedWeight, TensorConv2d, TensorLayer
from bayestrain.nn.precision import own_precision, product_dtype
from bayestrain.perf import chain, planner
from bayestrain.perf.planner import HalvesShape, Machine, PairedShape, Plan, Task

Made = TypeVar("Made")

MOST_KEPT = 256
"""Kinds of inputs for which a layer keeps how it runs them."""


# --- trains -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """A train whose mode k fuses factor k of the outputs with factor k of the inputs."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    features: tuple[int, int]
    """Outputs and inputs without padding."""

    def shape(self, cores: Collection[Tensor]) -> PairedShape:
        """What the planner needs to know of these cores."""
        return PairedShape(self.outs, self.ins, _ranks(cores))

    def factors(self, cores: Collection[Tensor], plan: Plan, dtype: torch.dtype) -> list[chain.Factor]:
        """The factors of a chain, for products of this type."""
        found = chain.factors(self._four_way(cores), plan.cuts, plan.side)
        return [chain.Factor(matrix.to(dtype), batch) for matrix, batch in found]

    def dense(self, cores: Collection[Tensor]) -> Tensor:
        """The whole weight."""
        return _cut(chain.merged(self._four_way(cores)).squeeze((0, 3)), *self.features)

    def _four_way(self, cores: Collection[Tensor]) -> list[Tensor]:
        """The cores as ``(left, out, in, right)``."""
        own = zip(_three_way(list(cores)), self.outs, self.ins, strict=True)
        return [core.reshape(core.shape[0], m, j, core.shape[2]) for core, m, j in own]


@dataclass(frozen=True)
class Halves:
    """A train with all modes of the outputs on one side of a bond: a convolution's, or one of the split layout."""

    cut: int
    outputs_first: bool
    weight_shape: tuple[int, ...]

    def shape(self, cores: Collection[Tensor]) -> HalvesShape:
        """What the planner needs to know of these cores."""
        sizes = tuple(core.shape[1] for core in _three_way(list(cores)))
        return HalvesShape(sizes, _ranks(cores), self.cut, self.outputs_first)

    def factors(self, cores: Collection[Tensor]) -> tuple[Tensor, Tensor]:
        """The weight as two thin ones, ``(rank, taps * inputs)`` and ``(outputs, rank)``, without padding."""
        three = _three_way(list(cores))
        first, second = _merged(three[: self.cut]).squeeze(0), _merged(three[self.cut :]).squeeze(2)
        (outputs, inputs, *taps), rank = self.weight_shape, first.shape[1]
        if self.outputs_first:
            return _cut(second, rank, inputs), _cut(first, outputs, rank)
        rows = rank * math.prod(taps)
        return _cut(first.mT.reshape(rows, -1), rows, inputs).reshape(rank, -1), _cut(second.mT, outputs, rank)

    def dense(self, cores: Collection[Tensor]) -> Tensor:
        """The whole weight; a kernel lies channels-last in memory."""
        inner, outer = self.factors(cores)
        return self.as_kernel(outer @ inner)

    def as_kernel(self, flat: Tensor) -> Tensor:
        """``(any, taps * inputs)`` in the shape of a weight with so many outputs."""
        _, inputs, *taps = self.weight_shape
        return flat.reshape(-1, *taps, inputs).permute(0, 3, 1, 2) if taps else flat


@lru_cache(maxsize=1024)
def known_use(layout: Any) -> Paired | Halves | None:
    """How a train folded like this can be used; None leaves it to the readable way."""
    outs, ins = len(layout.splits[0]), len(layout.splits[1])
    if layout.shape == layout.axes and layout.modes == tuple((k, outs + k) for k in range(outs)):
        return Paired(layout.splits[0], layout.splits[1], layout.shape)
    if layout.shape == layout.axes and layout.modes == tuple((k,) for k in range(outs + ins)):
        return Halves(outs, True, layout.shape)
    taps_first = (outs + ins, *range(outs, outs + ins), *range(outs))
    if len(layout.shape) == 4 and layout.modes == tuple((k,) for k in taps_first):
        return Halves(1 + ins, False, layout.shape)
    return None


def _cut(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix without its padding; where it has none, slices would only cost time in the backward pass."""
    return matrix if matrix.shape == (rows, columns) else matrix[:rows, :columns]


def _ranks(cores: Collection[Tensor]) -> tuple[int, ...]:
    """The ranks of a train, with ones at both ends."""
    return (1, *[core.shape[-1] for core in cores][:-1], 1)


def _three_way(cores: Sequence[Tensor]) -> list[Tensor]:
    """The cores as ``(left, mode, right)``."""
    return [cores[0][None], *cores[1:-1], cores[-1][..., None]]


def _merged(cores: Sequence[Tensor]) -> Tensor:
    """A run of cores ``(left, mode, right)`` contracted into one."""
    if len(cores) == 1:
        return cores[0]
    half = (len(cores) + 1) // 2  # in halves: only the last product is large
    left, right = _merged(cores[:half]), _merged(cores[half:])
    product = left.reshape(-1, left.shape[2]) @ right.reshape(right.shape[0], -1)
    return product.reshape(left.shape[0], -1, right.shape[2])


# --- layers -----------------------------------------------------------------------------------------------------------


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


def kept_for(layer: TensorLayer, cores: Collection[Tensor]) -> Kept | None:
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


def use_of(layer: TensorLayer) -> tuple[Paired | Halves, Collection[Tensor]] | tuple[None, None]:
    """How `perf` can use the layer's weight, and the cores that stand in it now; None if it cannot."""
    weight: Any = layer._modules["factorized"]
    cores = weight._modules["cores"]._parameters.values()  # as attributes they would take longer to read
    if type(weight) is not FactorizedWeight or weight.format.name != "tt" or len(cores) != len(weight.equation.cores):
        return None, None  # parametrised cores, for one, are no parameters
    use = known_use(weight.layout)
    return (None, None) if use is None else (use, cores)


def asked(layer: TensorLayer, x: Tensor, cores: Collection[Tensor], merged: bool) -> tuple[Task, Machine]:
    """What this input asks of a layer, and on which machine; the rows of a convolution are positions of its output."""
    conv, kind, dtype = isinstance(layer, TensorConv2d), x.device.type, product_dtype(x)
    rows = x.numel() // layer.in_channels // math.prod(layer.stride) if conv else math.prod(x.shape[:-1])  # type: ignore[operator, arg-type]
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


def materialised(use: Paired | Halves, cores: Collection[Tensor], x: Tensor) -> Tensor:
    """The whole weight, in the precision of the cores."""
    with own_precision(x):
        return use.dense(cores)
