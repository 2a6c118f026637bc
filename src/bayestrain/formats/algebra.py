"""What can be computed from any equation and its cores: products, norms, contributions of rank indices, slices."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayestrain.formats.equation import Equation, Labels

Operand = tuple[Tensor, Labels]
Shaped = tuple[Labels, tuple[int, ...]]  # the labels and sizes of an operand's axes
Step = tuple[int, int, Labels]  # two operands to contract, by number, and the labels of the result, which goes last


class Plan(NamedTuple):
    """How to contract operands pair by pair."""

    multiplications: int
    largest: int
    """Entries of the largest tensor on the way, operands and output included."""
    steps: tuple[Step, ...]


def contract(operands: Sequence[Operand], output: Labels, assumed: Mapping[str, int] | None = None) -> Tensor:
    """The einsum of any number of operands and labels, pair by pair along a path that keeps intermediates small.

    `torch.einsum` may form the dense tensor and knows 52 labels. `assumed` has sizes to plan with where traces vary.
    """
    work, known = list(operands), assumed or {}
    shaped = tuple(
        (labels, tuple(known.get(x, size) for x, size in zip(labels, tensor.shape, strict=True)))
        for tensor, labels in operands
    )
    if torch._C._get_tracing_state() is not None:  # `torch.jit.trace` has tensors for sizes
        shaped = tuple((labels, tuple(map(int, shape))) for labels, shape in shaped)
    for i, j, kept in _steps(shaped, output):
        second, first = work.pop(j), work.pop(i)
        work.append((_einsum([first, second], kept), kept))
    return work[0][0] if work[0][1] == output else _einsum(work, output)


def _steps(operands: tuple[Shaped, ...], output: Labels) -> tuple[Step, ...]:
    """The steps of `plan`, which a compiler takes as a constant."""
    return plan(operands, output).steps


# What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes a second.
_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _einsum(operands: Sequence[Operand], output: Labels) -> Tensor:
    """`torch.einsum` of one or two operands, whose labels become letters."""
    result: Tensor = torch.einsum(_letters(tuple(labels for _, labels in operands), output), *(t for t, _ in operands))
    return result


@lru_cache(maxsize=4096)
def _equation(operands: tuple[Labels, ...], output: Labels) -> str:
    letter = dict(zip(dict.fromkeys(label for labels in operands for label in labels), ascii_letters, strict=False))
    *left, right = ("".join(letter[label] for label in labels) for labels in (*operands, output))
    return f"{','.join(left)}->{right}"


def _letters(operands: tuple[Labels, ...], output: Labels) -> str:
    """What `torch.einsum` calls this; a constant to a compiler, as `_steps` are."""
    return _equation(operands, output)


_letters._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def plan(operands: tuple[Shaped, ...], output: Labels) -> Plan:
    """The cheaper of two greedy plans: least work in each step, and least growth in each step."""
    size = {label: n for labels, shape in operands for label, n in zip(labels, shape, strict=True)}
    return min(_greedy([labels for labels, _ in operands], size, output, by_growth) for by_growth in (False, True))


def _greedy(work: list[Labels], size: Mapping[str, int], output: Labels, by_growth: bool) -> Plan:
    """The plan whose every step takes the fewest multiplications, or makes tensors grow least."""
    uses = Counter(label for own in (*work, output) for label in own)

    def entries(own: Iterable[str]) -> int:
        return math.prod(size[label] for label in own)

    def scored(i: int, j: int) -> tuple[float, int, int, int, int, Labels]:
        """What a step costs, what it leaves, and the step."""
        both = dict.fromkeys((*work[i], *work[j]))
        kept = tuple(x for x in both if uses[x] > (x in work[i]) + (x in work[j]))
        cost, after = entries(both), entries(kept)
        score = after / max(1, entries(work[i]) + entries(work[j])) if by_growth else cost
        return score, after, i, j, cost, kept

    steps: list[Step] = []
    total, largest = 0, max(map(entries, (*work, output)))
    while len(work) > 1:
        pairs = list(combinations(range(len(work)), 2))
        joined = [(i, j) for i, j in pairs if not set(work[i]).isdisjoint(work[j])]
        _, after, i, j, cost, kept = min(scored(*pair) for pair in joined or pairs)  # outer products come last
        uses.subtract([*work.pop(j), *work.pop(i)])
        uses.update(kept)
        work.append(kept)
        steps.append((i, j, kept))
        total, largest = total + cost, max(largest, after)
    return Plan(total, largest, tuple(steps))


def operands(equation: Equation, cores: Sequence[Tensor], primed: Sequence[str] = ()) -> list[Operand]:
    """The cores with their labels; those in `primed` get another name, to contract a network with its twin."""
    return [
        (core, tuple(f"{label}'" if label in primed else label for label in labels))
        for core, labels in zip(cores, equation.cores, strict=True)
    ]


def dense(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """The full tensor."""
    return contract(operands(equation, cores), equation.modes)


def inner(equation: Equation, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The inner product of two tensors of the same equation, whose ranks may differ, without materialising either."""
    return contract(operands(equation, a) + operands(equation, b, equation.bonds), ())


