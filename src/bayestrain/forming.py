"""Form the weights of all layers with equal modes at once: a few large operations instead of thousands of small ones.

A deep network of small tensor-train layers spends its time on a GPU launching operations on tiny cores. Layers whose
plan is to form the weight, and which have the same modes, are stacked for that; ranks may differ, cores are padded with
zeros, which changes nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.layers import TTLayer
from bayestrain.layers.base import own_precision
from bayestrain.sizes import tt_layers


class FormTogether:
    """Forms the weights of a model's layers together, for every pass inside of ``with forming():``.

    ::

        forming = FormTogether(model)
        with forming():
            F.cross_entropy(model(x), y).backward()

    A layer's plan must be known, so the first pass, and the first after ranks have changed, is an ordinary one. The
    backward pass belongs inside where parts of the model are checkpointed, which run once more in it. A layer that a
    pass leaves out gets gradients of zero.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = tuple(tt_layers(model).values())
        self._ranks: tuple[object, ...] = ()
        self._groups: list[_Group] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        ranks = tuple(
            (layer.ranks, layer.cores[0].device, layer.cores[0].dtype, layer.low_memory, layer.forced_plan)
            for layer in self.layers
        )
        if ranks != self._ranks:
            self._ranks, self._groups = ranks, None
            yield
            return
        if self._groups is None:
            self._groups = _groups(self.layers)
        try:
            for group in self._groups:
                for layer, weight in zip(group.layers, group.weights(), strict=True):
                    layer.given = weight
            yield
        finally:
            for layer in self.layers:
                layer.given = None


class _Group:
    """Layers of one kind with equal modes."""

    def __init__(self, layers: Sequence[TTLayer]) -> None:
        self.layers = layers
        self.places = [
            _places([tuple(layer.cores[k].shape) for layer in layers], layers[0].cores[k].device)
            for k in range(len(layers[0].cores))
        ]

    def weights(self) -> tuple[Tensor, ...]:
        """The weight of every layer."""
        first = self.layers[0]
        with own_precision(first.cores[0]):
            stacked = []
            for k, (shape, where) in enumerate(self.places):
                cores = [layer.cores[k] for layer in self.layers]
                if where is None:
                    stacked.append(torch.stack(cores))
                else:
                    stacked.append(_PadStack.apply(shape, where, *cores))  # type: ignore[no-untyped-call]
            weights: Tensor = torch.vmap(lambda *cores: first.dense_weight(cores))(*stacked)
        return weights.unbind()


def _groups(layers: Sequence[TTLayer]) -> list[_Group]:
    found: dict[object, list[TTLayer]] = {}
    for layer in layers:
        if layer.plan is not None and layer.plan.kind in ("dense", "kernel") and not layer.plan.recompute:
            modes = tuple(core.shape[1:-1] for core in layer.cores)
            key = (type(layer), modes, layer.weight_shape, layer.cores[0].device, layer.cores[0].dtype)
            found.setdefault(key, []).append(layer)
    return [_Group(group) for group in found.values() if len(group) > 1]


def _places(shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[tuple[int, ...], Tensor | None]:
    """The shape of all cores padded and stacked, and where in it the entries of each lie; None if nothing is padded."""
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    whole = (len(shapes), *largest)
    if len(set(shapes)) == 1:
        return whole, None
    index = torch.arange(torch.Size(whole).numel()).reshape(whole)
    parts = [index[i][tuple(slice(size) for size in shape)].flatten() for i, shape in enumerate(shapes)]
    return whole, torch.cat(parts).to(device)


class _PadStack(torch.autograd.Function):
    """Stack tensors of different sizes, padded with zeros; every entry is copied once in both directions."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], where: Tensor, *cores: Tensor) -> Tensor:
        ctx.where, ctx.shapes = where, [core.shape for core in cores]
        flat = torch.cat([core.reshape(-1) for core in cores])
        return flat.new_zeros(torch.Size(shape).numel()).index_copy_(0, where, flat).reshape(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat = gradient.reshape(-1).index_select(0, ctx.where)
        parts = flat.split([shape.numel() for shape in ctx.shapes])
        return None, None, *(part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True))
