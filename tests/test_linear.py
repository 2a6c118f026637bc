"""`TTLinear` is `nn.Linear` with another weight: every path, any shape, and clear errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_kit import LayerKit, Recorder, check_equals_dense_twin, relative_error
from torch import nn
from torch.testing import assert_close

from bayestrain.errors import BayesTrainError, ConfigError, ShapeError
from bayestrain.layers import TTLinear


class LinearKit(LayerKit):
    sizes: tuple[int, int]
    in_modes: tuple[int, ...] | None = None
    out_modes: tuple[int, ...] | None = None
    max_rank = 2
    bias = True
    plan: str
    batch_shapes = ((), (1,), (2, 0, 3), (0,), (2, 1, 4), (6,))

    @property
    def event_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.sizes[:1]

    def make_layer(self, *, max_rank: int | None = None, dtype: torch.dtype = torch.float64) -> TTLinear:
        layer = TTLinear(
            *self.sizes, self.bias, in_modes=self.in_modes, out_modes=self.out_modes, dtype=dtype,
            max_rank=self.max_rank if max_rank is None else max_rank,
        )  # fmt: skip
        layer.force_plan(self.plan)
        return layer

    def test_takes_the_plan_it_is_meant_to_test(self) -> None:
        layer, x = self.make_layer(), self.make_input()
        layer(x)
        assert layer.plan is not None
        assert layer.plan.name == self.plan
        with torch.no_grad():
            layer(x)
        assert layer.plan.name == self.plan.removesuffix("+recompute")

    def test_weights_are_formed_in_the_precision_of_the_cores_under_autocast(self) -> None:
        layer, x = self.make_layer(dtype=torch.float32), self.make_input(dtype=torch.float32)
        with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
            layer(x)
        with_data = 1 if self.plan == "dense" else self.plan.count(",") + 2
        assert recorder.products[-with_data:] == [torch.bfloat16] * with_data
        assert set(recorder.products[:-with_data]) <= {torch.float32}


class TestDense(LinearKit):
    sizes, max_rank, plan = (24, 20), 20, "dense"


class TestDensePadded(LinearKit):
    sizes, max_rank, plan = (29, 31), 30, "dense"


class TestRightFirst(LinearKit):
    sizes, in_modes, out_modes, plan = (24, 24), (2, 12), (12, 2), "right:1"


class TestRightFirstPaddedWithoutBias(LinearKit):
    sizes, in_modes, out_modes, bias, plan = (30, 23), (2, 2, 8), (6, 2, 2), False, "right:2"


class TestLeftFirst(LinearKit):
    sizes, in_modes, out_modes, plan = (24, 24), (12, 2), (2, 12), "left:1"


class TestLeftFirstPaddedFourCores(LinearKit):
    sizes, in_modes, out_modes, plan = (47, 46), (4, 3, 2, 2), (2, 2, 3, 4), "left:2"


class TestNothingMergedPadded(LinearKit):
    sizes, in_modes, out_modes, plan = (47, 46), (4, 3, 2, 2), (2, 2, 3, 4), "right:1,2,3"


class TestThreeFactorsFromTheLeft(LinearKit):
    sizes, in_modes, out_modes, plan = (48, 48), (4, 3, 2, 2), (2, 2, 3, 4), "left:1,3"


class TestRecomputedPadded(LinearKit):
    sizes, in_modes, out_modes, plan = (47, 46), (4, 3, 2, 2), (2, 2, 3, 4), "right:2+recompute"


class TestRecomputedWithoutBias(LinearKit):
    sizes, in_modes, out_modes, bias, plan = (48, 48), (4, 3, 2, 2), (2, 2, 3, 4), False, "left:1,2,3+recompute"


# --- any shape --------------------------------------------------------------------------------------------------------


@st.composite
def padded_size(draw: st.DrawFn, modes: tuple[int, ...]) -> int:
    """A size these modes are right for: their product, or less by no more than no mode could be smaller."""
    product = math.prod(modes)
    smallest = max(product // mode * (mode - 1) for mode in modes) + 1
    return draw(st.integers(smallest, product))


@st.composite
def layers(draw: st.DrawFn) -> TTLinear:
    d = draw(st.integers(2, 4))
    mode = st.integers(1, 5 if d < 4 else 3)
    automatic = draw(st.sampled_from(["neither", "both", "in", "out"]))
    in_modes = None if automatic in ("both", "in") else draw(st.tuples(*[mode] * d))
    out_modes = None if automatic in ("both", "out") else draw(st.tuples(*[mode] * d))
    in_features = draw(padded_size(in_modes) if in_modes else st.integers(1, 40))
    out_features = draw(padded_size(out_modes) if out_modes else st.integers(1, 40))
    max_rank = draw(st.integers(1, 3) | st.integers(1, 60))
    bias = draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 1000)))
    return TTLinear(
        in_features, out_features, bias, in_modes=in_modes, out_modes=out_modes, max_rank=max_rank, dtype=torch.float64
    )


batch_shapes = st.lists(st.integers(0, 3) | st.integers(1, 12), max_size=3).map(tuple)


@given(layers(), batch_shapes)
def test_any_layer_equals_its_dense_twin(layer: TTLinear, batch_shape: tuple[int, ...]) -> None:
    check_equals_dense_twin(layer, torch.randn(*batch_shape, layer.in_features, dtype=torch.float64))


def unfoldings(weight: torch.Tensor, layer: TTLinear) -> list[np.ndarray]:
    """The matrices whose ranks the bonds stand for, by plain index arithmetic on the padded weight."""
    padded = np.zeros((math.prod(layer.out_modes), math.prod(layer.in_modes)))
    padded[: layer.out_features, : layer.in_features] = weight.detach().numpy()
    d = len(layer.in_modes)
    axes = [axis for k in range(d) for axis in (k, d + k)]
    tensor = padded.reshape(*layer.out_modes, *layer.in_modes).transpose(axes)
    sizes = [m * j for m, j in zip(layer.out_modes, layer.in_modes, strict=True)]
    return [tensor.reshape(math.prod(sizes[:k]), -1) for k in range(1, d)]


@given(layers())
def test_from_dense_and_back_is_exact_and_ranks_are_what_the_unfoldings_have(layer: TTLinear) -> None:
    dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.float64)
    again = TTLinear.from_dense(dense, layer.in_modes, layer.out_modes)
    assert (again.in_modes, again.out_modes) == (layer.in_modes, layer.out_modes)
    back = again.to_dense()
    assert_close(back.weight, dense.weight, rtol=1e-12, atol=1e-13)
    assert (back.bias is None) == (dense.bias is None)
    if dense.bias is not None:
        assert_close(back.bias, dense.bias, rtol=0, atol=0)
    assert again.ranks[1:-1] == tuple(np.linalg.matrix_rank(matrix) for matrix in unfoldings(dense.weight, layer))


@given(layers(), st.sampled_from([0.01, 0.1, 0.3, 0.7]))
def test_from_dense_respects_the_tolerance(layer: TTLinear, tol: float) -> None:
    dense = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
    rough = TTLinear.from_dense(dense, layer.in_modes, layer.out_modes, tol=tol)
    assert relative_error(rough.to_dense().weight, dense.weight) <= tol
    full = TTLinear.from_dense(dense, layer.in_modes, layer.out_modes)
    assert all(r <= f for r, f in zip(rough.ranks, full.ranks, strict=True))


@given(layers(), st.integers(1, 6))
def test_from_dense_respects_the_cap_and_is_as_good_as_svd_can_promise(layer: TTLinear, max_rank: int) -> None:
    dense = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
    capped = TTLinear.from_dense(dense, layer.in_modes, layer.out_modes, max_rank=max_rank)
    assert max(capped.ranks) <= max_rank
    tails = [
        (np.linalg.svd(matrix, compute_uv=False)[rank:] ** 2).sum()
        for matrix, rank in zip(unfoldings(dense.weight, layer), capped.ranks[1:-1], strict=True)
    ]
    error = (capped.weight - dense.weight).detach().norm()
    assert error <= math.sqrt(sum(tails)) + 1e-12


@given(layers())
def test_ranks_never_exceed_what_the_unfolding_can_have(layer: TTLinear) -> None:
    sizes = [m * j for m, j in zip(layer.out_modes, layer.in_modes, strict=True)]
    for k, rank in enumerate(layer.ranks[1:-1], start=1):
        assert 1 <= rank <= min(math.prod(sizes[:k]), math.prod(sizes[k:]))
        assert rank <= layer.ranks[k - 1] * sizes[k - 1]
        assert rank <= layer.ranks[k + 1] * sizes[k]


def test_max_rank_may_be_one_number_per_bond() -> None:
    assert TTLinear(784, 625, max_rank=(8, 1, 5)).ranks == (1, 8, 1, 5, 1)
    assert TTLinear(784, 625, max_rank=np.int64(7)).ranks == (1, 7, 7, 7, 1)
    assert TTLinear(784, 625, max_rank=10_000).ranks == (1, 35, 700, 20, 1)


def test_automatic_modes_are_the_papers() -> None:
    layer = TTLinear(784, 625)
    assert (layer.in_modes, layer.out_modes) == ((7, 4, 7, 4), (5, 5, 5, 5))
    last = TTLinear(625, 10)
    assert (last.in_modes, last.out_modes) == ((25, 25), (5, 2))


def test_sizes_with_large_prime_factors_hide_their_padding() -> None:
    layer = TTLinear(1009, 503, max_rank=3, dtype=torch.float64)
    assert math.prod(layer.in_modes) > 1009
    assert layer.weight.shape == layer.to_dense().weight.shape == (503, 1009)
    check_equals_dense_twin(layer, torch.randn(4, 1009, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [(784, 625), (625, 10), (1009, 503), (64, 3)], ids=str)
@pytest.mark.parametrize("max_rank", [1, 5, 20])
@pytest.mark.parametrize("init", ["he", "paper"])
def test_initial_variance_of_the_weight(sizes: tuple[int, int], max_rank: int, init: str) -> None:
    target = 2 / sizes[0] if init == "he" else math.sqrt(2 / math.prod(sizes))
    padded = math.prod(TTLinear(*sizes).in_modes) > sizes[0]
    # Exact for the whole tensor; where padding is cut off, right on average and close for each draw.
    draws = [TTLinear(*sizes, max_rank=max_rank, init=init).weight.detach() for _ in range(10 if padded else 1)]
    variance = torch.stack([weight.square().mean() for weight in draws]).mean()
    assert abs(variance / target - 1) < (0.1 if padded else 1e-4)


def test_bias_starts_as_that_of_nn_linear() -> None:
    bias = TTLinear(100, 4000).bias
    assert bias is not None
    assert 0.09 < bias.abs().max() <= 0.1
    assert abs(bias.std() * math.sqrt(3) / 0.1 - 1) < 0.05


def test_half_precision_weights_can_be_factored() -> None:
    dense = nn.Linear(24, 20, dtype=torch.bfloat16)
    layer = TTLinear.from_dense(dense)
    assert layer.cores[0].dtype == torch.bfloat16
    assert relative_error(layer.weight, dense.weight) < 2e-2


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rank", [0, -3, (2, 0, 2), 2.5, True])
def test_max_rank_below_one_is_refused(max_rank: object) -> None:
    with pytest.raises(ConfigError) as error:
        TTLinear(784, 625, max_rank=max_rank)  # type: ignore[arg-type]
    assert str(error.value) == (
        f"max_rank must be an integer of at least 1, or a tuple of them, got {max_rank!r}. Try max_rank=20."
    )


def test_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"max_rank must be one number or 3 inner ranks, got \(2, 2\)\."):
        TTLinear(784, 625, max_rank=(2, 2))


def test_modes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError) as error:
        TTLinear(784, 625, in_modes=(7, 4, 7, 3))
    assert str(error.value) == (
        "The product of in_modes must be at least 784, got (7, 4, 7, 3) with product 588. Try in_modes=(7, 4, 7, 4)."
    )
    with pytest.raises(ShapeError, match=r"out_modes are larger than needed: \(5, 5, 5, 9\) has product 1125"):
        TTLinear(784, 625, out_modes=(5, 5, 5, 9))
    with pytest.raises(ShapeError, match=r"in_modes must be positive integers, got \(784, 0\)\."):
        TTLinear(784, 625, in_modes=(784, 0))


def test_unequal_numbers_of_modes_are_refused() -> None:
    with pytest.raises(ShapeError) as error:
        TTLinear(784, 625, in_modes=(28, 28), out_modes=(5, 5, 25))
    assert str(error.value) == (
        "in_modes and out_modes must be equally many and at least 2, got (28, 28) and (5, 5, 25). "
        "Leave one of them out and it is chosen to match the other."
    )
    with pytest.raises(ShapeError, match=r"at least 2, got \(784,\) and \(625,\)\."):
        TTLinear(784, 625, in_modes=(784,), out_modes=(625,))


@pytest.mark.parametrize("shape", [(3, 23), (24, 3), (25,), ()], ids=str)
@pytest.mark.parametrize("max_rank", [1, 20])
def test_wrong_input_width_is_refused(shape: tuple[int, ...], max_rank: int) -> None:
    with pytest.raises(ShapeError) as error:
        TTLinear(24, 20, max_rank=max_rank)(torch.zeros(shape))
    assert str(error.value) == f"TTLinear expects 24 features in the last dimension, got {shape}."


def test_unknown_init_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"init must be one of \('he', 'paper'\), got 'svd'\."):
        TTLinear(24, 20, init="svd")


def test_a_weight_with_nan_cannot_be_factored() -> None:
    dense = nn.Linear(24, 20)
    with torch.no_grad():
        dense.weight[3, 4] = math.nan
    with pytest.raises(BayesTrainError, match=r"NaN or infinite entries has no TT-SVD\. Repair"):
        TTLinear.from_dense(dense)


@pytest.mark.parametrize("tol", [-0.1, 1.0])
def test_a_tolerance_outside_of_zero_to_one_is_refused(tol: float) -> None:
    with pytest.raises(ConfigError, match=rf"tol is a relative error and must lie in \[0, 1\), got {tol}\."):
        TTLinear.from_dense(nn.Linear(24, 20), tol=tol)


def test_cores_of_other_modes_are_refused_and_nothing_changes() -> None:
    layer = TTLinear(24, 20, max_rank=3)
    before = layer.weight.detach()
    cores = [torch.zeros(1, 5, 6, 2), torch.zeros(2, 4, 5, 1)]
    with pytest.raises(ShapeError, match=r"New cores must keep the modes \(4, 4\), got \(4, 5\)\."):
        layer.set_cores(cores)
    assert_close(layer.weight, before, rtol=0, atol=0)
