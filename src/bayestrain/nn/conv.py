"""`TensorConv2d`: a 2-d convolution with a factorised kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from operator import index
from typing import Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.errors import ConversionError, ShapeError
from bayestrain.formats import Format, algebra
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.fast import fast
from bayestrain.nn.layer import (
    DEFAULT_RANK,
    Folding,
    TensorLayer,
    autocasts,
    check_dense,
    factor_operands,
    own_precision,
    random_weight,
    sides,
    traced,
)
from bayestrain.nn.layout import Layout, conv_layout

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Cut(NamedTuple):
    """A network taken apart between taps and inputs on one side and outputs on the other."""

    first: tuple[int, ...]
    """The cores of the first convolution."""
    second: tuple[int, ...]
    """The cores of the 1x1 convolution."""
    bonds: tuple[str, ...]
    """The bonds between them: their indices are the channels in between."""


class TensorConv2d(TensorLayer):
    """Drop-in for `nn.Conv2d` (``groups=1``) with a factorised kernel.

    The kernel, as ``(taps, inputs, outputs)``, is cut in two between inputs and outputs: ``A[t, C, r] B[r, S]`` is a
    convolution with r filters, then a 1x1 convolution. It runs so where that takes fewer multiplications; otherwise the
    kernel is materialised.

    Args:
        in_channels .. padding_mode, device, dtype: as for `nn.Conv2d`; `groups` must be 1.
        format, layout, max_rank: as for `TensorLinear`.
        in_modes, out_modes: factors of the channel counts, any number each; chosen automatically when left out.
        init: "he" (variance ``2 / fan_in``) or "paper" (``sqrt(2 / Q)``, Q the number of entries).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        format: str | Format = "tt",
        layout: str = "paired",
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] = DEFAULT_RANK,
        init: str = "he",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # A twin on the meta device checks the arguments as PyTorch does.
        twin = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device="meta"
        )
        how = self._folding(twin, format=format, layout=layout, in_modes=in_modes, out_modes=out_modes)
        self._set_up(twin, random_weight(*how, max_rank, init, dtype, device), bias)

    def _set_up(self, dense: nn.Conv2d, weight: FactorizedWeight, bias: bool) -> None:
        TensorLayer.__init__(self, weight, bias)
        self.in_channels, self.out_channels = index(dense.in_channels), index(dense.out_channels)
        self.kernel_size, self.stride, self.dilation = map(_pair, (dense.kernel_size, dense.stride, dense.dilation))
        self.padding = dense.padding if isinstance(dense.padding, str) else _pair(dense.padding)
        self.groups, self.padding_mode = 1, dense.padding_mode
        self.edge = list(map(index, dense._reversed_padding_repeated_twice))
        """The padding as `F.pad` takes it, for padding modes other than zeros."""

    @classmethod
    def _folding(cls, dense: nn.Conv2d, **folding: Unpack[Folding]) -> tuple[Format, Layout]:
        check_dense(dense, nn.Conv2d)
        if dense.groups != 1:
            raise ConversionError(
                f"TensorConv2d needs groups=1, got groups={dense.groups}. A grouped kernel is already small: leave it "
                "dense (in tensorize_, with a filter_fn that returns False for it)."
            )
        sizes = index(dense.out_channels), index(dense.in_channels), _pair(dense.kernel_size)
        return conv_layout(*sizes, **folding)

    def _empty_dense(self) -> nn.Conv2d:
        return nn.Conv2d(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation, 1,
            self.bias is not None, self.padding_mode,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ShapeError(
                f"TensorConv2d expects (batch, {self.in_channels}, height, width) or the same without batch, "
                f"got {tuple(x.shape)}."
            )
        perf = None if traced() else fast()
        if perf is not None and (y := perf.conv2d(self, x)) is not None:
            return y  # type: ignore[no-any-return]
        return self.run(x, self.kernels())

    def kernels(self) -> list[Tensor]:
        """The whole kernel, or the two of the two-step form where these take fewer multiplications."""
        cut = self.cut()
        if cut is None or self.operations(cut) >= math.prod(self.factorized.shape):
            return [self.weight]
        return list(self.halves(cut))

    def cut(self) -> Cut | None:
        """The cheapest cut between inputs and outputs; None where a core has factors of both."""
        outs, ins = sides(self.factorized)
        if outs & ins:
            return None
        neutral = [k for k in range(len(self.cores)) if k not in outs | ins]
        equation, ranks = self.factorized.equation, dict(zip(self._bonds, self.factorized.ranks, strict=True))
        found = []
        for choice in product((True, False), repeat=len(neutral)):
            second = outs | {k for k, chosen in zip(neutral, choice, strict=True) if chosen}
            first = set(range(len(self.cores))) - second
            bonds = [b for b in self._bonds if set(equation.owners(b)) & first and set(equation.owners(b)) & second]
            cut = Cut(tuple(sorted(first)), tuple(sorted(second)), tuple(bonds))
            found.append((math.prod([ranks[bond] for bond in bonds]), cut))
        return min(found)[1]

    @property
    def _bonds(self) -> tuple[str, ...]:
        return self.factorized.equation.bonds

    def channels(self, cut: Cut) -> int:
        """How many channels there are between the two convolutions."""
        ranks = dict(zip(self._bonds, self.factorized.ranks, strict=True))
        return math.prod([ranks[bond] for bond in cut.bonds])

    def operations(self, cut: Cut) -> int:
        """Multiplications per position of the two convolutions."""
        out_channels, in_channels, *taps = self.factorized.shape
        return self.channels(cut) * (in_channels * math.prod(taps) + out_channels)

    def halves(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """The kernels ``(r, C, kh, kw)`` and ``(S, r, 1, 1)`` of the two-step form."""
        layout, cores = self.factorized.layout, list(self.cores)
        labels = [tuple(f"f{n}" for n, own in enumerate(layout.axis_of) if own == axis) for axis in range(3)]
        with own_precision(cores[0]):
            first = algebra.contract(
                factor_operands(self.factorized, cores, cut.first), (*cut.bonds, *labels[1], *labels[2])
            )
            second = algebra.contract(factor_operands(self.factorized, cores, cut.second), (*labels[0], *cut.bonds))
        channels = self.channels(cut)
        first = first.reshape(channels, layout.padded[1], *self.kernel_size)[:, : self.in_channels]
        return first, second.reshape(layout.padded[0], channels, 1, 1)[: self.out_channels]

    def run(self, x: Tensor, kernels: Sequence[Tensor]) -> Tensor:
        """Convolve with the whole kernel, or with the two of the two-step form."""
        if len(kernels) == 1:
            return self.convolve(x, kernels[0], self.bias)
        filtered = self.convolve(x, kernels[0], None)
        return F.conv2d(filtered, *_lowered(filtered, kernels[1], self.bias))

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve with this layer's stride, padding and dilation."""
        padding: int | tuple[int, ...] | str = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self.edge, mode=self.padding_mode), 0
        kernel, bias = _lowered(x, kernel, bias)
        return F.conv2d(x, kernel, bias, self.stride, padding, self.dilation)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding!r}, bias={self.bias is not None}, in_modes={self.in_modes}, "
            f"out_modes={self.out_modes}, {self._summary()}"
        )


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return index(value[0]), index(value[1])


def _lowered(x: Tensor, kernel: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Kernel and bias in the type of an input that autocast lowered before: inside vmap it forgets to."""
    if x.dtype == kernel.dtype or not autocasts(x):
        return kernel, bias
    return kernel.to(x.dtype), None if bias is None else bias.to(x.dtype)
