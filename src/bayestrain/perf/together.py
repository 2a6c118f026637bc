"""Materialise the weights of equally shaped layers together: a few large operations instead of thousands of small ones.

A deep network of small factorised layers spends its time on a GPU launching operations on tiny cores. In the steps of a
`Capture`, the first layer to run that uses its whole weight materialises those of all layers with the same modes. Ranks
may differ: cores are padded with zeros, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from bayestrain.nn import TensorLayer
from bayestrain.nn.precision import own_precision
from bayestrain.perf.weights import Halves, Paired, transformed, use_of


class Together:
    """The layers of a step, and the weights that are ready for those yet to run.

    The first step inside of ``with together():`` notes layers, the next ones materialise their weights together.
    """

    def __init__(self) -> None:
        self.noted: dict[TensorLayer, Paired | Halves] = {}
        self._noting = True
        self._ready: dict[TensorLayer, tuple[list[Tensor], Tensor]] = {}
        """The cores, and the weight they make."""
        self._places: dict[object, Tensor] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        token, self._noting = _ACTIVE.set(self), not self.noted
        try:
            yield
        finally:
            _ACTIVE.reset(token)
            self._ready.clear()

    def weight(self, layer: TensorLayer, use: Paired | Halves, cores: Collection[Tensor]) -> Tensor | None:
        """The layer's weight, if it is made together with others."""
        if self._noting:
            self.noted[layer] = use
        if self._noting or layer not in self.noted:
            return None
        # A second use makes its own, and particles put other cores in the place of those a weight was made of.
        own, made = self._ready.pop(layer, ([], None))
        if made is not None and all(a is b for a, b in zip(own, cores, strict=True)):
            return made
        alike = [other for other in self.noted if _kind(other) == _kind(layer)]
        now = [list(use_of(other)[1] or ()) for other in alike]
        if len(alike) == 1 or not all(now):
            return None
        self._ready |= zip(alike, zip(now, self._weights(use, now), strict=True), strict=True)
        return self._ready.pop(layer)[1]

    def _weights(self, use: Paired | Halves, layers: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """The weight of every layer, from the cores of each."""
        with own_precision(layers[0][0]):
            stacked = [self._stacked(cores) for cores in zip(*layers, strict=True)]
            made: Tensor = torch.vmap(lambda *cores: use.dense(cores))(*stacked)
        return made.unbind()

    def _stacked(self, cores: Sequence[Tensor]) -> Tensor:
        """Cores of different ranks padded with zeros and stacked."""
        shapes = tuple(core.shape for core in cores)
        whole = torch.Size((len(cores), *map(max, zip(*shapes, strict=True))))
        if len(set(shapes)) == 1:
            return torch.stack(list(cores))
        if shapes not in self._places:  # where the entries of each lie
            index = torch.arange(whole.numel()).reshape(whole)
            parts = [index[i][tuple(slice(size) for size in shape)].flatten() for i, shape in enumerate(shapes)]
            self._places[shapes] = torch.cat(parts).to(cores[0].device)
        stacked: Tensor = _PadStack.apply(whole, self._places[shapes], *cores)  # type: ignore[no-untyped-call]
        return stacked


_ACTIVE: ContextVar[Together | None] = ContextVar("together", default=None)


def weight(layer: TensorLayer, use: Paired | Halves, cores: Collection[Tensor]) -> Tensor | None:
    """The layer's weight, if this step makes it together with others."""
    active = _ACTIVE.get()
    # Checkpointed parts run again in the backward pass and must then do the same as before.
    if active is None or transformed() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return active.weight(layer, use, cores)


def _kind(layer: TensorLayer) -> tuple[object, ...]:
    like = next(iter(layer.cores))
    return type(layer), layer.factorized.layout, like.device, like.dtype


class _PadStack(torch.autograd.Function):
    """Stack tensors of different sizes, padded with zeros; every entry is copied once in both directions."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Size, where: Tensor, *cores: Tensor) -> Tensor:
        ctx.where, ctx.shapes = where, [core.shape for core in cores]
        flat = torch.cat([core.reshape(-1) for core in cores])
        return flat.new_zeros(whole.numel()).index_copy_(0, where, flat).reshape(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat = gradient.reshape(-1).index_select(0, ctx.where)
        parts = flat.split([shape.numel() for shape in ctx.shapes])
        return None, None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True))
