"""`Stacks`: tensors of several sizes padded with zeros and stacked, in two operations for any number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Stacks:
    """How groups of tensors are stacked: each group has one number of dimensions and becomes one tensor.

    Args:
        groups: the shapes of each group's tensors.
        device: where the tensors will be.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Size]], device: torch.device) -> None:
        self.shapes = [(len(shapes), *map(max, zip(*shapes, strict=True))) for shapes in groups]
        places, start = [], 0
        for shapes, whole in zip(groups, self.shapes, strict=True):
            index = torch.arange(start, start := start + math.prod(whole)).view(whole)
            places += [layer[tuple(map(slice, shape))].flatten() for layer, shape in zip(index, shapes, strict=True)]
        self.numel, self.places = start, torch.cat(places).to(device)

    def __call__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """The stacks of these tensors, group after group, perhaps in another type; differentiable."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
        every = flat.new_zeros(self.numel).index_copy(0, self.places, flat)
        parts = every.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
