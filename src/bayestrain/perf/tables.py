"""`Tables`: the prior of all weights at once, in a few large operations instead of many small ones.

The cores of all weights, one after the other, are the vector *flat*; all ``log lambda`` are the vector *u*. A *slice*
is what a core holds at one index of each of its bonds: all its entries have one variance, whose logarithm is a sum of
powers times entries of *u*. So a list of slices, with the lambdas of each, describes weights of any equation.

Nothing depends on a value, so a GPU is not waited for, a step can be captured, and `torch.vmap` runs it for many
particles. The readable twin is `bayestrain.prior.Group`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bayestrain.formats import Format, algebra
from bayestrain.formats.align import STACK, align_trees, stacked_operands
from bayestrain.formats.equation import Equation
from bayestrain.nn import FactorizedWeight
from bayestrain.prior import density
from bayestrain.prior.density import Move
from bayestrain.prior.groups import Group, shares, total
from bayestrain.prior.hold import Held


def group(weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> Tables | None:
    """The weights that have bonds as one group; None if there are none."""
    bonded = {name: own for name, own in weights.items() if own.equation.bonds}
    return Tables(bonded, held) if bonded else None


class Tables(Group):
    """The prior of some weights; see `Group`."""

    def __init__(self, weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> None:
        super().__init__(weights, held)
        self._key: object = None
        self._tables: list[Table] = []

    def tables(self) -> list[Table]:
        """One table for each dtype and device, rebuilt when ranks, dtypes or devices have changed."""
        cores = {name: cores_of(weight) for name, weight in self.weights.items()}
        key = [(self._state(n).start, *((c.shape, c.dtype, c.device) for c in own)) for n, own in cores.items()]
        if key == self._key:
            return self._tables
        kinds: dict[object, list[str]] = {}
        for name, own in cores.items():
            kinds.setdefault((own[0].dtype, own[0].device), []).append(name)
        with torch.inference_mode(False):  # else no gradient could ever go through the tables
            tables = [Table(self, names) for names in kinds.values()]
        # Inside of torch.func.grad all new tensors belong to that call.
        if not any(torch._C._functorch.is_functorch_wrapped_tensor(table.linear) for table in tables):
            self._key, self._tables = key, tables
        return tables

    def log_prob(self, a: float, b: float, other_variance: float) -> Tensor:
        return total([table.log_prob(a, b, other_variance) for table in self.tables()])

    @torch.no_grad()
    def move_(self, move: Move, a: float, floor: float, sweeps: int = 1) -> None:
        for table in self.tables():
            _copy(table.log_lambdas(), table.moved(move, a, floor, sweeps))

    @torch.no_grad()
    def align_(self, move: Move, a: float, floor: float, sweeps: int) -> None:
        weights = [self.weights[name] for name in self.trained]
        trees = [own for own in weights if own.equation.is_tree and type(own.format).align is Format.align]
        turned = dict(zip(trees, align_trees([(own.equation, cores_of(own)) for own in trees]), strict=True))
        for own in weights:
            cores = cores_of(own)
            new = turned[own] if own in turned else own.format.align(own.equation, cores)
            finite = _join(new).isfinite().all()
            for core, turned_core in zip(cores, new, strict=True):
                core.copy_(torch.where(finite, turned_core, core))
        for table in self.tables():
            moved = table.moved(move, a, floor, sweeps)
            _copy(table.log_lambdas(), moved, [table.names[place.row] in self.trained for place in table.bonds])

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for table in self.tables():
            if table.held:
                found |= zip(table.held, table.norms(_join(table.cores())), strict=True)
        return found

    @torch.no_grad()
    def hold_scale_(self) -> None:
        for table in self.tables():
            if table.held:
                table.hold_scale_()


class _Bond(NamedTuple):
    """Where the lambdas of one bond lie in *u*."""

    row: int
    """Number of the weight."""
    number: int
    rank: int
    first: int


class _Colour(NamedTuple):
    """A run of bonds of which no two share a core: all of them move at once."""

    start: int
    stop: int
    terms: tuple[tuple[float, Tensor], ...]
    """For every power, the slices ``(lambdas, most)`` in which a lambda has it; missing ones are the last slice + 1."""
    grid: Tensor
    """``(bonds, largest rank)``: the lambdas of each bond; missing ones are the last lambda + 1."""
    cells: Tensor
    """Where in the grid each lambda lies."""


class Table:
    """Weights of one dtype and device, and the indices by which they are treated as one."""

    def __init__(self, group: Tables, names: Sequence[str]) -> None:
        self.group, self.names = group, list(names)
        weights = [group.weights[name] for name in names]
        cores = [cores_of(own) for own in weights]
        like = cores[0][0]
        self.device, self.dtype = like.device, like.dtype
        self.exact = torch.promote_types(like.dtype, torch.float32)
        self._place_lambdas([own.equation for own in weights])
        self._cut_into_slices([own.equation for own in weights], cores)
        self._find_held(weights, cores)

    def _there(self, values: Any) -> Tensor:
        found = torch.as_tensor(values)
        return found.to(self.device, self.exact if found.is_floating_point() else found.dtype)

    def _place_lambdas(self, equations: Sequence[Equation]) -> None:
        """The order of *u*: colour by colour, so that the bonds of one colour are a part of it."""
        coloured = sorted(
            (colour, row, number)
            for row, equation in enumerate(equations)
            for number, colour in enumerate(colours(equation))
        )
        self.bonds: list[_Bond] = []
        self.lambdas, linear, ends = 0, [], {}
        for colour, row, number in coloured:
            weight, state = self.group.weights[self.names[row]], self.group._state(self.names[row])
            shapes = tuple(core.shape for core in cores_of(weight))
            rank = len(state.log_lambdas[number])
            self.bonds.append(_Bond(row, number, rank, self.lambdas))
            linear += [density.linear_terms(weight.equation, shapes, state.start)[number]] * rank
            self.lambdas += rank
            ends[colour] = self.lambdas
        self.linear, self._ends = self._there(torch.tensor(linear)), list(ends.values())
        self.row_of_lambda = self._there(_repeated([(bond.row, bond.rank) for bond in self.bonds]))

    def _cut_into_slices(self, equations: Sequence[Equation], cores: Sequence[Sequence[Tensor]]) -> None:
        """Number the slices, those with few entries first, and say which entries and lambdas belong to each."""
        sizes = [core.numel() for own in cores for core in own]
        self.entries = sum(sizes)
        numbered = iter(torch.arange(self.entries).split(sizes))
        first = {(bond.row, bond.number): bond.first for bond in self.bonds}
        parts = []
        for row, (equation, own) in enumerate(zip(equations, cores, strict=True)):
            for k, core in enumerate(own):
                axes = [equation.axis(k, bond) for bond in equation.bonds_of(k)]
                entries = next(numbered).view(core.shape).movedim(axes, [*range(-len(axes), 0)])
                ranks = entries.shape[entries.ndim - len(axes) :]
                places = [first[row, equation.bonds.index(bond)] for bond in equation.bonds_of(k)]
                powers = list(equation.powers[k].values())
                parts.append((entries.reshape(-1, math.prod(ranks)), ranks, places, powers))
        parts.sort(key=lambda part: len(part[0]))
        most = max(len(part[2]) for part in parts)
        slices = sum(part[0].shape[1] for part in parts)
        of_slices, powers_of = torch.full((most, slices), self.lambdas), torch.zeros(most, slices)
        self.slice_of_entry, start, free = torch.empty(self.entries, dtype=torch.int64), 0, torch.zeros(slices)
        by_size: dict[int, list[Tensor]] = {}
        for entries, ranks, places, powers in parts:
            stop = start + entries.shape[1]
            indices = torch.ones(ranks).nonzero().unbind(1)
            for n, (place, power, index) in enumerate(zip(places, powers, indices, strict=True)):
                of_slices[n, start:stop], powers_of[n, start:stop] = place + index, power
            free[start:stop] = float(not places)
            self.slice_of_entry[entries] = torch.arange(start, stop).expand(entries.shape)
            by_size.setdefault(len(entries), []).append(entries)
            start = stop
        blocks = [torch.cat(alike, 1) for alike in by_size.values()]
        self.sizes = [tuple(block.shape) for block in blocks]
        self.by_size = self._there(torch.cat([block.flatten() for block in blocks]))
        self.free_entries = sum(entries.numel() for entries, _, places, _ in parts if not places)
        self.free = self._there(free) if self.free_entries else None
        self.colours = self._coloured(of_slices, powers_of)
        self.slice_of_entry = self._there(self.slice_of_entry)
        self.of_slices, self.powers, self.most = self._there(of_slices.flatten()), self._there(powers_of), most
        self.zero, self.nothing = self._there(torch.zeros(1)), self._there(torch.full((1,), -math.inf))

    def _coloured(self, of_slices: Tensor, powers: Tensor) -> list[_Colour]:
        found, start, nowhere = [], 0, of_slices.shape[1]
        for stop in self._ends:
            terms = []
            inside = (of_slices >= start) & (of_slices < stop)
            for power in powers[inside].unique().tolist():
                slot, column = (inside & (powers == power)).nonzero(as_tuple=True)
                owner, order = (of_slices[slot, column] - start).sort(stable=True)
                counts = owner.bincount(minlength=stop - start)
                place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
                table = torch.full((stop - start, int(counts.max())), nowhere)
                table[owner, place] = column[order]
                terms.append((power, self._there(table)))
            own = [bond for bond in self.bonds if start <= bond.first < stop]
            grid = torch.full((len(own), max(bond.rank for bond in own)), stop - start)
            for line, bond in zip(grid, own, strict=True):
                line[: bond.rank] = torch.arange(bond.rank) + bond.first - start
            cells = (grid.flatten() < stop - start).nonzero().squeeze(1)
            found.append(_Colour(start, stop, tuple(terms), self._there(grid), self._there(cells)))
            start = stop
        return found

    def _find_held(self, weights: Sequence[FactorizedWeight], cores: Sequence[Sequence[Tensor]]) -> None:
        """Stack the held weights of each equation, padded with zeros, so that their norms are found together."""
        alike: dict[Equation, list[int]] = {}
        for row, name in enumerate(self.names):
            if name in self.group.held:
                alike.setdefault(weights[row].equation, []).append(row)
        rows = [row for own in alike.values() for row in own]
        self.held = [self.names[row] for row in rows]
        if not rows:
            return
        numbered = torch.arange(self.entries).split([core.numel() for own in cores for core in own])
        entries = iter(zip(numbered, (core.shape for own in cores for core in own), strict=True))
        views = [[next(entries) for _ in own] for own in cores]
        self.stacks, parts = [], []
        for equation, own in alike.items():
            shapes = []
            for k in range(len(equation.cores)):
                shape = (len(own), *map(max, zip(*(views[row][k][1] for row in own), strict=True)))
                stack = torch.full(shape, self.entries)
                for layer, row in zip(stack, own, strict=True):
                    index, size = views[row][k]
                    layer[tuple(map(slice, size))] = index.view(size)
                parts.append(stack.flatten())
                shapes.append(shape)
            self.stacks.append((equation, shapes))
        self.in_stacks = self._there(torch.cat(parts))
        # Weights that are not held come last, with a factor of one.
        number = torch.full((len(self.names),), len(rows))
        number[torch.tensor(rows)] = torch.arange(len(rows))
        sizes = [(row, core.numel()) for row, own in enumerate(cores) for core in own]
        self.held_of_entry = self._there(number[_repeated(sizes)])
        self.held_of_lambda = self._there(number[self.row_of_lambda.cpu()])
        self.counts = self._there([float(len(cores[row])) for row in rows])
        self.one = self._there([1.0])
        self._companions: tuple[object, Tensor] = None, self.one

    # --- what stands in the weights now ---

    def cores(self) -> list[Tensor]:
        """The cores of all weights, in the order of *flat*."""
        return [core for name in self.names for core in cores_of(self.group.weights[name])]

    def log_lambdas(self) -> list[Tensor]:
        """The vectors of all bonds, in the order of *u*."""
        us = [self.group._state(name).log_lambdas for name in self.names]
        return [us[bond.row][bond.number] for bond in self.bonds]

    # --- the formulas ---

    def log_variances(self, u: Tensor) -> Tensor:
        """Of every slice that has a bond."""
        terms = torch.cat([u, self.zero]).index_select(0, self.of_slices).view(self.powers.shape)
        return (terms * self.powers).sum(0)

    def log_prob(self, a: float, b: float, other_variance: float) -> Tensor:
        """The log density of all weights; see `density.log_prob`."""
        flat, u = _join(self.cores()), _join(self.log_lambdas())
        variances = self.log_variances(u)
        if self.free is not None:
            variances = variances + self.free * math.log(other_variance)
        squares = torch.dot(flat, flat * torch.exp(-variances).index_select(0, self.slice_of_entry))
        of_lambda = torch.dot(self.linear - (a - 1), u) + b * u.exp().sum()
        constant = self.lambdas * (a * math.log(b) - math.lgamma(a)) - 0.5 * self.entries * math.log(2 * math.pi)
        constant -= 0.5 * self.free_entries * math.log(other_variance)
        found: Tensor = constant - 0.5 * squares - of_lambda
        return found

    def moved(self, move: Move, a: float, floor: float, sweeps: int) -> Tensor:
        """*u* after so many rounds of one step of every bond on its conditional; see `density.sweep`."""
        flat, u = _join(self.cores()), _join(self.log_lambdas())
        parts = flat.square().index_select(0, self.by_size).split([math.prod(shape) for shape in self.sizes])
        energies = torch.cat([part.view(shape).sum(0) for part, shape in zip(parts, self.sizes, strict=True)])
        log_energies, linear = (0.5 * energies).log(), self.linear - (a - 1)
        for colour in self.colours * sweeps:
            own = u[colour.start : colour.stop]
            weighed = torch.cat([log_energies - self.log_variances(u), self.nothing])
            falling = {}
            for power, slices in colour.terms:  # without what the bond itself gives to the variance
                terms = weighed.index_select(0, slices.flatten()).view(slices.shape)
                falling[power] = (terms + power * own[:, None]).exp().sum(1)
            own = torch.cat([move(own, linear[colour.start : colour.stop], falling), self.nothing])
            own = density.apply_floor(own.index_select(0, colour.grid.flatten()).view(colour.grid.shape), floor)
            own = own.flatten().index_select(0, colour.cells)
            u = torch.cat([u[: colour.start], own, u[colour.stop :]])
        return u

    def norms(self, flat: Tensor) -> Tensor:
        """The Frobenius norms of the held weights' tensors, in double precision, where long products stay in range."""
        every = torch.cat([flat, self.zero]).double().index_select(0, self.in_stacks)
        pieces = iter(every.split([math.prod(shape) for _, shapes in self.stacks for shape in shapes]))
        squares = []
        for equation, shapes in self.stacks:
            cores = [next(pieces).view(shape) for shape in shapes]
            both = stacked_operands(equation, cores) + stacked_operands(equation, cores, equation.bonds)
            squares.append(algebra.contract(both, STACK))
        return torch.cat(squares).clamp_min(0.0).sqrt().to(self.exact)

    def hold_scale_(self) -> None:
        """Rescale held weights; see `Group.hold_scale_`."""
        cores, us, norms = self.cores(), self.log_lambdas(), [self.group._state(n).held_norm for n in self.held]
        flat, held = _join(cores), _join(norms)
        size = self.norms(flat)
        held = torch.where(held > 0, held, size)
        factor = torch.where(size > 0, held / size, torch.ones_like(size))
        share, factor = shares(factor, self.counts, self.dtype)
        _copy(norms, held)
        share = torch.cat([share, self.one])
        is_held = [name in self.group.held for name in self.names]
        chosen = [own for own, name in zip(is_held, self.names, strict=True) for _ in self.group.weights[name].cores]
        _copy(cores, flat * share.index_select(0, self.held_of_entry), chosen)
        u = _join(us) + share.log().index_select(0, self.held_of_lambda)
        _copy(us, u, [is_held[bond.row] for bond in self.bonds])
        self._scale_companions_(factor)

    def _scale_companions_(self, factor: Tensor) -> None:
        """Scale what goes with held weights, such as biases and running statistics, each by a power of the factor."""
        found = [
            (tensor, row + (power - 1) * len(self.held))
            for row, name in enumerate(self.held)
            for tensor, power in self.group.held[name].companions()
        ]
        if not found:
            return
        key = [(row, tensor.numel()) for tensor, row in found]
        if self._companions[0] != key:
            self._companions = key, self._there(_repeated(key))
        targets = [tensor for tensor, _ in found]
        _copy(targets, _join(targets) * torch.cat([factor, factor.square()]).index_select(0, self._companions[1]))


