"""Ranks for a parameter budget: indices go where they cost least, whatever the format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from bayestrain.errors import ConfigError
from bayestrain.formats.equation import Equation

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Priced:
    """What the indices of one weight's bonds are worth, and what they take."""

    equation: Equation
    modes: Sequence[int]
    shares: Sequence[Sequence[float]]
    """Per bond, what is lost of the weight's squared norm with each index, as a share of it; the last goes first."""
    usable: Callable[[Ranks], Ranks] = tuple
    """Ranks without the indices that neighbouring bonds cannot use, where the cut drops those for free."""

    def entries(self, ranks: Sequence[int]) -> int:
        """Entries of all cores with these ranks."""
        return sum(math.prod(shape) for shape in self.equation.shapes(self.modes, ranks))

    def freed(self, ranks: Sequence[int], bond: int) -> int:
        """Entries that one index of this bond takes."""
        shapes, label = self.equation.shapes(self.modes, ranks), self.equation.bonds[bond]
        return sum(math.prod(shapes[core]) for core in self.equation.owners(label)) // ranks[bond]


def cheapest_ranks(weights: Sequence[Priced], others: int, parameters: int) -> list[Ranks]:
    """Ranks with which all cores and the `others`, parameters that are in no core, are at most so many `parameters`.

    One rank index after the other goes, always the one with the lowest price; then the dearest that still fit return.
    """
    ranks = [[len(bond) for bond in weight.shares] for weight in weights]
    bonds = [(n, bond) for n, own in enumerate(ranks) for bond in range(len(own))]
    fewest = others + sum(weight.entries([1] * len(weight.shares)) for weight in weights)
    if fewest > parameters:
        raise ConfigError(
            f"{parameters:,} parameters are too few: with every rank at 1 there are {fewest:,}, of which {others:,} "
            "are in no core. Allow more, or tensorize more layers."
        )

    def price(n: int, bond: int, index: int) -> float:
        """What an index is of its weight, divided by the root of the entries that it takes.

        Dividing by the entries themselves would nearly minimise the sum of the layers' squared changes. But that hits
        wide layers hard, and the more a layer has lost the more harm does the next loss.
        """
        return weights[n].shares[bond][index] / math.sqrt(weights[n].freed(ranks[n], bond))

    def room() -> int:
        return parameters - others - sum(weight.entries(own) for weight, own in zip(weights, ranks, strict=True))

    left = room()
    last = [(price(n, bond, ranks[n][bond] - 1), n, bond) for n, bond in bonds if ranks[n][bond] > 1]
    heapify(last)
    while left < 0:
        known, n, bond = heappop(last)
        if price(n, bond, ranks[n][bond] - 1) == known:  # else a neighbouring rank has fallen since: prices only rise
            left += weights[n].freed(ranks[n], bond)
            ranks[n][bond] -= 1
        if ranks[n][bond] > 1:
            heappush(last, (price(n, bond, ranks[n][bond] - 1), n, bond))
    ranks[:] = [list(weight.usable(tuple(own))) for weight, own in zip(weights, ranks, strict=True)]
    left = room()

    def can_grow(n: int, bond: int) -> bool:
        own, weight = ranks[n], weights[n]
        if own[bond] >= len(weight.shares[bond]) or weight.freed(own, bond) > left:
            return False
        more = (*own[:bond], own[bond] + 1, *own[bond + 1 :])
        return weight.usable(more)[bond] == more[bond]

    while fitting := [(price(n, bond, ranks[n][bond]), n, bond) for n, bond in bonds if can_grow(n, bond)]:
        _, n, bond = max(fitting)
        left -= weights[n].freed(ranks[n], bond)
        ranks[n][bond] += 1
    return [tuple(own) for own in ranks]
