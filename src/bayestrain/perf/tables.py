"""`Tables`: the prior of all weights at once, in a few large operations instead of many small ones.

The cores of all weights, one after the other, are the vector *flat*; all ``log lambda`` are the vector *u*. A *slice*
is what a core holds at one index of each of its bonds: all its entries have one variance, whose logarithm is a sum of
powers times entries of *u*. So a list of slices, with the lambdas of each, describes weights of any equation.

Nothing depends on a value, so a GPU is not waited for, a step can be captured, and `torch.vmap` runs it for many
particles. The readable twin is `bayestrain.prior.Group`.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import groupby, pairwise

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
from bayestrain.prior.groups import Group, shares
from bayestrain.prior.hold import Held

FEW = 4  # on a CPU fewer weights are as fast one by one, and faster for many particles


class Tables(Group):
    """The prior of weights of one dtype on one device, with the indices that make them one vector; see `Group`."""

    def __init__(self, weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> None:
        super().__init__(weights, held)
        self._key: object = None

    def _cores(self) -> list[Tensor]:
        """The current cores of the weights, in the order of *flat*; indices follow changed ranks, dtypes or devices."""
        cores = {name: cores_of(own) for name, own in self.weights.items()}
        key = [(self._state(n).start, *((c.shape, c.dtype, c.device) for c in own)) for n, own in cores.items()]
        found = [core for own in cores.values() for core in own]
        if key != self._key:
            like, self.state = found[0], self._state(next(iter(cores)))  # the prior's settings are the same in all
            self.device, self.dtype = like.device, like.dtype
            self.exact = reduce(torch.promote_types, {core.dtype for core in found}, torch.float32)
            with torch.inference_mode(False):  # else no gradient could ever go through the tables
                self._place_lambdas(cores)
                self._cut_into_slices(cores)
                self._stack()
            # Inside of torch.func.grad all new tensors belong to that call.
            self._key = None if torch._C._functorch.is_functorch_wrapped_tensor(self.linear) else key
        return found

    def _log_lambdas(self) -> list[Tensor]:
        """The vectors of all bonds, in the order of *u*."""
        us = {name: self._state(name).log_lambdas for name in self.weights}
        return [us[name][number] for _, name, number in self.bonds]

    def _there(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.exact if values.is_floating_point() else values.dtype)

    def _place_lambdas(self, cores: Mapping[str, Sequence[Tensor]]) -> None:
        """The order of *u*: colour by colour, since the bonds of one colour move together."""
        colours = {name: density.colours(own.equation) for name, own in self.weights.items()}
        self.bonds = sorted((colour, name, n) for name, own in colours.items() for n, colour in enumerate(own))
        """Colour, weight and number in the weight of every bond."""
        self.lambdas, linear, self._first, ends = 0, [], dict[tuple[str, int], int](), dict[int, int]()
        us = self._log_lambdas()
        for (colour, name, number), u in zip(self.bonds, us, strict=True):
            shapes, equation = tuple(core.shape for core in cores[name]), self.weights[name].equation
            linear += [density.linear_terms(equation, shapes, self._state(name).start)[number]] * len(u)
            self._first[name, number] = self.lambdas
            self.lambdas += len(u)
            ends[colour] = self.lambdas
        self.linear, self.colours = self._there(torch.tensor(linear)), list(pairwise((0, *ends.values())))
        grid = _padded(_repeated(list(enumerate(us))), torch.arange(self.lambdas), len(us), self.lambdas)
        self.cells = self._there((grid.flatten() < self.lambdas).nonzero().squeeze(1))
        self.grid = self._there(torch.where(grid < self.lambdas, grid, grid[:, :1]))
        """The lambdas of each bond, ``(bonds, largest rank)``, filled up with its first; where in there each is."""

    def _cut_into_slices(self, cores: Mapping[str, Sequence[Tensor]]) -> None:
        """Number the slices, those with few entries first, and find the entries and lambdas of each."""
        parts, self.entries = [], 0
        most = max(len(own) for weight in self.weights.values() for own in weight.equation.powers)
        for name, k, core in [(name, k, core) for name, own in cores.items() for k, core in enumerate(own)]:
            equation, own = self.weights[name].equation, self.weights[name].equation.powers[k]
            bonds, missing = [equation.axis(k, bond) for bond in own], (0, 0, 0, most - len(own))
            order = [*(axis for axis in range(core.ndim) if axis not in bonds), *bonds]
            firsts = torch.tensor([self._first[name, equation.bonds.index(bond)] for bond in own], dtype=torch.int64)
            lambdas = (torch.ones([core.shape[axis] for axis in bonds]).nonzero() + firsts).mT
            powers = torch.tensor([*own.values()])[:, None].expand(lambdas.shape)
            entries = torch.arange(self.entries, self.entries + core.numel()).view(core.shape)
            slices = entries.permute(order).reshape(-1, lambdas.shape[1])
            parts.append((slices, F.pad(lambdas, missing, value=int(firsts[0])), F.pad(powers, missing)))
            self.entries += core.numel()
        parts.sort(key=lambda part: len(part[0]))
        blocks = [torch.cat([own for own, *_ in alike], 1) for _, alike in groupby(parts, lambda part: len(part[0]))]
        of_slices, powers = (torch.cat([part[n] for part in parts], 1) for n in (1, 2))
        slice_of_entry, done = torch.empty(self.entries, dtype=torch.int64), 0
        for block in blocks:
            slice_of_entry[block] = torch.arange(done, done + block.shape[1])
            done += block.shape[1]
        self.sizes, by_size = [block.shape for block in blocks], torch.cat([block.flatten() for block in blocks])
        self.by_size, self.slice_of_entry = self._there(by_size), self._there(slice_of_entry)
        self.of_slices, self.powers, self.terms = self._there(of_slices.flatten()), self._there(powers), []
        """The lambdas of each slice and their powers; per power the slices ``(lambdas, most)`` of each lambda."""
        for power in powers[powers > 0].unique().tolist():
            slot, column = (powers == power).nonzero(as_tuple=True)
            rows, sort = of_slices[slot, column].sort(stable=True)
            table = _padded(rows, column[sort], self.lambdas, of_slices.shape[1])
            self.terms.append((power, self._there(table)))

    def _stack(self) -> None:
        """Stack the weights to align, and those to hold; find by which factor each entry changes with their scale."""
        generic = {name: own for name in self.trained if type((own := self.weights[name]).format).align is Format.align}
        self.trees = stacks_of({name: own for name, own in generic.items() if own.equation.is_tree})
        self.stacks = stacks_of({name: self.weights[name] for name in self.held})
        self.stacked = [name for own in self.stacks for name in own.weights]
        if self.stacked:
            counts = torch.tensor([float(len(self.weights[name].equation.cores)) for name in self.stacked])
            us = [(n, u) for n, name in enumerate(self.stacked) for u in self._state(name).log_lambdas]
            self.counts, self.held_of_lambda = self._there(counts), self._there(_repeated(us))
            self.factor_of = self._there(_repeated(self._scaled()))

    def _scaled(self) -> list[tuple[int, Tensor]]:
        """What a change of scale multiplies, and by which of all shares, factors and squares of factors."""
        found = []
        for n, name in enumerate(self.stacked):
            found += [(n, core) for core in cores_of(self.weights[name])]
            found += [(n + power * len(self.stacked), t) for t, power in self.held[name].companions()]
        return found

    def _log_variances(self, u: Tensor) -> Tensor:
        """Of every slice."""
        return (u.index_select(0, self.of_slices).view(self.powers.shape) * self.powers).sum(0)

    def log_prob(self, other_variance: float) -> Tensor:  # noqa: ARG002
        flat, u, (a, b) = _join(self._cores()), _join(self._log_lambdas()), (self.state.a, self.state.b)
        precision = torch.exp(-self._log_variances(u)).index_select(0, self.slice_of_entry)
        squares: Tensor = (flat.square() * precision).sum()  # vmap would make a product of matrices of torch.dot
        of_lambda = torch.dot(self.linear - (a - 1), u) + b * u.exp().sum()
        constant = self.lambdas * (a * math.log(b) - math.lgamma(a)) - 0.5 * self.entries * math.log(2 * math.pi)
        return constant - 0.5 * squares - of_lambda

    @torch.no_grad()
    def move_(self, move: Move, sweeps: int = 1) -> None:
        flat, us = _join(self._cores()), self._log_lambdas()
        parts = flat.square().index_select(0, self.by_size).split([math.prod(shape) for shape in self.sizes])
        energies = torch.cat([part.view(shape).sum(0) for part, shape in zip(parts, self.sizes, strict=True)])
        u, log_energies, linear = _join(us), (0.5 * energies).log(), self.linear - (self.state.a - 1)
        for start, stop in self.colours * sweeps:
            own, falling = u[start:stop], {}
            weighed = F.pad(log_energies - self._log_variances(u), (0, 1), value=-math.inf)
            for power, table in self.terms:  # without what the bond itself gives to the variance
                terms = weighed.index_select(0, table[start:stop].flatten()).view(stop - start, -1)
                falling[power] = (terms + power * own[:, None]).exp().sum(1)
            moved = torch.cat([u[:start], move(own, linear[start:stop], falling, self.state.b), u[stop:]])
            by_bond = moved.index_select(0, self.grid.flatten()).view(self.grid.shape)
            u = density.apply_floor(by_bond, self.state.floor).flatten().index_select(0, self.cells)
        _copy(us, u)

    @torch.no_grad()
    def align_(self) -> None:
        self._cores()
        turned = align_trees(self.trees) if self.trees else {}
        for name in self.trained:
            weight, cores = self.weights[name], cores_of(self.weights[name])
            new = turned[name] if name in turned else weight.format.align(weight.equation, cores)
            new = [core.to(cores[0].dtype) for core in new]
            finite = _join(new).isfinite().all()
            for core, turned_core in zip(cores, new, strict=True):
                core.copy_(torch.where(finite, turned_core, core))

    @torch.no_grad()
    def hold_scale_(self) -> None:
        self._cores()
        if not self.stacked:
            return
        stacks = [(own.equation, own(torch.float64)) for own in self.stacks]  # where long products stay in range
        squares = torch.cat([torch.vmap(algebra.inner, (None, 0, 0))(*own, own[1]) for own in stacks])
        size, states = squares.clamp_min(0.0).sqrt().to(self.exact), [self._state(name) for name in self.stacked]
        norms, us = [state.held_norm for state in states], [u for state in states for u in state.log_lambdas]
        held, scaled = _join(norms), [tensor for _, tensor in self._scaled()]
        held = torch.where(held > 0, held, size)
        factor = torch.where(size > 0, held / size, torch.ones_like(size))
        share, factor = shares(factor, self.counts, self.dtype)
        factors = torch.cat([share, factor, factor.square()])
        _copy(norms, held)
        _copy(scaled, _join(scaled) * factors.index_select(0, self.factor_of))
        _copy(us, _join(us) + share.log().index_select(0, self.held_of_lambda))


def group(weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> Tables | None:
    """The weights of which every core has bonds, and that are like the first, as one group; None if too few."""
    kinds = {name: (own.cores[0].dtype, own.cores[0].device) for name, own in weights.items()}
    like = next(iter(kinds.values()), (None, torch.device("cpu")))
    found = {name: own for name, own in weights.items() if kinds[name] == like and all(own.equation.powers)}
    return Tables(found, held) if len(found) >= (FEW if like[1].type == "cpu" else 1) else None


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


def _repeated(pairs: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The numbers, each as often as its tensor has entries."""
    return torch.tensor([n for n, _ in pairs]).repeat_interleave(torch.tensor([len(t.reshape(-1)) for _, t in pairs]))


def _padded(rows: Tensor, values: Tensor, count: int, fill: int) -> Tensor:
    """A table of so many rows, where each value is in its row; `rows` is sorted."""
    lengths = rows.bincount(minlength=count)
    table = torch.full((count, int(lengths.max())), fill)
    table[rows, torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]] = values
    return table
