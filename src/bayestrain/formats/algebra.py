"""What can be computed from any equation: products, norms, contributions of rank indices, slices. Torch only.

Functions take an `Equation` and its cores, return new tensors and never change their arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.formats.equation import Equation, Labels

Operand = tuple[Tensor, Labels]

Score = Callable[[int, int, int, int], tuple[float, ...]]
"""Ranks a pair, smallest first, by the entries of its result and of its two operands, and its multiplications."""

RESCALE_EVERY = 8
"""`norm` divides cores by their own size first when there are so many that their product could leave the range."""


# --- contraction ------------------------------------------------------------------------------------------------------


def contract(operands: Sequence[Operand], output: Labels) -> Tensor:
    """The einsum of any number of operands, pair by pair along a planned path.

    A label may be in any number of operands; labels that are not in the output are summed over. Unlike `torch.einsum`,
    which contracts from left to right, the path keeps intermediates small, and there may be more than 52 labels.
    """
    shapes = tuple(tuple(tensor.shape) for tensor, _ in operands)
    if torch._C._get_tracing_state() is not None:  # `torch.jit.trace` has tensors for sizes
        shapes = tuple(tuple(map(int, shape)) for shape in shapes)
    path = _path(tuple(labels for _, labels in operands), shapes, output)
    work: list[Operand] = list(operands)
    for i, j, kept in path:
        second, first = work.pop(j), work.pop(i)
        work.append((_pair(first, second, kept), kept))
    return _single(work[0], output)


def _path(
    labels: tuple[Labels, ...], shapes: tuple[tuple[int, ...], ...], output: Labels
) -> tuple[tuple[int, int, Labels], ...]:
    """The path of `plan`, which a compiler takes as a constant."""
    return plan(labels, shapes, output)[0]


# What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes a second.
_path._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def plan(
    labels: tuple[Labels, ...], shapes: tuple[tuple[int, ...], ...], output: Labels
) -> tuple[tuple[tuple[int, int, Labels], ...], int]:
    """The pairs to contract, ``(i, j, labels of the result)``, and the entries of the largest tensor on the way.

    Greedy: of the three usual ways to rank pairs, the one whose whole path takes fewest multiplications.
    """
    size = {label: n for own, shape in zip(labels, shapes, strict=True) for label, n in zip(own, shape, strict=True)}
    scores: tuple[Score, ...] = (
        lambda result, a, b, _: (result - a - b, result),
        lambda result, _, __, work: (work, result),
        lambda result, a, b, _: (result / (a + b), result),
    )
    found = [_greedy(labels, size, output, score) for score in scores]
    path, _, largest = min(found, key=lambda each: (each[1], each[2]))
    return path, largest


def operations(operands: Sequence[tuple[Labels, tuple[int, ...]]], output: Labels) -> int:
    """How many multiplications `contract` takes for operands with these labels and shapes."""
    path, _ = plan(tuple(own for own, _ in operands), tuple(shape for _, shape in operands), output)
    size = {label: n for own, shape in operands for label, n in zip(own, shape, strict=True)}
    work, total = [own for own, _ in operands], 0
    for i, j, kept in path:
        second, first = work.pop(j), work.pop(i)
        total += math.prod(size[label] for label in {*first, *second})
        work.append(kept)
    return total


def _greedy(
    labels: Sequence[Labels], size: Mapping[str, int], output: Labels, score: Score
) -> tuple[tuple[tuple[int, int, Labels], ...], int, int]:
    """Steps, multiplications and largest intermediate of the path that takes the best pair each time."""
    work = list(labels)
    uses = Counter(label for own in work for label in own)
    uses.update(output)

    def entries(own: Sequence[str]) -> int:
        return math.prod(size[label] for label in own)

    def pair(i: int, j: int) -> tuple[tuple[float, ...], int, int, Labels, int]:
        """How good a pair is (smaller is better), the pair, and what it leaves; outer products come last."""
        joined = tuple(dict.fromkeys((*work[i], *work[j])))
        rest = tuple(label for label in joined if uses[label] > (label in work[i]) + (label in work[j]))
        cost, apart = entries(joined), len(joined) == len(work[i]) + len(work[j])
        return (apart, *score(entries(rest), entries(work[i]), entries(work[j]), cost)), i, j, rest, cost

    path: list[tuple[int, int, Labels]] = []
    total, largest = 0, max(entries(own) for own in (*work, output))
    while len(work) > 1:
        _, i, j, rest, cost = min(pair(i, j) for i, j in combinations(range(len(work)), 2))
        second, first = work.pop(j), work.pop(i)
        uses.subtract(first)
        uses.subtract(second)
        uses.update(rest)
        work.append(rest)
        path.append((i, j, rest))
        total, largest = total + cost, max(largest, entries(rest))
    return tuple(path), total, largest


def _pair(a: Operand, b: Operand, kept: Labels) -> Tensor:
    """Two operands contracted to the labels `kept`."""
    number = {label: n for n, label in enumerate(dict.fromkeys((*a[1], *b[1])))}
    args = (a[0], [number[x] for x in a[1]], b[0], [number[x] for x in b[1]], [number[x] for x in kept])
    product: Tensor = torch.einsum(*args)
    return product


def _single(operand: Operand, output: Labels) -> Tensor:
    """One operand with its labels in the order of the output, the others summed over."""
    tensor, labels = operand
    if labels == output:
        return tensor
    if drop := [n for n, label in enumerate(labels) if label not in output]:
        tensor, labels = tensor.sum(drop), tuple(label for label in labels if label in output)
    return tensor.permute([labels.index(label) for label in output])


def operands(equation: Equation, cores: Sequence[Tensor]) -> list[Operand]:
    """The cores with their labels, as `contract` takes them."""
    return list(zip(cores, equation.cores, strict=True))


def dense(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """The full tensor."""
    return contract(operands(equation, cores), equation.output)


# --- norms and contributions ------------------------------------------------------------------------------------------


def primed(equation: Equation, cores: Sequence[Tensor], labels: Sequence[str]) -> list[Operand]:
    """The cores as operands whose `labels` have another name, for contractions of a network with another."""
    return [
        (core, tuple(f"{label}'" if label in labels else label for label in own))
        for core, own in zip(cores, equation.cores, strict=True)
    ]


def inner(equation: Equation, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The inner product of two tensors of the same equation, whose ranks may differ, without materialising either."""
    return contract(operands(equation, a) + primed(equation, b, equation.bonds), ())


