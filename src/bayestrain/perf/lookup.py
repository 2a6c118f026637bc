"""Rows of an embedding whose weight is a train: a fused sum in the place of gathered slices."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.nn import FactorizedWeight
from bayestrain.nn.precision import transformed


class Select(torch.autograd.Function):
    """``(n, r) vectors, (r, size, q) core, (n,) digits -> (n, q)``: each vector times a slice of the core.

    That is a sum of weighted rows of the core, which `F.embedding_bag` takes without writing the slices down: they are
    several times the result.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, core: Tensor, digits: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, core, digits)
        rank, size, after = core.shape
        rows = torch.arange(0, rank * size, size) + digits[:, None]
        return F.embedding_bag(rows, core.reshape(-1, after), per_sample_weights=vectors, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # of operations that have gradients, too
        vectors, core, digits = ctx.saved_tensors
        of_vectors = torch.einsum("nq,rnq->nr", grad, core.index_select(1, digits))
        of_core = torch.zeros_like(core).index_add(1, digits, torch.einsum("nr,nq->rnq", vectors, grad))
        return of_vectors, of_core, None


def rows(weight: FactorizedWeight, index: Tensor) -> Tensor | None:
    """``FactorizedWeight.rows``, or None where only the readable code applies."""
    layout, cores = weight.layout, list(weight.cores)
    (outs, *others), count = layout.splits, len(layout.splits[0])
    apart = layout.modes == tuple((k,) for k in range(len(layout.factors)))
    if weight.format.name != "tt" or not apart or count < 2 or len(others) != 1 or not len(index):
        return None
    if transformed() or index.device.type != "cpu" or cores[0].dtype not in (torch.float32, torch.float64):
        return None
    first, *digits = torch.unravel_index(index, outs)
    state = cores[0].index_select(0, first)
    for core, digit in zip(cores[1:count], digits, strict=True):
        state = Select.apply(state, core, digit)  # type: ignore[no-untyped-call]
    labels, dims = weight.equation.cores[count:], weight.equation.modes[count:]
    inner = algebra.contract(list(zip(cores[count:], labels, strict=True)), (labels[0][0], *dims))
    return torch.mm(state, inner.reshape(len(inner), -1)[:, : layout.axes[1]])
