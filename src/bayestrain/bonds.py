"""The prior of all layers at once: a few large operations instead of many small ones. Torch only; knows no modules.

The cores of all layers, one after the other, are the vector *flat*; all ``log lambda`` are the vector *u*. What goes
entry by entry works on these two. What needs the shape of a train works on tables with one row per layer, gathered from
the vectors by indices made once: for each place k in a train a block of cores ``(G, L, M, R)``, for lambda
``(G, B, R)``, with G layers, B bonds and the largest sizes that occur. Where a row has nothing, the index points to a
zero behind the vector's end; a train with fewer cores goes on with ``1 x 1 x 1`` cores that hold a one.

No value is looked at, so nothing waits for a GPU, a step can be captured, and `torch.vmap` runs it for many particles.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from bayestrain import gauge, shrinkage, tt

Train = Sequence[tuple[int, int, int]]
"""The shapes of one layer's cores, with their modes taken together: ``(left, modes, right)``."""

Move = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(u, linear, inverse, inverse_square) -> u``: a step on the conditional of `shrinkage.conditional`."""

SPACIOUS, WASTE = 4_000_000, 16
"""A table may have so many entries, or so many times those of its cores; else the layers go into several `Bonds`."""


# --- one vector and its pieces ----------------------------------------------------------------------------------------


def join(tensors: Sequence[Tensor]) -> Tensor:
    """All entries of all tensors in one vector; half precision, which can hold no sums, becomes single."""
    whole = not _transformed()
    flat = _flatten_dense_tensors(tensors) if whole else torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `join` has joined, in the shapes of `like`."""
    if _transformed():
        parts = flat.split([tensor.numel() for tensor in like])
        return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
    return list(_unflatten_dense_tensors(flat, like))


def copy_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value to its target."""
    if _transformed():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    elif targets:
        torch._foreach_copy_(list(targets), list(values))


def _transformed() -> bool:
    """Whether `torch.vmap` or the like is at work, which has no rules for whole lists of tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# --- the prior --------------------------------------------------------------------------------------------------------


