"""`TTConv2d` is `nn.Conv2d` with another kernel: both paths, every setting, and clear errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from layer_kit import LayerKit, Recorder, check_equals_dense_twin, relative_error
from torch import Tensor, nn
from torch.testing import assert_close

from bayestrain.errors import ConfigError, ConversionError, ShapeError
from bayestrain.layers import TTConv2d


class ConvKit(LayerKit):
    channels: int
    max_rank = 2
    steps: int
    """Number of convolutions the path under test takes."""
    batch_shapes = ((), (1,), (0,), (2,))

    def build(self, **options: Any) -> TTConv2d:
        """The layer of this case; `options` are ranks and dtype."""
        raise NotImplementedError

    @property
    def event_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.channels, 7, 6

    def make_layer(self, *, max_rank: int | None = None, dtype: torch.dtype = torch.float64) -> TTConv2d:
        layer = self.build(max_rank=self.max_rank if max_rank is None else max_rank, dtype=dtype)
        layer.force_plan("kernel" if self.steps == 1 else "two-step")
        return layer

    def test_takes_the_path_it_is_meant_to_test(self) -> None:
        layer, x = self.make_layer(dtype=torch.float32), self.make_input(dtype=torch.float32)
        with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert recorder.convolutions == [torch.bfloat16] * self.steps
        assert set(recorder.products) == {torch.float32}, "the kernel is formed in the precision of the cores"

    def test_takes_an_input_that_autocast_has_lowered_within_vmap_too(self) -> None:
        layer, x = self.make_layer(dtype=torch.float32), self.make_input(dtype=torch.float32).bfloat16()
        particles = {name: torch.stack([p.detach(), p.detach()]) for name, p in layer.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            both = torch.vmap(lambda tensors: torch.func.functional_call(layer, tensors, (x,)))(particles)
            alone = layer(x)
        for one in both:
            torch.testing.assert_close(one.float(), alone.float(), rtol=0.05, atol=0.05)


class TestKernelFormed(ConvKit):
    channels, max_rank, steps = 6, 20, 1

    def build(self, **options: Any) -> TTConv2d:
        return TTConv2d(6, 8, 3, padding=1, **options)


class TestKernelFormedPaddedModesReflect(ConvKit):
    channels, max_rank, steps = 5, 20, 1

    def build(self, **options: Any) -> TTConv2d:
        return TTConv2d(
            5, 7, (3, 2), (2, 1), (1, 2), bias=False, padding_mode="reflect", in_modes=(3, 2), out_modes=(2, 2, 2),
            **options,
        )  # fmt: skip


class TestTwoSteps(ConvKit):
    channels, steps = 16, 2

    def build(self, **options: Any) -> TTConv2d:
        return TTConv2d(16, 18, 3, padding="same", **options)


class TestTwoStepsPaddedModesCircularStrided(ConvKit):
    channels, steps = 11, 2

    def build(self, **options: Any) -> TTConv2d:
        return TTConv2d(
            11, 13, (2, 3), 2, (1, 2), (2, 1), padding_mode="circular", in_modes=(4, 3), out_modes=(7, 2), **options
        )  # fmt: skip


class TestPointwise(ConvKit):
    channels, steps = 12, 2

    def build(self, **options: Any) -> TTConv2d:
        return TTConv2d(12, 12, 1, bias=False, in_modes=(3, 4), **options)


# --- any shape and setting --------------------------------------------------------------------------------------------


@st.composite
def channels(draw: st.DrawFn) -> tuple[int, tuple[int, ...] | None]:
    """A channel count with automatic modes, or given ones, perhaps padded."""
    if draw(st.booleans()):
        return draw(st.integers(1, 20)), None
    modes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    product = math.prod(modes)
    smallest = max(product // mode * (mode - 1) for mode in modes) + 1
    return draw(st.integers(smallest, product)), modes


pairs = st.integers(1, 2) | st.tuples(st.integers(1, 2), st.integers(1, 2))


@st.composite
def settings_of_conv(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for `nn.Conv2d`, and those only `TTConv2d` has."""
    (ins, in_modes), (outs, out_modes) = draw(channels()), draw(channels())
    kernel = draw(st.integers(1, 3) | st.tuples(st.integers(1, 4), st.integers(1, 3)))
    dilation = draw(pairs)
    padding_mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding: Any = draw(
        st.sampled_from(["same", "valid"]) | st.integers(0, 2) | st.tuples(st.integers(0, 2), st.integers(0, 2))
    )
    if padding == "same" and padding_mode == "zeros":
        # PyTorch itself warns of a copy where 'same' has to pad one side more than the other.
        spans = [d * (k - 1) for d, k in zip(pair(dilation), pair(kernel), strict=True)]
        assume(all(span % 2 == 0 for span in spans))
    dense = {
        "in_channels": ins,
        "out_channels": outs,
        "kernel_size": kernel,
        "stride": 1 if padding == "same" else draw(pairs),
        "padding": padding,
        "dilation": dilation,
        "bias": draw(st.booleans()),
        "padding_mode": padding_mode,
    }
    torch.manual_seed(draw(st.integers(0, 1000)))
    max_rank = draw(st.integers(1, 3) | st.integers(1, 40))
    return dense, {"in_modes": in_modes, "out_modes": out_modes, "max_rank": max_rank, "dtype": torch.float64}


def pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


@given(settings_of_conv(), st.sampled_from([(), (0,), (1,), (2,)]), st.integers(7, 9), st.integers(7, 9))
def test_any_layer_equals_its_dense_twin(
    arguments: tuple[dict[str, Any], dict[str, Any]], batch: tuple[int, ...], height: int, width: int
) -> None:
    layer = TTConv2d(**arguments[0], **arguments[1])
    assert repr(layer.to_dense()) == repr(nn.Conv2d(**arguments[0])), "the twin has the settings asked for"
    check_equals_dense_twin(layer, torch.randn(*batch, layer.in_channels, height, width, dtype=torch.float64))


def unfoldings(weight: Tensor, layer: TTConv2d) -> list[np.ndarray]:
    """The matrices whose ranks the bonds stand for, from the padded kernel ``(kh*kw, C, S)``."""
    t, padded_in, padded_out = math.prod(layer.kernel_size), math.prod(layer.in_modes), math.prod(layer.out_modes)
    kernel = np.zeros((t, padded_in, padded_out))
    for s in range(layer.out_channels):
        for c in range(layer.in_channels):
            kernel[:, c, s] = weight[s, c].detach().flatten().numpy()
    sizes = (t, *layer.in_modes, *layer.out_modes)
    return [kernel.reshape(math.prod(sizes[:k]), -1) for k in range(1, len(sizes))]


@given(settings_of_conv(), st.integers(1, 6), st.sampled_from([0.05, 0.3, 0.7]))
def test_from_dense_exactly_to_a_tolerance_and_to_a_cap(
    arguments: tuple[dict[str, Any], dict[str, Any]], max_rank: int, tol: float
) -> None:
    dense = nn.Conv2d(**arguments[0], dtype=torch.float64)
    modes = arguments[1]["in_modes"], arguments[1]["out_modes"]
    exact = TTConv2d.from_dense(dense, *modes)
    back = exact.to_dense()
    assert repr(back) == repr(dense)
    assert_close(back.weight, dense.weight, rtol=1e-12, atol=1e-13)
    if dense.bias is not None:
        assert_close(back.bias, dense.bias, rtol=0, atol=0)
    matrices = unfoldings(dense.weight, exact)
    assert exact.ranks[1:-1] == tuple(np.linalg.matrix_rank(matrix) for matrix in matrices)

    rough = TTConv2d.from_dense(dense, *modes, tol=tol)
    assert relative_error(rough.weight, dense.weight) <= tol
    assert all(r <= e for r, e in zip(rough.ranks, exact.ranks, strict=True))

    capped = TTConv2d.from_dense(dense, *modes, max_rank=max_rank)
    assert max(capped.ranks) <= max_rank
    tails = [
        (np.linalg.svd(matrix, compute_uv=False)[rank:] ** 2).sum()
        for matrix, rank in zip(matrices, capped.ranks[1:-1], strict=True)
    ]
    assert (capped.weight - dense.weight).detach().norm() <= math.sqrt(sum(tails)) + 1e-12


@given(settings_of_conv())
def test_ranks_never_exceed_what_the_unfolding_can_have(arguments: tuple[dict[str, Any], dict[str, Any]]) -> None:
    layer = TTConv2d(**arguments[0], **arguments[1])
    sizes = (math.prod(layer.kernel_size), *layer.in_modes, *layer.out_modes)
    for k, rank in enumerate(layer.ranks[1:-1], start=1):
        assert 1 <= rank <= min(math.prod(sizes[:k]), math.prod(sizes[k:]), arguments[1]["max_rank"])
        assert rank <= layer.ranks[k - 1] * sizes[k - 1]
        assert rank <= layer.ranks[k + 1] * sizes[k]


