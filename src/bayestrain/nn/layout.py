"""`Layout`: how a layer's weight becomes a tensor with modes. Data only: a padding, a reshape and a permutation."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from bayestrain.errors import ShapeError

LAYOUTS = ("paired", "split")


@dataclass(frozen=True)
class Layout:
    """How a weight is folded into a tensor.

    Every axis of the weight is split into *factors* whose product is at least its size; the surplus is padding that
    exists only inside. A *mode* is one factor or several fused ones. In the *paired* layout of a linear weight, mode k
    fuses factor k of the outputs and factor k of the inputs (the TT-matrix of the literature). In the *split* layout
    all factors of the outputs come first, so that the middle bond is an ordinary matrix rank.

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

    def __post_init__(self) -> None:
        if math.prod(self.shape) != math.prod(self.axes) or len(self.axes) != len(self.splits):
            raise ShapeError(f"axes {self.axes} must have as many entries as shape {self.shape}, and one split each.")
        if sorted(self._order) != list(range(len(self.factors))):
            raise ShapeError(f"modes must use each of the {len(self.factors)} factors once, got {self.modes}.")
        if any(covered < size for size, covered in zip(self.axes, self.padded, strict=True)):
            raise ShapeError(f"The factors {self.splits} must cover the axes {self.axes}.")

    @property
    def factors(self) -> tuple[int, ...]:
        """The sizes of all factors, axis after axis."""
        return tuple(size for split in self.splits for size in split)

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """A label for each factor, axis by axis, as `formats.algebra.contract` takes them."""
        return tuple(tuple(f"axis{k}.{n}" for n in range(len(split))) for k, split in enumerate(self.splits))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the modes."""
        return tuple(math.prod(self.factors[n] for n in mode) for mode in self.modes)

    @property
    def padded(self) -> tuple[int, ...]:
        """The sizes of the axes with their padding."""
        return tuple(map(math.prod, self.splits))

    @property
    def _order(self) -> tuple[int, ...]:
        return tuple(n for mode in self.modes for n in mode)

    def fold(self, weight: Tensor) -> Tensor:
        """The tensor with one axis per mode, padded with zeros."""
        x = weight.reshape(self.axes)
        ends = [(0, want - have) for have, want in zip(self.axes[::-1], self.padded[::-1], strict=True)]
        x = F.pad(x, [n for end in ends for n in end])
        return x.reshape(self.factors).permute(self._order).reshape(self.sizes)

    def unfold(self, tensor: Tensor) -> Tensor:
        """The weight that a tensor with one axis per mode stands for."""
        x = tensor.reshape([self.factors[n] for n in self._order])
        x = x.permute([self._order.index(n) for n in range(len(self._order))]).reshape(self.padded)
        return x[tuple(map(slice, self.axes))].reshape(self.shape)
