"""Ranks for a parameter budget: indices are dropped where that costs least, whatever the format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from bayestrain.errors import ConfigError
from bayestrain.formats import Equation

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Priced:
    """What the indices of one weight's bonds contribute, and how many entries they take."""

    equation: Equation
    modes: Sequence[int]
    shares: Sequence[Sequence[float]]
    """Per bond, what is lost of the weight's squared norm with each index, as a share of it; the last goes first."""

    def entries(self, ranks: Sequence[int]) -> int:
        """Entries of all cores with these ranks."""
        return sum(map(math.prod, self.equation.shapes(self.modes, ranks)))

    def freed(self, ranks: Sequence[int], bond: int) -> int:
        """Entries that one index of this bond takes."""
        shapes, label = self.equation.shapes(self.modes, ranks), self.equation.bonds[bond]
        return sum(math.prod(shapes[core]) for core in self.equation.owners(label)) // ranks[bond]

    def price(self, ranks: Sequence[int], bond: int) -> float:
        """What the last index of a bond contributes to its weight, divided by the root of the entries it takes.

        Dividing by the entries themselves would nearly minimise the sum of the layers' squared changes. But that hits
        wide layers hard, and the more a layer has lost, the more harm the next loss does.
        """
        return self.shares[bond][ranks[bond] - 1] / math.sqrt(self.freed(ranks, bond))


def cheapest_ranks(weights: Sequence[Priced], others: int, parameters: int) -> list[Ranks]:
    """Ranks with which all cores and the `others`, parameters that are in no core, are at most so many `parameters`.

    One rank index after another is dropped, always the one with the lowest price.
    """
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
