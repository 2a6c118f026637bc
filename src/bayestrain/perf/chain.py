"""Multiply a batch by a paired train without materialising its weight: a chain of matrix products. Torch only.

Neighbouring cores are merged into a few factors. Every factor acts as one batched matrix product, and what comes out
has the layout that the next one needs, so nothing is permuted on the way. From the right end the state is ``(inputs
left to do, rank, outputs done)``, from the left end ``(outputs done, rank, inputs left to do)``. The batch is the first
axis of the state, which needs no copies of input and output, or its last, which makes products larger and fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Factor(NamedTuple):
    """One product of the chain: `matrix` ``(n, K)`` times each of `batch` slices ``(K, any)`` of the state."""

    matrix: Tensor
    batch: int


# --- merging cores ----------------------------------------------------------------------------------------------------


def merged(cores: Sequence[Tensor]) -> Tensor:
    """A run of cores ``(left, out, in, right)`` contracted into one."""
    if len(cores) == 1:
        return cores[0]
    half = (len(cores) + 1) // 2  # each half is brought into order while it is small
    left, right = merged(cores[:half]), merged(cores[half:])
    (outer, m, j, r), (_, n, k, last) = left.shape, right.shape
    product = left.reshape(-1, r) @ right.reshape(r, -1)
    return product.reshape(outer, m, j, n, k, last).transpose(2, 3).reshape(outer, m * n, j * k, last)


def factors(cores: Sequence[Tensor], cuts: Sequence[int], side: str) -> list[Factor]:
    """What the cores ``(left, out, in, right)`` between the bonds `cuts` merge into, in the order in which it acts."""
    runs = [merged(cores[a:b]) for a, b in pairwise((0, *cuts, len(cores)))]
    batches = [1]
    for run in runs[:-1]:  # a factor acts once for each output that is done, or each input that is left to do
        batches.append(batches[-1] * run.shape[1 if side == "left" else 2])
    if side == "left":
        matrices = [run.permute(1, 3, 0, 2).reshape(run.shape[1] * run.shape[3], -1) for run in runs]
        return list(map(Factor, matrices, batches))
    matrices = [run.reshape(run.shape[0] * run.shape[1], -1) for run in runs]
    return list(map(Factor, matrices, batches))[::-1]


# --- multiplying ------------------------------------------------------------------------------------------------------


def multiply(x: Tensor, chain: Sequence[Factor]) -> Tensor:
    """``(B, inputs) -> (B, outputs)`` in plain operations, with the batch as the first axis."""
    rows = len(x)
    state = x
    for matrix, batch in chain:
        state = _product(matrix, state.reshape(rows * batch, matrix.shape[1], -1))
    return state.reshape(rows, -1)


def multiply_blocks(x: Tensor, chain: Sequence[Factor], bias: Tensor | None, outputs: int, block: int) -> Tensor:
    """The first `outputs` columns of `multiply` plus `bias`, with the batch as the last axis, `block` rows at a time.

    What lies between two products then stays in the cache.
    """
    matrices, batches = zip(*chain, strict=True)
    y: Tensor = _Blocks.apply(x, bias, outputs, block, batches, *matrices)  # type: ignore[no-untyped-call]
    return y


def _product(matrix: Tensor, state: Tensor, memory: Tensor | None = None) -> Tensor:
    """`matrix` ``(n, K)`` times every slice of `state` ``(batch, K, N)``, perhaps in the flat `memory`."""
    batch, _, columns = state.shape
    out = None if memory is None else memory[: batch * matrix.shape[0] * columns].view(batch, matrix.shape[0], columns)
    if columns == 1:
        return torch.mm(state.squeeze(2), matrix.mT, out=None if out is None else out.squeeze(2)).unsqueeze(2)
    if batch == 1:
        return torch.mm(matrix, state.squeeze(0), out=None if out is None else out.squeeze(0)).unsqueeze(0)
    return torch.bmm(matrix.expand(batch, -1, -1), state, out=out)


class _Blocks(torch.autograd.Function):
    """Saves the states between products; gradients of the matrices are added up over slices and blocks in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, outputs: int, block: int, batches: tuple[int, ...], *matrices: Tensor
    ) -> Tensor:
        y, saved, keep = x.new_empty(len(x), outputs), [], any(ctx.needs_input_grad)
        # What is not saved goes to the same memory for every block, which is then in the cache.
        *sizes, last = (n * min(block, len(x)) for n in _widths(x.shape[1], matrices)[1:])
        memory = [*(None if keep else x.new_empty(size) for size in sizes), x.new_empty(last)]
        for rows, into in zip(x.split(block), y.split(block), strict=True):
            state = rows.mT
            for matrix, batch, out in zip(matrices, batches, memory, strict=True):
                state = state.reshape(batch, matrix.shape[1], -1)
                saved += [state] if keep else []
                state = _product(matrix, state, out)
            found = state.reshape(-1, len(rows)).mT[:, :outputs]
            if bias is None:
                into.copy_(found)
            else:
                torch.add(found, bias, out=into)
        ctx.save_for_backward(x, bias, *matrices, *saved)
        ctx.outputs, ctx.block, ctx.batches = outputs, block, batches
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, *rest = ctx.saved_tensors
        count = len(ctx.batches)
        matrices, saved = rest[:count], iter(rest[count:])
        if torch.is_grad_enabled() or _many(gradient):
            gx, gb, *others = _plain_gradients(ctx, [x, bias, *matrices], gradient)
            return gx, gb, None, None, None, *others
        gx = torch.empty_like(x)
        widths = _widths(x.shape[1], matrices)
        memory = [x.new_empty(n * min(ctx.block, len(x))) for n in widths]  # for the gradients of the states
        exact = torch.promote_types(x.dtype, torch.float32)
        totals = [
            torch.zeros((batch, *m.shape) if batch > 1 else m.shape, dtype=exact, device=m.device)
            for m, batch in zip(matrices, ctx.batches, strict=True)
        ]
        for g, into in zip(gradient.split(ctx.block), gx.split(ctx.block), strict=True):
            states = [next(saved) for _ in range(count)]
            g = F.pad(g, (0, widths[-1] - ctx.outputs)) if widths[-1] > ctx.outputs else g
            g = memory[-1][: g.numel()].view(widths[-1], -1).copy_(g.mT)
            for k in reversed(range(count)):
                g = g.reshape(ctx.batches[k], len(matrices[k]), -1)
                _add_outer(totals[k], g, states[k])
                if k:
                    g = _product(matrices[k].mT, g, memory[k])
                elif ctx.needs_input_grad[0]:
                    _to_inputs(matrices[k], g, into, memory[0])
        gb = gradient.sum(0, dtype=bias.dtype) if ctx.needs_input_grad[1] else None
        summed = [(t.sum(0) if t.ndim == 3 else t).to(m.dtype) for t, m in zip(totals, matrices, strict=True)]
        return gx if ctx.needs_input_grad[0] else None, gb, None, None, None, *summed


