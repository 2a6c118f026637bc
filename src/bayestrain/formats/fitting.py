"""Least squares for networks with loops or shared bonds, where no singular values tell the best cores."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.formats.algebra import Operand
from bayestrain.formats.equation import Equation

RIDGES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)  # a start is fitted with one that falls: past most local minima
GENTLE = (1e-3, 1e-5)  # ridges that keep the small components of a tensor whose singular values fall over decades
STARTS, SWEEPS, STEPS = 8, 200, 60  # random starts, sweeps and Newton steps at most
STALLED = 1e-3  # fitting stops where the relative error falls by less in ten sweeps or steps
FOUND, EXACT = 1e-3, 1e-8  # relative errors below which no other start is tried, and nothing is left to fit
SMALLEST = 1e-14  # relative damping at least: Newton's normal matrix is singular, since cores scale against each other
WORK, NEWTON_WORK = 6e9, 2e10  # rough multiplications that a fit core by core may take, and one of all cores at once


def fitted(equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
    """Cores of ranks that grow from 1 until the relative error is at most `tol`; with a tolerance of 0, of `caps`."""
    caps, exact, ranks = tuple(caps), tensor.double(), (1,) * len(caps)
    if not bool(exact.any()):
        return [exact.new_zeros(shape) for shape in equation.shapes(exact.shape, ranks)]
    if tol == 0.0:
        return nearest(equation, exact, caps)[1]
    while (found := nearest(equation, exact, ranks, tol, starts=2))[0] > tol and ranks != caps:
        ranks = tuple(min(rank + (rank + 1) // 2, cap) for rank, cap in zip(ranks, caps, strict=True))
    return lowered(equation, found[1], exact, tol) if found[0] <= tol else found[1]


def nearest(
    equation: Equation, tensor: Tensor, ranks: Sequence[int], tol: float = 0.0, starts: int = STARTS
) -> tuple[float, list[Tensor]]:
    """The best cores of these ranks from some random starts, and their relative error."""
    small, bases = inside(equation, tensor, ranks)
    generator = torch.Generator().manual_seed(0)  # the same tensor has the same cores
    sweeps, best = int(WORK / work(equation, small.shape, ranks)), (math.inf, list[Tensor]())
    for number in range(max(min(starts, sweeps // (5 * len(RIDGES))), 1)):
        cores = start(equation, small, ranks, generator)
        at_once = is_small(small, cores)
        for ridge in RIDGES if number % 2 else () if at_once else GENTLE:
            cores = algebra.refit(equation, cores, [(small, equation.modes)], 5 if sweeps >= 30 else 1, ridge)
        found = polished(equation, cores, small, tol) if at_once else (relative_error(equation, cores, small), cores)
        best = min(best, found, key=lambda each: each[0])
        if best[0] <= max(tol, FOUND):
            break
    return polished(equation, outside(equation, polished(equation, best[1], small, tol)[1], bases), tensor, tol)


def start(equation: Equation, tensor: Tensor, ranks: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Random cores on a tensor's device."""
    cores = algebra.random_cores(equation, tensor.shape, ranks, 1.0, generator=generator, dtype=torch.float64)
    return [core.to(tensor.device) for core in cores]


