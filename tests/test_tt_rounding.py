"""TT-SVD and rounding against numpy's SVD of the full tensor's unfoldings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_kit import relative_error, slow_dense
from torch import Tensor
from torch.testing import assert_close
from tt_reference import decaying_tensors, delta_rank, gaussian_train, random_gauge, singular_values, tolerances

from bayestrain import gauge, tt
from bayestrain.errors import ConfigError

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
    assert_close(gauge.align(train), train, rtol=0, atol=0)


def test_a_train_of_one_core() -> None:
    core = torch.randn(1, 7, 1, dtype=torch.float64)
    for cores in (tt.tt_svd(core.flatten(), 0.1), tt.round_cores([core], 0.1), gauge.align([core])):
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
    gauge.align(cores)
    tt.slice_bond(cores, 1, torch.tensor([0]))
    gauge.change_gauge(cores, 2, torch.randn(3, 3, dtype=torch.float64))
    tt.subtract(cores, cores)
    tt.bond_spectra(cores)
    assert_close(cores, before, rtol=0, atol=0)
