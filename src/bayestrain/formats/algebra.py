"""What can be computed from any equation: products, norms, contributions of rank indices, slices. Torch only.

Functions take an `Equation` and its cores, return new tensors and never change their arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.formats.equation import Equation, Labels

Operand = tuple[Tensor, Labels]
Step = tuple[int, int, Labels]
"""Two operands to contract, by number, and the labels of the result, which goes to the end of the list."""

# --- contraction ------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How to contract operands pair by pair."""

    multiplications: int
    largest: int
    """Entries of the largest tensor on the way, operands and output included."""
    steps: tuple[Step, ...]


def contract(operands: Sequence[Operand], output: Labels) -> Tensor:
    """The einsum of any number of operands, pair by pair along a planned path.

    A label may be in any number of operands; labels that are not in the output are summed over. Unlike `torch.einsum`,
    which contracts from left to right, the path keeps intermediates small, and there may be more than 52 labels.
    """
    shapes = tuple(tuple(tensor.shape) for tensor, _ in operands)
    if torch._C._get_tracing_state() is not None:  # `torch.jit.trace` has tensors for sizes
        shapes = tuple(tuple(map(int, shape)) for shape in shapes)
    work = list(operands)
    for i, j, kept in _steps(tuple(labels for _, labels in operands), shapes, output):
        second, first = work.pop(j), work.pop(i)
        work.append((_einsum([first, second], kept), kept))
    return work[0][0] if work[0][1] == output else _einsum(work, output)


def _steps(labels: tuple[Labels, ...], shapes: tuple[tuple[int, ...], ...], output: Labels) -> tuple[Step, ...]:
    """The steps of `plan`, which a compiler takes as a constant."""
    return plan(labels, shapes, output).steps


# What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes a second.
_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _einsum(operands: Sequence[Operand], output: Labels) -> Tensor:
    """`torch.einsum` of one or two operands, whose labels become numbers below 52."""
    number = {label: n for n, label in enumerate(dict.fromkeys(x for _, labels in operands for x in labels))}
    args = [each for tensor, labels in operands for each in (tensor, [number[x] for x in labels])]
    result: Tensor = torch.einsum(*args, [number[x] for x in output])
    return result


@lru_cache(maxsize=4096)
def plan(labels: tuple[Labels, ...], shapes: tuple[tuple[int, ...], ...], output: Labels) -> Plan:
    """The cheaper of two greedy plans: least work in each step, and least growth in each step."""
    size = {label: n for own, shape in zip(labels, shapes, strict=True) for label, n in zip(own, shape, strict=True)}
    return min(_greedy(labels, size, output, by_growth) for by_growth in (False, True))


def _greedy(labels: Sequence[Labels], size: Mapping[str, int], output: Labels, by_growth: bool) -> Plan:
    """The plan whose every step takes the fewest multiplications, or makes tensors grow least."""
    work = list(labels)
    uses = Counter(label for own in (*work, output) for label in own)

    def entries(own: Iterable[str]) -> int:
        return math.prod(size[label] for label in own)

    def result(i: int, j: int) -> Labels:
        both = dict.fromkeys((*work[i], *work[j]))
        return tuple(x for x in both if uses[x] > (x in work[i]) + (x in work[j]))

    def score(pair: tuple[int, int]) -> tuple[float, int]:
        first, second, after = work[pair[0]], work[pair[1]], entries(result(*pair))
        if by_growth:
            return after / max(1, entries(first) + entries(second)), after
        return entries({*first, *second}), after

    steps: list[Step] = []
    total, largest = 0, max(entries(own) for own in (*work, output))
    while len(work) > 1:
        pairs = list(combinations(range(len(work)), 2))
        joined = [(i, j) for i, j in pairs if not set(work[i]).isdisjoint(work[j])]
        i, j = min(joined or pairs, key=score)  # outer products come last
        kept = result(i, j)
        second, first = work.pop(j), work.pop(i)
        uses.subtract([*first, *second])
        uses.update(kept)
        work.append(kept)
        steps.append((i, j, kept))
        total, largest = total + entries({*first, *second}), max(largest, entries(kept))
    return Plan(total, largest, tuple(steps))


def operations(operands: Sequence[tuple[Labels, tuple[int, ...]]], output: Labels) -> int:
    """How many multiplications `contract` takes for operands with these labels and shapes."""
    labels, shapes = zip(*operands, strict=True)
    return plan(labels, shapes, output).multiplications


def operands(equation: Equation, cores: Sequence[Tensor], primed: Sequence[str] = ()) -> list[Operand]:
    """The cores with their labels, as `contract` takes them.

    The labels `primed` get another name, for contractions of a network with another of the same equation.
    """
    return [
        (core, tuple(f"{label}'" if label in primed else label for label in labels))
        for core, labels in zip(cores, equation.cores, strict=True)
    ]


