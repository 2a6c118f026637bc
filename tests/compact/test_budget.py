"""Ranks for a parameter budget, on equations of every kind."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayestrain.compact.budget import Priced, cheapest_ranks
from bayestrain.errors import ConfigError
from bayestrain.formats.equation import Equation

EQUATIONS = {
    "train": ("ax, xby, yc -> abc", (4, 5, 3)),
    "cp": ("ar, br, cr -> abc", (4, 5, 3)),
    "tucker": ("xyz, ax, by, cz -> abc", (4, 5, 3)),
    "ring": ("rax, xby, ycr -> abc", (4, 5, 3)),
    "tucker without a core": ("xyc, ax, by -> abc", (4, 5, 3)),
}


def priced(kind: str, values: list[list[float]]) -> Priced:
    text, modes = EQUATIONS[kind]
    equation = Equation.parse(text)
    shares = [sorted(values[k % len(values)], reverse=True) for k in range(len(equation.bonds))]
    return Priced(equation, modes, shares)


spectra = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=3)
kinds = st.sampled_from(sorted(EQUATIONS))


@given(kinds, kinds, spectra, spectra, st.floats(0, 1))
def test_the_cheapest_index_goes_first(
    first: str, second: str, values: list[list[float]], others: list[list[float]], share: float
) -> None:
    weights = [priced(first, values), priced(second, others)]
    ranks = [[len(bond) for bond in weight.shares] for weight in weights]
    bonds = [(n, bond) for n, own in enumerate(ranks) for bond in range(len(own))]

    def size() -> int:
        return 7 + sum(weight.entries(own) for weight, own in zip(weights, ranks, strict=True))

    least = 7 + sum(weight.entries([1] * len(weight.shares)) for weight in weights)
    wanted = round(least + share * (size() - least))
    found = cheapest_ranks(weights, 7, wanted)
    while size() > wanted:  # the same by looking through all bonds before every step
        _, n, bond = min((weights[n].price(ranks[n], bond), n, bond) for n, bond in bonds if ranks[n][bond] > 1)
        ranks[n][bond] -= 1
    assert found == [tuple(own) for own in ranks]


@pytest.mark.parametrize("kind", EQUATIONS)
def test_an_index_takes_what_its_cores_shrink_by(kind: str) -> None:
    weight = priced(kind, [[1.0] * 3, [1.0] * 4])
    ranks = [len(bond) for bond in weight.shares]
    for bond in range(len(ranks)):
        fewer = [rank - (k == bond) for k, rank in enumerate(ranks)]
        freed = weight.entries(ranks) - weight.entries(fewer)
        assert weight.freed(ranks, bond) == freed
        assert weight.price(ranks, bond) == weight.shares[bond][-1] / math.sqrt(freed)


@pytest.mark.parametrize("kind", EQUATIONS)
def test_a_budget_below_the_smallest_size_is_refused_with_that_size(kind: str) -> None:
    weight = priced(kind, [[0.5, 0.3, 0.2]])
    ones = (1,) * len(weight.shares)
    least = 40 + weight.entries(ones)
    assert cheapest_ranks([weight], 40, least) == [ones]
    with pytest.raises(ConfigError, match=f"there are {least:,}, of which 40 are in no core. Allow more"):
        cheapest_ranks([weight], 40, least - 1)
