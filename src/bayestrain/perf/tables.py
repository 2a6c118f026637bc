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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bayestrain.formats import Format, algebra
from bayestrain.formats.equation import Equation
from bayestrain.nn import FactorizedWeight
from bayestrain.perf.stacks import Stacks
from bayestrain.perf.trees import align_trees
from bayestrain.prior import density
from bayestrain.prior.density import Move
from bayestrain.prior.groups import Group, shares, total
from bayestrain.prior.hold import Held

FEW = 4
"""On a CPU fewer weights than this are as fast one by one, and faster for many particles."""


def group(weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> Tables | None:
    """The weights that have bonds as one group; None if there are too few."""
    bonded = {name: own for name, own in weights.items() if own.equation.bonds}
    on_cpu = all(own.cores[0].device.type == "cpu" for own in bonded.values())
    return Tables(bonded, held) if len(bonded) >= (FEW if on_cpu else 1) else None


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

    def log_prob(self, other_variance: float) -> Tensor:
        return total([table.log_prob(other_variance) for table in self.tables()])

    @torch.no_grad()
    def move_(self, move: Move, sweeps: int = 1) -> None:
        for table in self.tables():
            _copy(table.log_lambdas(), table.moved(move, sweeps))

    @torch.no_grad()
    def align_(self) -> None:
        weights = [self.weights[name] for name in self.trained]
        trees = [own for own in weights if own.equation.is_tree and type(own.format).align is Format.align]
        turned = dict(zip(trees, align_trees([(own.equation, cores_of(own)) for own in trees]), strict=True))
        for own in weights:
            cores = cores_of(own)
            new = turned[own] if own in turned else own.format.align(own.equation, cores)
            finite = _join(new).isfinite().all()
            for core, turned_core in zip(cores, new, strict=True):
                core.copy_(torch.where(finite, turned_core, core))

    @torch.no_grad()
    def hold_scale_(self) -> None:
        for table in self.tables():
            if table.held:
                table.hold_scale_()


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
        self.equations = [group.weights[name].equation for name in names]
        like = cores_of(group.weights[names[0]])[0]
        self.device, self.dtype, self.exact = like.device, like.dtype, torch.promote_types(like.dtype, torch.float32)
        self.zero, self.nothing = self._there([0.0]), self._there([-math.inf])
        self._place_lambdas()
        self._cut_into_slices()
        self._stack_held()

    def cores(self) -> list[Tensor]:
        """The current cores of the weights, in the order of *flat*."""
        return [core for name in self.names for core in cores_of(self.group.weights[name])]

    def log_lambdas(self) -> list[Tensor]:
        """The vectors of all bonds, in the order of *u*."""
        us = [self.group._state(name).log_lambdas for name in self.names]
        return [us[row][number] for _, row, number in self.bonds]

    def _there(self, values: Any) -> Tensor:
        found = torch.as_tensor(values)
        return found.to(self.device, self.exact if found.is_floating_point() else found.dtype)

    def _place_lambdas(self) -> None:
        """The order of *u*: colour by colour, so that the bonds of one colour are a part of it."""
        self.bonds = sorted(
            (colour, row, number)
            for row, equation in enumerate(self.equations)
            for number, colour in enumerate(density.colours(equation))
        )
        """Colour, number of the weight and number in the weight of every bond."""
        self.lambdas, linear, self._first, self._ends = 0, [], dict[tuple[int, int], int](), dict[int, int]()
        for (colour, row, number), u in zip(self.bonds, self.log_lambdas(), strict=True):
            shapes = tuple(core.shape for core in cores_of(self.group.weights[self.names[row]]))
            start = self.group._state(self.names[row]).start
            linear += [density.linear_terms(self.equations[row], shapes, start)[number]] * len(u)
            self._first[row, number] = self.lambdas
            self.lambdas += len(u)
            self._ends[colour] = self.lambdas
        self.linear = self._there(torch.tensor(linear))

    def _cut_into_slices(self) -> None:
        """Number the slices, those with few entries first, and find the entries and lambdas of each."""
        cores = self.cores()
        sizes = [core.numel() for core in cores]
        self.entries, parts = sum(sizes), []
        places = [(row, k) for row, equation in enumerate(self.equations) for k in range(len(equation.cores))]
        for (row, k), core, entries in zip(places, cores, torch.arange(self.entries).split(sizes), strict=True):
            equation, axes = self.equations[row], range(core.ndim)
            bonds = [equation.axis(k, bond) for bond in equation.powers[k]]
            order = [*(axis for axis in axes if axis not in bonds), *bonds]
            ranks = [core.shape[axis] for axis in bonds]
            firsts = [self._first[row, equation.bonds.index(bond)] for bond in equation.powers[k]]
            own = entries.view(core.shape).permute(order).reshape(-1, math.prod(ranks))
            parts.append((own, ranks, firsts, list(equation.powers[k].values())))
        parts.sort(key=lambda part: len(part[0]))
        most, slices = max(len(firsts) for _, _, firsts, _ in parts), sum(own.shape[1] for own, *_ in parts)
        of_slices, powers, free = (
            torch.full((most, slices), self.lambdas),
            torch.zeros(most, slices),
            torch.zeros(slices),
        )
        slice_of_entry, by_size, start = torch.empty(self.entries, dtype=torch.int64), dict[int, list[Tensor]](), 0
        for own, ranks, firsts, exponents in parts:
            stop = start + own.shape[1]
            indices = torch.ones(ranks).nonzero().unbind(1)
            for n, (first, power, index) in enumerate(zip(firsts, exponents, indices, strict=True)):
                of_slices[n, start:stop], powers[n, start:stop] = first + index, power
            free[start:stop] = float(not firsts)
            slice_of_entry[own] = torch.arange(start, stop).expand(own.shape)
            by_size.setdefault(len(own), []).append(own)
            start = stop
        blocks = [torch.cat(alike, 1) for alike in by_size.values()]
        self.sizes, self.by_size = [block.shape for block in blocks], torch.cat([block.flatten() for block in blocks])
        self.by_size, self.slice_of_entry = self._there(self.by_size), self._there(slice_of_entry)
        self.free_entries = sum(own.numel() for own, _, firsts, _ in parts if not firsts)
        self.free, self.colours = self._there(free), self._coloured(of_slices, powers)
        self.of_slices, self.powers = self._there(of_slices.flatten()), self._there(powers)

    def _coloured(self, of_slices: Tensor, powers: Tensor) -> list[_Colour]:
        found, start, nowhere = [], 0, of_slices.shape[1]
        for colour, stop in self._ends.items():
            terms, inside = [], (of_slices >= start) & (of_slices < stop)
            for power in powers[inside].unique().tolist():
                slot, column = (inside & (powers == power)).nonzero(as_tuple=True)
                rows, order = (of_slices[slot, column] - start).sort(stable=True)
                terms.append((power, self._there(_padded(rows, column[order], stop - start, nowhere))))
            own = [len(u) for u, (other, _, _) in zip(self.log_lambdas(), self.bonds, strict=True) if other == colour]
            rows = torch.arange(len(own)).repeat_interleave(torch.tensor(own))
            grid = _padded(rows, torch.arange(stop - start), len(own), stop - start)
            cells = (grid.flatten() < stop - start).nonzero().squeeze(1)
            found.append(_Colour(start, stop, tuple(terms), self._there(grid), self._there(cells)))
            start = stop
        return found

    def _stack_held(self) -> None:
        """Stack the held weights of each equation, so that their norms are found together."""
        alike: dict[Equation, list[str]] = {}
        for name, equation in zip(self.names, self.equations, strict=True):
            if name in self.group.held:
                alike.setdefault(equation, []).append(name)
        self.held, self._held_equations = [name for own in alike.values() for name in own], list(alike)
        if not self.held:
            return
        weights = {name: self.group.weights[name] for name in self.held}
        self._stacked = [[(name, k) for name in own] for eq, own in alike.items() for k in range(len(eq.cores))]
        shapes = [[weights[name].cores[k].shape for name, k in stack] for stack in self._stacked]
        self.stacks = Stacks(shapes, self.device)
        self.counts = self._there([float(len(own.cores)) for own in weights.values()])
        us = [(n, u) for n, name in enumerate(self.held) for u in self.group._state(name).log_lambdas]
        self.held_of_lambda = self._there(_repeated([(n, len(u)) for n, u in us]))
        self.factor_of = self._there(_repeated([(n, len(tensor.reshape(-1))) for n, tensor in self._scaled()]))

    def _scaled(self) -> list[tuple[int, Tensor]]:
        """What a change of scale multiplies, and by which of all shares, factors and squares of factors."""
        found = []
        for n, name in enumerate(self.held):
            found += [(n, core) for core in cores_of(self.group.weights[name])]
            found += [(n + power * len(self.held), t) for t, power in self.group.held[name].companions()]
        return found

    # --- the formulas -------------------------------------------------------------------------------------------------

    def log_variances(self, u: Tensor) -> Tensor:
        """Of every slice that has a bond."""
        terms = torch.cat([u, self.zero]).index_select(0, self.of_slices).view(self.powers.shape)
        return (terms * self.powers).sum(0)

    def log_prob(self, other_variance: float) -> Tensor:
        """The log density of all weights; see `density.log_prob`."""
        state = self.group._state(self.names[0])
        a, b, flat, u = state.a, state.b, _join(self.cores()), _join(self.log_lambdas())
        variances = self.log_variances(u)
        if self.free_entries:
            variances = variances + self.free * math.log(other_variance)
        squares = torch.dot(flat, flat * torch.exp(-variances).index_select(0, self.slice_of_entry))
        of_lambda = torch.dot(self.linear - (a - 1), u) + b * u.exp().sum()
        constant = self.lambdas * (a * math.log(b) - math.lgamma(a)) - 0.5 * self.entries * math.log(2 * math.pi)
        constant -= 0.5 * self.free_entries * math.log(other_variance)
        found: Tensor = constant - 0.5 * squares - of_lambda
        return found

    def moved(self, move: Move, sweeps: int) -> Tensor:
        """*u* after so many rounds of one step of every bond on its conditional; see `density.conditional_mode`."""
        state = self.group._state(self.names[0])
        flat, u = _join(self.cores()), _join(self.log_lambdas())
        parts = flat.square().index_select(0, self.by_size).split([math.prod(shape) for shape in self.sizes])
        energies = torch.cat([part.view(shape).sum(0) for part, shape in zip(parts, self.sizes, strict=True)])
        log_energies, linear = (0.5 * energies).log(), self.linear - (state.a - 1)
        for colour in self.colours * sweeps:
            own = u[colour.start : colour.stop]
            weighed = torch.cat([log_energies - self.log_variances(u), self.nothing])
            falling = {}
            for power, slices in colour.terms:  # without what the bond itself gives to the variance
                terms = weighed.index_select(0, slices.flatten()).view(slices.shape)
                falling[power] = (terms + power * own[:, None]).exp().sum(1)
            own = torch.cat([move(own, linear[colour.start : colour.stop], falling, state.b), self.nothing])
            own = density.apply_floor(own.index_select(0, colour.grid.flatten()).view(colour.grid.shape), state.floor)
            own = own.flatten().index_select(0, colour.cells)
            u = torch.cat([u[: colour.start], own, u[colour.stop :]])
        return u

    def norms(self) -> Tensor:
        """The Frobenius norms of the held weights' tensors, in double precision, where long products stay in range."""
        cores = [self.group.weights[name].cores[k] for stack in self._stacked for name, k in stack]
        stacks, squares = iter(self.stacks(cores, torch.float64)), []
        for equation in self._held_equations:
            own = [next(stacks) for _ in equation.cores]
            squares.append(torch.vmap(partial(algebra.inner, equation))(own, own))
        return torch.cat(squares).clamp_min(0.0).sqrt().to(self.exact)

    def hold_scale_(self) -> None:
        """Rescale held weights; see `Group.hold_scale_`."""
        states = [self.group._state(name) for name in self.held]
        norms, us = [state.held_norm for state in states], [u for state in states for u in state.log_lambdas]
        held, size, scaled = _join(norms), self.norms(), [tensor for _, tensor in self._scaled()]
        held = torch.where(held > 0, held, size)
        factor = torch.where(size > 0, held / size, torch.ones_like(size))
        share, factor = shares(factor, self.counts, self.dtype)
        factors = torch.cat([share, factor, factor.square()])
        _copy(norms, held)
        _copy(scaled, _join(scaled) * factors.index_select(0, self.factor_of))
        _copy(us, _join(us) + share.log().index_select(0, self.held_of_lambda))


def cores_of(weight: FactorizedWeight) -> list[Tensor]:
    """The current cores of a weight; reading them one by one as attributes would be slow."""
    own: Any = weight.cores._parameters
    return list(own.values()) if len(own) == len(weight.equation.cores) else list(weight.cores)


# --- one vector and its pieces ----------------------------------------------------------------------------------------


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of all tensors in one vector; half precision, which holds no sums, becomes single."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if _transformed() else _flatten_dense_tensors(tensors)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _copy(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the pieces of a vector to the tensors that were joined."""
    if not _transformed():
        torch._foreach_copy_(list(targets), list(_unflatten_dense_tensors(flat, targets)))
        return
    for target, part in zip(targets, flat.split([tensor.numel() for tensor in targets]), strict=True):
        target.copy_(part.view(target.shape))


def _transformed() -> bool:
    """Whether `torch.vmap` or the like is active, which has no rules for whole lists of tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- indices ----------------------------------------------------------------------------------------------------------


def _repeated(pairs: Sequence[tuple[int, int]]) -> Tensor:
    """For pairs (number, count): each number as often as its count."""
    numbers, counts = zip(*pairs, strict=True)
    return torch.tensor(numbers).repeat_interleave(torch.tensor(counts))


def _padded(rows: Tensor, values: Tensor, count: int, fill: int) -> Tensor:
    """A table of so many rows, where each value is in its row; `rows` is sorted."""
    lengths = rows.bincount(minlength=count)
    table = torch.full((count, int(lengths.max())), fill)
    table[rows, torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]] = values
    return table