def norm(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """The Frobenius norm of the full tensor. Differentiable away from zero."""
    if len(cores) < RESCALE_EVERY:
        return inner(equation, cores, cores).clamp_min(0.0).sqrt()
    sizes = [torch.linalg.vector_norm(core.detach()) for core in cores]
    sizes = [torch.where(size > 0, size, torch.ones_like(size)) for size in sizes]
    scaled = [core / size for core, size in zip(cores, sizes, strict=True)]
    log_size = torch.stack([size.log() for size in sizes]).sum()
    return inner(equation, scaled, scaled).clamp_min(0.0).sqrt() * log_size.exp()


def gram(equation: Equation, cores: Sequence[Tensor], bond: str) -> Tensor:
    """``(R, R)``: the inner products of the R tensors that a bond's indices contribute; their sum is the full tensor.

    It is the contraction of the network with itself with that label left open on both sides.
    """
    return contract(operands(equation, cores) + primed(equation, cores, equation.bonds), (bond, f"{bond}'"))


def contributions(equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
    """For every bond the norm of what each of its indices contributes to the full tensor.

    Unlike the norm of a slice, this does not depend on how the scale is spread over the cores.
    """
    return [gram(equation, cores, bond).diagonal().clamp_min(0.0).sqrt() for bond in equation.bonds]


def drop_order(equation: Equation, cores: Sequence[Tensor], bond: str) -> tuple[Tensor, Tensor]:
    """A bond's indices, least important first, and the exact error (norm) of dropping the first 1, 2, .. of them.

    Dropping a set D of indices changes the tensor by the sum over D x D of `gram`.
    """
    cross = gram(equation, cores, bond)
    order = cross.diagonal().argsort()
    errors = cross[order][:, order].cumsum(0).cumsum(1).diagonal().clamp_min(0.0).sqrt()
    return order, errors.cummax(0).values


# --- changing a network -----------------------------------------------------------------------------------------------


def keep(equation: Equation, cores: Sequence[Tensor], bond: str, index: Tensor) -> list[Tensor]:
    """The cores with only the indices `index` (1-d) of a bond, in every core that has it."""
    owners = equation.owners(bond)
    return [core.index_select(equation.axis(k, bond), index) if k in owners else core for k, core in enumerate(cores)]


def random_cores(
    equation: Equation,
    mode_sizes: Sequence[int],
    ranks: Sequence[int],
    variance: float,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Gaussian cores whose full tensor has entries of mean square `variance`, exactly.

    An entry is a sum of ``prod(ranks)`` products of d core entries, so cores with entries of variance ``sigma^2`` give
    it the variance ``prod(ranks) * sigma^(2d)``. Small cores make that fluctuate from draw to draw; the last step
    therefore rescales by the norm that the draw really has.
    """
    if not variance > 0.0:
        raise ConfigError(f"variance must be positive, got {variance}.")
    d = len(equation.cores)
    sigma = (variance / math.prod(ranks)) ** (1 / (2 * d))
    cores = [
        sigma * torch.randn(shape, generator=generator, dtype=dtype, device=device)
        for shape in equation.shapes(mode_sizes, ranks)
    ]
    if cores[0].is_meta:
        return cores
    size = float(norm(equation, [core.double() for core in cores]))
    correction = math.sqrt(variance * math.prod(mode_sizes)) / size if size > 0 else 1.0
    return [core * correction ** (1 / d) for core in cores]


def max_ranks(equation: Equation, mode_sizes: Sequence[int], max_rank: int | Sequence[int] | None) -> tuple[int, ...]:
    """The largest useful rank of every bond, at most `max_rank` (one number, or one per bond).

    A bond between two cores never needs more indices than either core has entries per index. A bond that joins more
    cores needs no more than the tensor has entries, divided by its largest mode.
    """
    bonds = equation.bonds
    total = max(math.prod(mode_sizes), 1)
    asked = [total] * len(bonds) if max_rank is None else max_rank
    wanted = list(asked) if isinstance(asked, Sequence) else [asked] * len(bonds)
    if len(wanted) != len(bonds):
        raise ShapeError(f"max_rank must be one number or {len(bonds)} ranks, one per bond, got {tuple(wanted)}.")
    if any(isinstance(rank, bool) or not hasattr(rank, "__index__") or rank < 1 for rank in wanted):
        raise ConfigError(
            f"max_rank must be an integer of at least 1, or one per bond, got {max_rank!r}. Try max_rank=20."
        )
    size = dict(zip((*equation.output, *bonds), (*mode_sizes, *map(int, wanted)), strict=True))
    changed = True
    while changed:
        changed = False
        for bond in bonds:
            owners = equation.owners(bond)
            if len(owners) == 2:
                limits = [math.prod(size[x] for x in equation.cores[k] if x != bond) for k in owners]
            else:
                limits = [total // max(mode_sizes)]
            if size[bond] > (limit := max(1, min(limits))):
                size[bond], changed = limit, True
    return tuple(size[bond] for bond in bonds)


def refit(
    equation: Equation, cores: Sequence[Tensor], target: Sequence[Tensor], sweeps: int = 2, jitter: float = 1e-12
) -> list[Tensor]:
    """Cores of the same shapes, nearer to the tensor of the cores `target`, by alternating least squares.

    Each core in turn is the exact least-squares solution given the others. Neither tensor is materialised.
    """
    result = list(cores)
    for _ in range(sweeps):
        for k, labels in enumerate(equation.cores):
            others = [(result[i], equation.cores[i]) for i in range(len(result)) if i != k]
            twin = [operand for i, operand in enumerate(primed(equation, result, equation.bonds)) if i != k]
            own = tuple(label for label in labels if label not in equation.output)
            if not own:
                continue
            both = (*own, *(f"{label}'" for label in own))
            width = math.prod(result[k].shape[labels.index(label)] for label in own)
            matrix = contract([*others, *twin], both).reshape(width, width)
            goal_labels = tuple(f"{label}'" if label not in equation.output else label for label in labels)
            goal = contract([*operands(equation, target), *twin], goal_labels)
            place = [labels.index(x) for x in own]
            moved = goal.movedim(place, list(range(len(own))))
            flat = moved.reshape(width, -1)
            ridge = jitter * matrix.diagonal().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
            eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
            solved = torch.linalg.solve(matrix + ridge * eye, flat)
            result[k] = solved.reshape(moved.shape).movedim(list(range(len(own))), place)
    return result
