"""`Tables`: the prior of all weights at once, in a few large operations instead of many small ones.

The cores of all weights, one after the other, are the vector *flat*; all ``log lambda`` are the vector *u*. A *slice*
is what a core holds at one index of each of its bonds: all its entries have one variance, whose logarithm is a sum of
powers times entries of *u*. So a list of slices, with the lambdas of each, describes weights of any equation.

Nothing depends on a value, so a GPU is not waited for, a step can be captured, and `torch.vmap` runs it for many
particles. The readable twin is `bayestrain.prior.Group`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bayestrain.formats import Format, algebra
from bayestrain.nn import FactorizedWeight
from bayestrain.nn.precision import transformed
from bayestrain.perf.stacks import align_trees, cores_of, stacks_of
from bayestrain.prior import density
from bayestrain.prior.density import Move
from bayestrain.prior.groups import Group, shares, total
from bayestrain.prior.hold import Held

FEW = 4
"""On a CPU fewer weights than this are as fast one by one, and faster for many particles."""


class Table:
    """Weights of one dtype and device, and the indices by which they are treated as one."""

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self.group, self.names = group, list(names)
        self.equations = [group.weights[name].equation for name in names]
        like = cores_of(group.weights[names[0]])[0]
        self.device, self.dtype, self.exact = like.device, like.dtype, torch.promote_types(like.dtype, torch.float32)
        self.state = group._state(names[0])
        """Any of them: the prior's settings are the same in all."""
        self._place_lambdas()
        self._cut_into_slices()
        self._stack()

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
        """The order of *u*: colour by colour, since the bonds of one colour move together."""
        self.bonds = sorted(
            (colour, row, number)
            for row, equation in enumerate(self.equations)
            for number, colour in enumerate(density.colours(equation))
        )
        """Colour, number of the weight and number in the weight of every bond."""
        self.lambdas, linear, self._first, ends = 0, [], dict[tuple[int, int], int](), dict[int, int]()
        for (colour, row, number), u in zip(self.bonds, self.log_lambdas(), strict=True):
            shapes = tuple(core.shape for core in cores_of(self.group.weights[self.names[row]]))
            start = self.group._state(self.names[row]).start
            linear += [density.linear_terms(self.equations[row], shapes, start)[number]] * len(u)
            self._first[row, number] = self.lambdas
            self.lambdas += len(u)
            ends[colour] = self.lambdas
        self.linear, self.colours = self._there(torch.tensor(linear)), list(pairwise((0, *ends.values())))
        widths = torch.tensor([len(u) for u in self.log_lambdas()])
        rows = torch.arange(len(widths)).repeat_interleave(widths)
        grid = _padded(rows, torch.arange(self.lambdas), len(widths), self.lambdas)
        self.grid, self.cells = self._there(grid), self._there((grid.flatten() < self.lambdas).nonzero().squeeze(1))
        """The lambdas of each bond, ``(bonds, largest rank)``, and where in there each lambda is."""

    def _cut_into_slices(self) -> None:
        """Number the slices, those with few entries first, and find the entries and lambdas of each."""
        cores, most = self.cores(), max(len(own) for equation in self.equations for own in equation.powers)
        sizes = [core.numel() for core in cores]
        self.entries, parts = sum(sizes), []
        places = [(row, k) for row, equation in enumerate(self.equations) for k in range(len(equation.cores))]
        for (row, k), core, entries in zip(places, cores, torch.arange(self.entries).split(sizes), strict=True):
            equation, own = self.equations[row], self.equations[row].powers[k]
            bonds, missing = [equation.axis(k, bond) for bond in own], (0, 0, 0, most - len(own))
            order = [*(axis for axis in range(core.ndim) if axis not in bonds), *bonds]
            firsts = torch.tensor([self._first[row, equation.bonds.index(bond)] for bond in own], dtype=torch.int64)
            lambdas = (torch.ones([core.shape[axis] for axis in bonds]).nonzero() + firsts).mT
            powers = torch.tensor([*own.values()])[:, None].expand(lambdas.shape)
            slices = entries.view(core.shape).permute(order).reshape(-1, lambdas.shape[1])
            parts.append((slices, F.pad(lambdas, missing, value=self.lambdas), F.pad(powers, missing)))
        parts.sort(key=lambda part: len(part[0]))
        blocks = [torch.cat([own for own, *_ in alike], 1) for _, alike in groupby(parts, lambda part: len(part[0]))]
        of_slices, powers = (torch.cat([part[n] for part in parts], 1) for n in (1, 2))
        numbers = torch.arange(of_slices.shape[1]).split([block.shape[1] for block in blocks])
        slice_of_entry = torch.empty(self.entries, dtype=torch.int64)
        for block, own in zip(blocks, numbers, strict=True):
            slice_of_entry[block] = own
        self.sizes, self.by_size = [block.shape for block in blocks], torch.cat([block.flatten() for block in blocks])
        self.by_size, self.slice_of_entry = self._there(self.by_size), self._there(slice_of_entry)
        self.of_slices, self.powers, self.terms = self._there(of_slices.flatten()), self._there(powers), []
        """The lambdas of each slice and their powers; per power the slices ``(lambdas, most)`` of each lambda."""
        for power in powers[powers > 0].unique().tolist():
            slot, column = (powers == power).nonzero(as_tuple=True)
            rows, sort = of_slices[slot, column].sort(stable=True)
            table = _padded(rows, column[sort], self.lambdas, of_slices.shape[1])
            self.terms.append((power, self._there(table)))

    def _stack(self) -> None:
        """Stack the weights to align, and those to hold; find by which factor each entry changes with their scale."""
        weights = {name: self.group.weights[name] for name in self.names}
        trained = {name: own for name, own in weights.items() if name in self.group.trained}
        generic = {name: own for name, own in trained.items() if type(own.format).align is Format.align}
        self.trees = stacks_of({name: own for name, own in generic.items() if own.equation.is_tree})
        self.stacks = stacks_of({name: own for name, own in weights.items() if name in self.group.held})
        self.held = [name for own in self.stacks for name in own.weights]
        if self.held:
            self.counts = self._there([float(len(weights[name].equation.cores)) for name in self.held])
            us = [(n, u) for n, name in enumerate(self.held) for u in self.group._state(name).log_lambdas]
            self.held_of_lambda, self.factor_of = self._there(_repeated(us)), self._there(_repeated(self._scaled()))

    def _scaled(self) -> list[tuple[int, Tensor]]:
        """What a change of scale multiplies, and by which of all shares, factors and squares of factors."""
        found = []
        for n, name in enumerate(self.held):
            found += [(n, core) for core in cores_of(self.group.weights[name])]
            found += [(n + power * len(self.held), t) for t, power in self.group.held[name].companions()]
        return found

    # --- the formulas -------------------------------------------------------------------------------------------------

    def log_variances(self, u: Tensor) -> Tensor:
        """Of every slice."""
        terms = F.pad(u, (0, 1)).index_select(0, self.of_slices).view(self.powers.shape)
        return (terms * self.powers).sum(0)

    def log_prob(self) -> Tensor:
        """The log density of all weights; see `density.log_prob`."""
        a, b = self.state.a, self.state.b
        flat, u = _join(self.cores()), _join(self.log_lambdas())
        squares = torch.dot(flat, flat * torch.exp(-self.log_variances(u)).index_select(0, self.slice_of_entry))
        of_lambda = torch.dot(self.linear - (a - 1), u) + b * u.exp().sum()
        constant = self.lambdas * (a * math.log(b) - math.lgamma(a)) - 0.5 * self.entries * math.log(2 * math.pi)
        found: Tensor = constant - 0.5 * squares - of_lambda
        return found

    def moved(self, move: Move, sweeps: int) -> Tensor:
        """*u* after so many rounds of one step of every bond on its conditional; see `density.conditional_mode`."""
        flat, u = _join(self.cores()), _join(self.log_lambdas())
        parts = flat.square().index_select(0, self.by_size).split([math.prod(shape) for shape in self.sizes])
        energies = torch.cat([part.view(shape).sum(0) for part, shape in zip(parts, self.sizes, strict=True)])
        log_energies, linear = (0.5 * energies).log(), self.linear - (self.state.a - 1)
        for start, stop in self.colours * sweeps:
            own, falling = u[start:stop], {}
            weighed = F.pad(log_energies - self.log_variances(u), (0, 1), value=-math.inf)
            for power, table in self.terms:  # without what the bond itself gives to the variance
                terms = weighed.index_select(0, table[start:stop].flatten()).view(stop - start, -1)
                falling[power] = (terms + power * own[:, None]).exp().sum(1)
            moved = torch.cat([u[:start], move(own, linear[start:stop], falling, self.state.b), u[stop:]])
            by_bond = F.pad(moved, (0, 1), value=-math.inf).index_select(0, self.grid.flatten()).view(self.grid.shape)
            u = density.apply_floor(by_bond, self.state.floor).flatten().index_select(0, self.cells)
        return u

    def norms(self) -> Tensor:
        """The Frobenius norms of the held weights' tensors, in double precision, where long products stay in range."""
        stacked = [(own.equation, own(torch.float64)) for own in self.stacks]
        squares = [torch.vmap(algebra.inner, (None, 0, 0))(equation, cores, cores) for equation, cores in stacked]
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

    def log_prob(self, other_variance: float) -> Tensor:  # noqa: ARG002
        return total([table.log_prob() for table in self.tables()])

    @torch.no_grad()
    def move_(self, move: Move, sweeps: int = 1) -> None:
        for table in self.tables():
            _copy(table.log_lambdas(), table.moved(move, sweeps))

    @torch.no_grad()
    def align_(self) -> None:
        turned = align_trees([own for table in self.tables() for own in table.trees])
        for name in self.trained:
            weight, cores = self.weights[name], cores_of(self.weights[name])
            new = turned[name] if name in turned else weight.format.align(weight.equation, cores)
            new = [own.to(cores[0].dtype) for own in new]
            finite = _join(new).isfinite().all()
            for core, turned_core in zip(cores, new, strict=True):
                core.copy_(torch.where(finite, turned_core, core))

    @torch.no_grad()
    def hold_scale_(self) -> None:
        for table in self.tables():
            if table.held:
                table.hold_scale_()


