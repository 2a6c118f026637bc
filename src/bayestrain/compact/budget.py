"""Ranks for a parameter budget: indices go where they cost least, whatever the format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def cheapest_ranks(weights: Mapping[str, Priced], others: int, parameters: int) -> dict[str, Ranks]:
    """Ranks with which all cores and the `others`, parameters that are in no core, are at most so many `parameters`.

    One rank index after the other goes, always the one with the lowest price; then the dearest that still fit return.
    """
    chains = {name: [len(bond) for bond in weight.shares] for name, weight in weights.items()}
    fewest = others + sum(weight.entries([1] * len(weight.shares)) for weight in weights.values())
    if fewest > parameters:
        raise ConfigError(
            f"{parameters:,} parameters are too few: with every rank at 1 there are {fewest:,}, of which {others:,} "
            "are in no core. Allow more, or tensorize more layers."
        )

    def price(name: str, bond: int, index: int) -> float:
        """What an index is of its weight, divided by the root of the entries that it takes.

        Dividing by the entries themselves would nearly minimise the sum of the layers' squared changes. But that hits
        wide layers hard, and the more a layer has lost the more harm does the next loss.
        """
        return weights[name].shares[bond][index] / math.sqrt(weights[name].freed(chains[name], bond))

    def bonds() -> Iterator[tuple[str, int]]:
        return ((name, bond) for name, chain in chains.items() for bond in range(len(chain)))

    room = parameters - others - sum(weight.entries(chains[name]) for name, weight in weights.items())
    last = [(price(name, bond, chains[name][bond] - 1), name, bond) for name, bond in bonds() if chains[name][bond] > 1]
    heapify(last)
    while room < 0:
        known, name, bond = heappop(last)
        now = price(name, bond, chains[name][bond] - 1)
        if now > known:  # a neighbouring rank has fallen since: prices only rise
            heappush(last, (now, name, bond))
            continue
        room += weights[name].freed(chains[name], bond)
        chains[name][bond] -= 1
        if (rank := chains[name][bond]) > 1:
            heappush(last, (price(name, bond, rank - 1), name, bond))
    for name, weight in weights.items():
        before = weight.entries(chains[name])
        chains[name] = list(weight.usable(tuple(chains[name])))
        room += before - weight.entries(chains[name])

    def can_grow(name: str, bond: int) -> bool:
        chain, weight = chains[name], weights[name]
        if chain[bond] >= len(weight.shares[bond]) or weight.freed(chain, bond) > room:
            return False
        more = (*chain[:bond], chain[bond] + 1, *chain[bond + 1 :])
        return weight.usable(more)[bond] == more[bond]

    while fitting := [(price(*at, chains[at[0]][at[1]]), *at) for at in bonds() if can_grow(*at)]:
        _, name, bond = max(fitting)
        room -= weights[name].freed(chains[name], bond)
        chains[name][bond] += 1
    return {name: tuple(chain) for name, chain in chains.items()}
