"""`Stacks`: networks of one equation padded with zeros and stacked, in two operations for any number of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Network = Sequence[Tensor]
"""The cores, whose sizes may differ from one network to the next."""


class Stacks:
    """How networks with the shapes of these are stacked, and taken apart again."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self.shapes = [[core.shape for core in own] for own in zip(*networks, strict=True)]
        self.stacked = [(len(own), *map(max, zip(*own, strict=True))) for own in self.shapes]
        self.sizes, places = [math.prod(shape) for shape in self.stacked], []
        for shapes, index in zip(self.shapes, self._split(torch.arange(sum(self.sizes))), strict=True):
            places += [cell.flatten() for cell in _cells(index, shapes)]
        self.places = torch.cat(places).to(networks[0][0].device)

    def __call__(self, networks: Sequence[Network], dtype: torch.dtype | None = None) -> list[Tensor]:
        """The stacked cores, perhaps in another type; differentiable."""
        flat = torch.cat([core.reshape(-1) for own in zip(*networks, strict=True) for core in own]).to(dtype)
        return self._split(flat.new_zeros(sum(self.sizes)).index_copy(0, self.places, flat))

    def apart(self, stacks: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The cores of every network."""
        return list(zip(*map(_cells, stacks, self.shapes), strict=True))

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.stacked, strict=True)]


def _cells(stack: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The layers of a stack without their padding."""
    return [layer[tuple(map(slice, shape))] for layer, shape in zip(stack, shapes, strict=True)]
