"""Ranks for a parameter budget, on equations of every kind."""

import math

from hypothesis import given
from hypothesis import strategies as st
from networks import NAMED

from bayestrain.compact.rules import Priced, cheapest_ranks

spectra = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=3)
kinds = st.sampled_from([kind for kind, equation in NAMED.items() if equation.bonds])


def priced(kind: str, values: list[list[float]]) -> Priced:
    equation = NAMED[kind]
    shares = [sorted(values[k % len(values)], reverse=True) for k in range(len(equation.bonds))]
    return Priced(equation, (4, 5, 3, 2)[: len(equation.modes)], shares)


@given(kinds, kinds, spectra, spectra, st.floats(0, 1))
def test_the_cheapest_index_goes_first(
    first: str, second: str, values: list[list[float]], others: list[list[float]], share: float
) -> None:
    weights = [priced(first, values), priced(second, others)]
    ranks = [[len(bond) for bond in weight.shares] for weight in weights]

    def size() -> int:
        return 7 + sum(weight.entries(own) for weight, own in zip(weights, ranks, strict=True))

    def price(n: int, bond: int) -> float:
        fewer = [rank - (k == bond) for k, rank in enumerate(ranks[n])]
        freed = weights[n].entries(ranks[n]) - weights[n].entries(fewer)
        return weights[n].shares[bond][ranks[n][bond] - 1] / math.sqrt(freed)

    least = 7 + sum(weight.entries([1] * len(weight.shares)) for weight in weights)
    wanted = round(least + share * (size() - least))
    found = cheapest_ranks(weights, 7, wanted)
    while size() > wanted:  # the same by looking through all bonds before every step
        bonds = [(n, bond) for n, own in enumerate(ranks) for bond, rank in enumerate(own) if rank > 1]
        _, n, bond = min((price(*each), *each) for each in bonds)
        ranks[n][bond] -= 1
    assert found == [tuple(own) for own in ranks]
