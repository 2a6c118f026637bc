"""Products with a weight of two factors in one kernel: nothing between the two products is written to memory.

For every sample ``X``, a matrix, ``Y = sum_r A_r X B_r^T``: the weight is a train in the paired layout, merged into two
factors. The gradient of x is the same product with both factors transposed. The kernels are written in Triton, which
comes with PyTorch for CUDA.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bayestrain.nn.precision import transformed
from bayestrain.perf.planner import tile

WIDE, NARROW = 128, 64  # rows and columns up to which samples are packed into a tile: of products, and of gradients
PROGRAMS = 528  # that sum up gradients, about: some for every multiprocessor of a large GPU

Sizes = tuple[int, ...]
"""Outputs and inputs of the first factor, outputs and inputs of the second one."""


@lru_cache(maxsize=1024)
def options(sizes: Sizes, dtype: torch.dtype, precision: str, columns: int) -> dict[str, Any]:
    """Tiles, samples in a tile, and what else a kernel is compiled with; `precision` is that of float32 products."""
    tiles = dict(zip(("O1", "I1", "O2", "I2"), map(tile, sizes), strict=True))
    return tiles | {
        "P": max(1, columns // max(tiles.values())), "num_warps": 8 if columns == WIDE else 4,
        "PRECISION": "tf32" if precision == "tf32" or dtype != torch.float32 else "ieee",
    }  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, a, b, bias, y, count, i1, i2, o1, o2, rank,
    I1: tl.constexpr, I2: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, P: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``Y = sum_r A_r X B_r^T`` for P samples of a network; their rows, and columns, lie side by side in a tile."""
    first, net = tl.program_id(0).to(tl.int64) * P, tl.program_id(1).to(tl.int64)
    a, b = a + net * rank * o1 * i1, b + net * rank * o2 * i2
    ni, no, mi, mo = tl.arange(0, I1), tl.arange(0, O1), tl.arange(0, I2), tl.arange(0, O2)
    row = tl.arange(0, I1 * P)  # row i * P + p is row i of sample p
    sample = first + row % P
    at = (net * count + sample[:, None]) * i1 * i2 + (row // P)[:, None] * i2 + mi[None, :]
    inside = (sample < count)[:, None] & (row // P < i1)[:, None] & (mi < i2)[None, :]
    X = tl.load(x + at, mask=inside, other=0.0)
    at_a, at_b = no[:, None] * i1 + ni[None, :], mo[None, :] * i2 + mi[:, None]
    in_a, in_b = (no < o1)[:, None] & (ni < i1)[None, :], (mi < i2)[:, None] & (mo < o2)[None, :]
    Y = tl.zeros((O1, P * O2), tl.float32)
    for r in range(rank):
        B = tl.load(b + r * o2 * i2 + at_b, mask=in_b, other=0.0).to(X.dtype)
        Z = tl.dot(X, B, input_precision=PRECISION).to(X.dtype)
        A = tl.load(a + r * o1 * i1 + at_a, mask=in_a, other=0.0).to(X.dtype)
        Y = tl.dot(A, tl.reshape(Z, (I1, P * O2)), Y, input_precision=PRECISION)
    column = tl.arange(0, P * O2)  # column p * O2 + q is column q of sample p
    sample, q = first + column // O2, column % O2
    place = no[:, None] * o2 + q[None, :]
    inside = (no < o1)[:, None] & ((q < o2) & (sample < count))[None, :]
    if BIAS:
        Y += tl.load(bias + net * o1 * o2 + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + (net * count + sample[None, :]) * o1 * o2 + place, Y.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    x, g, a, b, of_a, of_b, count, i1, i2, o1, o2, rounds,
    I1: tl.constexpr, I2: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of ``A_r`` and ``B_r``, summed over a part of the samples of a network."""
    r, part, net = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    ni, no, mi, mo = tl.arange(0, I1), tl.arange(0, O1), tl.arange(0, I2), tl.arange(0, O2)
    in_a, in_b = (no < o1)[:, None] & (ni < i1)[None, :], (mo < o2)[:, None] & (mi < i2)[None, :]
    at_a, at_b = no[:, None] * i1 + ni[None, :], mo[:, None] * i2 + mi[None, :]
    own = net * tl.num_programs(0) + r
    A = tl.load(a + own * o1 * i1 + at_a, mask=in_a, other=0.0).to(x.dtype.element_ty)
    B = tl.load(b + own * o2 * i2 + at_b, mask=in_b, other=0.0).to(x.dtype.element_ty)
    row, column = tl.arange(0, I1 * P), tl.arange(0, P * O2)
    at_x, in_x = (row // P)[:, None] * i2 + mi[None, :], (row // P < i1)[:, None] & (mi < i2)[None, :]
    at_g = no[:, None] * o2 + (column % O2)[None, :]
    in_g = (no < o1)[:, None] & (column % O2 < o2)[None, :]
    dA, dB = tl.zeros((O1, I1), tl.float32), tl.zeros((O2, I2), tl.float32)
    for turn in range(rounds):
        first = (part * rounds + turn) * P
        of_row, of_column = first + row[:, None] % P, first + column[None, :] // O2
        X = tl.load(x + (net * count + of_row) * i1 * i2 + at_x, mask=in_x & (of_row < count), other=0.0)
        G = tl.load(g + (net * count + of_column) * o1 * o2 + at_g, mask=in_g & (of_column < count), other=0.0)
        Z = tl.reshape(tl.dot(X, tl.trans(B), input_precision=PRECISION).to(X.dtype), (I1, P * O2))
        dA = tl.dot(G, tl.trans(Z), dA, input_precision=PRECISION)
        U = tl.reshape(tl.dot(tl.trans(A), G, input_precision=PRECISION).to(X.dtype), (I1 * P, O2))
        dB = tl.dot(tl.trans(U), X, dB, input_precision=PRECISION)
    place = (net * tl.num_programs(1) + part) * tl.num_programs(0) + r
    tl.store(of_a + place * o1 * i1 + at_a, dA, mask=in_a)
    tl.store(of_b + place * o2 * i2 + at_b, dB, mask=in_b)


def multiply(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], transposed: bool) -> Tensor:
    """``(n, samples, i1 * i2)`` times the weights of n networks, ``(n, R, o1 * i1)`` and ``(n, R, o2 * i2)``.

    Factors may be more precise than x. Transposed, x has the outputs and the result the inputs.
    """
    (nets, count, _), rank = x.shape, a.shape[1]
    o1, i1, o2, i2 = sizes
    if transposed:  # matrix units want the axis that is summed to be the last one
        a, b = a.unflatten(2, (o1, i1)).mT, b.unflatten(2, (o2, i2)).mT
        o1, i1, o2, i2 = i1, o1, i2, o2
    x, a, b, y = x.contiguous(), a.contiguous(), b.contiguous(), x.new_empty(nets, count, o1 * o2)
    how = options((o1, i1, o2, i2), x.dtype, torch.backends.cuda.matmul.fp32_precision, WIDE)
    if y.numel():
        own, grid = bias if bias is None else bias.contiguous(), (-(-count // how["P"]), nets)
        with torch.cuda.device_of(x):
            _multiply[grid](x, a, b, own, y, count, i1, i2, o1, o2, rank, **how, BIAS=bias is not None)
    return y


def sums(x: Tensor, g: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The gradients of both factors of `multiply`, not transposed."""
    (o1, i1, o2, i2), (nets, count, _), rank = sizes, x.shape, a.shape[1]
    if not count:
        return torch.zeros_like(a), torch.zeros_like(b)
    how = options(tuple(sizes), x.dtype, torch.backends.cuda.matmul.fp32_precision, NARROW)
    turns = -(-count // how["P"])
    rounds = -(-turns // max(1, min(turns, PROGRAMS // (rank * nets))))
    parts = -(-turns // rounds)
    found = [own.new_empty(nets, parts, *own.shape[1:], dtype=torch.float32) for own in (a, b)]
    given = [own.contiguous() for own in (x, g, a, b)]
    with torch.cuda.device_of(x):
        _gradients[(rank, parts, nets)](*given, *found, count, i1, i2, o1, o2, rounds, **how)
    return found[0].sum(1).to(a.dtype), found[1].sum(1).to(b.dtype)


two_factors = torch.library.custom_op("bayestrain::two_factors", multiply, mutates_args=())
gradients = torch.library.custom_op("bayestrain::two_factors_gradients", sums, mutates_args=())
"""The same for compilers, which do not look inside. A call of them takes longer."""


@two_factors.register_fake
def _(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], transposed: bool) -> Tensor:  # noqa: ARG001
    o1, i1, o2, i2 = sizes
    return x.new_empty(*x.shape[:2], i1 * i2 if transposed else o1 * o2)


@gradients.register_fake
def _(x: Tensor, g: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return a.new_empty(a.shape), b.new_empty(b.shape)


def product(*given: Any) -> Tensor:
    """`multiply` with its gradients."""
    if torch.compiler.is_compiling():
        return two_factors(*given)  # type: ignore[no-any-return]
    if transformed():
        return TwoFactors.apply(*given)  # type: ignore[no-any-return, no-untyped-call]
    if torch.is_grad_enabled():
        return EagerTwoFactors.apply(*given)  # type: ignore[no-any-return, no-untyped-call]
    return multiply(*given)


def _sums(*given: Any) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return gradients(*given)  # type: ignore[no-any-return]
    if not (transformed() or torch.is_grad_enabled()):
        return sums(*given)
    found: tuple[Tensor, Tensor] = Gradients.apply(*given)  # type: ignore[no-untyped-call]
    return found


class TwoFactors(torch.autograd.Function):
    """`multiply` with its gradients; inside of `vmap` networks are an axis of the grid."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int], transposed: bool) -> Tensor:
        return multiply(x, a, b, bias, sizes, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        x, a, b, bias, ctx.sizes, ctx.transposed = inputs
        ctx.save_for_backward(x, a, b)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        needs, of_a, of_b = ctx.needs_input_grad, None, None
        of_x = product(g, a, b, None, ctx.sizes, not ctx.transposed) if needs[0] else None
        if needs[1] or needs[2]:
            ends = (g, x) if ctx.transposed else (x, g)
            of_a, of_b = _sums(*ends, a, b, ctx.sizes)
        of_bias = g.sum(1, dtype=torch.float32).to(ctx.bias) if needs[3] else None
        return of_x, of_a, of_b, of_bias, None, None

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], *given: Any) -> tuple[Tensor, int]:
        y = product(*_together(info.batch_size, dims, given[:4]), *given[4:])
        return y.unflatten(0, (info.batch_size, -1)), 0


two_factors.register_autograd(TwoFactors.backward, setup_context=TwoFactors.setup_context)


class EagerTwoFactors(torch.autograd.Function):
    """The same without `vmap`: PyTorch inspects the signature of the other one at each call, which takes longer."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        y = multiply(*given)
        TwoFactors.setup_context(ctx, given, y)
        return y

    backward = TwoFactors.backward


class Gradients(torch.autograd.Function):
    """`sums` with gradients of their own, which are such products and sums again."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, a: Tensor, b: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        return sums(x, g, a, b, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        *tensors, ctx.sizes = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, of_a: Tensor, of_b: Tensor) -> tuple[Tensor | None, ...]:
        """Through the function ``sum(of_a * dA) + sum(of_b * dB)``, which is two products and a sum."""
        x, g, a, b = ctx.saved_tensors
        along = [(of_a.to(a.dtype), b), (a, of_b.to(b.dtype))]
        of_g, of_x = (
            product(own, *along[0], None, ctx.sizes, turned) + product(own, *along[1], None, ctx.sizes, turned)
            for own, turned in ((x, False), (g, True))
        )
        _, to_b = _sums(x, g, of_a.to(a.dtype), b, ctx.sizes)
        to_a, _ = _sums(x, g, a, of_b.to(b.dtype), ctx.sizes)
        return of_x, of_g, to_a, to_b, None

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], *given: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        of_a, of_b = _sums(*_together(info.batch_size, dims, given[:4]), given[4])
        return (of_a.unflatten(0, (info.batch_size, -1)), of_b.unflatten(0, (info.batch_size, -1))), (0, 0)


def _together(nets: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors of `vmap` with its axis and that of networks as one."""
    found: list[Tensor | None] = []
    for own, at in zip(tensors, dims, strict=False):
        moved = own if own is None or at is None else own.movedim(at, 0)
        moved = moved if moved is None or at is not None else moved.expand(nets, *moved.shape)
        found.append(None if moved is None else moved.flatten(0, 1))
    return found
