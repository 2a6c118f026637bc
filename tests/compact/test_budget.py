"""Ranks for a parameter budget, on equations of every kind."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayestrain.compact.budget import Priced, cheapest_ranks
from bayestrain.errors import ConfigError
from bayestrain.formats.algebra import max_ranks
from bayestrain.formats.equation import Equation

EQUATIONS = {
    "train": ("ax, xby, yc -> abc", (4, 5, 3)),
    "cp": ("ar, br, cr -> abc", (4, 5, 3)),
    "tucker": ("xyz, ax, by, cz -> abc", (4, 5, 3)),
    "ring": ("rax, xby, ycr -> abc", (4, 5, 3)),
    "tucker without a core": ("xyc, ax, by -> abc", (4, 5, 3)),
}


def priced(kind: str, values: list[list[float]], rounds: bool = True) -> Priced:
    text, modes = EQUATIONS[kind]
    equation = Equation.parse(text)
    shares = [sorted(values[k % len(values)], reverse=True) for k in range(len(equation.bonds))]
    return Priced(equation, modes, shares, partial(max_ranks, equation, modes) if rounds else tuple)


spectra = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=3)


def searched(weights: list[Priced], parameters: int) -> list[tuple[int, ...]]:
    """The same by looking through all bonds before every step."""
    ranks = [[len(bond) for bond in weight.shares] for weight in weights]
    bonds = [(n, bond) for n, own in enumerate(ranks) for bond in range(len(own))]

    def size(n: int, bond: int | None = None, more: int = 0) -> int:
        return weights[n].entries([rank + more * (k == bond) for k, rank in enumerate(ranks[n])])

    def total() -> int:
        return sum(map(size, range(len(weights))))

    def takes(n: int, bond: int) -> int:
        return size(n, bond, 1) - size(n)

    def price(n: int, bond: int, index: int) -> float:
        return weights[n].shares[bond][index] / math.sqrt(takes(n, bond))

    while total() > parameters:
        _, n, bond = min((price(*at, ranks[at[0]][at[1]] - 1), *at) for at in bonds if ranks[at[0]][at[1]] > 1)
        ranks[n][bond] -= 1
    for n, weight in enumerate(weights):
        ranks[n][:] = weight.usable(tuple(ranks[n]))

    def grows(n: int, bond: int) -> bool:
        more = tuple(rank + (k == bond) for k, rank in enumerate(ranks[n]))
        fits = total() + takes(n, bond) <= parameters
        return fits and ranks[n][bond] < len(weights[n].shares[bond]) and weights[n].usable(more) == more

    while fitting := [(price(*at, ranks[at[0]][at[1]]), *at) for at in bonds if grows(*at)]:
        _, n, bond = max(fitting)
        ranks[n][bond] += 1
    return [tuple(own) for own in ranks]


@given(st.sampled_from(sorted(EQUATIONS)), st.sampled_from(sorted(EQUATIONS)), spectra, spectra, st.floats(0, 1))
def test_the_cheapest_index_goes_first_and_nothing_more_would_fit(
    first: str, second: str, values: list[list[float]], others: list[list[float]], share: float
) -> None:
    weights = [priced(first, values), priced(second, others, rounds=False)]
    least = sum(weight.entries([1] * len(weight.shares)) for weight in weights)
    most = sum(weight.entries([len(bond) for bond in weight.shares]) for weight in weights)
    wanted = 7 + round(least + share * (most - least))
    found = cheapest_ranks(weights, 7, wanted)
    assert sum(weight.entries(ranks) for weight, ranks in zip(weights, found, strict=True)) + 7 <= wanted
    assert found[0] == weights[0].usable(found[0])
    assert found == searched(weights, wanted - 7)


@pytest.mark.parametrize("kind", EQUATIONS)
def test_an_index_takes_what_its_cores_shrink_by(kind: str) -> None:
    weight = priced(kind, [[1.0] * 3, [1.0] * 4])
    ranks = [len(bond) for bond in weight.shares]
    for bond in range(len(ranks)):
        fewer = [rank - (k == bond) for k, rank in enumerate(ranks)]
        assert weight.freed(ranks, bond) == weight.entries(ranks) - weight.entries(fewer)


def test_of_what_went_the_dearest_that_fits_returns() -> None:
    """The third index that goes takes 100 entries, of which 30 are too many: one of the two before it fits, of 20."""

    def matrix(size: int, share: float) -> Priced:
        return Priced(Equation.parse("ax, xb -> ab"), (size, size), [[1 - share, share]])

    wide, dear, cheap = matrix(50, 0.1), matrix(10, 0.005), matrix(10, 0.001)
    assert cheapest_ranks([wide, dear, cheap], 0, 170) == [(1,), (2,), (1,)]


@pytest.mark.parametrize("kind", EQUATIONS)
def test_a_budget_below_the_smallest_size_is_refused_with_that_size(kind: str) -> None:
    weight = priced(kind, [[0.5, 0.3, 0.2]])
    ones = (1,) * len(weight.shares)
    least = 40 + weight.entries(ones)
    assert cheapest_ranks([weight], 40, least) == [ones]
    with pytest.raises(ConfigError, match=f"there are {least:,}, of which 40 are in no core. Allow more"):
        cheapest_ranks([weight], 40, least - 1)