def colours(equation: Equation) -> list[int]:
    """The place of every bond in `density.update_order`, counted in runs of which no two bonds share a core."""
    found, colour, taken = [0] * len(equation.bonds), 0, set[int]()
    for number in density.update_order(equation):
        owners = set(equation.owners(equation.bonds[number]))
        if owners & taken:
            colour, taken = colour + 1, set()
        found[number], taken = colour, taken | owners
    return found


def cores_of(weight: FactorizedWeight) -> list[Tensor]:
    """The cores that stand in a weight now; reading them one by one as attributes would be slow."""
    own: Any = weight.cores._parameters
    return list(own.values()) if len(own) == len(weight.equation.cores) else list(weight.cores)


# --- one vector and its pieces ----------------------------------------------------------------------------------------


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of all tensors in one vector; half precision, which holds no sums, becomes single."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if _transformed() else _flatten_dense_tensors(tensors)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _copy(targets: Sequence[Tensor], flat: Tensor, chosen: Sequence[bool] | None = None) -> None:
    """Copy the pieces of a vector to the tensors that were joined, or to those that are `chosen`."""
    if _transformed():  # torch.vmap has no rules for whole lists of tensors
        parts = flat.split([tensor.numel() for tensor in targets])
        for target, part, wanted in zip(targets, parts, chosen or [True] * len(targets), strict=True):
            if wanted:
                target.copy_(part.view(target.shape))
        return
    values = _unflatten_dense_tensors(flat, targets)
    if chosen is not None:
        targets, values = list(compress(targets, chosen)), list(compress(values, chosen))
    if targets:
        torch._foreach_copy_(list(targets), list(values))


def _transformed() -> bool:
    """Whether `torch.vmap` or the like is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _repeated(pairs: Sequence[tuple[int, int]]) -> Tensor:
    """For pairs (number, count): each number as often as its count."""
    numbers, counts = zip(*pairs, strict=True)
    return torch.tensor(numbers).repeat_interleave(torch.tensor(counts))
