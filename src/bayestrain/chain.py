"""Multiply a batch by a tensor-train matrix without forming it: a chain of matrix products. Torch only.

Neighbouring cores are merged into a few factors. Every factor acts as one batched matrix product, and what comes out
has the layout that the next one needs: nothing is permuted on the way. From the right end the state is ``(inputs left
to do, rank, outputs done)``, from the left end ``(outputs done, rank, inputs left to do)``. The batch is its first
axis, which needs no copies of input and output, or its last, which makes the products larger and fewer.

`multiply` is plain torch. `multiply_blocks` and `dense_blocks` compute the same block by block, so that what lies
between two products stays in the cache and little or nothing is saved for the backward pass.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain import tt


class Factor(NamedTuple):
    """One product of the chain: `matrix` ``(n, K)`` times each of `batch` slices ``(K, any)`` of the state."""

    matrix: Tensor
    batch: int


def factors(cores: tt.Cores, cuts: Sequence[int], side: str) -> list[Factor]:
    """What the cores between the bonds `cuts` merge into, in the order in which it acts; `side` acts first."""
    merged = [tt.merge_matrix(cores[a:b]) for a, b in pairwise((0, *cuts, len(cores)))]
    if side == "left":
        matrices = [f.permute(1, 3, 0, 2).reshape(f.shape[1] * f.shape[3], -1) for f in merged]
        batches = [1]
        for f in merged[:-1]:  # every factor acts once for each output that is done
            batches.append(batches[-1] * f.shape[1])
        return [Factor(*pair) for pair in zip(matrices, batches, strict=True)]
    matrices = [f.reshape(f.shape[0] * f.shape[1], -1) for f in merged]
    batches = [1]
    for f in merged[:-1]:  # every factor acts once for each input that is left to do
        batches.append(batches[-1] * f.shape[2])
    return [Factor(*pair) for pair in zip(matrices, batches, strict=True)][::-1]


def multiply(x: Tensor, chain: Sequence[Factor], batch_last: bool) -> Tensor:
    """``(B, inputs) -> (B, outputs)``."""
    state, rows = (x.mT, 1) if batch_last else (x, x.shape[0])
    for matrix, batch in chain:
        state = _product(matrix, state.reshape(rows * batch, matrix.shape[1], -1))
    return state.reshape(-1, x.shape[0]).mT if batch_last else state.reshape(x.shape[0], -1)


def states(
    x: Tensor, chain: Sequence[Factor], batch_last: bool, into: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """What goes into every product, and what comes out of the last; `into` is memory for what comes out of each."""
    state, rows, found = (x.mT, 1, []) if batch_last else (x, x.shape[0], [])
    for (matrix, batch), memory in zip(chain, into or [None] * len(chain), strict=True):
        state = state.reshape(rows * batch, matrix.shape[1], -1)
        found.append(state)
        state = _product(matrix, state, memory)
    return [*found, state]


def sizes(inputs: int, chain: Sequence[Factor]) -> list[int]:
    """How many numbers go into every product and come out of the last, for one row of the batch."""
    found = [inputs]
    for matrix, _ in chain:
        found.append(found[-1] // matrix.shape[1] * matrix.shape[0])
    return found


def multiply_blocks(
    x: Tensor, chain: Sequence[Factor], bias: Tensor | None, outputs: int, batch_last: bool, block: int, recompute: bool
) -> Tensor:
    """The first `outputs` columns of `multiply` plus `bias`, `block` rows of the batch at a time.

    With `recompute` nothing but the input is saved for the backward pass.
    """
    matrices, batches = zip(*chain, strict=True)
    if not batch_last and not recompute:
        rows: Tensor = _ChainRows.apply(x, bias, outputs, block, batches, *matrices)  # type: ignore[no-untyped-call]
        return rows
    y: Tensor = _ChainBlocks.apply(x, bias, outputs, batch_last, block, recompute, batches, *matrices)  # type: ignore[no-untyped-call]
    return y


def dense_blocks(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, outputs: int, block: int) -> Tensor:
    """The same from the weight, of which only `block` rows of `left` are formed at a time, in both passes.

    `left` is ``(M1, J1, r)``, `right` ``(r, M2, J2)``.
    """
    y: Tensor = _DenseBlocks.apply(x, left, right, bias, outputs, block)  # type: ignore[no-untyped-call]
    return y


def _product(matrix: Tensor, state: Tensor, into: Tensor | None = None) -> Tensor:
    """`matrix` ``(n, K)`` times every slice of `state` ``(batch, K, N)``, perhaps in the memory of a flat `into`."""
    batch, _, columns = state.shape
    out = None if into is None else into[: batch * matrix.shape[0] * columns].view(batch, matrix.shape[0], columns)
    if columns == 1:
        found = torch.mm(state.squeeze(2), matrix.mT, out=None if out is None else out.squeeze(2))
        return found.unsqueeze(2)
    if batch == 1:
        return torch.mm(matrix, state.squeeze(0), out=None if out is None else out.squeeze(0)).unsqueeze(0)
    return torch.bmm(matrix.expand(batch, -1, -1), state, out=out)


def _to_inputs(matrix: Tensor, gradient: Tensor, into: Tensor, batch_last: bool, memory: Tensor) -> None:
    """The last step back: the gradient of the inputs ``(rows, inputs)`` of the first product."""
    batch, _, columns = gradient.shape
    if not batch_last:
        _product(matrix.mT, gradient, into.view(-1))
    elif batch > 1 and columns == len(into):  # rows come before a slice's inputs: whole runs of these are copied
        found = torch.bmm(
            gradient.mT, matrix.expand(batch, -1, -1), out=memory[: into.numel()].view(batch, columns, -1)
        )
        into.view(columns, batch, -1).copy_(found.transpose(0, 1))
    else:
        into.copy_(_product(matrix.mT, gradient, memory).reshape(-1, len(into)).mT)


class _Outer:
    """Adds up ``gradient @ state^T`` over slices and blocks of the batch, in single precision at least."""

    def __init__(self, matrix: Tensor, slices: int) -> None:
        self.dtype = matrix.dtype
        shape = (slices, *matrix.shape) if slices > 1 else matrix.shape
        self.total = torch.zeros(shape, dtype=torch.promote_types(self.dtype, torch.float32), device=matrix.device)

    def add(self, gradient: Tensor, state: Tensor) -> None:
        """`gradient` ``(batch, n, N)`` and `state` ``(batch, K, N)``."""
        exact = self.total.dtype == state.dtype
        if state.shape[2] == 1:
            gradient, state = gradient.squeeze(2).mT, state.squeeze(2).mT
        elif len(state) == 1:
            gradient, state = gradient.squeeze(0), state.squeeze(0)
        elif self.total.ndim == 3 and exact:
            self.total.baddbmm_(gradient, state.mT)
            return
        else:
            self.total += torch.bmm(gradient, state.mT).sum(0)
            return
        if exact:
            self.total.addmm_(gradient, state.mT)
        else:
            self.total += gradient @ state.mT

    def sum(self) -> Tensor:
        """The gradient of the matrix."""
        return (self.total.sum(0) if self.total.ndim == 3 else self.total).to(self.dtype)


def _wants_plain(gradient: Tensor) -> bool:
    """Whether a backward pass is itself differentiated, or runs for many gradients at once."""
    functorch = torch._C._functorch
    transformed = functorch.peek_interpreter_stack() is not None or functorch.is_legacy_batchedtensor(gradient)
    return torch.is_grad_enabled() or bool(transformed)


def _again(function: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """Gradients by plain torch, which can be differentiated once more."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), wanted, gradient, create_graph=further))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def _plain(ctx: Any, batch_last: bool) -> Callable[..., Tensor]:
    """The same function in plain torch."""

    def plain(x: Tensor, bias: Tensor | None, *matrices: Tensor) -> Tensor:
        chain = [Factor(*pair) for pair in zip(matrices, ctx.batches, strict=True)]
        y = multiply(x, chain, batch_last)[:, : ctx.outputs]
        return y if bias is None else y + bias.to(y.dtype)

    return plain


