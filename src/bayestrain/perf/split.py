"""A linear layer whose weight is a train in the split layout, as one node of autograd: few and small operations."""

from typing import Any

import torch
from torch import Tensor

from bayestrain.nn.precision import own_precision
from bayestrain.perf import trains
from bayestrain.perf.planner import Train


class SplitLinear(torch.autograd.Function):
    """``(rows, inputs) -> (rows, outputs)`` through the factors at the middle bond, which are merged core by core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, train: Train, dtype: torch.dtype, *cores: Tensor) -> Tensor:
        ctx.train, ctx.dtype, outputs, inputs = train, dtype, *train.shape
        with own_precision(x):
            outers, inners = _outer(cores[: train.middle]), _inner(cores[train.middle :])
            outer, inner, x = outers[-1][:outputs].to(dtype), inners[0][:, :inputs].to(dtype), x.to(dtype)
            h = x @ inner.mT
            y = h @ outer.mT if bias is None else torch.addmm(bias.to(dtype), h, outer.mT)
        ctx.save_for_backward(x, bias, h, outer, inner, *outers, *inners, *cores)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        train, middle = ctx.train, ctx.train.middle
        x, bias, h, outer, inner, *others = ctx.saved_tensors
        cores = others[len(others) // 2 :]
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a graph of the backward pass is wanted: plain operations have one
            wanted = [own for own, need in zip((x, bias, *cores), (*needs[:2], *needs[4:]), strict=True) if need]
            found = iter(torch.autograd.grad(plain(x, bias, train, ctx.dtype, cores), wanted, g, create_graph=True))
            all_of = [next(found) if need else None for need in (*needs[:2], *needs[4:])]
            return *all_of[:2], None, None, *all_of[2:]
        with own_precision(x):
            of_h = g @ outer
            of_x = of_h @ inner if needs[0] else None
            of_bias = g.sum(0).to(bias.dtype) if needs[1] else None
            of_cores: list[Tensor | None] = [None] * len(cores)
            if any(needs[4:]):
                outers, inners = others[:middle], others[middle : len(cores)]
                own = _padded(g.mT @ h, 0, len(outers[-1])).to(cores[0].dtype)
                for k in range(middle - 1, 0, -1):
                    own = own.reshape(len(outers[k - 1]), -1)
                    of_cores[k] = (outers[k - 1].mT @ own).view_as(cores[k])
                    own = own @ cores[k].reshape(len(cores[k]), -1).mT
                of_cores[0] = own.view_as(cores[0])
                own = _padded(of_h.mT @ x, 1, inners[0].shape[1]).to(cores[0].dtype)
                for k in range(middle, len(cores) - 1):
                    core = cores[k].reshape(-1, cores[k].shape[-1])
                    own = own.reshape(len(core), -1)
                    of_cores[k] = (own @ inners[k - middle + 1].mT).view_as(cores[k])
                    own = core.mT @ own
                of_cores[-1] = own.view_as(cores[-1])
        return of_x, of_bias, None, None, *of_cores


def plain(x: Tensor, bias: Tensor | None, train: Train, dtype: torch.dtype, cores: Any) -> Tensor:
    """The same by plain operations."""
    with own_precision(x):
        inner, outer = (own.to(dtype) for own in trains.halves(train, cores))
        y = (x.to(dtype) @ inner.mT) @ outer.mT
        return y if bias is None else y + bias.to(dtype)


def _outer(cores: Any) -> list[Tensor]:
    """The first core, the first two merged, and so on: ``(outputs, rank)`` each."""
    found = [cores[0].reshape(-1, cores[0].shape[-1])]
    for core in cores[1:]:
        found.append((found[-1] @ core.reshape(len(core), -1)).view(-1, core.shape[-1]))
    return found


def _inner(cores: Any) -> list[Tensor]:
    """All cores merged, all but the first, and so on: ``(rank, inputs)`` each."""
    found = [cores[-1].reshape(len(cores[-1]), -1)]
    for core in reversed(cores[:-1]):
        found.append((core.reshape(-1, core.shape[-1]) @ found[-1]).view(len(core), -1))
    return found[::-1]


def _padded(own: Tensor, dim: int, size: int) -> Tensor:
    missing = size - own.shape[dim]
    return own if not missing else torch.nn.functional.pad(own, (0, missing) if dim else (0, 0, 0, missing))
