"""A convolution runs as the chain of thin ones that takes the fewest multiplications, whatever its layout."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayestrain.formats import FORMATS, get
from bayestrain.nn import FactorizedWeight, Layout, TensorConv1d, TensorConv2d, TensorConvTranspose2d, chains

SHAPE = (12, 10, 3, 3)
OUT, IN, TAPS = 0, 1, 2
LAYOUTS = {
    "taps, in, out": ((TAPS,), (IN,), (OUT,)),
    "in, taps, out": ((IN,), (TAPS,), (OUT,)),
    "out, taps, in": ((OUT,), (TAPS,), (IN,)),
    "in, out, taps": ((IN,), (OUT,), (TAPS,)),
    "svd over out | in*k": ((OUT,), (IN, TAPS)),
    "svd over out*k | in": ((OUT, TAPS), (IN,)),
    "svd over k | out*in": ((TAPS,), (OUT, IN)),
}


def layer(modes: Any, format: Any = "tt", rank: int = 2, **settings: Any) -> TensorConv2d:
    dense = nn.Conv2d(SHAPE[1], SHAPE[0], 3, **settings).double()
    layout = Layout(SHAPE, (12, 10, 9), ((12,), (10,), (9,)), modes)
    weight = FactorizedWeight.random(get(format), layout, rank, dtype=torch.float64)
    return TensorConv2d.of(dense, weight)


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("settings", [{"padding": 1}, {"stride": 2, "padding": 2, "padding_mode": "reflect"}])
def test_every_layout_computes_what_its_dense_twin_does(order: str, format: Any, settings: dict[str, Any]) -> None:
    own = layer(LAYOUTS[order], format, **settings)
    x = torch.randn(2, 10, 8, 7, dtype=torch.float64)
    twin = own.to_dense()
    assert_close(own(x), twin(x))
    found = chains.chains(chains.network(own.factorized), own.factorized.layout.labels)
    for chain in found:
        kernels = chains.kernels(own.factorized, chain)
        assert_close(own.run(x, kernels, 0 in chain.stages, chain.groups), twin(x))


@pytest.mark.parametrize(
    ("order", "plan", "work"),
    [  # multiplications per position of the output
        ("taps, in, out", "two convolutions", 2 * 10 * 9 + 12 * 2),
        ("in, taps, out", "three convolutions", 10 * 2 + 2 * 2 * 9 + 2 * 12),
        ("svd over out | in*k", "two convolutions", 2 * 10 * 9 + 12 * 2),
        ("svd over out*k | in", "two convolutions", 10 * 2 + 2 * 12 * 9),
        ("svd over k | out*in", "whole weight", 12 * 10 * 9),
    ],
)
def test_the_cheapest_chain_is_chosen(order: str, plan: str, work: int) -> None:
    own = layer(LAYOUTS[order])
    name, relative = own.plan(torch.empty(0))
    assert name == plan
    assert math.isclose(relative, work / math.prod(SHAPE))


def test_cp_is_a_depthwise_convolution_and_strides_count() -> None:
    own = layer(LAYOUTS["taps, in, out"], "cp", rank=3)
    name, relative = own.plan(torch.empty(0))
    assert name == "three convolutions"
    assert math.isclose(relative, (10 * 3 + 3 * 9 + 3 * 12) / math.prod(SHAPE))
    own = layer(LAYOUTS["in, taps, out"], stride=2)
    assert math.isclose(own.plan(torch.empty(0))[1], (4 * 10 * 2 + 2 * 2 * 9 + 2 * 12) / math.prod(SHAPE))
    transposed = TensorConvTranspose2d(10, 12, 3, stride=3, max_rank=2)
    taps_first = 2 * 10 * 9 + 9 * 12 * 2
    assert math.isclose(transposed.plan(torch.empty(0))[1], taps_first / math.prod(SHAPE))


@pytest.mark.parametrize("order", ["taps, in, out", "svd over k | out*in"])  # two convolutions, and the whole kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_computes_in_the_type_of_autocast(order: str, dtype: torch.dtype) -> None:
    own, x = layer(LAYOUTS[order]).float(), torch.randn(2, 10, 8, 7).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = own(x), own.to_dense()(x)
    assert found.dtype == torch.bfloat16
    assert_close(found, expected, rtol=0.1, atol=0.1)


def test_taps_may_be_apart_and_transposed_convolutions_have_any_size() -> None:
    """A kernel of rank 1 over its height and width is two thin ones, made into one."""
    layout = Layout((8, 6, 3, 5), (8, 6, 3, 5), ((8,), (6,), (3,), (5,)), ((1,), (2,), (3,), (0,)))
    for order in permutations(range(4)):
        own = Layout(layout.shape, layout.axes, layout.splits, tuple((k,) for k in order))
        weight = FactorizedWeight.random(get("tt"), own, 2, dtype=torch.float64)
        conv = TensorConv2d.of(nn.Conv2d(6, 8, (3, 5), dtype=torch.float64), weight)
        x = torch.randn(2, 6, 7, 9, dtype=torch.float64)
        assert_close(conv(x), conv.to_dense()(x))
    own = TensorConvTranspose2d(6, 4, 3, stride=3, max_rank=2, dtype=torch.float64)
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    for size in ([12, 15], [14, 17]):
        assert_close(own(x, size), own.to_dense()(x, size))
    with pytest.raises(ValueError, match="output size"):
        own(x, [20, 20])


@pytest.mark.parametrize("kind", [TensorConv1d, TensorConvTranspose2d])
def test_random_starts_keep_the_size_of_a_signal(kind: Any) -> None:
    own = kind(32, 32, 4, stride=2, bias=False, max_rank=12)
    x = torch.randn(16, 32, *([20] * (1 if kind is TensorConv1d else 2)))
    assert 1.4 < float(own(x).detach()[..., 3:-3].square().mean()) < 2.8  # He's start doubles it for a ReLU
