"""What a change of gauge must not change, and what alignment does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_kit import relative_error, slow_dense
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from tt_reference import diagonal_gauge, gaussian_train, random_gauge, singular_values, trains

from bayestrain import gauge, tt

# --- gauge ------------------------------------------------------------------------------------------------------------


@st.composite
def gapped_trains(draw: st.DrawFn) -> list[Tensor]:
    """A planted train plus redundant and tiny ranks: rounding to 1e-3 has one right answer."""
    sizes = draw(st.lists(st.integers(3, 6), min_size=3, max_size=4))
    torch.manual_seed(draw(st.integers(0, 1000)))
    planted = gaussian_train(sizes, [2] * (len(sizes) - 1))
    tiny = gaussian_train(sizes, [2] * (len(sizes) - 1))
    tiny[0] = tiny[0] * 1e-6 * tt.norm(planted) / tt.norm(tiny)
    return tt.subtract(planted, tiny)


@given(gapped_trains())
def test_random_gauges_change_nothing_that_matters(cores: list[Tensor]) -> None:
    other = random_gauge(cores)
    assert min(relative_error(a, b) for a, b in zip(other, cores, strict=True)) > 1e-2
    assert relative_error(slow_dense(other), slow_dense(cores)) < 1e-9
    for a, b in zip(tt.bond_spectra(other), tt.bond_spectra(cores), strict=True):
        assert_close(a / b[0], b / b[0], rtol=1e-6, atol=1e-11)
    kept, kept_other = tt.round_cores(cores, 1e-3), tt.round_cores(other, 1e-3)
    assert tt.ranks(kept) == tt.ranks(kept_other) == (1, *[2] * (len(cores) - 1), 1)
    assert relative_error(slow_dense(kept_other), slow_dense(kept)) < 1e-9


@given(trains(min_cores=2, two_modes=True))
def test_contributions_do_not_see_a_diagonal_gauge(cores: list[Tensor]) -> None:
    other = diagonal_gauge(cores)
    assert_close(slow_dense(other), slow_dense(cores), rtol=1e-9, atol=1e-9)
    for a, b in zip(tt.contributions(other), tt.contributions(cores), strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(3, 6), min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 1000), st.booleans())
def test_align_puts_one_singular_value_on_each_index(sizes: list[int], rank: int, seed: int, wild: bool) -> None:
    torch.manual_seed(seed)
    cores = gaussian_train(sizes, [rank] * (len(sizes) - 1))
    cores = diagonal_gauge(cores) if wild else random_gauge(cores, spread=0.5)
    aligned = gauge.align(cores, live=0.0)
    assert [core.shape for core in aligned] == [core.shape for core in cores]
    assert relative_error(slow_dense(aligned), slow_dense(cores)) < 1e-9
    for (left, right), (old_left, old_right) in zip(
        zip(*tt.grams(aligned), strict=True), zip(*tt.grams(cores), strict=True), strict=True
    ):
        ratio, old_ratio = left.diagonal() / right.diagonal(), old_left.diagonal() / old_right.diagonal()
        assert_close(ratio, old_ratio, rtol=1e-5, atol=0)  # no core grows or shrinks as a whole
    values = singular_values(slow_dense(cores))
    for left, right, s in zip(*tt.grams(aligned), values, strict=True):
        largest = float(s[0])
        size = (left.diagonal() * right.diagonal()).sqrt()
        for gram in (left, right):
            unit = gram / gram.diagonal().sqrt()[:, None] / gram.diagonal().sqrt()
            assert_close(unit, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-5)
        found = size.sort(descending=True).values
        assert_close(found, torch.from_numpy(s[:rank]), rtol=1e-6, atol=1e-7 * largest)
    for contribution, s in zip(tt.contributions(aligned), values, strict=True):
        found = contribution.sort(descending=True).values
        assert_close(found, torch.from_numpy(s[:rank]), rtol=1e-6, atol=1e-7 * float(s[0]))


def test_aligning_twice_changes_nothing() -> None:
    once = gauge.align(gaussian_train((4, 5, 6, 4), (3, 4, 3)))
    assert_close(gauge.align(once), once, rtol=1e-8, atol=1e-8)


def test_align_keeps_the_order_of_the_indices() -> None:
    cores = gauge.align(gaussian_train((4, 5, 6, 4), (4, 4, 4)))
    for bond in (1, 2, 3):
        cores = tt.slice_bond(cores, bond, torch.randperm(4))
    assert_close(gauge.align(cores), cores, rtol=1e-8, atol=1e-8)
    nearby = [core + 1e-6 * torch.randn_like(core) for core in cores]
    for new, old in zip(gauge.align(nearby), nearby, strict=True):
        assert relative_error(new, old) < 1e-3


def test_align_works_in_an_extreme_gauge() -> None:
    cores = gaussian_train((5, 6, 5), (3, 3))
    expected = tt.bond_spectra(cores)
    for bond in (1, 2):
        cores = gauge.change_gauge(cores, bond, torch.diag(torch.tensor([1e9, 1.0, 1e-9], dtype=torch.float64)))
    aligned = gauge.align(cores)
    assert relative_error(slow_dense(aligned), slow_dense(cores)) < 1e-12
    for found, s in zip(tt.contributions(aligned), expected, strict=True):
        assert_close(found.sort(descending=True).values, s, rtol=1e-10, atol=0)


def test_align_leaves_dead_indices_where_they_are() -> None:
    cores = gaussian_train((5, 6, 5), (3, 3))
    scale = torch.tensor([1.0, 1e-6, 1.0], dtype=torch.float64)
    cores[1] = cores[1] * scale[:, None, None] * scale
    aligned = gauge.align(cores)
    assert_close(aligned[0][:, :, 1], cores[0][:, :, 1], rtol=1e-12, atol=0)
    assert_close(aligned[2][1], cores[2][1], rtol=1e-12, atol=0)
    assert relative_error(aligned[0][:, :, ::2], cores[0][:, :, ::2]) > 1e-3
    assert relative_error(slow_dense(aligned), slow_dense(cores)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_align_keeps_a_tensor_with_redundant_ranks(dtype: torch.dtype) -> None:
    train = gaussian_train((4, 5, 6, 4), (2, 3, 2), dtype)
    redundant = tt.subtract(train, [2 * train[0], *train[1:]])  # every slice twice
    aligned = gauge.align(redundant)
    assert all(core.dtype == dtype for core in aligned)
    assert relative_error(slow_dense(aligned), slow_dense(redundant)) < (1e-7 if dtype == torch.float64 else 1e-3)


def test_many_trains_are_aligned_at_once_and_a_broken_one_harms_no_other() -> None:
    torch.manual_seed(0)
    trains = [tt.random_cores([(4, 3), (5, 2), (3, 3)], (4, 3), 1.0, dtype=torch.float64) for _ in range(5)]
    trains[2][1][:, :, :, 1:] *= 1e-6  # indices that are to stay as they are
    stacked = [torch.stack(cores) for cores in zip(*trains, strict=True)]
    stacked[0][4] = float("nan")
    together = torch.vmap(lambda *cores: tuple(gauge.align(list(cores))))(*stacked)
    for i, cores in enumerate(trains[:4]):
        for one, many in zip(gauge.align(cores), together, strict=True):
            torch.testing.assert_close(many[i], one)
        torch.testing.assert_close(tt.to_dense([core[i] for core in together]), tt.to_dense(cores))
    assert bool(together[0][4].isnan().all())


def test_gauges_of_many_bonds_and_their_inverses() -> None:
    """Bonds of all ranks at once, filled up with zeros, have the gauges that they have alone."""
    cores = gaussian_train((4, 5, 6, 4), (3, 8, 4))
    pairs = list(zip(*tt.grams(cores), strict=True))
    filled = [[pad(gram, (0, 8 - len(gram)) * 2) for gram in pair] for pair in pairs]
    filled += [[torch.zeros_like(filled[0][0])] * 2, [torch.full_like(filled[0][0], float("nan"))] * 2]
    left, right = (torch.stack(grams) for grams in zip(*filled, strict=True))
    gauges, inverses = gauge.aligning_gauges(left, right)
    identity = torch.eye(8, dtype=torch.float64)
    assert_close(gauges @ inverses, identity.expand(5, 8, 8), rtol=0, atol=1e-12)
    for many, inverse, pair in zip(gauges, inverses, pairs, strict=False):
        alone, rank = gauge.aligning_gauges(*pair)[0], len(pair[0])
        assert_close(many[:rank, :rank], alone, rtol=1e-10, atol=1e-10)
        assert torch.equal(many[rank:], identity[rank:])
        assert torch.equal(inverse[:, rank:], identity[:, rank:])
    assert torch.equal(gauges[3:], identity.expand(2, 8, 8))
    by_bond = cores
    for bond, (own, pair) in enumerate(zip(gauges, pairs, strict=False), start=1):
        by_bond = gauge.change_gauge(by_bond, bond, own[: len(pair[0]), : len(pair[0])])
    assert_close(by_bond, gauge.align(cores), rtol=1e-10, atol=1e-10)