def _widths(inputs: int, matrices: Sequence[Tensor]) -> list[int]:
    """How many numbers go into every product and come out of the last, for one row of the batch."""
    found = [inputs]
    for matrix in matrices:
        found.append(found[-1] // matrix.shape[1] * matrix.shape[0])
    return found


def _add_outer(total: Tensor, gradient: Tensor, state: Tensor) -> None:
    """Add ``gradient @ state^T``, per slice if there are several."""
    if total.ndim == 2:
        gradient, state = gradient.squeeze(0), state.squeeze(0)
    if total.dtype != state.dtype:
        total += gradient @ state.mT
    elif total.ndim == 2:
        total.addmm_(gradient, state.mT)
    else:
        total.baddbmm_(gradient, state.mT)


def _to_inputs(matrix: Tensor, gradient: Tensor, into: Tensor, memory: Tensor) -> None:
    """The last step back: the gradient of the inputs ``(rows, inputs)`` of the first product."""
    batch, _, columns = gradient.shape
    if batch > 1 and columns == len(into):  # rows come before a slice's inputs, so that whole runs are copied
        out = memory[: into.numel()].view(batch, columns, -1)
        found = torch.bmm(gradient.mT, matrix.expand(batch, -1, -1), out=out)
        into.view(columns, batch, -1).copy_(found.transpose(0, 1))
    else:
        into.copy_(_product(matrix.mT, gradient, memory).reshape(-1, len(into)).mT)


def _many(gradient: Tensor) -> bool:
    """Whether a backward pass runs for many gradients at once."""
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None or bool(functorch.is_legacy_batchedtensor(gradient))


def _plain_gradients(ctx: Any, inputs: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """The gradients by plain operations, which can be differentiated once more."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        x, bias, *matrices = inputs
        assert x is not None
        y = multiply(x, [Factor(m, batch) for m, batch in zip(matrices, ctx.batches, strict=True) if m is not None])
        y = y[:, : ctx.outputs] if bias is None else y[:, : ctx.outputs] + bias.to(y.dtype)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=further))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