def dense(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """The full tensor."""
    return contract(operands(equation, cores), equation.output)


# --- norms and contributions ------------------------------------------------------------------------------------------


def inner(equation: Equation, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The inner product of two tensors of the same equation, whose ranks may differ, without materialising either."""
    return contract(operands(equation, a) + operands(equation, b, equation.bonds), ())


def norm(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """The Frobenius norm of the full tensor. Differentiable away from zero.

    Cores are divided by their own norms first, so that squares and long products stay in range.
    """
    sizes = [torch.linalg.vector_norm(core.detach()) for core in cores]
    sizes = [torch.where(size > 0, size, torch.ones_like(size)) for size in sizes]
    scaled = [core / size for core, size in zip(cores, sizes, strict=True)]
    log_size = torch.stack([size.log() for size in sizes]).sum()
    return inner(equation, scaled, scaled).clamp_min(0.0).sqrt() * log_size.exp()


def gram(equation: Equation, cores: Sequence[Tensor], bond: str) -> Tensor:
    """``(R, R)``: the inner products of the R tensors that a bond's indices contribute; their sum is the full tensor.

    It is the contraction of the network with itself with that label left open on both sides.
    """
    return contract(operands(equation, cores) + operands(equation, cores, equation.bonds), (bond, f"{bond}'"))


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


def keep(equation: Equation, cores: Sequence[Tensor], label: str, index: Tensor) -> list[Tensor]:
    """The cores with only the indices `index` (1-d) of a bond, or of a mode, in every core that has it."""
    owners = equation.owners(label)
    return [core.index_select(equation.axis(k, label), index) if k in owners else core for k, core in enumerate(cores)]


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
    it the variance ``prod(ranks) * sigma^(2d)``, which fluctuates from draw to draw; the last step removes that.
    """
    if not variance > 0.0:
        raise ConfigError(f"variance must be positive, got {variance}.")
    d, shapes = len(equation.cores), equation.shapes(mode_sizes, ranks)
    sigma = (variance / math.prod(ranks)) ** (1 / (2 * d))
    cores = [sigma * torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes]
    if cores[0].is_meta:
        return cores
    size = float(norm(equation, [core.double() for core in cores]))
    correction = math.sqrt(variance * math.prod(mode_sizes)) / size if size > 0 else 1.0
    return [core * correction ** (1 / d) for core in cores]


def checked_rank(max_rank: object) -> int | tuple[int, ...]:
    """One rank, or a tuple with one per bond, as plain integers of at least 1; NumPy's are taken, too."""
    given = tuple(max_rank) if isinstance(max_rank, Sequence) else (max_rank,)
    if any(isinstance(r, bool | str) or not hasattr(r, "__index__") or r.__index__() < 1 for r in given):
        raise ConfigError(
            f"max_rank must be an integer of at least 1, or a tuple of them, got {max_rank!r}. Try max_rank=20."
        )
    ranks = tuple(map(int, given))
    return ranks if isinstance(max_rank, Sequence) else ranks[0]


def max_ranks(equation: Equation, mode_sizes: Sequence[int], max_rank: int | Sequence[int] | None) -> tuple[int, ...]:
    """The largest useful rank of every bond, at most `max_rank` (one number, or one per bond).

    A bond between two cores never needs more indices than either core has entries per index. A bond that joins more
    cores needs no more than the tensor has entries, divided by its largest mode.
    """
    bonds, total = equation.bonds, max(math.prod(mode_sizes), 1)
    asked = total if max_rank is None else checked_rank(max_rank)
    wanted = asked if isinstance(asked, tuple) else (asked,) * len(bonds)
    if len(wanted) != len(bonds):
        raise ShapeError(f"max_rank must be one number or {len(bonds)} ranks, one per bond, got {wanted}.")
    size = dict(zip((*equation.output, *bonds), (*mode_sizes, *wanted), strict=True))
    before: dict[str, int] = {}
    while size != before:  # a smaller bond may make its neighbours smaller
        before = dict(size)
        for bond in bonds:
            limits = [total // max(mode_sizes)]
            if len(owners := equation.owners(bond)) == 2:
                limits = [math.prod(size[x] for x in equation.cores[k] if x != bond) for k in owners]
            size[bond] = max(1, min(size[bond], *limits))
    return tuple(size[bond] for bond in bonds)


def refit(
    equation: Equation, cores: Sequence[Tensor], target: Sequence[Operand], sweeps: int = 2, jitter: float = 1e-12
) -> list[Tensor]:
    """Cores of the same shapes, nearer to the tensor that contracting `target` makes, by alternating least squares.

    Each core in turn is the exact least-squares solution given the others. Neither tensor is materialised: the target
    may be the `operands` of a larger network.
    """
    result, goal = [core.double() for core in cores], [(tensor.double(), labels) for tensor, labels in target]
    for _ in range(sweeps):
        for k, labels in enumerate(equation.cores):
            own = equation.bonds_of(k)
            modes = tuple(label for label in labels if label not in own)
            primes = tuple(f"{bond}'" for bond in own)
            others, twins = operands(equation, result), operands(equation, result, equation.bonds)
            del others[k], twins[k]
            width = math.prod(result[k].shape[labels.index(bond)] for bond in own)
            matrix = contract([*others, *twins], (*primes, *own)).reshape(width, width)
            right = contract([*goal, *twins], (*primes, *modes))
            ridge = (jitter * matrix.diagonal().amax()).clamp_min(torch.finfo(matrix.dtype).tiny)
            eye = torch.eye(width, dtype=matrix.dtype, device=matrix.device)
            solved = torch.linalg.solve(matrix + ridge * eye, right.reshape(width, -1)).reshape(right.shape)
            result[k] = solved.permute([(*own, *modes).index(label) for label in labels])
    return [new.to(old.dtype) for new, old in zip(result, cores, strict=True)]