class _ChainRows(torch.autograd.Function):
    """The whole batch at once, as its first axis; states are let go on the way back, outer products made in blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, outputs: int, block: int, batches: tuple[int, ...], *matrices: Tensor
    ) -> Tensor:
        chain = [Factor(*pair) for pair in zip(matrices, batches, strict=True)]
        *ctx.states, out = states(x, chain, False)
        ctx.inside, ctx.outputs, ctx.block, ctx.batches = out.numel() // len(x), outputs, block, batches
        ctx.save_for_backward(x, bias, *matrices)
        y = out.reshape(len(x), -1)
        if ctx.inside > outputs:
            y = y[:, :outputs].contiguous()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, *matrices = ctx.saved_tensors
        if _wants_plain(gradient):
            gx, gb, *rest = _again(_plain(ctx, False), [x, bias, *matrices], gradient)
            return gx, gb, None, None, None, *rest
        chain = [Factor(*pair) for pair in zip(matrices, ctx.batches, strict=True)]
        kept, ctx.states = ctx.states, None
        if kept is None:  # a second time through the same graph
            kept = states(x, chain[:-1], False)
        outer = [_Outer(matrix, 1) for matrix in matrices]
        g = F.pad(gradient, (0, ctx.inside - ctx.outputs)) if ctx.inside > ctx.outputs else gradient
        for k in reversed(range(len(chain))):
            matrix, batch = chain[k]
            state = kept.pop().reshape(len(x) * batch, matrix.shape[1], -1)
            g = g.reshape(len(x) * batch, matrix.shape[0], -1)
            for rows in _row_blocks(len(g), len(g) if g.shape[2] == 1 else ctx.block * batch):
                outer[k].add(g[rows], state[rows])
            del state
            if k or ctx.needs_input_grad[0]:
                g = _product(matrix.mT, g)
        gx = g.reshape(len(x), -1) if ctx.needs_input_grad[0] else None
        gb = gradient.sum(0, dtype=bias.dtype) if ctx.needs_input_grad[1] else None
        return gx, gb, None, None, None, *(total.sum() for total in outer)


class _ChainBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, outputs: int, batch_last: bool, block: int, recompute: bool,
        batches: tuple[int, ...], *matrices: Tensor,
    ) -> Tensor:  # fmt: skip
        y = x.new_empty(len(x), outputs)
        ctx.block = block
        chain = [Factor(*pair) for pair in zip(matrices, batches, strict=True)]
        saved: list[Tensor] = []
        ctx.kept = not recompute and any(ctx.needs_input_grad)
        *_, ctx.inside = numbers = sizes(x.shape[1], chain)
        # What is not saved goes to the same memory for every block, which is then in the cache.
        direct = not batch_last and ctx.inside == outputs
        needed = [not ctx.kept] * (len(chain) - 1) + [not direct]
        into = [x.new_empty(need * n * min(block, len(x))) for need, n in zip(needed, numbers[1:], strict=True)]
        for rows in _row_blocks(len(x), block):
            part = x[rows]
            memory: list[Tensor | None] = [None if ctx.kept else scratch for scratch in into]
            memory[-1] = y[rows].view(-1) if direct else into[-1]
            *inputs, out = states(part, chain, batch_last, memory)
            saved += inputs if ctx.kept else []
            if not direct:
                out = out.reshape(-1, len(part)).mT if batch_last else out.reshape(len(part), -1)
                out = (
                    y[rows].copy_(out[:, :outputs]) if bias is None else torch.add(out[:, :outputs], bias, out=y[rows])
                )
            elif bias is not None:
                y[rows] += bias
        ctx.save_for_backward(x, bias, *matrices, *saved)
        ctx.outputs, ctx.batch_last, ctx.batches = outputs, batch_last, batches
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, *rest = ctx.saved_tensors
        count, last = len(ctx.batches), ctx.batch_last
        matrices, saved = rest[:count], rest[count:]
        if _wants_plain(gradient):
            gx, gb, *rest = _again(_plain(ctx, last), [x, bias, *matrices], gradient)
            return gx, gb, None, None, None, None, None, *rest
        chain = [Factor(*pair) for pair in zip(matrices, ctx.batches, strict=True)]
        gx = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        most = min(ctx.block, len(x))
        outer = [_Outer(matrix, batch if last else 1) for matrix, batch in chain]
        numbers = [most * number for number in sizes(x.shape[1], chain)]
        into = [x.new_empty(number) for number in ([] if ctx.kept else numbers[1:-1])]
        down = [x.new_empty(number if last or 0 < k < count else 0) for k, number in enumerate(numbers)]
        """Memory for the gradients of the states."""
        for number, rows in enumerate(_row_blocks(len(x), ctx.block)):
            part, g = x[rows], gradient[rows]
            inputs = saved[number * count : (number + 1) * count] if ctx.kept else states(part, chain[:-1], last, into)
            if ctx.inside > ctx.outputs:
                g = F.pad(g, (0, ctx.inside - ctx.outputs))
            if last:
                g = down[-1][: g.numel()].view(ctx.inside, len(part)).copy_(g.mT)
            for k in reversed(range(count)):
                matrix, batch = chain[k]
                slices = batch if last else len(part) * batch
                g = g.reshape(slices, matrix.shape[0], -1)
                outer[k].add(g, inputs[k].reshape(slices, matrix.shape[1], -1))
                if k:
                    g = _product(matrix.mT, g, down[k])
                elif gx is not None:
                    _to_inputs(matrix, g, gx[rows], last, down[0])
        gb = gradient.sum(0, dtype=bias.dtype) if ctx.needs_input_grad[1] else None
        return gx, gb, None, None, None, None, None, *(total.sum() for total in outer)


class _DenseBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, outputs: int, block: int
    ) -> Tensor:
        y = x.new_empty(len(x), outputs)
        for rows, columns in _DenseBlocks.blocks(left, right, outputs, block):
            weight = _DenseBlocks.weight(left[rows], right)[: columns.stop - columns.start]
            torch.mm(x, weight.mT, out=y[:, columns])
        if bias is not None:
            y += bias
        ctx.save_for_backward(x, left, right, bias)
        ctx.outputs, ctx.block = outputs, block
        return y

    @staticmethod
    def blocks(left: Tensor, right: Tensor, outputs: int, block: int) -> list[tuple[slice, slice]]:
        """Rows of `left` and the columns of the output that they make."""
        each = right.shape[1]
        ends = [
            (rows, slice(rows.start * each, min(rows.stop * each, outputs))) for rows in _row_blocks(len(left), block)
        ]
        return [(rows, columns) for rows, columns in ends if columns.start < columns.stop]

    @staticmethod
    def weight(left: Tensor, right: Tensor) -> Tensor:
        """``(m * M2, J1 * J2)``, these rows of the weight."""
        (m, j, r), (_, n, k) = left.shape, right.shape
        product = left.reshape(m * j, r) @ right.reshape(r, n * k)
        return product.reshape(m, j, n, k).transpose(1, 2).reshape(m * n, j * k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, left, right, bias = ctx.saved_tensors
        if _wants_plain(gradient):

            def plain(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
                return F.linear(
                    x, _DenseBlocks.weight(left, right)[: ctx.outputs], None if bias is None else bias.to(x.dtype)
                )

            return *_again(plain, [x, left, right, bias], gradient), None, None
        (_, j, r), (_, n, k) = left.shape, right.shape
        exact = torch.promote_types(x.dtype, torch.float32)
        gx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        total_left, total_right = torch.zeros_like(left, dtype=exact), torch.zeros_like(right, dtype=exact)
        for rows, columns in _DenseBlocks.blocks(left, right, ctx.outputs, ctx.block):
            g = gradient[:, columns]
            if gx is not None:
                gx.addmm_(g, _DenseBlocks.weight(left[rows], right)[: g.shape[1]])
            outer = F.pad(g.mT @ x, (0, 0, 0, (rows.stop - rows.start) * n - g.shape[1]))
            outer = outer.reshape(-1, n, j, k).transpose(1, 2).reshape(-1, n * k)  # (m * J1, M2 * J2)
            total_left[rows] = (outer @ right.reshape(r, n * k).mT).reshape(-1, j, r)
            total_right += (left[rows].reshape(-1, r).mT @ outer).reshape(r, n, k)
        gb = gradient.sum(0) if ctx.needs_input_grad[3] else None
        return gx, total_left.to(left.dtype), total_right.to(right.dtype), gb, None, None


def _row_blocks(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]
