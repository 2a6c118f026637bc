"""A linear layer whose weight is a train in the split layout, as one node of autograd: few and small operations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.nn.precision import own_precision
from bayestrain.perf import trains
from bayestrain.perf.planner import Train


class SplitLinear(torch.autograd.Function):
    """``(rows, inputs) -> (rows, outputs)`` through the factors at the middle bond, which are merged core by core.

    The rows are of the type in which products are computed; cores may be more precise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, train: Train, *cores: Tensor) -> Tensor:
        outputs, inputs = train.shape
        with own_precision(x):
            outers, inners = _outer(cores[: train.middle]), _inner(cores[train.middle :])
            outer, inner = outers[-1][:outputs].to(x.dtype), inners[0][:, :inputs].to(x.dtype)
            h = x @ inner.mT
            y = h @ outer.mT if bias is None else torch.addmm(bias.to(x.dtype), h, outer.mT)
        ctx.train, ctx.bias = train, None if bias is None else bias.dtype
        trained = any(core.requires_grad for core in cores)
        ctx.save_for_backward(*cores, outer, inner, *((x, h, *outers, *inners) if trained else ()))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        train, middle, needs = ctx.train, ctx.train.middle, ctx.needs_input_grad
        count, saved = len(train.outs), ctx.saved_tensors
        cores, outer, inner, others = saved[:count], saved[count], saved[count + 1], saved[count + 2 :]
        of_bias = g.sum(0).to(ctx.bias) if needs[1] else None
        of_cores: list[Tensor | None] = [None] * count
        if torch.is_grad_enabled():  # a graph of the backward pass is wanted: plain operations have one
            of_x, of_cores = _differentiable(g, others[0] if others else None, train, cores, (needs[0], needs[3:]))
            return of_x, of_bias, None, *of_cores
        with own_precision(g):
            of_h = g @ outer
            of_x = of_h @ inner if needs[0] else None
            if others:
                (x, h), outers, inners = others[:2], others[2 : 2 + middle], others[2 + middle :]
                own = _padded(g.mT @ h, 0, len(outers[-1])).to(cores[0].dtype)
                for k in range(middle - 1, 0, -1):
                    own = own.reshape(len(outers[k - 1]), -1)
                    of_cores[k] = (outers[k - 1].mT @ own).view_as(cores[k])
                    own = own @ cores[k].reshape(len(cores[k]), -1).mT
                of_cores[0] = own.view_as(cores[0])
                own = _padded(of_h.mT @ x, 1, inners[0].shape[1]).to(cores[0].dtype)
                for k in range(middle, count - 1):
                    core = cores[k].reshape(-1, cores[k].shape[-1])
                    own = own.reshape(len(core), -1)
                    of_cores[k] = (own @ inners[k - middle + 1].mT).view_as(cores[k])
                    own = core.mT @ own
                of_cores[-1] = own.view_as(cores[-1])
        return of_x, of_bias, None, *of_cores


def plain(x: Tensor, bias: Tensor | None, train: Train, cores: Any) -> Tensor:
    """The same by plain operations."""
    with own_precision(x):
        inner, outer = (own.to(x.dtype) for own in trains.halves(train, cores))
        y = (x @ inner.mT) @ outer.mT
        return y if bias is None else y + bias.to(x.dtype)


def _differentiable(
    g: Tensor, x: Tensor | None, train: Train, cores: Any, needs: tuple[bool, tuple[bool, ...]]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of the rows and of the cores, with a graph of their own."""
    rows = x if x is not None and x.requires_grad else g.new_zeros(len(g), train.shape[1]).requires_grad_()
    with torch.enable_grad():
        y = plain(rows if x is None else x, None, train, cores)
    wanted = [own for own, need in zip((rows, *cores), (needs[0], *needs[1]), strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True))
    return next(found) if needs[0] else None, [next(found) if need else None for need in needs[1]]


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
    return own if not missing else F.pad(own, (0, missing) if dim else (0, 0, 0, missing))