def sketched(equation: Equation, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """Cores of these ranks from one random start and a few sweeps, to compare many ranks."""
    small, bases = inside(equation, tensor, ranks)
    cores = start(equation, small, ranks, torch.Generator().manual_seed(0))
    for ridge in (*GENTLE, 1e-12):
        cores = algebra.refit(equation, cores, [(small, equation.modes)], 5, ridge)
    return outside(equation, cores, bases)


def inside(equation: Equation, tensor: Tensor, ranks: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The tensor in the leading singular directions of its modes, more than such cores can use, and bases of these."""
    rank, bases = dict(zip(equation.bonds, ranks, strict=True)), dict[str, Tensor]()
    for axis, mode in enumerate(equation.modes):
        (k,) = equation.owners(mode)
        rows, width = tensor.movedim(axis, 0).flatten(1), math.prod(rank[bond] for bond in equation.bonds_of(k))
        if len(equation.cores[k]) == len(equation.bonds_of(k)) + 1 and width < len(rows):
            values, vectors = torch.linalg.eigh(rows @ rows.mT)
            width = min(2 * width + 8, int((values > 1e-12 * values[-1]).sum()))  # a tensor of these ranks has no more
            bases[mode] = vectors[:, -width:]
            tensor = (tensor.movedim(axis, -1) @ bases[mode]).movedim(-1, axis)
    return tensor, bases


def outside(equation: Equation, cores: Sequence[Tensor], bases: Mapping[str, Tensor]) -> list[Tensor]:
    """The cores of the whole tensor for those of a tensor `inside`."""
    result = list(cores)
    for mode, basis in bases.items():
        (k,) = equation.owners(mode)
        axis = equation.axis(k, mode)
        result[k] = (cores[k].movedim(axis, -1) @ basis.mT).movedim(-1, axis)
    return result


def is_small(tensor: Tensor, cores: Sequence[Tensor]) -> bool:
    """Whether all cores may be fitted at once."""
    width = sum(core.numel() for core in cores)
    return width**2 * (tensor.numel() + width) * STEPS <= NEWTON_WORK


def work(equation: Equation, sizes: Sequence[int], ranks: Sequence[int]) -> int:
    """Roughly the multiplications of a sweep, whose normal matrices are as wide as a core has bond indices."""
    size = dict(zip(equation.bonds, ranks, strict=True))
    widest = max(math.prod(size[bond] for bond in equation.bonds_of(k)) for k in range(len(equation.cores)))
    return len(equation.cores) * widest * (math.prod(sizes) + widest**2)


def is_quick(equation: Equation, sizes: Sequence[int], ranks: Sequence[int]) -> bool:
    """Whether a fit from a random start takes seconds."""
    return len(RIDGES) * work(equation, sizes, ranks) <= WORK


def polished(
    equation: Equation, cores: Sequence[Tensor], tensor: Tensor, tol: float = 0.0
) -> tuple[float, list[Tensor]]:
    """Cores fitted until that gains little, and their error: by Newton steps for all at once, or core by core."""
    if is_small(tensor, cores):
        return newton(equation, cores, tensor, tol)
    limit = int(min(SWEEPS, WORK / work(equation, tensor.shape, equation.ranks([core.shape for core in cores]))))
    error_of = partial(relative_error, equation, tensor=tensor)
    return swept(equation, cores, [(tensor, equation.modes)], error_of, max(tol, EXACT), limit)


def swept(
    equation: Equation, cores: Sequence[Tensor], goal: Sequence[Operand], error_of: Callable[[Sequence[Tensor]], float],
    tol: float, limit: int = SWEEPS,
) -> tuple[float, list[Tensor]]:  # fmt: skip
    """Cores fitted core by core to a contraction of operands until that gains little, and their error."""
    best, error = list(cores), error_of(cores)
    for _ in range(0, limit, 10):
        if error <= tol:
            break
        best = algebra.refit(equation, best, goal, sweeps=min(10, limit))
        before, error = error, error_of(best)
        if before - error < STALLED * before:
            break
    return error, best


def newton(equation: Equation, cores: Sequence[Tensor], tensor: Tensor, tol: float) -> tuple[float, list[Tensor]]:
    """Levenberg-Marquardt: Gauss-Newton steps for all cores, damped more after a step that gained nothing."""
    best, rest = list(cores), tensor - algebra.dense(equation, cores)
    size, shapes = torch.linalg.vector_norm(tensor), [core.shape for core in cores]
    error, damping, history = float(torch.linalg.vector_norm(rest) / size), 1.0, list[float]()
    for _ in range(STEPS):
        history.append(error)
        if error <= max(tol, EXACT) or (len(history) > 10 and history[-11] - error < STALLED * error):
            break
        jacobian = slopes(equation, best)
        normal, right = jacobian.mT @ jacobian, jacobian.mT @ rest.flatten()
        scale = normal.diagonal().mean()
        while damping < 1e12:
            damped = normal + damping * scale * torch.eye(len(right), dtype=right.dtype, device=right.device)
            factor, singular = torch.linalg.cholesky_ex(damped)
            steps = torch.cholesky_solve(right[:, None], factor).split([shape.numel() for shape in shapes])
            cores = [core + step.reshape(shape) for core, step, shape in zip(best, steps, shapes, strict=True)]
            left = tensor - algebra.dense(equation, cores)
            if not singular and (new := float(torch.linalg.vector_norm(left) / size)) < error:
                best, rest, error, damping = cores, left, new, max(damping / 3, SMALLEST)
                break
            damping *= 4
        else:
            break
    return error, best


def slopes(equation: Equation, cores: Sequence[Tensor]) -> Tensor:
    """``(entries of the tensor, entries of all cores)``: the derivatives of the one by the other."""
    parts, entries = [], math.prod(algebra.dense(equation, cores).shape)
    for k, labels in enumerate(equation.cores):
        others = algebra.operands(equation, cores)
        own = [label for label in labels if label in equation.modes]
        del others[k]
        for label in own:
            eye = torch.eye(cores[k].shape[equation.axis(k, label)], dtype=cores[k].dtype, device=cores[k].device)
            others.append((eye, (label, f"{label}'")))
        columns = tuple(f"{label}'" if label in own else label for label in labels)
        parts.append(algebra.contract(others, (*equation.modes, *columns)).reshape(entries, -1))
    return torch.cat(parts, dim=1)


def lowered(equation: Equation, cores: Sequence[Tensor], tensor: Tensor, tol: float) -> list[Tensor]:
    """Without the indices that the others can replace within the tolerance."""
    best, bonds = list(cores), list(equation.bonds)
    while bonds:
        bond, *bonds = bonds
        order, _ = algebra.drop_order(equation, best, bond)
        if len(order) > 1:
            error, less = polished(equation, algebra.keep(equation, best, bond, order[1:].sort().values), tensor, tol)
            if error <= tol:
                best, bonds = less, [*bonds, bond]
    return best


def relative_error(equation: Equation, cores: Sequence[Tensor], tensor: Tensor) -> float:
    """Of cores as an approximation of a tensor that is not all zeros."""
    rest = algebra.dense(equation, cores) - tensor
    return float(torch.linalg.vector_norm(rest) / algebra.nonzero(torch.linalg.vector_norm(tensor)))
