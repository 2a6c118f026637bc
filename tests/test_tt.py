"""Tensor-train maths against slow references: einsum over all cores, numpy's SVD of the full tensor's unfoldings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_kit import relative_error, slow_dense
from torch import Tensor
from torch.testing import assert_close

from bayestrain import tt
from bayestrain.errors import ConfigError, ShapeError

# --- trains and oracles -----------------------------------------------------------------------------------------------


def gaussian_train(
    sizes: Sequence[int | tuple[int, ...]], ranks: Sequence[int], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Cores with standard normal entries."""
    chain = (1, *ranks, 1)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [
        torch.randn(left, *shape, right, dtype=dtype)
        for left, shape, right in zip(chain[:-1], shapes, chain[1:], strict=True)
    ]


def decaying_train(sizes: Sequence[int], decay: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A train of full ranks in which rank index r of every bond is damped by ``decay ** r``."""
    cores = gaussian_train(sizes, tt.feasible_ranks(sizes), dtype)
    return [core * decay ** torch.arange(core.shape[-1], dtype=dtype) for core in cores]


def unfoldings(tensor: Tensor, bonds: int | None = None) -> list[np.ndarray]:
    array = tensor.detach().double().numpy()
    return [array.reshape(math.prod(array.shape[:k]), -1) for k in range(1, bonds or array.ndim)]


def singular_values(tensor: Tensor) -> list[np.ndarray]:
    return [np.linalg.svd(matrix, compute_uv=False) for matrix in unfoldings(tensor)]


def delta_rank(values: np.ndarray, delta: float) -> int:
    """The smallest rank >= 1 of a matrix within `delta` of the one with these singular values (Eckart and Young)."""
    for rank in range(1, len(values)):
        if math.sqrt(float((values[rank:] ** 2).sum())) <= delta:
            return rank
    return len(values)


def random_gauge(cores: Sequence[Tensor], spread: float = 1.0) -> list[Tensor]:
    """The same tensor after a random invertible matrix at every bond."""
    result = list(cores)
    for bond in range(1, len(cores)):
        rank = cores[bond].shape[0]
        left, right = (torch.linalg.qr(torch.randn(rank, rank, dtype=cores[0].dtype)).Q for _ in range(2))
        result = tt.change_gauge(result, bond, left * torch.exp(spread * torch.randn(rank, dtype=left.dtype)) @ right)
    return result


def diagonal_gauge(cores: Sequence[Tensor]) -> list[Tensor]:
    result = list(cores)
    for bond in range(1, len(cores)):
        scale = torch.exp(3 * torch.randn(cores[bond].shape[0], dtype=cores[0].dtype))
        result = tt.change_gauge(result, bond, torch.diag(scale))
    return result


@st.composite
def trains(draw: st.DrawFn, min_cores: int = 1, two_modes: bool = False) -> list[Tensor]:
    d = draw(st.integers(min_cores, 5))
    mode = st.tuples(st.integers(1, 3), st.integers(1, 3)) if two_modes else st.integers(1, 4)
    sizes = draw(st.lists(mode, min_size=d, max_size=d))
    ranks = draw(st.lists(st.integers(1, 5), min_size=d - 1, max_size=d - 1))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return gaussian_train(sizes, ranks)


@st.composite
def decaying_tensors(draw: st.DrawFn) -> Tensor:
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    torch.manual_seed(draw(st.integers(0, 1000)))
    decay = draw(st.sampled_from([0.1, 0.3, 0.6, None]))
    if decay is None:  # no decay at all
        return torch.randn(sizes, dtype=torch.float64)
    return slow_dense(decaying_train(sizes, decay))


tolerances = st.sampled_from([0.003, 0.01, 0.03, 0.1, 0.3, 0.7])


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


# --- TT-SVD and rounding ----------------------------------------------------------------------------------------------


def check_truncation(tensor: Tensor, cores: Sequence[Tensor], tol: float, first_cut: int, slack: float) -> None:
    """The error is within `tol`, and every rank lies between the smallest that any train of that error can have and the
    delta-rank of the unfolding for the bond's share of the error; the bond cut first has exactly the latter."""
    size = float(tensor.double().norm())
    assert relative_error(slow_dense(cores), tensor) <= tol * (1 + slack) + slack
    found, values = tt.ranks(cores)[1:-1], singular_values(tensor)
    share = tol * size / math.sqrt(len(values))
    for rank, s in zip(found, values, strict=True):
        assert delta_rank(s, tol * size * (1 + slack)) <= rank <= delta_rank(s, share * (1 - slack))
    exact = values[first_cut]
    assert delta_rank(exact, share * (1 + slack)) <= found[first_cut] <= delta_rank(exact, share * (1 - slack))


@given(decaying_tensors(), tolerances)
def test_tt_svd_against_numpy(tensor: Tensor, tol: float) -> None:
    check_truncation(tensor, tt.tt_svd(tensor, tol), tol, first_cut=0, slack=1e-10)
    single = tensor.float()
    cores = tt.tt_svd(single, tol)
    assert all(core.dtype == torch.float32 for core in cores)
    check_truncation(single, cores, tol, first_cut=0, slack=1e-4)


@given(decaying_tensors(), tolerances)
def test_rounding_against_numpy(tensor: Tensor, tol: float) -> None:
    cores = random_gauge(tt.tt_svd(tensor))
    check_truncation(tensor, tt.round_cores(cores, tol), tol, first_cut=-1, slack=1e-9)
    single = [core.float() for core in cores]
    rounded = tt.round_cores(single, tol)
    assert all(core.dtype == torch.float32 for core in rounded)
    check_truncation(slow_dense(single), rounded, tol, first_cut=-1, slack=1e-4)


@given(decaying_tensors(), st.integers(1, 6))
def test_a_cap_on_the_ranks_is_kept_and_costs_no_more_than_it_must(tensor: Tensor, max_rank: int) -> None:
    for cores in (tt.tt_svd(tensor, max_rank=max_rank), tt.round_cores(tt.tt_svd(tensor), max_rank=max_rank)):
        ranks = tt.ranks(cores)[1:-1]
        assert max(ranks) <= max_rank
        values = singular_values(tensor)
        bound = math.sqrt(sum(float((s[rank:] ** 2).sum()) for s, rank in zip(values, ranks, strict=True)))
        assert float((slow_dense(cores) - tensor).norm()) <= bound * (1 + 1e-10) + 1e-12 * float(tensor.norm())


def test_many_small_singular_values_are_not_dropped_together() -> None:
    tensor = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)  # every unfolding has equal singular values
    # Bond 1 has twelve of size 1: dropping one of them is an error of sqrt(1/12) = 0.29, dropping two is 0.41.
    for tol, rank in ((0.4, 12), (0.42, 11), (0.57, 11), (0.58, 10)):  # times sqrt(1/2), the share of one bond of two
        assert tt.ranks(tt.tt_svd(tensor, tol))[1] == rank
    rounded = tt.round_cores(tt.tt_svd(tensor.permute(1, 2, 0)), 0.42)
    assert tt.ranks(rounded)[2] == 11


