"""Convolutions with a factorised kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Size, Tensor, nn

from bayestrain.formats import Format
from bayestrain.formats.modes import check_modes
from bayestrain.nn import chains
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import Modes, TensorLayer
from bayestrain.nn.layout import Layout
from bayestrain.nn.precision import autocasts, own_precision

TWO_MODES_FROM = 16  # channel counts from this one on are split into two modes, smaller ones stay whole


class TensorConv(TensorLayer):
    """What all convolutions share.

    The weight runs as a whole kernel, or as a chain of two or three thin ones (`nn.chains`), whichever takes the fewest
    multiplications.
    """

    settings: ClassVar[tuple[str, ...]] = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"
    )  # fmt: skip
    pointwise: ClassVar[Callable[..., Tensor]]
    """PyTorch's function for a convolution of this many dimensions."""
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    padding_mode: str

    @staticmethod
    def fold(shape: Size, format: Format, layout: str, in_modes: Modes = None, out_modes: Modes = None) -> Layout:
        """The layout of a convolution's weight: taps, then input channels, then output channels.

        This is the paper's order, in which "paired" and "split" are the same: the bond between input and output
        channels is a matrix rank, and a batch goes through two thin convolutions.
        """
        outputs, inputs, *kernel = shape
        outs = check_modes(outputs, out_modes, 2 if format.splits and outputs >= TWO_MODES_FROM else 1, "out_modes")
        ins = check_modes(inputs, in_modes, 2 if format.splits and inputs >= TWO_MODES_FROM else 1, "in_modes")
        d, e, taps = len(outs), len(ins), math.prod(kernel)
        modes = ((d + e,), *((d + k,) for k in range(e)), *((k,) for k in range(d)))
        return Layout(tuple(shape), (outputs, inputs, taps), (outs, ins, (taps,)), modes, layout)

    def _become(self, dense: Any, weight: FactorizedWeight) -> None:
        super()._become(dense, weight)
        self._reversed_padding_repeated_twice = dense._reversed_padding_repeated_twice  # as PyTorch's layers pad

    def multiply(self, x: Tensor, **options: Any) -> Tensor:
        """By the whole kernel, or thin ones where these take fewer multiplications."""
        chain, _ = self._chain()
        with own_precision(self.cores[0]):
            kernels = [self.factorized.dense()] if chain is None else chains.kernels(self.factorized, chain)
        place, groups = (0, 1) if chain is None else (0 in chain.stages, chain.groups)
        return self.run(x, kernels, place, groups, **options)

    def run(self, x: Tensor, kernels: Sequence[Tensor], place: int = 0, groups: int = 1, **options: Any) -> Tensor:
        """Convolve with these kernels, one after the other, of which that at `place` has the taps, and such groups."""
        for k, kernel in enumerate(kernels):
            bias: Tensor | None = self.bias if k == len(kernels) - 1 else None
            if x.dtype != kernel.dtype and autocasts(x):  # which it does not do by itself inside vmap
                kernel, bias = kernel.to(x.dtype), None if bias is None else bias.to(x.dtype)
            if k == place:
                x = self.convolve(x, kernel, bias, groups, **options)
            else:
                x = type(self).pointwise(x, kernel, bias)
        return x

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """Convolve with a kernel ``(outputs, inputs of a group, taps ..)``, padded and strided as this layer is."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        return type(self).pointwise(x, kernel, bias, self.stride, padding, self.dilation, groups)

    def plan(self, x: Tensor) -> tuple[str, float]:  # noqa: ARG002
        chain, relative = self._chain()
        kernels = len(set(chain.stages)) if chain else 1
        return ("whole weight", "two convolutions", "three convolutions")[kernels - 1], relative

    def _chain(self) -> tuple[chains.Chain | None, float]:
        weight = self.factorized
        return chains.cheapest(chains.network(weight), weight.layout.labels, weight.shape, self._positions())

    def _positions(self) -> tuple[int, int]:
        return math.prod(self.stride), 1  # the first kernel acts before the stride


class TensorConv1d(TensorConv):
    """Drop-in for `nn.Conv1d` with ``groups=1``; the keywords for its factorisation are those of `TensorLayer`."""

    dense_kind, input_axis, pointwise = nn.Conv1d, -2, F.conv1d


class TensorConv2d(TensorConv):
    """Drop-in for `nn.Conv2d` with ``groups=1``: ``TensorConv2d(in_channels, out_channels, kernel_size, ..)``.

    The keywords that say how the kernel is factorised are those of `TensorLayer`; "paired" and "split" are the same.
    """

    dense_kind, input_axis, pointwise = nn.Conv2d, -3, F.conv2d


class TensorConv3d(TensorConv):
    """Drop-in for `nn.Conv3d` with ``groups=1``; the keywords for its factorisation are those of `TensorLayer`."""

    dense_kind, input_axis, pointwise = nn.Conv3d, -4, F.conv3d


class TensorConvTranspose2d(TensorConv):
    """Drop-in for `nn.ConvTranspose2d` with ``groups=1``; further keywords are those of `TensorLayer`."""

    dense_kind, input_axis, pointwise = nn.ConvTranspose2d, -3, F.conv2d
    settings = (*TensorConv.settings, "output_padding")
    output_padding: tuple[int, ...]

    @staticmethod
    def oriented(weight: Tensor) -> Tensor:
        return weight.transpose(0, 1)

    @classmethod
    def start(cls, dense: Any, init: str) -> str | float:
        """With He's variance for the terms that an output is a sum of, which are fewer by the strides."""
        inputs, _, *kernel = dense.weight.shape
        return 2 * math.prod(dense.stride) / (inputs * math.prod(kernel)) if init == "he" else init

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        self.check(x)
        if output_size is None:
            return self.multiply(x)
        own = (output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation)
        return self.multiply(x, extra=nn.ConvTranspose2d._output_padding(self, x, *own))  # type: ignore[arg-type]

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None, groups: int, extra: Any = None) -> Tensor:
        kernel = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        extra = self.output_padding if extra is None else extra
        return F.conv_transpose2d(x, kernel, bias, self.stride, self.padding, extra, groups, self.dilation)

    def _positions(self) -> tuple[int, int]:
        return 1, math.prod(self.stride)
