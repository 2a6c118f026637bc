"""`ChainGroup`: the prior of all trains at once, in a few large operations instead of many small ones.

The cores of all weights, one after the other, are the vector *flat*; all ``log lambda`` are the vector *u*. What goes
entry by entry works on these two. What needs the shape of a train works on tables with one row per weight, gathered
from the vectors by indices that are made once: blocks of cores ``(G, left, mode, right)`` for each of the K places in a
train, ``(G, B, R)`` for lambda and ``(G, K, R, R)`` for slices of cores, with G weights, B bonds and the largest sizes
that occur. Where a row has nothing, the index points to a zero behind the end of the vector; a train with fewer cores
continues with ``1 x 1 x 1`` cores that hold a one.

No value is looked at, so a GPU is not waited for, a step can be captured, and `torch.vmap` runs it for many particles.
The readable twin is `bayestrain.prior.Group`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bayestrain.formats.align import aligning_gauges
from bayestrain.nn import FactorizedWeight
from bayestrain.prior import density
from bayestrain.prior.density import Move
from bayestrain.prior.groups import Group, shares, total
from bayestrain.prior.hold import Held

Train = tuple[tuple[int, int, int], ...]
"""The shapes of one weight's cores, ``(left, mode, right)`` with ones at both ends."""

SPACIOUS, WASTE = 4_000_000, 16
"""A table may have so many entries, or so many times those of its cores; else the weights go into several tables."""

RESCALE_FROM = 8
"""Trains of so many cores have a norm that could leave the range of single precision on the way."""


