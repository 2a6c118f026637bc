"""How each rule cuts one weight of n particles, and which ranks fit a parameter budget.

Particles share the ranks, but a rank index means something different in each of them, so only errors are averaged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from bayestrain.compact.measure import relative_change
from bayestrain.compact.weights import Weight
from bayestrain.errors import ConfigError
from bayestrain.formats import Equation, algebra

SWEEPS = 3  # of alternating least squares after a cut by contribution in a format that cannot round

Cores = Sequence[Sequence[Tensor]]  # of every particle


class Cut(NamedTuple):
    """New cores of one weight, stacked ``(n, ..)``."""

    cores: list[Tensor]
    keep: dict[str, Tensor] | None  # per bond the surviving indices ``(n, rank)``; None if the rule mixes them
    error: float


def cut(weight: Weight, rule: str | None, tol: float, ranks: tuple[int, ...] | None = None) -> Cut:
    """Cut one weight to these ranks, or as far as the tolerance allows."""
    method = _method(weight, rule)
    if method == "rounding":
        shares = _singular_shares(weight)
        each = tol / max(len(shares), 1) ** 0.5  # errors add up in squares
        ranks = ranks or tuple(_rank(weight.mean(bond), each) for bond in shares)
        rounded = [weight.format.round(weight.equation, cores, 0.0, ranks) for cores in weight.exact]
        return _cut(weight, rounded, None)
    keep, cores, bonds = {}, _start(weight, method), weight.equation.bonds
    for number, bond in enumerate(bonds):
        if method == "lambda":  # sorted: particles that did not start at one point have no indices in common
            values, order = weight.log_lambdas[number].cpu().exp().sort(dim=1)
            rank = max(int((weight.mean(values) > tol).sum()), 1)
        else:
            order, share = _dropped(weight, cores, bond)  # at worst errors add up
            rank = _rank(weight.mean(share), tol / len(bonds)) if ranks is None else ranks[number]
        keep[bond] = order[:, -rank:].sort(dim=1).values
        pairs = zip(cores, keep[bond], strict=True)
        cores = [algebra.keep(weight.equation, own, bond, index) for own, index in pairs]
    if method == "refit":
        return _cut(weight, [_refitted(weight, *pair) for pair in zip(weight.exact, cores, strict=True)], None)
    return _cut(weight, cores, keep)


def _cut(weight: Weight, cores: Cores, keep: dict[str, Tensor] | None) -> Cut:
    changes = [relative_change(weight.module, *pair) for pair in zip(weight.exact, cores, strict=True)]
    error = float(weight.mean(torch.tensor(changes, dtype=torch.float64).square())) ** 0.5
    return Cut([_stacked(core, weight) for core in zip(*cores, strict=True)], keep, error)


def _stacked(cores: Sequence[Tensor], weight: Weight) -> Tensor:
    """One core of every particle; one that needs lower ranks is padded with zeros."""
    shape = weight.largest([max(sizes) for sizes in zip(*(core.shape for core in cores), strict=True)])
    result = cores[0].new_zeros(len(cores), *shape)
    for own, core in zip(result, cores, strict=True):
        own[tuple(map(slice, core.shape))] = core
    return result


def _method(weight: Weight, rule: str | None) -> str:
    """What a rule does with this weight: "rounding", "refit", "contribution" or "lambda"."""
    can_round = weight.format.rounds(weight.equation)
    if rule == "rounding" and not can_round:
        raise ConfigError(
            f"rule='rounding' needs a format that can round, and layer {weight.name!r} has format "
            f"{weight.format.name!r}. Leave rule out: it is then cut by contribution and fitted again."
        )
    if rule == "lambda" and not weight.log_lambdas:
        raise ConfigError(f"rule='lambda' needs lambda, and layer {weight.name!r} has none. Train with a RankPrior.")
    return rule or ("rounding" if can_round else "refit")


def _rank(shares: Tensor, tol: float) -> int:
    """The smallest rank with which the indices from it on lose at most `tol` of the norm together."""
    tails = shares.flip(0).cumsum(0).flip(0).clamp_min(0.0).sqrt()
    return max(int((tails > tol).sum()), 1)


def _singular_shares(weight: Weight) -> list[Tensor]:
    """Shares by singular values; what is rounding noise has none."""
    found = []
    for bond in zip(*(weight.format.spectra(weight.equation, cores) for cores in weight.exact), strict=True):
        values = torch.stack(bond)
        noise = 10 * torch.finfo(values.dtype).eps * values.shape[1] * values[:, :1]
        found.append(torch.where(values > noise, values / weight.norms, 0.0).square())
    return found


def _start(weight: Weight, method: str) -> Cores:
    """The cores whose indices are dropped: aligned ones where they are fitted again."""
    return weight.exact if method != "refit" else [weight.format.align(weight.equation, own) for own in weight.exact]


def _dropped(weight: Weight, cores: Cores, bond: str) -> tuple[Tensor, Tensor]:
    """The indices of a bond, least important first, and their shares, the last to go first; both ``(n, R)``."""
    orders, errors = zip(*(algebra.drop_order(weight.equation, own, bond) for own in cores), strict=True)
    lost = (torch.stack(errors) / weight.norms).square()
    return torch.stack(orders), lost.diff(dim=1, prepend=torch.zeros_like(lost[:, :1])).flip(1)


def _refitted(weight: Weight, whole: Sequence[Tensor], cores: Sequence[Tensor]) -> Sequence[Tensor]:
    """The cores fitted to what the weight was, where that brings them nearer."""
    fitted = algebra.refit(weight.equation, cores, algebra.operands(weight.equation, whole), SWEEPS)
    return min(cores, fitted, key=lambda each: relative_change(weight.module, whole, each))


@dataclass(frozen=True)
class Priced:
    """What the indices of one weight's bonds contribute, and how many entries they take."""

    equation: Equation
    modes: Sequence[int]
    shares: Sequence[Sequence[float]]
    """Per bond each index's share of the weight's squared norm; the last goes first."""

    def entries(self, ranks: Sequence[int]) -> int:
        return self.equation.entries(self.modes, ranks)

    def freed(self, ranks: Sequence[int], bond: int) -> int:
        """Entries that one index of this bond takes."""
        shapes, label = self.equation.shapes(self.modes, ranks), self.equation.bonds[bond]
        return sum(math.prod(shapes[core]) for core in self.equation.owners(label)) // ranks[bond]

    def price(self, ranks: Sequence[int], bond: int) -> float:
        """What the last index of a bond contributes to its weight, divided by the root of the entries it takes."""
        # Dividing by the entries would nearly minimise the sum of squared changes, but hits wide layers hard.
        return self.shares[bond][ranks[bond] - 1] / math.sqrt(self.freed(ranks, bond))