def test_cores_and_automatic_modes() -> None:
    layer = TTConv2d(128, 256, 3, max_rank=30)
    assert (layer.in_modes, layer.out_modes) == ((16, 8), (16, 16))
    assert [tuple(core.shape) for core in layer.cores] == [
        (1, 9, 9), (9, 16, 30), (30, 8, 30), (30, 16, 16), (16, 16, 1),
    ]  # fmt: skip
    small = TTConv2d(3, 15, 5)
    assert (small.in_modes, small.out_modes) == ((3,), (15,))
    assert [core.shape[1] for core in small.cores] == [25, 3, 15]


@pytest.mark.parametrize("shape", [(3, 16, 3), (128, 256, 3), (31, 37, (5, 3)), (64, 64, 1)], ids=str)
@pytest.mark.parametrize("max_rank", [1, 4, 30])
@pytest.mark.parametrize("init", ["he", "paper"])
def test_initial_variance_of_the_kernel(shape: tuple[int, int, Any], max_rank: int, init: str) -> None:
    fan_in = shape[0] * math.prod(pair(shape[2]))
    target = 2 / fan_in if init == "he" else math.sqrt(2 / (fan_in * shape[1]))
    padded = shape[0] == 31
    draws = [TTConv2d(*shape, max_rank=max_rank, init=init).weight.detach() for _ in range(10 if padded else 1)]
    variance = torch.stack([weight.square().mean() for weight in draws]).mean()
    assert abs(variance / target - 1) < (0.1 if padded else 1e-4)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_groups_are_refused() -> None:
    with pytest.raises(ConversionError) as error:
        TTConv2d(8, 8, 3, groups=2)
    assert str(error.value) == (
        "TTConv2d needs groups=1, got groups=2. A grouped kernel is already small: leave it dense "
        "(in tensorize_, with a filter_fn that returns False for it)."
    )
    with pytest.raises(ConversionError, match=r"TTConv2d needs groups=1, got groups=4\."):
        TTConv2d.from_dense(nn.Conv2d(8, 8, 3, groups=4))


@pytest.mark.parametrize("max_rank", [0, -1, (2, 2, 0, 2)])
def test_max_rank_below_one_is_refused(max_rank: Any) -> None:
    with pytest.raises(ConfigError) as error:
        TTConv2d(16, 16, 3, max_rank=max_rank)
    assert str(error.value) == (
        f"max_rank must be an integer of at least 1, or a tuple of them, got {max_rank!r}. Try max_rank=20."
    )


def test_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"max_rank must be one number or 4 inner ranks, got \(2, 2\)\."):
        TTConv2d(16, 16, 3, max_rank=(2, 2))


def test_modes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError) as error:
        TTConv2d(128, 64, 3, in_modes=(8, 8))
    assert str(error.value) == (
        "The product of in_modes must be at least 128, got (8, 8) with product 64. Try in_modes=(16, 8)."
    )
    with pytest.raises(
        ShapeError, match=r"out_modes are larger than needed: \(8, 16\) has product 128 for a size of 64"
    ):
        TTConv2d(128, 64, 3, out_modes=(8, 16))
    with pytest.raises(ShapeError, match=r"out_modes must be positive integers, got \(\)\."):
        TTConv2d(128, 64, 3, out_modes=())


@pytest.mark.parametrize("shape", [(2, 7, 9, 9), (8, 9), (1, 2, 8, 9, 9)], ids=str)
@pytest.mark.parametrize("max_rank", [1, 40])
def test_wrong_input_is_refused(shape: tuple[int, ...], max_rank: int) -> None:
    with pytest.raises(ShapeError) as error:
        TTConv2d(8, 8, 3, max_rank=max_rank)(torch.zeros(shape))
    assert str(error.value) == (f"TTConv2d expects (batch, 8, height, width) or the same without batch, got {shape}.")


def test_settings_pytorch_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"padding='same' is not supported for strided convolutions"):
        TTConv2d(8, 8, 3, stride=2, padding="same")
    with pytest.raises(ValueError, match=r"padding_mode must be one of"):
        TTConv2d(8, 8, 3, padding_mode="mirror")  # type: ignore[arg-type]