def group(weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> ChainGroup | None:
    """The weights that are trains of at least two cores as one group; None if there are none."""
    chains = {name: own for name, own in weights.items() if own.format.name == "tt" and len(own.cores) > 1}
    return ChainGroup(chains, held) if chains else None


class ChainGroup(Group):
    """The prior of weights that are trains; see `Group`."""

    def __init__(self, weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> None:
        super().__init__(weights, held)
        self._key: object = None
        self._tables: list[Table] = []

    def tables(self) -> list[Table]:
        """The tables, made again when ranks, dtypes or devices have changed; all together have the order of `cores`."""
        cores = {name: cores_of(weight) for name, weight in self.weights.items()}
        key = [(self._state(n).start, *((c.shape, c.dtype, c.device) for c in own)) for n, own in cores.items()]
        if key == self._key:
            return self._tables
        trains = {name: _train(own) for name, own in cores.items()}
        runs: list[list[str]] = []
        for name in self.weights:  # neighbours share a table where they can
            like, before = cores[name][0], cores[runs[-1][0]][0] if runs else None
            alike = before is not None and (like.dtype, like.device) == (before.dtype, before.device)
            if alike and is_compact([trains[other] for other in (*runs[-1], name)]):
                runs[-1].append(name)
            else:
                runs.append([name])
        with torch.inference_mode(False):  # else no gradient could ever go through the tables
            tables = [Table(self, names, [trains[name] for name in names], cores[names[0]][0]) for names in runs]
        # Inside of torch.func.grad all new tensors belong to that call.
        if not any(torch._C._functorch.is_functorch_wrapped_tensor(table.linear) for table in tables):
            self._key, self._tables = key, tables
        return tables

    def log_prob(self, a: float, b: float, other_variance: float) -> Tensor:  # noqa: ARG002
        terms = []
        for table in self.tables():
            flat, u = _join(table.cores()), _join(table.log_lambdas())
            terms.append(table.log_prob(torch.dot(flat, flat * table.precision(u)), u, a, b))
        return total(terms)

    @torch.no_grad()
    def move_(self, move: Move, a: float, floor: float, sweeps: int = 1) -> None:
        for table in self.tables():
            us = table.log_lambdas()
            _copy(us, table.moved(_join(table.cores()), _join(us), move, a, floor, sweeps))

    @torch.no_grad()
    def align_(self, move: Move, a: float, floor: float, sweeps: int) -> None:
        for table in self.tables():
            if any(table.is_trained):
                cores, us = table.cores(), table.log_lambdas()
                _copy(cores, table.aligned(_join(cores)), table.for_cores(table.is_trained))
                moved = table.moved(_join(cores), _join(us), move, a, floor, sweeps)
                _copy(us, moved, table.for_bonds(table.is_trained))

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for table in self.tables():
            if any(table.is_held):
                found |= compress(zip(table.names, table.norms(_join(table.cores())), strict=True), table.is_held)
        return found

    @torch.no_grad()
    def hold_scale_(self) -> None:
        for table in self.tables():
            if any(table.is_held):
                cores, us, norms = table.cores(), table.log_lambdas(), [self._state(n).held_norm for n in table.names]
                flat, held = _join(cores), _join(norms)
                size = table.norms(flat)
                held = torch.where(table.held & (held <= 0), size, held)
                factor = torch.where(table.held & (size > 0), held / size, torch.ones_like(size))
                share, factor = shares(factor, table.counts, cores[0].dtype)
                _copy(norms, held, table.is_held)
                _copy(cores, flat * share.index_select(0, table.row_of_entry), table.for_cores(table.is_held))
                u = _join(us) + share.log().index_select(0, table.row_of_lambda)
                _copy(us, u, table.for_bonds(table.is_held))
                table.scale_companions_(factor)


class Table:
    """Weights of one dtype and device, and the indices by which they are treated as one."""

    def __init__(self, group: ChainGroup, names: Sequence[str], trains: Sequence[Train], like: Tensor) -> None:
        self.group, self.names, self.trains = group, list(names), trains
        self.is_held = [name in group.held for name in names]
        self.is_trained = [name in group.trained for name in names]
        exact = torch.promote_types(like.dtype, torch.float32)

        def there(values: Any) -> Tensor:
            found = torch.as_tensor(values)
            return found.to(like.device, exact if found.is_floating_point() else found.dtype)

        self.entries = sum(math.prod(shape) for train in trains for shape in train)
        self.lambdas = sum(right for train in trains for _, _, right in train[:-1])
        self.blocks = [(len(trains), *block) for block in _blocks(trains)]
        rows, places, widest = len(trains), len(self.blocks), max(block[3] for block in self.blocks)
        us = _numbers([[(right,) for _, _, right in train[:-1]] for train in trains])
        table = torch.stack([_stacked(row, (places - 1, widest), self.lambdas) for row in us])
        self.table, self.unused = there(table), there(table == self.lambdas)  # (G, B, R)
        self.from_table = there((table < self.lambdas).flatten().nonzero().squeeze(1))

        entries, one = _numbers(trains), torch.full((1, 1, 1), self.entries + 1)
        at = [[own[k] if k < len(own) else one for own in entries] for k in range(places)]
        in_blocks = torch.cat([
            _stacked(own, block, self.entries).flatten() for own, block in zip(at, self.blocks, strict=True)
        ])  # fmt: skip
        from_blocks = in_blocks.argsort()[: self.entries]  # all else points behind flat's end
        self.in_blocks, self.from_blocks = there(in_blocks), there(from_blocks)
        slices = torch.arange(rows * places * widest**2).view(rows, places, widest, widest)
        of_blocks = [slices[:, k, :a, None, :b].expand(-1, -1, m, -1) for k, (_, a, m, b) in enumerate(self.blocks)]
        self.slice_of_entry = there(torch.cat([own.flatten() for own in of_blocks])[from_blocks])
        # A slice's variance is the product of the lambdas on its two sides; at the ends the one there is counts twice.
        left, right = (F.pad(table, (0, 0, *side), value=self.lambdas) for side in ((1, 0), (0, 1)))
        left, right = (own.expand(slices.shape).clone() for own in (left[..., None], right[..., None, :]))
        last = range(rows), [len(train) - 1 for train in trains]
        left[:, 0], right[last] = right[:, 0], left[last]
        self.left, self.right = there(left.flatten()), there(right.flatten())
        self.sizes, by_size, energy = _energies(trains, entries, slices.shape)
        inner, ends = energy.clone(), torch.full((2, *table.shape), int(energy.max()))
        ends[0, :, 0], ends[1, last[0], [k - 1 for k in last[1]]] = energy[:, 0, 0], energy[last][..., 0]
        inner[:, 0] = inner[last] = int(energy.max())
        self.by_size, self.energies = there(by_size), there(torch.cat([inner.flatten(), ends.flatten()]))

        self.row_of_entry = there(_repeated((g, sum(map(math.prod, train))) for g, train in enumerate(trains)))
        self.row_of_lambda = there(_repeated((g, sum(map(len, row))) for g, row in enumerate(us)))
        linear = [term for name in names for term in self._linear(name)]
        self.linear, self.linear_table = there(linear), there(torch.tensor([*linear, 0.0])[table])
        self.held, self.counts = there(self.is_held), there([float(len(train)) for train in trains])
        self.behind = there([0.0, 1.0])
        self._companions: tuple[object, Tensor] = None, self.behind

    def _linear(self, name: str) -> list[float]:
        """Per lambda the coefficient of u in the conditional, for a = 1."""
        weight, state = self.group.weights[name], self.group._state(name)
        terms = density.linear_terms(weight.equation, tuple(core.shape for core in cores_of(weight)), state.start)
        return [term for term, u in zip(terms, state.log_lambdas, strict=True) for _ in range(len(u))]

    def cores(self) -> list[Tensor]:
        """The cores that stand in the weights now."""
        return [core for name in self.names for core in cores_of(self.group.weights[name])]

    def log_lambdas(self) -> list[Tensor]:
        """The vectors of all bonds that stand in the weights now."""
        return [u for name in self.names for u in self.group._state(name).log_lambdas]

    def for_cores(self, chosen: Sequence[bool]) -> list[bool]:
        """What holds for a weight, for each of its cores."""
        return [own for own, train in zip(chosen, self.trains, strict=True) for _ in train]

    def for_bonds(self, chosen: Sequence[bool]) -> list[bool]:
        """What holds for a weight, for each of its bonds."""
        return [own for own, train in zip(chosen, self.trains, strict=True) for _ in train[1:]]

    def precision(self, u: Tensor) -> Tensor:
        """``1 / variance`` of every entry of flat."""
        u = torch.cat([u, self.behind[:1]])
        per_slice = torch.exp(-(u.index_select(0, self.left) + u.index_select(0, self.right)))
        return per_slice.index_select(0, self.slice_of_entry)

    def log_prob(self, squares: Tensor, u: Tensor, a: float, b: float) -> Tensor:
        """The log density of all weights, from the sum of squared entries over their variances."""
        of_lambda = torch.dot(self.linear - (a - 1), u) + b * u.exp().sum()
        constant = self.lambdas * (a * math.log(b) - math.lgamma(a)) - 0.5 * self.entries * math.log(2 * math.pi)
        return constant - 0.5 * squares - of_lambda

    def moved(self, flat: Tensor, u: Tensor, move: Move, a: float, floor: float, sweeps: int) -> Tensor:
        """``u`` after so many steps of every bond on its conditional.

        A bond's conditional depends on its two neighbours and no other bond, so all odd bonds move at once, then all
        even ones, which see where their neighbours have gone.
        """
        rows, bonds, widest = self.table.shape
        parts = flat.square().index_select(0, self.by_size).split([math.prod(shape) for shape in self.sizes])
        sums = [part.view(shape).sum(0) for part, shape in zip(parts, self.sizes, strict=True)]
        found = 0.5 * torch.cat([*sums, self.behind[:1]]).index_select(0, self.energies)
        inner, ends = found.split([rows * (bonds + 1) * widest**2, 2 * rows * bonds * widest])
        inner, ends = inner.view(rows, bonds + 1, widest, widest), ends.view(2, rows, bonds, widest).sum(0)
        table = torch.cat([u, self.behind[:1]]).index_select(0, self.table.flatten()).view(self.table.shape)
        linear = self.linear_table - (a - 1)
        for first in (*range(min(2, bonds)),) * sweeps:
            own = slice(first, bonds, 2)
            inverse_lambda = F.pad(torch.exp(-table), (0, 0, 1, 1))  # (G, B + 2, R): bond k stands at k + 1
            from_left = (inverse_lambda[:, first:bonds:2, :, None] * inner[:, first:bonds:2]).sum(-2)
            from_right = (inner[:, first + 1 : bonds + 1 : 2] * inverse_lambda[:, first + 2 :: 2, None]).sum(-1)
            after = move(table[:, own], linear[:, own], {1.0: from_left + from_right, 2.0: ends[:, own]})
            after = after.masked_fill(self.unused[:, own], -math.inf)
            table[:, own] = density.apply_floor(after, floor)
        return table.reshape(-1).index_select(0, self.from_table)

    def norms(self, flat: Tensor) -> Tensor:
        """The Frobenius norm of every weight's tensor, ``(G,)``."""
        blocks, scale = self._in_blocks(flat), None
        if len(blocks) >= RESCALE_FROM:
            sizes = torch.stack([torch.linalg.vector_norm(block.flatten(1), dim=1) for block in blocks])
            sizes = torch.where(sizes > 0, sizes, torch.ones_like(sizes))
            blocks = [block / size[:, None, None, None] for block, size in zip(blocks, sizes, strict=True)]
            scale = sizes.log().sum(0).exp()
        gram = blocks[0].new_ones(len(self.names), 1, 1)
        for block in blocks:
            gram = _gram_right(gram, block)
        norm = gram.squeeze((1, 2)).clamp_min(0.0).sqrt()
        return norm if scale is None else norm * scale

    def aligned(self, flat: Tensor) -> Tensor:
        """``flat`` with all bonds turned to singular directions; weights that are not finite stay as they are."""
        rows, _, widest = self.table.shape
        blocks = self._in_blocks(flat.double())
        left, right = [blocks[0].new_ones(rows, 1, 1)], [blocks[0].new_ones(rows, 1, 1)]
        for block, other in zip(blocks[:-1], blocks[:0:-1], strict=True):
            left.append(_gram_right(left[-1], block))
            right.append(_gram_left(right[-1], other))
        padded = [
            torch.stack([F.pad(gram, (0, widest - gram.shape[-1]) * 2) for gram in own], 1)  # (G, B, R, R)
            for own in (left[1:], right[:0:-1])
        ]
        pairs = aligning_gauges(padded[0].masked_fill(self.unused[..., None], 0.0), padded[1])
        for k, (gauge, inverse) in enumerate(zip(*(pair.unbind(1) for pair in pairs), strict=True)):
            rank, before, after = self.blocks[k][3], self.blocks[k], self.blocks[k + 1]
            blocks[k] = (blocks[k].reshape(rows, -1, rank) @ gauge[:, :rank, :rank]).reshape(before)
            blocks[k + 1] = (inverse[:, :rank, :rank] @ blocks[k + 1].reshape(rows, rank, -1)).reshape(after)
        finite = torch.stack([block.flatten(1).isfinite().all(1) for block in blocks]).all(0)
        new = torch.cat([block.reshape(-1) for block in blocks]).index_select(0, self.from_blocks)
        return torch.where(finite.index_select(0, self.row_of_entry), new.to(flat.dtype), flat)

    def _in_blocks(self, flat: Tensor) -> list[Tensor]:
        """The cores of all weights at each place in a train."""
        every = torch.cat([flat, self.behind.to(flat.dtype)]).index_select(0, self.in_blocks)
        parts = every.split([math.prod(block) for block in self.blocks])
        return [part.view(block) for part, block in zip(parts, self.blocks, strict=True)]

    def scale_companions_(self, factor: Tensor) -> None:
        """Scale what goes with held weights, such as biases and running statistics, each by a power of the factor."""
        held = ((row, self.group.held[name]) for row, name in enumerate(self.names) if name in self.group.held)
        found = [(t, row + (power - 1) * len(self.names)) for row, own in held for t, power in own.companions()]
        if not found:
            return
        key = [(row, tensor.numel()) for tensor, row in found]
        if self._companions[0] != key:
            self._companions = key, _repeated(key).to(self.held.device)
        targets = [tensor for tensor, _ in found]
        _copy(targets, _join(targets) * torch.cat([factor, factor.square()]).index_select(0, self._companions[1]))


def cores_of(weight: FactorizedWeight) -> list[Tensor]:
    """The cores that stand in a weight now; reading them one by one as attributes would be slow."""
    own: Any = weight.cores._parameters
    return list(own.values()) if len(own) == len(weight.equation.cores) else list(weight.cores)


def is_compact(trains: Sequence[Train]) -> bool:
    """Whether one table of these is no larger than it may be."""
    blocks = _blocks(trains)
    widest = max(right for _, _, right in blocks)
    padded = len(trains) * max(sum(map(math.prod, blocks)), len(blocks) * widest**2)
    return padded <= max(SPACIOUS, WASTE * sum(math.prod(shape) for train in trains for shape in train))


def _gram_right(gram: Tensor, block: Tensor) -> Tensor:
    """The Gram matrices ``(G, a, a)`` of what is left of a block ``(G, a, M, c)``, carried through it."""
    rows, left, size, right = block.shape
    carried = (gram @ block.reshape(rows, left, size * right)).reshape(rows, left * size, right)
    return block.reshape(rows, left * size, right).mT @ carried


def _gram_left(gram: Tensor, block: Tensor) -> Tensor:
    """The same from the right: ``(G, c, c)`` to ``(G, a, a)``."""
    rows, left, size, right = block.shape
    carried = (block.reshape(rows, left * size, right) @ gram).reshape(rows, left, size * right)
    return block.reshape(rows, left, size * right) @ carried.mT


# --- one vector and its pieces ----------------------------------------------------------------------------------------


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of all tensors in one vector; half precision, which holds no sums, becomes single."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if _transformed() else _flatten_dense_tensors(tensors)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `_join` has joined, in the shapes of `like`."""
    if not _transformed():
        return list(_unflatten_dense_tensors(flat, like))
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _copy(targets: Sequence[Tensor], flat: Tensor, chosen: Sequence[bool] | None = None) -> None:
    """Copy the pieces of a vector to their targets, or to those that are `chosen`."""
    values = _pieces(flat, targets)
    if chosen is not None:
        targets, values = list(compress(targets, chosen)), list(compress(values, chosen))
    if not _transformed() and targets:
        torch._foreach_copy_(list(targets), values)
        return
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _transformed() -> bool:
    """Whether `torch.vmap` or the like is active, which has no rules for whole lists of tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- indices ----------------------------------------------------------------------------------------------------------


def _train(cores: Sequence[Tensor]) -> Train:
    shapes = [(1, *cores[0].shape), *(tuple(core.shape) for core in cores[1:-1]), (*cores[-1].shape, 1)]
    return tuple((left, mode, right) for left, mode, right in shapes)


def _blocks(trains: Sequence[Train]) -> list[tuple[int, int, int]]:
    """For each place in a train the largest ``(left, mode, right)`` that occurs there."""
    places = [[train[k] for train in trains if k < len(train)] for k in range(max(map(len, trains)))]
    return [(max(s[0] for s in place), max(s[1] for s in place), max(s[2] for s in place)) for place in places]


def _numbers(shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Tensors of these shapes whose entries are numbered throughout."""
    sizes = [math.prod(shape) for row in shapes for shape in row]
    parts = iter(torch.arange(sum(sizes)).split(sizes))
    return [[next(parts).view(shape) for shape in row] for row in shapes]


def _stacked(tensors: Sequence[Tensor], shape: tuple[int, ...], fill: int) -> Tensor:
    """A table of this shape whose rows hold the tensors in their first corners."""
    result = torch.full(shape, fill)
    for row, tensor in enumerate(tensors):
        result[row][tuple(slice(size) for size in tensor.shape)] = tensor
    return result


def _repeated(pairs: Iterable[tuple[int, int]]) -> Tensor:
    """For pairs (number, count): each number as often as its count."""
    numbers, counts = zip(*pairs, strict=True)
    return torch.tensor(numbers).repeat_interleave(torch.tensor(counts))


def _energies(
    trains: Sequence[Train], entries: Sequence[Sequence[Tensor]], shape: tuple[int, ...]
) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """Shapes and order that put slices of one size side by side to be summed, and the sum that each slice has.

    A shape is ``(entries in a slice, slices)``. Behind the sums stands a zero, which slices that do not exist have.
    """
    columns: dict[int, list[Tensor]] = {}
    found: dict[tuple[int, int], Tensor] = {}
    count = 0
    for size, g, k in sorted((train[k][1], g, k) for g, train in enumerate(trains) for k in range(len(train))):
        left, _, right = trains[g][k]
        columns.setdefault(size, []).append(entries[g][k].transpose(0, 1).reshape(size, -1))
        found[g, k] = torch.arange(count, count + left * right).view(left, right)
        count += left * right
    blocks = [torch.cat(alike, dim=1) for alike in columns.values()]
    table = [_stacked([found[g, k] for k in range(len(train))], shape[1:], count) for g, train in enumerate(trains)]
    sizes = [(len(block), block.shape[1]) for block in blocks]
    return sizes, torch.cat([block.flatten() for block in blocks]), torch.stack(table)
