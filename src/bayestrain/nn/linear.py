"""`TensorLinear`: a linear layer with a factorised weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.errors import ShapeError
from bayestrain.formats import Format, algebra
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.fast import fast
from bayestrain.nn.layer import (
    DEFAULT_RANK,
    Folding,
    TensorLayer,
    check_dense,
    factor_operands,
    own_precision,
    product_dtype,
    random_weight,
    traced,
)
from bayestrain.nn.layout import Layout, linear_layout


class TensorLinear(TensorLayer):
    """Drop-in for `nn.Linear` with a factorised weight.

    Where the product of the modes is larger than the number of features, the surplus exists only inside.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`.
        format: name of a format in `bayestrain.formats.FORMATS`, or a `Format`.
        layout: "paired" fuses mode k of the outputs with mode k of the inputs (a TT-matrix); "split" puts all modes of
            the outputs first, so that a batch goes through two thin products.
        in_modes, out_modes: factors of the two sizes; chosen automatically when left out.
        max_rank: one number, or one per bond; cut down to what the modes can use.
        init: "he" (variance ``2 / in_features``) or "paper" (``sqrt(2 / Q)``, Q the number of entries).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
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
        how = linear_layout(index(out_features), index(in_features), format, layout, in_modes, out_modes)
        self._set_up(None, random_weight(*how, max_rank, init, dtype, device), bias)

    def _set_up(self, dense: nn.Linear | None, weight: FactorizedWeight, bias: bool) -> None:  # noqa: ARG002
        TensorLayer.__init__(self, weight, bias)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def _folding(cls, dense: nn.Linear, **folding: Unpack[Folding]) -> tuple[Format, Layout]:
        check_dense(dense, nn.Linear)
        return linear_layout(dense.out_features, dense.in_features, **folding)

    def _empty_dense(self) -> nn.Linear:
        return nn.Linear(self.in_features, self.out_features, self.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"TensorLinear expects {self.in_features} features in the last dimension, got {tuple(x.shape)}."
            )
        perf = None if traced() else fast()
        if perf is not None and (y := perf.linear(self, x)) is not None:
            return y  # type: ignore[no-any-return]
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """The readable forward pass: by the whole weight, or core by core where that takes fewer multiplications."""
        if not traced() and 0 < self.operations(rows := math.prod(x.shape[:-1])) < self.dense_operations(rows):
            return self._contract(x)
        return F.linear(x, self.weight, self.bias)

    def operations(self, rows: int) -> int:
        """Multiplications of one forward pass for so many rows, contracting core by core."""
        cores = factor_operands(self.factorized, list(self.cores), range(len(self.cores)))
        known = [(labels, tuple(core.shape)) for core, labels in cores]
        ins = self._labels(1)
        return algebra.operations([(("batch", *ins), (rows, *self.in_modes)), *known], ("batch", *self._labels(0)))

    def dense_operations(self, rows: int) -> int:
        """Multiplications of one forward pass for so many rows, materialising the weight first."""
        weight = self.factorized
        known = [(labels, tuple(core.shape)) for core, labels in zip(weight.cores, weight.equation.cores, strict=True)]
        return algebra.operations(known, weight.equation.output) + rows * self.in_features * self.out_features

    def _labels(self, axis: int) -> tuple[str, ...]:
        """The labels of an axis's factors."""
        return tuple(f"f{n}" for n, own in enumerate(self.factorized.layout.axis_of) if own == axis)

    def _contract(self, x: Tensor) -> Tensor:
        layout, dtype = self.factorized.layout, product_dtype(x)
        rows = x.reshape(-1, self.in_features).to(dtype)
        rows = F.pad(rows, (0, layout.padded[1] - self.in_features)).reshape(-1, *self.in_modes)
        with own_precision(x):
            cores = [core.to(dtype) for core in self.cores]
            operands = factor_operands(self.factorized, cores, range(len(cores)))
            y = algebra.contract([(rows, ("batch", *self._labels(1))), *operands], ("batch", *self._labels(0)))
            y = y.reshape(len(rows), -1)[:, : self.out_features]
            y = y if self.bias is None else y + self.bias.to(dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"in_modes={self.in_modes}, out_modes={self.out_modes}, {self._summary()}"
        )
