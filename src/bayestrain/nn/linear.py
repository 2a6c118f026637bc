"""`TensorLinear`: a linear layer with a factorised weight."""

import math

import torch.nn.functional as F
from torch import Size, Tensor, nn

from bayestrain.errors import ShapeError
from bayestrain.formats import Format
from bayestrain.formats.modes import check_modes, choose_count
from bayestrain.nn import chains, fast
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import Modes, TensorLayer
from bayestrain.nn.layout import Layout
from bayestrain.nn.precision import own_precision, product_dtype, traced


class TensorLinear(TensorLayer):
    """Drop-in for `nn.Linear` with a factorised weight: ``TensorLinear(in_features, out_features, bias=True, ..)``.

    The keywords that say how the weight is factorised are those of `TensorLayer`.
    """

    dense_kind = nn.Linear
    settings = ("in_features", "out_features")
    input_axis = -1
    in_features: int
    out_features: int

    @staticmethod
    def fold(shape: Size, format: Format, layout: str, in_modes: Modes = None, out_modes: Modes = None) -> Layout:
        """The layout of an ``(out, in)`` weight; modes not given are chosen by the format's default."""
        outputs, inputs = shape
        if in_modes is None and out_modes is None and not format.splits:
            layout, in_modes, out_modes = "split", (inputs,), (outputs,)
        given = out_modes if in_modes is None else in_modes
        count = choose_count(inputs, outputs) if given is None else len(given)
        ins = check_modes(inputs, in_modes, count, "in_modes")
        outs = check_modes(outputs, out_modes, count, "out_modes")
        d, e = len(outs), len(ins)
        if layout == "paired" and not d == e > 1:
            raise ShapeError(
                "In the paired layout in_modes and out_modes must be equally many and at least 2, "
                f"got {ins} and {outs}. Leave one out and it is chosen to match the other, or use layout='split'."
            )
        modes = [(k, d + k) for k in range(d)] if layout == "paired" else [(k,) for k in range(d + e)]
        return Layout((outputs, inputs), (outputs, inputs), (outs, ins), tuple(modes), layout)

    def multiply(self, x: Tensor) -> Tensor:
        """By the whole weight, or core by core where that takes fewer multiplications.

        While the pass is traced, by `traced_product`.
        """
        if traced():
            return traced_product(self.factorized, x, self.bias)
        if self.plan(x)[0] == "whole weight":
            return F.linear(x, self.weight, self.bias)
        dtype = product_dtype(x)
        with own_precision(x):
            y = self.factorized.multiply(x.to(dtype))
            return y if self.bias is None else y + self.bias.to(dtype)

    def plan(self, x: Tensor) -> tuple[str, float]:
        rows = math.prod(x.shape[:-1])
        by_cores, whole = self.factorized.operations(rows)
        name = "core by core" if 0 < by_cores < whole else "whole weight"
        return name, min(by_cores, whole) / max(rows * self.factorized.dense_numel, 1)


def traced_product(weight: FactorizedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """By thin factors between inputs and outputs, or the whole weight where that is smaller, for any number of rows.

    What it does can be traced, and transformed by `torch.func`.
    """
    if fast.found is not None and (y := fast.found.compiled(weight, x, bias)) is not None:
        return y  # type: ignore[no-any-return]
    thin, _ = chains.cheapest(chains.network(weight), weight.layout.labels, weight.shape, (1, 1))
    with own_precision(x):
        factors = [weight.dense()] if thin is None or thin.groups > 1 else chains.kernels(weight, thin)
    for factor in factors[:-1]:
        x = F.linear(x, factor)
    return F.linear(x, factors[-1], bias)
