"""Any size factors into balanced modes with little padding."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.modes import MAX_CORES, PADDING_PENALTY, check_modes, choose_count, factor

sizes = st.integers(1, 100_000)
counts = st.integers(1, 4)


def score(modes: tuple[int, ...], size: int) -> float:
    """What `factor` promises to minimise."""
    total = math.prod(modes)
    return sum(modes) * (1.0 if total == size else PADDING_PENALTY * total / size)


@given(sizes, counts)
def test_modes_cover_the_size_with_little_waste_and_well_balanced(size: int, count: int) -> None:
    modes = factor(size, count)
    assert len(modes) == count
    total = math.prod(modes)
    assert size <= total < 1.25 * size
    if size >= 1000:
        assert total <= 1.05 * size
    assert check_modes(size, modes, "modes") == modes, "no mode could be smaller"
    # Never worse than the plain choice: the root, rounded up, in every place.
    root = next(r for r in range(1, size + 1) if r**count >= size)
    assert sum(modes) <= PADDING_PENALTY * root**count / size * count * root
    assert all(a >= b for a, b in zip(modes[0::2], modes[1::2], strict=False)), "large and small modes alternate"


@given(sizes, st.lists(st.integers(1, 60), max_size=3))
def test_no_other_choice_is_better(size: int, others: list[int]) -> None:
    alternative = (*others, -(-size // math.prod(others)))
    assert score(factor(size, len(alternative)), size) <= score(alternative, size)


@pytest.mark.parametrize("count", [2, 3])
def test_the_best_of_all_for_small_sizes(count: int) -> None:
    for size in range(1, 61):
        candidates = product(range(1, size + 1), repeat=count - 1)
        best = min(score((*modes, -(-size // math.prod(modes))), size) for modes in candidates)
        assert score(factor(size, count), size) == pytest.approx(best, rel=1e-12)


def test_known_sizes() -> None:
    assert factor(784, 4) == (7, 4, 7, 4)
    assert factor(625, 4) == (5, 5, 5, 5)
    assert factor(625, 2) == (25, 25)
    assert factor(10, 2) == (5, 2)
    assert factor(1024, 4) in {(8, 4, 8, 4), (6, 5, 6, 6)}
    assert factor(1, 3) == (1, 1, 1)
    assert factor(7, 1) == (7,)


@pytest.mark.parametrize("size", [1009, 50257, 99991])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_large_primes_are_padded_a_little(size: int, count: int) -> None:
    modes = factor(size, count)
    assert size < math.prod(modes) < 1.1 * size
    assert max(modes) <= 2 * min(modes)


def test_an_exact_product_is_taken_unless_it_is_lopsided() -> None:
    assert factor(2 * 3 * 5 * 7, 2) == (15, 14)
    assert math.prod(factor(2 * 101, 2)) > 202, "2 x 101 is too lopsided"
    assert factor(2 * 17, 2) == (7, 5), "a sum of 12 where 2 x 17 has 19"
    assert factor(3 * 7, 2) == (7, 3)


@given(st.lists(sizes, min_size=1, max_size=3))
def test_the_number_of_cores_is_between_two_and_four(several: list[int]) -> None:
    count = choose_count(*several)
    assert 2 <= count <= MAX_CORES
    assert count == choose_count(min(several))


def test_the_number_of_cores_grows_with_the_smallest_side() -> None:
    assert choose_count(784, 625) == 4
    assert choose_count(625, 10) == 2
    assert choose_count(1_000_000, 1) == 2
    assert choose_count(1_000_000, 100) == 3
    counts = [choose_count(size) for size in range(1, 1000)]
    assert counts == sorted(counts)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 2000))
def test_check_modes_takes_exactly_what_fits(modes: list[int], size: int) -> None:
    total = math.prod(modes)
    wasteful = any(total // mode * (mode - 1) >= size for mode in modes)
    if total >= size and not wasteful:
        assert check_modes(size, tuple(modes), "in_modes") == tuple(modes)
    else:
        with pytest.raises(ShapeError, match=rf"in_modes=\({factor(size, len(modes))[0]},"):
            check_modes(size, tuple(modes), "in_modes")


def test_errors_say_the_rule_the_value_and_what_to_type() -> None:
    with pytest.raises(ShapeError) as error:
        check_modes(784, (7, 4, 7, 3), "in_modes")
    assert str(error.value) == (
        "The product of in_modes must be at least 784, got (7, 4, 7, 3) with product 588. Try in_modes=(7, 4, 7, 4)."
    )
    with pytest.raises(ShapeError) as error:
        check_modes(10, (5, 3), "out_modes")
    assert str(error.value) == (
        "out_modes are larger than needed: (5, 3) has product 15 for a size of 10, and a smaller mode would do. "
        "Try out_modes=(5, 2)."
    )
    for modes in ((), (3, 0), (-2, -5), (3.5, 4)):
        with pytest.raises(ShapeError) as error:
            check_modes(10, modes, "in_modes")
        assert str(error.value).startswith(f"in_modes must be positive integers, got {modes}. Try in_modes=(")


@pytest.mark.parametrize(("size", "count"), [(0, 2), (-5, 2), (5, 0)])
def test_sizes_and_counts_below_one_are_refused(size: int, count: int) -> None:
    with pytest.raises(ConfigError) as error:
        factor(size, count)
    assert str(error.value) == (f"A size and a number of modes must be at least 1, got size={size}, count={count}.")
