"""`Layout`: how a layer's weight becomes a tensor with modes. Data only: a padding, a reshape and a permutation.

Every axis of the weight is split into *factors* whose product is at least its size; the surplus is padding that exists
only inside. A *mode* is one factor or several fused ones. In the *paired* layout of a linear weight, mode k fuses
factor k of the outputs and factor k of the inputs (the TT-matrix of the literature). In the *split* layout all factors
of the outputs come first, then those of the inputs, so that the middle bond is an ordinary matrix rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.formats import Format, get
from bayestrain.formats.modes import check_modes, choose_count, factor

LAYOUTS = ("paired", "split")

TWO_MODES_FROM = 16
"""Channel counts from this one on are split into two modes, smaller ones stay whole."""


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


def linear_layout(
    outputs: int,
    inputs: int,
    format: str | Format = "tt",
    layout: str = "paired",
    in_modes: Sequence[int] | None = None,
    out_modes: Sequence[int] | None = None,
) -> tuple[Format, Layout]:
    """The format, and the layout of an ``(out, in)`` weight; modes not given are chosen by the format's default."""
    kind = get(format)
    outs, ins = out_modes, in_modes
    if outs is None and ins is None and not kind.splits:
        layout, outs, ins = check_name(layout) and "split", (outputs,), (inputs,)
    count = choose_count(inputs, outputs) if outs is None and ins is None else len(ins or outs or ())
    ins = check_modes(inputs, factor(inputs, count) if ins is None else tuple(ins), "in_modes")
    outs = check_modes(outputs, factor(outputs, count) if outs is None else tuple(outs), "out_modes")
    d = len(outs)
    modes: list[tuple[int, ...]]
    if check_name(layout) == "split":
        modes = [(k,) for k in range(d + len(ins))]
    elif len(ins) == d > 1:
        modes = [(k, d + k) for k in range(d)]
    else:
        raise ShapeError(
            "In the paired layout in_modes and out_modes must be equally many and at least 2, "
            f"got {ins} and {outs}. Leave one out and it is chosen to match the other, or use layout='split'."
        )
    return kind, Layout((outputs, inputs), (outputs, inputs), (outs, ins), tuple(modes), layout)


def conv_layout(
    outputs: int,
    inputs: int,
    kernel_size: tuple[int, ...],
    format: str | Format = "tt",
    layout: str = "paired",
    in_modes: Sequence[int] | None = None,
    out_modes: Sequence[int] | None = None,
) -> tuple[Format, Layout]:
    """The format, and the layout of a convolution's weight: taps, then input channels, then output channels.

    This is the paper's order, in which "paired" and "split" are the same: the bond between input and output channels is
    a matrix rank, and a batch goes through two thin convolutions.
    """
    kind, taps = get(format), math.prod(kernel_size)
    outs = _channels(outputs, out_modes, "out_modes", kind)
    ins = _channels(inputs, in_modes, "in_modes", kind)
    d, e = len(outs), len(ins)
    modes = ((d + e,), *((d + k,) for k in range(e)), *((k,) for k in range(d)))
    splits = (outs, ins, (taps,))
    return kind, Layout((outputs, inputs, *kernel_size), (outputs, inputs, taps), splits, modes, check_name(layout))


def _channels(size: int, modes: Sequence[int] | None, what: str, format: Format) -> tuple[int, ...]:
    if modes is not None:
        return check_modes(size, tuple(modes), what)
    return factor(size, 2) if format.splits and size >= TWO_MODES_FROM else (size,)


def check_name(name: str) -> str:
    """A layout's name, or an error that lists them."""
    if name not in LAYOUTS:
        raise ConfigError(f"layout must be one of {LAYOUTS}, got {name!r}.")
    return name
