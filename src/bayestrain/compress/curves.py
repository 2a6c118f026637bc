"""Error against size for what a weight may become: from singular values where the network is a tree, else by fits.

Candidates are decomposed in whitened coordinates, in which a change counts by what it does to the outputs: exactly
where one mode holds all inputs, else with one matrix per mode, and points are measured in the exact metric.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bayestrain.compress.candidates import SVD, Candidate
from bayestrain.formats import algebra, trees
from bayestrain.formats.fitting import is_quick, polished, sketched
from bayestrain.nn import FactorizedWeight

RIDGE = 1e-3  # added to the second moment, relative to its mean diagonal: what calibration did not see counts a little
GRID = 0.87  # sizes at which curves are sampled: each is this share of the one before
PROMISING = 2.0  # squared errors are measured where the estimate is within this factor of the best one at that size
COMBINATIONS = 50_000  # ranks of several bonds that are compared, at most
TRIED = 8  # so many of them that promise most at a size are measured there
SWEEPS, STEPS = 4, 10  # rounds over the cores to fit them again, and steps of conjugate gradients for each core
FITTED_AT = (0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.04)
"""Shares of the dense size at which a network with loops or shared bonds is fitted, where that takes seconds."""


Sized = tuple[int, float, tuple[int, ...]]  # entries, an estimate of the squared error, and ranks


@dataclass(frozen=True)
class Point:
    """What a weight may become: its entries, its squared error as a share of the outputs' square, and how."""

    size: int
    error: float
    candidate: Candidate | None = None
    """None is the dense weight."""
    ranks: tuple[int, ...] = ()


class Target:
    """A dense weight, and the second moment of its inputs, with taps or without, by which changes are measured."""

    def __init__(self, weight: Tensor, moment: Tensor | None) -> None:
        self.weight, self.moment = weight.detach().cpu().double(), None
        if moment is not None:
            moment = moment.cpu()
            eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
            self.moment = moment / algebra.nonzero(moment.diagonal().mean()) + RIDGE * eye
        self.norm = algebra.nonzero(self.loss(self.weight))

    @property
    def whole(self) -> bool:
        """Whether the moment is that of inputs times taps."""
        return self.moment is not None and len(self.moment) == self.weight[0].numel()

    def raised(self, change: Tensor) -> Tensor:
        """A change of the weight times the moment."""
        if self.moment is None:
            return change
        if self.whole:
            return (change.flatten(1) @ self.moment).reshape(change.shape)
        return (change.movedim(1, -1) @ self.moment).movedim(-1, 1)

    def loss(self, change: Tensor) -> Tensor:
        """The mean square of what a change of the weight does to the outputs."""
        return (self.raised(change) * change).sum()


