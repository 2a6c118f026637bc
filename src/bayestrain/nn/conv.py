"""`TensorConv2d`: a 2-d convolution with a factorised kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Size, Tensor, nn

from bayestrain.formats import Format
from bayestrain.formats.modes import check_modes
from bayestrain.nn.factorized import Cut, FactorizedWeight
from bayestrain.nn.layer import Modes, TensorLayer
from bayestrain.nn.layout import Layout
from bayestrain.nn.precision import autocasts, own_precision

TWO_MODES_FROM = 16
"""Channel counts from this one on are split into two modes, smaller ones stay whole."""


class TensorConv2d(TensorLayer):
    """Drop-in for `nn.Conv2d` with ``groups=1``: ``TensorConv2d(in_channels, out_channels, kernel_size, ..)``.

    The kernel, as ``(taps, inputs, outputs)``, is cut in two between inputs and outputs: ``A[t, C, r] B[r, S]`` is a
    convolution with r filters, then a 1x1 convolution. It runs so where that takes fewer multiplications; otherwise the
    kernel is materialised.

    The keywords that say how the kernel is factorised are those of `TensorLayer`; "paired" and "split" are the same.
    """

    dense_kind = nn.Conv2d
    settings = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"
    )  # fmt: skip
    input_axis = -3
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]

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
        self._reversed_padding_repeated_twice = dense._reversed_padding_repeated_twice  # `nn.Conv2d` pads with it

    def multiply(self, x: Tensor) -> Tensor:
        """By the whole kernel, or two thin ones where these take fewer multiplications."""
        cut, _ = self._cut()
        if cut is None:
            return self.run(x, [self.weight])
        with own_precision(self.cores[0]):
            first, second = self.factorized.halves(cut)
        return self.run(x, [first, second[:, :, None, None]])

    def run(self, x: Tensor, kernels: Sequence[Tensor]) -> Tensor:
        """Convolve with the whole kernel, or with the two of the two-step form."""
        bias = self.bias if len(kernels) == 1 else None
        x = nn.Conv2d._conv_forward(self, x, *_lowered(x, kernels[0], bias))  # type: ignore[arg-type]
        return x if len(kernels) == 1 else F.conv2d(x, *_lowered(x, kernels[1], self.bias))

    def plan(self, x: Tensor) -> tuple[str, float]:  # noqa: ARG002
        cut, operations = self._cut()
        return "whole weight" if cut is None else "two convolutions", operations

    def _cut(self) -> tuple[Cut | None, float]:
        """The cut between two thin kernels, if these take fewer multiplications, and how many relative to dense."""
        cut, (outputs, *inputs) = self.factorized.cut(), self.factorized.shape
        relative = math.inf if cut is None else cut[0] * (math.prod(inputs) + outputs) / self.factorized.dense_numel
        return (cut, relative) if relative < 1 else (None, 1.0)


def _lowered(x: Tensor, kernel: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Kernel and bias in the type of an input that autocast has lowered, which it does not do for them inside vmap."""
    if x.dtype != kernel.dtype and autocasts(x):
        kernel, bias = kernel.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return kernel, bias
