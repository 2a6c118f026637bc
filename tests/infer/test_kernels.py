"""Kernels, distances and diagnostics against plain sums and autograd."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_svgd import median_rule
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer import Kernel, diagnose, imq, kernels, median_bandwidth, rbf
from bayestrain.infer.particles import flatten

F64 = torch.float64


def all_alive(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool)


def squared_distances(particles: dict[str, Tensor], alive: Tensor) -> Tensor:
    return kernels.squared_distances_(flatten(particles), alive)


def distances_of(points: Tensor) -> Tensor:
    """All squared distances, from the differences themselves."""
    return (points[:, None] - points).square().sum(2)


@given(st.integers(2, 6), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_squared_distances_are_those_of_all_tensors_together(n: int, sizes: list[int]) -> None:
    particles = {f"t{k}": torch.randn(n, size, 2, dtype=F64) for k, size in enumerate(sizes)}
    points = flatten(particles)
    found = squared_distances(particles, all_alive(n))
    torch.testing.assert_close(found, torch.cdist(points, points) ** 2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1e-6), (torch.float32, 0.1)])
def test_distances_of_particles_close_together_and_far_from_the_origin(dtype: torch.dtype, apart: float) -> None:
    near = 1e4 + apart * torch.randn(5, 50, dtype=dtype)
    found = squared_distances({"x": near}, all_alive(5))
    torch.testing.assert_close(found.double(), distances_of(near.double()), rtol=1e-3, atol=0.0)
    naive = near.square().sum(1)[:, None] + near.square().sum(1) - 2 * near @ near.T
    assert not torch.allclose(naive.double(), distances_of(near.double()), rtol=0.5, atol=0.0)


@pytest.mark.parametrize("kernel", [partial(rbf, bandwidth=0.7), partial(imq, bandwidth=0.7)], ids=["rbf", "imq"])
def test_the_slope_of_a_kernel_is_its_derivative(kernel: Kernel) -> None:
    d2 = torch.linspace(0, 9, 100, dtype=F64).view(10, 10).requires_grad_()
    value, slope = kernel(d2)
    (expected,) = torch.autograd.grad(value.sum(), d2)
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-12)
    assert float(value.detach()[0, 0]) == 1.0
    at_infinity = kernel(torch.full((2, 2), math.inf))
    assert float(at_infinity[0].abs().max()) == float(at_infinity[1].abs().max()) == 0.0


def test_diagnostics_also_of_broken_particles_and_copies() -> None:
    found = diagnose({"x": torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0]], dtype=F64)})
    h = 2 / math.log(3)  # squared distances 2, 2, 4
    assert found.kernel_mass == pytest.approx((2 * math.exp(-2 / h) + math.exp(-4 / h)) / 3)
    assert found.spread == pytest.approx(math.sqrt(2))
    assert found.effective_particles == pytest.approx(3.0)
    found = diagnose({"x": torch.randn(1, 30).expand(6, 30)})
    assert found.effective_particles == pytest.approx(1.0)
    assert found.kernel_mass == pytest.approx(1.0)
    assert found.spread == 0.0
    assert diagnose({"x": torch.randn(2, 30).repeat(5, 1)}).effective_particles == pytest.approx(2.0)
    whole = torch.randn(4, 5, dtype=F64)
    broken = torch.cat([whole[:2], torch.full((1, 5), math.nan), whole[2:]])
    found, expected = vars(diagnose({"x": broken})), vars(diagnose({"x": whole}))
    assert found == pytest.approx(expected)
    with pytest.raises(ConfigError, match="at least 2, got 1"):
        diagnose({"x": torch.zeros(1, 3)})
    points = torch.randn(4, 3, dtype=F64)
    points[1] = math.nan
    alive = torch.tensor([True, False, True, True])
    found = squared_distances({"x": points}, alive)
    assert bool(found[1].isinf().all())
    assert bool(found[:, 1].isinf().all())
    torch.testing.assert_close(found[alive][:, alive], distances_of(points[alive]))
    for size in (3, 1000):
        points = torch.randn(2, size).repeat_interleave(10, dim=0)
        found = squared_distances({"x": points}, all_alive(20))
        assert float(found[:10, :10].max()) == float(found[10:, 10:].max()) == 0.0
        torch.testing.assert_close(found[:10, 10:], distances_of(points)[:10, 10:])
    points = torch.randn(5, 3, dtype=F64)
    alive = torch.tensor([True, False, True, True, False])
    among_three = float(median_bandwidth(squared_distances({"x": points}, alive)))
    assert among_three == pytest.approx(median_rule(list(points[alive])))
    assert float(median_bandwidth(squared_distances({"x": points}, torch.arange(5) == 2))) > 0


@given(st.integers(2, 8), st.floats(1e-6, 1e6), st.floats(-1e3, 1e3))
def test_diagnostics_stay_within_their_bounds(n: int, scale: float, shift: float) -> None:
    found = diagnose({"x": shift + scale * torch.randn(n, 4, dtype=F64)})
    assert 0 <= found.kernel_mass <= 1
    assert 1 - 1e-9 <= found.effective_particles <= n + 1e-9
    assert found.spread >= 0