class Curve:
    """What one candidate may become, from many ranks to few, in the modes of its layout, whitened one by one."""

    def __init__(self, target: Target, candidate: Candidate) -> None:
        self.candidate, self.target, layout = candidate, target, candidate.layout
        self.layout, self.sizes, self.dense = layout, layout.sizes, target.weight.numel()
        self.equation = candidate.format.equation(self.sizes)
        self.turns: dict[int, tuple[tuple[int, int, int], Tensor, Tensor]] = {}
        """By number of the mode: its size before, inside and behind the factors that are whitened; the root of their
        moment, and its inverse."""
        first, taps = len(layout.splits[0]), len(layout.splits[0]) + len(layout.splits[1])
        self.covered = range(first, len(layout.factors) if target.whole else taps)
        known = self.covered if candidate.whiten == "modes" else range(first, taps)
        whitened = layout.modes if target.moment is not None and candidate.whiten != "nothing" else ()
        for number, mode in enumerate(whitened):
            if inside := [n for n in mode if n in known]:
                values, vectors = torch.linalg.eigh(self._gram(inside))
                root = values.clamp_min(1e-12 * float(values[-1])).sqrt()
                start = mode.index(inside[0])  # the tables of candidates keep factors of the inputs together
                parts = mode[:start], inside, mode[start + len(inside) :]
                before, own, behind = (math.prod(layout.factors[n] for n in part) for part in parts)
                self.turns[number] = (before, own, behind), (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
        self.exact = target.moment is None or any(sizes[1] == len(target.moment) for sizes, *_ in self.turns.values())
        self.tensor = self._turned(layout.fold(target.weight), range(len(layout.modes)), 0)
        self.cores: list[Tensor] = []
        if self.equation.is_tree:
            cores = trees.decompose(self.equation, self.tensor, 0.0, candidate.format.max_ranks(self.sizes))
            self.cores, values, log_scale = trees.singular_gauge(self.equation, cores)
            self.cores[0] = self.cores[0] * log_scale.exp()
            self.shares = [(own.square() / algebra.nonzero(own.square().sum())).tolist() for own in values]

    def _gram(self, inside: Sequence[int]) -> Tensor:
        """The moment of some factors of the inputs, with the others summed over."""
        known, moment = self.covered, self.target.moment
        assert moment is not None
        sizes, rows = [self.layout.factors[n] for n in known], tuple(str(n) for n in known)
        columns = tuple(f"{n}'" if n in inside else str(n) for n in known)
        output = (*(str(n) for n in inside), *(f"{n}'" for n in inside))
        found = algebra.contract([(moment.reshape(*sizes, *sizes), (*rows, *columns))], output)
        gram = found.reshape(math.prod(found.shape[: len(inside)]), -1)
        return gram / gram.diagonal().mean()

    def _turned(self, tensor: Tensor, modes: Sequence[int], which: int) -> Tensor:
        """A tensor whose axes are modes (-1: a bond), with the roots (0) or their inverses (1) applied."""
        for axis, number in enumerate(modes):
            if number in self.turns:
                sizes, *matrices = self.turns[number]
                moved = tensor.movedim(axis, -1)
                parts = moved.reshape(*moved.shape[:-1], *sizes)
                parts = (parts.movedim(-2, -1) @ matrices[which]).movedim(-1, -2)
                tensor = parts.reshape(moved.shape).movedim(-1, axis)
        return tensor

    def plain(self, tensor: Tensor) -> Tensor:
        """The weight that a whitened tensor stands for."""
        return self.layout.unfold(self._turned(tensor, range(len(self.layout.modes)), 1))

    def plain_cores(self, cores: Sequence[Tensor]) -> list[Tensor]:
        number = {label: n for n, label in enumerate(self.equation.modes)}
        labelled = zip(cores, self.equation.cores, strict=True)
        return [self._turned(core, [number.get(label, -1) for label in own], 1) for core, own in labelled]

    def raised(self, tensor: Tensor) -> Tensor:
        """A whitened tensor times the metric, which is near the identity in these coordinates."""
        if self.target.moment is None:
            return tensor
        raised = self.layout.fold(self.target.raised(self.plain(tensor)))
        return self._turned(raised, range(len(self.layout.modes)), 1)

    @cached_property
    def known(self) -> list[float] | None:
        """The squared error at every rank of a single bond; None where measuring some takes far less work."""
        if not self.equation.is_tree or len(self.shares) != 1:
            return None
        if self.exact:
            lost = torch.tensor(self.shares[0], dtype=torch.float64)
            return [*lost.flip(0).cumsum(0).flip(0).tolist(), 0.0]
        if self.candidate.kind != SVD:
            return None
        gram = self._bond_gram()  # dropping a set of indices costs the sum over all pairs of them
        lost = gram.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0) / self.target.norm
        return [*lost.clamp_min(0.0).tolist(), 0.0]

    def _bond_gram(self) -> Tensor:
        """The inner products, in the metric, of what the indices of a single bond contribute to the weight."""
        layout, moment = self.candidate.layout, self.target.moment
        assert moment is not None
        weight = FactorizedWeight(self.candidate.format, layout, self.plain_cores(self.cores))
        own = [(core.detach(), labels) for core, labels in weight.operands()]
        _, inputs, *taps = layout.labels
        inside = [label for axis in ([inputs, *taps] if self.target.whole else [inputs]) for label in axis]
        sizes = dict(zip([x for axis in layout.labels for x in axis], layout.factors, strict=True))
        primed = {*inside, *self.equation.bonds}
        twins = [(core, tuple(f"{x}'" if x in primed else x for x in labels)) for core, labels in own]
        shape = [sizes[label] for label in inside]
        metric = moment.reshape(*shape, *shape), (*inside, *(f"{label}'" for label in inside))
        (bond,) = self.equation.bonds
        return algebra.contract([*own, *twins, metric], (bond, f"{bond}'"))

    def path(self) -> list[Sized]:
        """Sizes below that of the dense weight, estimated squared errors, and ranks."""
        sized: list[Sized]
        if self.known is not None:
            size, wanted = self.equation.entries, range(len(self.known) - 1, 0, -1)
            sized = [(size(self.sizes, (rank,)), self.known[rank], (rank,)) for rank in wanted]
        elif not self.equation.is_tree:  # for some sizes the largest equal ranks that fit
            tried = dict.fromkeys(self.largest(int(share * self.dense)) for share in FITTED_AT)
            quick = [ranks for ranks in tried if is_quick(self.equation, self.sizes, ranks)]
            sized = [(self.equation.entries(self.sizes, ranks), 0.0, ranks) for ranks in quick]
        else:
            total, lost, every = self._combinations
            smaller = torch.cat([lost.new_tensor([math.inf]), lost.cummin(0).values[:-1]])
            better = smaller > lost
            rows = zip(total[better].tolist(), lost[better].tolist(), map(tuple, every[better].tolist()), strict=True)
            sized = list(rows)[::-1]
        return [each for each in sized if each[0] < self.dense]

    @cached_property
    def _combinations(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sizes, what is lost at all bonds of a tree together, and ranks: all, or many where bonds are large."""
        most = widest = max(map(len, self.shares))
        while math.prod(min(len(own), most) for own in self.shares) > COMBINATIONS:
            most -= 1
        power = 1 if most == widest else 2  # small ranks lie closer
        steps = [torch.linspace(1.0, len(own) ** (1 / power), min(len(own), most)) ** power for own in self.shares]
        ranks = torch.cartesian_prod(*(own.round().long().unique() for own in steps)).reshape(-1, len(steps))
        labels = (*self.equation.modes, *self.equation.bonds)
        size: dict[str, Any] = dict(zip(labels, (*self.sizes, *ranks.unbind(1)), strict=True))
        total = sum(math.prod(size[label] for label in own) for own in self.equation.cores)
        assert isinstance(total, Tensor)
        lost = torch.zeros(len(ranks), dtype=torch.float64)
        for own, number in zip(self.shares, ranks.unbind(1), strict=True):
            lost += torch.tensor([*own, 0.0], dtype=torch.float64).flip(0).cumsum(0).flip(0)[number]
        order = lost.argsort()
        order = order[total[order].argsort(stable=True)]
        return total[order], lost[order], ranks[order]

    def largest(self, entries: int) -> tuple[int, ...]:
        """The best ranks with so many entries: curves are not sampled everywhere."""
        if self.known is not None:
            return next(ranks for size, _, ranks in self.path() if size <= entries)
        if self.equation.is_tree:
            total, lost, every = self._combinations
            fits = int((total <= entries).sum())
            near = lost[:fits].topk(min(TRIED, fits), largest=False).indices
            return min(map(tuple, every[near].tolist()), key=lambda own: self.error(self.cut(own)))
        ranks = larger = self.candidate.format.max_ranks(self.sizes, 1)
        while self.equation.entries(self.sizes, larger) <= entries:
            ranks, larger = larger, self.candidate.format.max_ranks(self.sizes, max(larger) + 1)
            if larger == ranks:
                break
        return ranks

    def cut(self, ranks: Sequence[int]) -> list[Tensor]:
        """Whitened cores of these ranks: of a tree the first singular directions, else a quick fit."""
        if self.equation.is_tree:
            cores = self.cores
            for bond, rank in zip(self.equation.bonds, ranks, strict=True):
                cores = algebra.keep(self.equation, cores, bond, torch.arange(rank, device=cores[0].device))
            return cores
        return sketched(self.equation, self.tensor, ranks)

    def error(self, cores: Sequence[Tensor]) -> float:
        """The squared error of whitened cores, as a share of the outputs' square."""
        change = self.plain(algebra.dense(self.equation, cores)) - self.target.weight
        return float(self.target.loss(change) / self.target.norm)

    def refined(self, cores: Sequence[Tensor], sweeps: int = SWEEPS) -> list[Tensor]:
        """Whitened cores nearer to the target in its exact metric: least squares for one core after another."""
        result = list(cores)
        if not self.equation.is_tree:
            result = min(result, polished(self.equation, result, self.tensor)[1], key=self.error)
        if self.exact and (self.known is not None or not self.equation.is_tree):  # no other cores are nearer
            return result
        goal = self.raised(self.tensor)
        for _ in range(sweeps):
            for k in range(len(result)):
                result[k] = self._solved(result, k, goal)
        return result

    def _solved(self, cores: list[Tensor], k: int, goal: Tensor) -> Tensor:
        """Conjugate gradients for core k, which enters the weight linearly."""
        others = [operand for n, operand in enumerate(algebra.operands(self.equation, cores)) if n != k]

        def back(tensor: Tensor) -> Tensor:
            return algebra.contract([(tensor, self.equation.modes), *others], self.equation.cores[k])

        def normal(core: Tensor) -> Tensor:
            dense = algebra.contract([(core, self.equation.cores[k]), *others], self.equation.modes)
            return back(self.raised(dense))

        return conjugate_gradients(normal, back(goal), cores[k], STEPS)


def conjugate_gradients(normal: Callable[[Tensor], Tensor], right: Tensor, x: Tensor, steps: int) -> Tensor:
    """A better solution of ``normal(x) = right`` for a positive definite linear map."""
    residual = right - normal(x)
    direction, square = residual, residual.square().sum()
    limit = 1e-20 * right.square().sum()
    for _ in range(steps):
        if square <= limit:
            break
        image = normal(direction)
        step = square / (direction * image).sum()
        x, residual = x + step * direction, residual - step * image
        before, square = square, residual.square().sum()
        direction = residual + square / before * direction
    return x


def points(target: Target, wanted: Sequence[Candidate]) -> list[Point]:
    """Measured points of all candidates: every rank where singular values tell the error, else those that promise."""
    dense, found = target.weight.numel(), []
    guesses = dict[int, float]()
    sampled = list[tuple[Curve, int, Sized]]()
    for candidate in wanted:
        curve, last = Curve(target, candidate), None
        for size, guess, ranks in curve.path():
            place = math.floor(math.log(size / dense) / math.log(GRID) + 1e-9)
            if curve.known is not None:
                found.append(Point(size, guess, candidate, ranks))
            elif place != last:
                sampled.append((curve, place, (size, guess, ranks)))
                last = place
            if curve.equation.is_tree:
                guesses[place] = min(guesses.get(place, math.inf), guess)
    for curve, place, (size, guess, ranks) in sampled:
        if guess <= PROMISING * guesses.get(place, math.inf):
            found.append(Point(size, curve.error(curve.cut(ranks)), curve.candidate, ranks))
    return found