def priced(weight: Weight, rule: str | None) -> Priced:
    """What the indices of one weight are worth to a budget, in the mean over particles."""
    if (method := _method(weight, rule)) == "rounding":
        rows = [weight.mean(bond) for bond in _singular_shares(weight)]
        rows = [row[: max(int((row > 0).sum()), 1)] for row in rows]  # rounding keeps no index for noise
    else:
        start = _start(weight, method)
        rows = [weight.mean(_dropped(weight, start, bond)[1]) for bond in weight.equation.bonds]
    return Priced(weight.equation, weight.layout.sizes, [row.tolist() for row in rows])


def cheapest_ranks(weights: Sequence[Priced], others: int, parameters: int) -> list[tuple[int, ...]]:
    """Ranks with at most so many `parameters`, `others` of them in no core: the index of lowest price goes first."""
    ranks = [list(map(len, weight.shares)) for weight in weights]
    size = others + sum(map(Priced.entries, weights, ranks))
    fewest = others + sum(weight.entries([1] * len(weight.shares)) for weight in weights)
    if fewest > parameters:
        raise ConfigError(
            f"{parameters:,} parameters are too few: with every rank at 1 there are {fewest:,}, of which {others:,} "
            "are in no core. Allow more, or tensorize more layers."
        )
    bonds = [(n, bond) for n, own in enumerate(ranks) for bond in range(len(own)) if own[bond] > 1]
    cheapest = [(weights[n].price(ranks[n], bond), n, bond) for n, bond in bonds]
    heapify(cheapest)
    while size > parameters:
        known, n, bond = heappop(cheapest)
        if weights[n].price(ranks[n], bond) == known:  # else a neighbouring rank has fallen since: prices only rise
            size -= weights[n].freed(ranks[n], bond)
            ranks[n][bond] -= 1
        if ranks[n][bond] > 1:
            heappush(cheapest, (weights[n].price(ranks[n], bond), n, bond))
    return list(map(tuple, ranks))