def group(weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> Tables | None:
    """The weights of which every core has bonds as one group; None if there are too few."""
    bonded = {name: own for name, own in weights.items() if all(own.equation.powers)}
    on_cpu = all(own.cores[0].device.type == "cpu" for own in bonded.values())
    return Tables(bonded, held) if len(bonded) >= (FEW if on_cpu else 1) else None


# --- one vector and its pieces ----------------------------------------------------------------------------------------


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of all tensors in one vector; half precision, which holds no sums, becomes single."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if transformed() else _flatten_dense_tensors(tensors)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _copy(targets: Sequence[Tensor], flat: Tensor) -> None:
    """Copy the pieces of a vector to the tensors that were joined."""
    if not transformed():
        torch._foreach_copy_(list(targets), list(_unflatten_dense_tensors(flat, targets)))
        return
    for target, part in zip(targets, flat.split([tensor.numel() for tensor in targets]), strict=True):
        target.copy_(part.view(target.shape))


# --- indices ----------------------------------------------------------------------------------------------------------


def _repeated(pairs: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The numbers, each as often as its tensor has entries."""
    return torch.tensor([n for n, _ in pairs]).repeat_interleave(torch.tensor([len(t.reshape(-1)) for _, t in pairs]))


def _padded(rows: Tensor, values: Tensor, count: int, fill: int) -> Tensor:
    """A table of so many rows, where each value is in its row; `rows` is sorted."""
    lengths = rows.bincount(minlength=count)
    table = torch.full((count, int(lengths.max())), fill)
    table[rows, torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]] = values
    return table
