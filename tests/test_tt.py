"""Shapes, dense forms, norms and random starts of tensor trains against slow references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_kit import slow_dense
from torch import Tensor
from torch.testing import assert_close
from tt_reference import gaussian_train, singular_values, trains

from bayestrain import tt
from bayestrain.errors import ConfigError, ShapeError

# --- shapes -----------------------------------------------------------------------------------------------------------


def test_check_says_what_is_wrong_with_a_chain() -> None:
    tt.check([torch.zeros(1, 2, 3), torch.zeros(3, 2, 2, 1)])
    for cores, message in [
        ([], r"needs at least one core, got none\."),
        ([torch.zeros(1, 1)], r"Core 0 must have shape \(left rank, modes\.\., right rank\), got \(1, 1\)\."),
        ([torch.zeros(1, 2, 3), torch.zeros(2, 2, 1)], r"Bond 1 joins rank 3 to rank 2; they must be equal\."),
        ([torch.zeros(2, 2, 1)], r"The first and last rank must be 1, got ranks \(2, 1\)\."),
    ]:
        with pytest.raises(ShapeError, match=message):
            tt.check(cores)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 30) | st.none())
def test_feasible_ranks_are_the_largest_a_train_can_use(sizes: list[int], max_rank: int | None) -> None:
    ranks = tt.feasible_ranks(sizes, max_rank)
    chain = (1, *ranks, 1)
    for k, rank in enumerate(ranks, start=1):
        unfolding = min(math.prod(sizes[:k]), math.prod(sizes[k:]))
        if max_rank is None:
            assert rank == unfolding
        else:
            assert rank == min(max_rank, unfolding, chain[k - 1] * sizes[k - 1], chain[k + 1] * sizes[k])
    # Rounding a train of these ranks finds nothing to cut.
    if max(ranks, default=1) <= 10:
        assert tt.ranks(tt.round_cores(gaussian_train(sizes, ranks), 1e-12))[1:-1] == ranks


def test_feasible_ranks_follow_a_narrow_neighbour() -> None:
    assert tt.feasible_ranks((35, 20, 35, 20), (8, 1, 5)) == (8, 1, 5)
    assert tt.feasible_ranks((4, 3, 50, 4), (1, 50, 50)) == (1, 3, 4)
    with pytest.raises(ShapeError, match=r"one number or 3 inner ranks, got \(2, 2\)\."):
        tt.feasible_ranks((4, 4, 4, 4), (2, 2))
    with pytest.raises(ConfigError, match=r"integer of at least 1, or a tuple of them, got \(2, -1, 2\)\. Try"):
        tt.feasible_ranks((4, 4, 4, 4), (2, -1, 2))


# --- dense and back ---------------------------------------------------------------------------------------------------


@given(trains())
def test_to_dense_of_a_train(cores: list[Tensor]) -> None:
    assert_close(tt.to_dense(cores), slow_dense(cores), rtol=1e-12, atol=1e-12)


@given(trains(two_modes=True))
def test_to_dense_of_a_matrix_train_and_its_reordering(cores: list[Tensor]) -> None:
    d = len(cores)
    full = slow_dense(cores)  # m1 j1 m2 j2 ..
    out_modes, in_modes = full.shape[0::2], full.shape[1::2]
    matrix = full.permute(*range(0, 2 * d, 2), *range(1, 2 * d, 2)).reshape(out_modes.numel(), in_modes.numel())
    assert_close(tt.matrix_to_dense(cores), matrix, rtol=1e-12, atol=1e-12)
    assert_close(tt.to_dense(cores), full, rtol=1e-12, atol=1e-12)
    reordered = tt.matrix_to_tensor(matrix, out_modes, in_modes)
    assert_close(reordered, full.reshape([m * j for m, j in zip(out_modes, in_modes, strict=True)]), rtol=0, atol=0)


@given(trains(min_cores=3, two_modes=True), st.data())
def test_a_run_of_cores_merges_to_one(cores: list[Tensor], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(cores) - 1))
    halves = [tt.merge(cores[:cut]), tt.merge(cores[cut:])]
    assert_close(slow_dense(halves).flatten(), slow_dense(cores).flatten(), rtol=1e-12, atol=1e-12)
    left, right = tt.merge_matrix(cores[:cut]), tt.merge_matrix(cores[cut:])
    assert left.shape[-1] == right.shape[0] == cores[cut].shape[0]
    assert_close(tt.matrix_to_dense([left, right]), tt.matrix_to_dense(cores), rtol=1e-12, atol=1e-12)


# --- norms and contributions ------------------------------------------------------------------------------------------


@given(trains(two_modes=True), st.data())
def test_inner_norm_and_difference(a: list[Tensor], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(1, 4), min_size=len(a) - 1, max_size=len(a) - 1))
    b = gaussian_train([tuple(core.shape[1:-1]) for core in a], ranks)
    dense_a, dense_b = slow_dense(a), slow_dense(b)
    size = float(dense_a.norm() * dense_b.norm())
    assert_close(tt.inner(a, b), (dense_a * dense_b).sum(), rtol=1e-12, atol=1e-12 * size)
    assert_close(tt.norm(a), dense_a.norm(), rtol=1e-12, atol=1e-12)
    difference = tt.subtract(a, b)
    tt.check(difference)
    expected = dense_a - dense_b
    assert_close(slow_dense(difference).flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)
    assert tt.ranks(difference)[1:-1] == tuple(x + y for x, y in zip(tt.ranks(a)[1:-1], ranks, strict=True))


@given(trains(min_cores=2))
def test_a_contribution_is_what_dropping_the_index_changes(cores: list[Tensor]) -> None:
    full = slow_dense(cores)
    for bond, contribution in enumerate(tt.contributions(cores), start=1):
        rank = cores[bond].shape[0]
        assert contribution.shape == (rank,)
        for index in range(rank):
            keep = torch.tensor([r for r in range(rank) if r != index], dtype=torch.long)
            sliced = tt.slice_bond(cores, bond, keep)
            assert tt.ranks(sliced)[bond] == rank - 1
            change = full - (slow_dense(sliced) if rank > 1 else torch.zeros_like(full))
            assert_close(contribution[index], change.norm(), rtol=1e-9, atol=1e-9)


@given(trains(min_cores=2))
def test_grams_are_those_of_the_two_halves(cores: list[Tensor]) -> None:
    for bond, (left, right) in enumerate(zip(*tt.grams(cores), strict=True), start=1):
        rank = cores[bond].shape[0]
        columns = tt.merge(cores[:bond]).reshape(-1, rank)
        rows = tt.merge(cores[bond:]).reshape(rank, -1)
        assert_close(left, columns.mT @ columns, rtol=1e-12, atol=1e-12)
        assert_close(right, rows @ rows.mT, rtol=1e-12, atol=1e-12)


@given(trains(min_cores=2))
def test_bond_spectra_are_numpys_singular_values(cores: list[Tensor]) -> None:
    for found, expected in zip(tt.bond_spectra(cores), singular_values(slow_dense(cores)), strict=True):
        count = min(len(found), len(expected))
        assert_close(found[:count], torch.from_numpy(expected[:count]), rtol=1e-9, atol=1e-9)
        rest = torch.cat([found[count:], torch.from_numpy(expected[count:])])
        assert (rest < 1e-9).all()


@pytest.mark.parametrize(
    ("dtype", "log_norm"), [(torch.float64, 500), (torch.float64, -500), (torch.float32, 60), (torch.float32, -60)]
)
def test_the_norm_of_a_long_train_stays_in_range(dtype: torch.dtype, log_norm: float) -> None:
    train = gaussian_train([3] * 30, [4] * 29)
    gram, before = torch.ones(1, 1, dtype=torch.float64), 0.0
    for core in train:
        gram = torch.einsum("ab,aic,bid->cd", gram, core, core)
        before += 0.5 * math.log(gram.norm())
        gram = gram / gram.norm()
    long = [(core * math.exp((log_norm - before) / 30)).to(dtype) for core in train]
    assert not 0.0 < tt.inner(long, long) < math.inf, "the square leaves the range"
    assert abs(float(tt.norm(long).double().log()) - log_norm) < (1e-10 if dtype == torch.float64 else 1e-4)


def test_norm_inner_and_dense_are_differentiable() -> None:
    a = [core.requires_grad_() for core in gaussian_train((2, 3, 2), (2, 3))]
    b = [core.requires_grad_() for core in gaussian_train((2, 3, 2), (3, 2))]
    long = [core.requires_grad_() for core in gaussian_train((2,) * 9, (2,) * 8)]  # norm rescales on the way
    assert torch.autograd.gradcheck(lambda *cores: tt.norm(cores), a)
    assert torch.autograd.gradcheck(lambda *cores: tt.norm(cores), long)
    assert torch.autograd.gradgradcheck(lambda *cores: tt.norm(cores), long, fast_mode=True)
    assert torch.autograd.gradcheck(lambda *cores: tt.inner(cores[:3], cores[3:]), [*a, *b])
    assert torch.autograd.gradcheck(lambda *cores: tt.to_dense(cores), a)
    assert torch.autograd.gradcheck(lambda *cores: tt.norm(tt.subtract(cores[:3], cores[3:])), [*a, *b])
    assert torch.autograd.gradcheck(lambda *cores: tuple(tt.contributions(cores)), a)


def test_norm_works_under_vmap() -> None:
    particles = [gaussian_train((3,) * 10, (2,) * 9) for _ in range(4)]
    stacked = [torch.stack(cores) for cores in zip(*particles, strict=True)]
    norms = torch.func.vmap(lambda *cores: tt.norm(cores))(*stacked)
    assert_close(norms, torch.stack([tt.norm(cores) for cores in particles]), rtol=1e-12, atol=0)


# --- random starts ----------------------------------------------------------------------------------------------------

STARTS = {
    "TTM": ([(5, 7), (5, 4), (5, 7), (5, 4)], (20, 20, 20)),
    "TTM, unequal ranks": ([(5, 7), (5, 4), (5, 7), (5, 4)], (8, 1, 5)),
    "TTM, two cores": ([(5, 25), (2, 25)], (13,)),
    "convolution": ([(9,), (16,), (8,), (16,), (16,)], (9, 30, 30, 16)),
    "convolution, unequal ranks": ([(9,), (3,), (16,)], (2, 5)),
    "rank one": ([(2,), (2,), (2,)], (1, 1)),
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("variance", [1e-4, 2.0])
def test_random_cores_have_the_variance_asked_for(name: str, variance: float) -> None:
    shapes, ranks = STARTS[name]
    for dtype, slack in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        cores = tt.random_cores(shapes, ranks, variance, dtype=dtype)
        assert tt.ranks(cores)[1:-1] == ranks
        assert [tuple(core.shape[1:-1]) for core in cores] == shapes
        full = tt.to_dense(cores).double()
        assert abs(float(full.square().mean()) / variance - 1) < slack
        if full.numel() > 400:
            assert abs(float(full.var()) / variance - 1) < 0.1


@pytest.mark.parametrize("name", STARTS)
def test_the_plain_formula_is_right_on_average(name: str) -> None:
    shapes, ranks = STARTS[name]
    d, entries, variance = len(shapes), math.prod(math.prod(shape) for shape in shapes), 0.3
    sigma = (variance / math.prod(ranks)) ** (1 / (2 * d))
    draws = 200 if entries > 400 else 20_000
    plain = [sigma * torch.randn(draws, *core.shape) for core in gaussian_train(shapes, ranks)]
    mean_squares = torch.func.vmap(lambda *cores: tt.inner(cores, cores))(*plain) / entries
    assert abs(mean_squares.mean() / variance - 1) < 0.1


@pytest.mark.parametrize("name", STARTS)
def test_random_cores_are_gaussian_draws_times_one_factor(name: str) -> None:
    shapes, ranks = STARTS[name]
    cores = tt.random_cores(shapes, ranks, 0.3, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    ratios = torch.cat([(core / torch.randn(core.shape, generator=generator)).flatten() for core in cores])
    assert_close(ratios, ratios[0].expand_as(ratios))


def test_random_cores_on_the_meta_device_and_without_variance() -> None:
    assert all(core.is_meta for core in tt.random_cores([(2,), (3,)], (2,), 1.0, device="meta"))
    for variance in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=rf"variance must be positive, got {variance}\."):
            tt.random_cores([(2,), (3,)], (2,), variance)
