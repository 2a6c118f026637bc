"""`Layout`: how a layer's weight becomes a tensor with modes. Data only: a padding, a reshape and a permutation.

Every axis of the weight is split into *factors* whose product is at least its size; the surplus is padding that exists
only inside. A *mode* is one factor or several fused ones. In the *paired* layout of a linear weight, mode k fuses
factor k of the outputs and factor k of the inputs (the TT-matrix of the literature). In the *split* layout all factors
of the outputs come first, then those of the inputs, so that the middle bond is an ordinary matrix rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError

LAYOUTS = ("paired", "split")


@dataclass(frozen=True)
class Layout:
    """How a weight of `shape` is folded into a tensor.

    Attributes:
        shape: of the weight, outputs first, for example ``(out, in)`` or ``(out, in, kernel height, kernel width)``.
        axes: sizes the weight is viewed with first, for example ``(out, in, height * width)``.
        splits: the factors of each of these axes.
        modes: the factors that each mode fuses, numbered through all axes.
        name: what a user calls it, "paired" or "split".
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    modes: tuple[tuple[int, ...], ...]
    name: str = "paired"
    factors: tuple[int, ...] = field(init=False, repr=False)
    """The sizes of all factors, axis after axis."""
    axis_of: tuple[int, ...] = field(init=False, repr=False)
    """The axis that each factor belongs to."""
    sizes: tuple[int, ...] = field(init=False, repr=False)
    """The sizes of the modes."""
    padded: tuple[int, ...] = field(init=False, repr=False)
    """The sizes of the axes with their padding."""

    def __post_init__(self) -> None:
        factors = tuple(size for split in self.splits for size in split)
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "axis_of", tuple(axis for axis, split in enumerate(self.splits) for _ in split))
        if math.prod(self.shape) != math.prod(self.axes) or len(self.axes) != len(self.splits):
            raise ShapeError(f"axes {self.axes} must have as many entries as shape {self.shape}, and one split each.")
        if sorted(n for mode in self.modes for n in mode) != list(range(len(self.factors))):
            raise ShapeError(f"modes must use each of the {len(self.factors)} factors once, got {self.modes}.")
        if any(math.prod(split) < size for size, split in zip(self.axes, self.splits, strict=True)):
            raise ShapeError(f"The factors {self.splits} must cover the axes {self.axes}.")
        object.__setattr__(self, "sizes", tuple(math.prod(factors[n] for n in mode) for mode in self.modes))
        object.__setattr__(self, "padded", tuple(math.prod(split) for split in self.splits))

    @property
    def is_padded(self) -> bool:
        """Whether the tensor has more entries than the weight."""
        return self.padded != self.axes

    def fold(self, weight: Tensor) -> Tensor:
        """The tensor with one axis per mode, padded with zeros."""
        x = weight.reshape(self.axes)
        ends = [(0, want - have) for have, want in zip(self.axes[::-1], self.padded[::-1], strict=True)]
        x = F.pad(x, [n for end in ends for n in end])
        return x.reshape(self.factors).permute([n for mode in self.modes for n in mode]).reshape(self.sizes)

    def unfold(self, tensor: Tensor) -> Tensor:
        """The weight that a tensor with one axis per mode stands for."""
        order = [n for mode in self.modes for n in mode]
        x = tensor.reshape([self.factors[n] for n in order])
        x = x.permute([order.index(n) for n in range(len(order))]).reshape(self.padded)
        if self.is_padded:
            for axis, size in enumerate(self.axes):
                x = x.narrow(axis, 0, size)
        return x.reshape(self.shape)


def check_layout(name: str) -> None:
    """Raise unless `name` is that of a layout."""
    if name not in LAYOUTS:
        raise ConfigError(f"layout must be one of {LAYOUTS}, got {name!r}.")