def norm(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """The Frobenius norm of the full tensor. Differentiable away from zero."""
    # Cores are divided by their own norms first, so that squares and long products stay in range.
    sizes = [nonzero(torch.linalg.vector_norm(core.detach())) for core in cores]
    scaled = [core / size for core, size in zip(cores, sizes, strict=True)]
    log_size = torch.stack([size.log() for size in sizes]).sum()
    return inner(equation, scaled, scaled).clamp_min(0.0).sqrt() * log_size.exp()


def nonzero(size: Tensor) -> Tensor:
    """A norm to divide by: 1 where it is 0."""
    return torch.where(size > 0, size, torch.ones_like(size))


def gram(equation: Equation, cores: Sequence[Tensor], bond: str) -> Tensor:
    """``(R, R)``: the inner products of what a bond's indices contribute to the full tensor, which is their sum."""
    return contract(operands(equation, cores) + operands(equation, cores, equation.bonds), (bond, f"{bond}'"))


def contributions(equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
    """For every bond the norm of what each of its indices contributes, however the scale is spread over the cores."""
    return [gram(equation, cores, bond).diagonal().clamp_min(0.0).sqrt() for bond in equation.bonds]


def drop_order(equation: Equation, cores: Sequence[Tensor], bond: str) -> tuple[Tensor, Tensor]:
    """A bond's indices, least important first, and the exact error (norm) of dropping the first 1, 2, .. of them."""
    cross = gram(equation, cores, bond)  # dropping a set of indices costs the sum over all pairs of them
    order = cross.diagonal().argsort()
    errors = cross[order][:, order].cumsum(0).cumsum(1).diagonal().clamp_min(0.0).sqrt()
    return order, errors.cummax(0).values


def keep(equation: Equation, cores: Sequence[Tensor], label: str, index: Tensor) -> list[Tensor]:
    """The cores with only the indices `index` (1-d) of a bond, or of a mode, in every core that has it."""
    owners = equation.owners(label)
    return [core.index_select(equation.axis(k, label), index) if k in owners else core for k, core in enumerate(cores)]


def slices(equation: Equation, cores: Sequence[Tensor], k: int, label: str) -> Tensor:
    """``(R, entries)``: what core k holds at each index of one of its labels."""
    moved = cores[k].movedim(equation.axis(k, label), 0)
    return moved.reshape(len(moved), -1)


def random_cores(
    equation: Equation, mode_sizes: Sequence[int], ranks: Sequence[int], variance: float, **options: Any
) -> list[Tensor]:
    """Gaussian cores (generator, dtype, device) whose full tensor has entries of mean square `variance`, exactly."""
    d, shapes = len(equation.cores), equation.shapes(mode_sizes, ranks)
    # An entry is a sum of prod(ranks) products of d entries; what its variance fluctuates is corrected afterwards.
    sigma = (variance / math.prod(ranks)) ** (1 / (2 * d))
    cores = [sigma * torch.randn(shape, **options) for shape in shapes]
    if cores[0].is_meta:
        return cores
    size = float(norm(equation, [core.double() for core in cores]))
    correction = math.sqrt(variance * math.prod(mode_sizes)) / size if size > 0 else 1.0
    return [core * correction ** (1 / d) for core in cores]


def refit(
    equation: Equation, cores: Sequence[Tensor], target: Sequence[Operand], sweeps: int = 2, jitter: float = 1e-12
) -> list[Tensor]:
    """Cores nearer to what contracting `target` makes, by alternating least squares; neither is materialised."""
    result, goal = [core.double() for core in cores], [(tensor.double(), labels) for tensor, labels in target]
    for _ in range(sweeps):
        for k, labels in enumerate(equation.cores):
            own = equation.bonds_of(k)
            primes, modes = tuple(f"{bond}'" for bond in own), tuple(label for label in labels if label not in own)
            others, twins = operands(equation, result), operands(equation, result, equation.bonds)
            del others[k], twins[k]
            width = math.prod(result[k].shape[labels.index(bond)] for bond in own)
            matrix = contract([*others, *twins], (*primes, *own)).reshape(width, width)
            right = contract([*goal, *twins], (*primes, *modes))
            diagonal = matrix.diagonal()
            diagonal += (jitter * diagonal.amax()).clamp_min(torch.finfo(matrix.dtype).tiny)
            solved = torch.linalg.solve(matrix, right.reshape(width, -1)).reshape(right.shape)
            result[k] = solved.permute([(*own, *modes).index(label) for label in labels])
    return [new.to(old.dtype) for new, old in zip(result, cores, strict=True)]