def test_one_cap_per_bond() -> None:
    tensor = torch.randn(4, 5, 4, 3, dtype=torch.float64)
    assert tt.ranks(tt.tt_svd(tensor, max_rank=(4, 7, 2))) == (1, 4, 7, 2, 1)
    assert tt.ranks(tt.round_cores(tt.tt_svd(tensor), max_rank=(3, 2, 1))) == (1, 3, 2, 1, 1)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("ranks", [(3, 2, 3), (1, 1, 1), (4, 6, 2), (2, 8, 5)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_planted_ranks_are_found(dtype: torch.dtype, tol: float, ranks: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    sizes = (6, 7, 8, 5)
    train = gaussian_train(sizes, ranks, dtype)
    assert tt.ranks(tt.tt_svd(slow_dense(train), tol))[1:-1] == ranks
    # Blow the train up with redundant rank: three copies of it, added and subtracted, in a wild gauge.
    large = random_gauge(tt.subtract(tt.subtract(train, train), train), spread=0.3)
    assert tt.ranks(large)[1:-1] == tuple(3 * rank for rank in ranks)
    rounded = tt.round_cores(large, 10 * tol)
    assert tt.ranks(rounded)[1:-1] == ranks
    assert relative_error(slow_dense(rounded), -slow_dense(train)) < 100 * tol
    # One rank less at any bond is too few.
    for bond in range(3):
        fewer = [rank - (k == bond) for k, rank in enumerate(ranks)]
        if min(fewer) >= 1:
            assert relative_error(slow_dense(tt.round_cores(rounded, max_rank=fewer)), -slow_dense(train)) > 1e-3


def test_without_a_tolerance_only_rounding_noise_is_cut() -> None:
    tensor = torch.randn(4, 5, 6, 3, dtype=torch.float64)
    assert tt.ranks(tt.tt_svd(tensor)) == (1, 4, 18, 3, 1)
    train = gaussian_train((4, 5, 6, 3), (2, 3, 2))
    assert tt.ranks(tt.tt_svd(slow_dense(train))) == (1, 2, 3, 2, 1)
    assert tt.ranks(tt.round_cores(tt.subtract(train, [2 * train[0], *train[1:]]))) == (1, 2, 3, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_rounding_at_extreme_scales(dtype: torch.dtype, scale: float) -> None:
    train = gaussian_train((4, 5, 3, 4, 5), (2, 3, 2, 2), dtype)
    large = tt.subtract(train, [2 * train[0], *train[1:]])
    expected = slow_dense(large)
    for factors in ([scale] * 5, [scale, 1 / scale] * 2 + [1.0], [1.0, scale, 1.0, 1 / scale, 1.0]):
        cores = [core * factor for core, factor in zip(large, factors, strict=True)]
        rounded = tt.round_cores(cores, 1e-4)
        assert tt.ranks(rounded) == (1, 2, 3, 2, 2, 1)
        typical = math.prod(factors) ** (1 / 5)
        norms = torch.stack([core.norm() / core.numel() ** 0.5 for core in rounded]) / typical
        assert norms.max() < 10
        assert norms.min() > 0.1, "the norm comes back spread over the cores"
        assert relative_error(slow_dense([core / typical for core in rounded]), expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tt_svd_at_extreme_scales(dtype: torch.dtype, scale: float) -> None:
    tensor = slow_dense(gaussian_train((4, 5, 3, 4), (2, 3, 2), dtype))
    cores = tt.tt_svd(tensor * scale, 1e-5)
    assert tt.ranks(cores) == (1, 2, 3, 2, 1)
    cores[-1] = cores[-1] / scale
    assert relative_error(slow_dense(cores), tensor) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_zero_tensor_has_rank_one_everywhere(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, 4, 5, dtype=dtype)
    train = gaussian_train((3, 4, 5), (3, 4), dtype)
    train[1] = torch.zeros_like(train[1])
    for cores in (tt.tt_svd(zero), tt.tt_svd(zero, 0.1), tt.round_cores(train), tt.round_cores(train, 0.1)):
        assert tt.ranks(cores) == (1, 1, 1, 1)
        assert_close(slow_dense(cores), zero, rtol=0, atol=0)
    assert tt.norm(train) == 0
    assert not torch.stack([c.abs().max() for c in tt.contributions(train)]).any()
    assert not torch.stack([s.abs().max() for s in tt.bond_spectra(train)]).any()
    assert_close(tt.align(train), train, rtol=0, atol=0)


def test_a_train_of_one_core() -> None:
    core = torch.randn(1, 7, 1, dtype=torch.float64)
    for cores in (tt.tt_svd(core.flatten(), 0.1), tt.round_cores([core], 0.1), tt.align([core])):
        assert_close(cores, [core], rtol=1e-14, atol=1e-14)
    assert_close(tt.subtract([core], [3 * core]), [-2 * core], rtol=1e-14, atol=1e-14)
    assert_close(tt.norm([core]), core.norm(), rtol=1e-14, atol=1e-14)
    assert tt.contributions([core]) == tt.bond_spectra([core]) == []


@pytest.mark.parametrize("tol", [-1e-3, 1.0, math.nan])
def test_a_tolerance_outside_of_zero_to_one_is_refused(tol: float) -> None:
    tensor = torch.randn(3, 4, 5)
    with pytest.raises(ConfigError, match=rf"tol is a relative error and must lie in \[0, 1\), got {tol}\."):
        tt.tt_svd(tensor, tol)
    with pytest.raises(ConfigError, match=r"must lie in \[0, 1\)"):
        tt.round_cores(tt.tt_svd(tensor), tol)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_tt_svd_refuses_what_is_not_finite(bad: float) -> None:
    tensor = torch.randn(3, 4, 5)
    tensor[1, 2, 3] = bad
    with pytest.raises(
        ConfigError, match=r"NaN or infinite entries has no TT-SVD\. Repair or re-initialise it first\."
    ):
        tt.tt_svd(tensor)


def test_functions_leave_their_arguments_alone() -> None:
    cores = gaussian_train((3, 4, 5), (2, 3))
    before = [core.clone() for core in cores]
    tt.round_cores(cores, 0.5)
    tt.align(cores)
    tt.slice_bond(cores, 1, torch.tensor([0]))
    tt.change_gauge(cores, 2, torch.randn(3, 3, dtype=torch.float64))
    tt.subtract(cores, cores)
    tt.bond_spectra(cores)
    assert_close(cores, before, rtol=0, atol=0)


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
    aligned = tt.align(cores, live=0.0)
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
    once = tt.align(gaussian_train((4, 5, 6, 4), (3, 4, 3)))
    assert_close(tt.align(once), once, rtol=1e-8, atol=1e-8)


def test_align_keeps_the_order_of_the_indices() -> None:
    cores = tt.align(gaussian_train((4, 5, 6, 4), (4, 4, 4)))
    for bond in (1, 2, 3):
        cores = tt.slice_bond(cores, bond, torch.randperm(4))
    assert_close(tt.align(cores), cores, rtol=1e-8, atol=1e-8)
    nearby = [core + 1e-6 * torch.randn_like(core) for core in cores]
    for new, old in zip(tt.align(nearby), nearby, strict=True):
        assert relative_error(new, old) < 1e-3


def test_align_works_in_an_extreme_gauge() -> None:
    cores = gaussian_train((5, 6, 5), (3, 3))
    expected = tt.bond_spectra(cores)
    for bond in (1, 2):
        cores = tt.change_gauge(cores, bond, torch.diag(torch.tensor([1e9, 1.0, 1e-9], dtype=torch.float64)))
    aligned = tt.align(cores)
    assert relative_error(slow_dense(aligned), slow_dense(cores)) < 1e-12
    for found, s in zip(tt.contributions(aligned), expected, strict=True):
        assert_close(found.sort(descending=True).values, s, rtol=1e-10, atol=0)


def test_align_leaves_dead_indices_where_they_are() -> None:
    cores = gaussian_train((5, 6, 5), (3, 3))
    scale = torch.tensor([1.0, 1e-6, 1.0], dtype=torch.float64)
    cores[1] = cores[1] * scale[:, None, None] * scale
    aligned = tt.align(cores)
    assert_close(aligned[0][:, :, 1], cores[0][:, :, 1], rtol=1e-12, atol=0)
    assert_close(aligned[2][1], cores[2][1], rtol=1e-12, atol=0)
    assert relative_error(aligned[0][:, :, ::2], cores[0][:, :, ::2]) > 1e-3
    assert relative_error(slow_dense(aligned), slow_dense(cores)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_align_keeps_a_tensor_with_redundant_ranks(dtype: torch.dtype) -> None:
    train = gaussian_train((4, 5, 6, 4), (2, 3, 2), dtype)
    redundant = tt.subtract(train, [2 * train[0], *train[1:]])  # every slice twice
    aligned = tt.align(redundant)
    assert all(core.dtype == dtype for core in aligned)
    assert relative_error(slow_dense(aligned), slow_dense(redundant)) < (1e-7 if dtype == torch.float64 else 1e-3)


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