class Bonds:
    """The prior's formulas for layers with cores of these shapes and, per bond, `dropped` rank indices."""

    def __init__(
        self,
        trains: Sequence[Train],
        dropped: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.entries = sum(math.prod(shape) for train in trains for shape in train)
        self.lambdas = sum(right for train in trains for _, _, right in train[:-1])
        self.blocks = [(len(trains), *block) for block in _blocks(trains)]
        u = _numbers([[(right,) for _, _, right in train[:-1]] for train in trains])
        table = _lambda_table(u)
        self.shape = table.shape  # (G, B, R)
        left, right, entry_slice = _variance_index(trains, u)
        exact = torch.promote_types(dtype, torch.float32)

        def there(index: Tensor) -> Tensor:
            return index.to(device)

        block_index = _block_index(trains, self.blocks)
        self._block_index = there(block_index)
        self._from_blocks = there(block_index.argsort()[: self.entries])  # all else points behind flat's end
        self._sizes, by_size, energies = _energy_index(trains, len(self.blocks), self.shape[2])
        self._by_size, self._energy_index = there(by_size), there(energies)
        self._left, self._right, self._slice = there(left), there(right), there(entry_slice)
        self._table, self._unused = there(table.reshape(-1)), there(table == self.lambdas)
        self._back = there((table < self.lambdas).reshape(-1).nonzero().squeeze(1))
        self._layer_of_entry = there(repeated((g, sum(map(math.prod, train))) for g, train in enumerate(trains)))
        self._layer_of_lambda = there(repeated((g, sum(map(len, layer))) for g, layer in enumerate(u)))
        linear = [term for train, gone in zip(trains, dropped, strict=True) for term in _linear(train, gone)]
        self._linear = there(torch.tensor(linear, dtype=exact))
        self._linear_table = there(torch.tensor([*linear, 0.0], dtype=exact)[table])
        self._roots = there(torch.tensor([1 / len(train) for train in trains], dtype=exact))
        self._behind = there(torch.tensor([0.0, 1.0], dtype=exact))

    def precision(self, u: Tensor) -> Tensor:
        """``1 / variance`` of every entry of flat."""
        per_slice = torch.exp(-(u.index_select(0, self._left) + u.index_select(0, self._right)))
        return per_slice.index_select(0, self._slice)

    def log_prob(self, flat: Tensor, precision: Tensor, u: Tensor, a: float, b: float) -> Tensor:
        """The sum of `shrinkage.log_prob` over all layers. Its gradient for flat is ``-precision * flat``."""
        squares = (flat.square() * precision).sum()
        of_lambda = ((self._linear - (a - 1)) * u + b * u.exp()).sum()
        constant = self.lambdas * (a * math.log(b) - math.lgamma(a)) - 0.5 * self.entries * math.log(2 * math.pi)
        return constant - 0.5 * squares - of_lambda

    def norms(self, flat: Tensor) -> Tensor:
        """The Frobenius norm of every layer's tensor, ``(G,)``."""
        return torch.vmap(tt.norm)(self._in_blocks(flat))

    def aligned(self, flat: Tensor) -> Tensor:
        """``flat`` after `gauge.align` of every layer; one that is not finite, before or after, stays as it is."""
        _, _, widest = self.shape
        blocks = self._in_blocks(flat.double())
        grams = [
            torch.stack([F.pad(gram, (0, widest - gram.shape[-1]) * 2) for gram in own], 1)  # (G, B, R, R)
            for own in torch.vmap(tt.grams)(blocks)
        ]
        left, right = (own.masked_fill(self._unused[..., None], 0.0) for own in grams)
        pairs = [
            [matrix[:, k, :rank, :rank] for k, (_, _, _, rank) in enumerate(self.blocks[:-1])]
            for matrix in gauge.aligning_gauges(left, right)
        ]
        turned = torch.vmap(gauge.change_gauges)(blocks, *pairs)
        finite = torch.stack([block.flatten(1).isfinite().all(1) for block in turned]).all(0)
        new = torch.cat([block.reshape(-1) for block in turned]).index_select(0, self._from_blocks)
        return torch.where(finite.index_select(0, self._layer_of_entry), new.to(flat.dtype), flat)

    def shares(self, factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Each core's share of its layer's factor, and the factors that these make, for cores of this dtype.

        In half precision a share is the nearest power of two: most others would be lost when cores are rounded.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            return factors**self._roots, factors
        powers = (factors.float().log2() * self._roots.float()).round()
        return powers.exp2(), (powers / self._roots.float()).round().exp2()

    def scaled(self, flat: Tensor, u: Tensor, per_core: Tensor) -> tuple[Tensor, Tensor]:
        """``(flat, u)`` with every core of a layer and its lambda times the layer's share."""
        by_entry = per_core.index_select(0, self._layer_of_entry)
        return flat * by_entry, u + per_core.log().index_select(0, self._layer_of_lambda)

    def moved(self, flat: Tensor, u: Tensor, move: Move, a: float, floor: float, sweeps: int = 1) -> Tensor:
        """``u`` after so many steps of every bond towards its conditional mode.

        A bond's conditional depends on its two neighbours and no other bond, so all odd bonds move at once, then all
        even ones, which see where their neighbours have gone: the same as bond after bond in that order.
        """
        inner, ends = self._energies(flat)
        _, bonds, _ = self.shape
        table = torch.cat([u, self._behind[:1]]).index_select(0, self._table).view(self.shape)
        linear = self._linear_table - (a - 1)
        for first in (*range(min(2, bonds)),) * sweeps:
            own = slice(first, bonds, 2)
            inverse_lambda = F.pad(torch.exp(-table), (0, 0, 1, 1))  # (G, B + 2, R): bond k stands at k + 1
            from_left = (inverse_lambda[:, first:bonds:2, :, None] * inner[:, first:bonds:2]).sum(-2)
            from_right = (inner[:, first + 1 : bonds + 1 : 2] * inverse_lambda[:, first + 2 :: 2, None]).sum(-1)
            after = move(table[:, own], linear[:, own], from_left + from_right, ends[:, own])
            after = after.masked_fill(self._unused[:, own], -math.inf)
            table[:, own] = shrinkage.apply_floor(after, floor)
        return table.reshape(-1).index_select(0, self._back)

    def _in_blocks(self, flat: Tensor) -> list[Tensor]:
        """The cores of all layers at each place in a train, ``(G, L, M, R)``."""
        every = torch.cat([flat, self._behind.to(flat.dtype)]).index_select(0, self._block_index)
        parts = every.split([math.prod(block) for block in self.blocks])
        return [part.view(block) for part, block in zip(parts, self.blocks, strict=True)]

    def _energies(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Half of the slices' sums of squares: inner cores' ``(G, B + 1, R, R)``, the ends' ``(G, B, R)``."""
        layers, bonds, widest = self.shape
        parts = flat.square().index_select(0, self._by_size).split([math.prod(shape) for shape in self._sizes])
        sums = [part.view(shape).sum(0) for part, shape in zip(parts, self._sizes, strict=True)]
        found = 0.5 * torch.cat([*sums, self._behind[:1]]).index_select(0, self._energy_index)
        of_inner, of_ends = found.split([layers * (bonds + 1) * widest**2, 2 * layers * bonds * widest])
        ends = of_ends.view(2, layers, bonds, widest).sum(0)
        return of_inner.view(layers, bonds + 1, widest, widest), ends


def groups(trains: Sequence[Train]) -> list[list[int]]:
    """Which layers go into one `Bonds`: all, unless they are so unlike that the tables were mostly zeros."""
    everything = list(range(len(trains)))
    if _is_compact(trains):
        return [everything]
    found: list[list[int]] = []
    for i in sorted(everything, key=lambda i: sum(map(math.prod, trains[i]))):
        if found and _is_compact([trains[j] for j in [*found[-1], i]]):
            found[-1].append(i)
        else:
            found.append([i])
    return [sorted(group) for group in found]


def _is_compact(trains: Sequence[Train]) -> bool:
    """Whether the largest table is no larger than it may be."""
    blocks = _blocks(trains)
    widest = max(right for _, _, right in blocks)
    padded = len(trains) * max(sum(map(math.prod, blocks)), len(blocks) * widest**2)
    return padded <= max(SPACIOUS, WASTE * sum(math.prod(shape) for train in trains for shape in train))


# --- indices ----------------------------------------------------------------------------------------------------------


def _blocks(trains: Sequence[Train]) -> list[tuple[int, int, int]]:
    """For each place in a train the largest ``(left, modes, right)`` that occurs there."""
    places = [[train[k] for train in trains if k < len(train)] for k in range(max(map(len, trains)))]
    return [(max(s[0] for s in place), max(s[1] for s in place), max(s[2] for s in place)) for place in places]


def _numbers(shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Tensors of these shapes whose entries are numbered throughout."""
    start = 0
    found: list[list[Tensor]] = []
    for row in shapes:
        found.append([])
        for shape in row:
            found[-1].append(torch.arange(start, start + math.prod(shape)).view(shape))
            start += math.prod(shape)
    return found


def _stacked(tensors: Sequence[Tensor], shape: tuple[int, ...], fill: int, start: int = 0) -> Tensor:
    """A table of this shape, whose rows from `start` on hold the tensors in their first corners."""
    result = torch.full(shape, fill)
    for row, tensor in enumerate(tensors, start):
        result[row][tuple(slice(size) for size in tensor.shape)] = tensor
    return result


def repeated(pairs: Iterable[tuple[int, int]]) -> Tensor:
    """For pairs (number, count): each number as often as its count."""
    return torch.cat([torch.full((count,), number) for number, count in pairs])


def _lambda_table(u: Sequence[Sequence[Tensor]]) -> Tensor:
    """``(G, B, R)`` into u; its length, where there is no lambda."""
    end = sum(len(bond) for layer in u for bond in layer)
    bonds, widest = max(map(len, u)), max(len(bond) for layer in u for bond in layer)
    return torch.stack([_stacked(layer, (bonds, widest), end) for layer in u])


def _block_index(trains: Sequence[Train], blocks: Sequence[tuple[int, ...]]) -> Tensor:
    """All blocks one after the other, into flat with a zero and a one behind it."""
    entry = _numbers(trains)
    zero = sum(math.prod(shape) for train in trains for shape in train)
    one = torch.full((1, 1, 1), zero + 1)
    tables = (
        _stacked([layer[k] if k < len(layer) else one for layer in entry], block, zero)
        for k, block in enumerate(blocks)
    )
    return torch.cat([table.reshape(-1) for table in tables])


def _variance_index(trains: Sequence[Train], u: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Per slice the two lambdas of its variance (twice the same at the ends); per entry of flat its slice."""
    left, right = [], []
    for layer in u:
        first, last = layer[0][None, :], layer[-1][:, None]
        inner = [torch.broadcast_tensors(x[:, None], y[None, :]) for x, y in pairwise(layer)]
        for x, y in [(first, first), *inner, (last, last)]:
            left.append(x.reshape(-1))
            right.append(y.reshape(-1))
    slices = _numbers([[(shape[0], 1, shape[2]) for shape in train] for train in trains])
    entry_slice = [
        own.expand(shape).reshape(-1)
        for train, layer in zip(trains, slices, strict=True)
        for shape, own in zip(train, layer, strict=True)
    ]
    return torch.cat(left), torch.cat(right), torch.cat(entry_slice)


def _energy_index(trains: Sequence[Train], depth: int, widest: int) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """For `Bonds._energies`: shapes and order that put slices of one size side by side; the tables into their sums.

    A shape is ``(entries in a slice, slices)``. Behind the sums stands a zero.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    for g, train in enumerate(trains):
        for k, (_, size, _) in enumerate(train):
            places.setdefault(size, []).append((g, k))
    entry = _numbers(trains)
    columns = [
        torch.cat([entry[g][k].transpose(0, 1).reshape(size, -1) for g, k in alike], dim=1)
        for size, alike in places.items()
    ]
    energy: dict[tuple[int, int], Tensor] = {}
    zero = 0
    for g, k in (place for alike in places.values() for place in alike):
        left, _, right = trains[g][k]
        energy[g, k] = torch.arange(zero, zero + left * right).view(left, right)
        zero += left * right
    inner, first, last = [], [], []
    for g, train in enumerate(trains):
        own = [energy[g, k] for k in range(len(train))]
        inner.append(_stacked(own[1:-1], (depth, widest, widest), zero, start=1))
        first.append(_stacked([own[0][0]], (depth - 1, widest), zero))
        last.append(_stacked([own[-1][:, 0]], (depth - 1, widest), zero, start=len(train) - 2))
    tables = torch.cat([torch.stack(table).reshape(-1) for table in (inner, first, last)])
    shapes = [(block.shape[0], block.shape[1]) for block in columns]
    return shapes, torch.cat([block.reshape(-1) for block in columns]), tables


def _linear(train: Train, dropped: Sequence[int]) -> list[float]:
    """Per lambda of one layer the coefficient of u in the conditional, for a = 1."""
    found: list[float] = []
    for k, ((_, before, rank), (_, behind, _)) in enumerate(pairwise(train)):
        total = 0.0
        total += before if k == 0 else 0.5 * before * (train[k - 1][2] + dropped[k - 1])
        total += behind if k == len(train) - 2 else 0.5 * behind * (train[k + 1][2] + dropped[k + 1])
        found += [total] * rank
    return found
