"""Particles against densities whose moments are known in closed form."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from infer_kit import set_lr
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer import HMC, SGLD, SVGD, Kernel, imq, rbf, value_and_grad

F64 = torch.float64
LogDensity = Callable[[dict[str, Tensor], Any], Tensor]


def momentum(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0, momentum=0.9)


def normal(mean: Tensor, covariance: Tensor) -> LogDensity:
    precision = torch.linalg.inv(covariance)

    def log_density(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        away = p["x"] - mean
        energy: Tensor = ((away @ precision) * away).sum(1)
        return -0.5 * energy

    return log_density


def svgd(density: LogDensity, particles: dict[str, Tensor], optimizer: Any, **options: Any) -> SVGD:
    """As it is printed: phi is a mean over the particles."""
    return SVGD(value_and_grad(density), particles, optimizer, scale=1 / len(particles["x"]), **options)


def settle(method: SVGD, rates: Sequence[tuple[int, float]]) -> Tensor:
    """Take so many steps at every learning rate; return where the particles are then."""
    for steps, lr in rates:
        set_lr(method, lr)
        for _ in range(steps):
            method.step(None)
    return method.particles["x"].detach()


def assert_within(found: Tensor, expected: Tensor, share: float) -> None:
    """The whole matrix or vector differs by less than this share, and every diagonal entry does."""
    assert float((found - expected).norm()) < share * float(expected.norm()), (found, expected)
    if expected.ndim == 2:
        torch.testing.assert_close(found.diagonal(), expected.diagonal(), rtol=share, atol=0.0)


@pytest.mark.parametrize("kernel", [rbf, imq])
def test_svgd_finds_mean_and_covariance_of_a_gaussian(kernel: Kernel) -> None:
    mean, covariance = torch.tensor([2.0, -1.0], dtype=F64), torch.tensor([[2.0, 0.9], [0.9, 1.0]], dtype=F64)
    method = svgd(normal(mean, covariance), {"x": torch.randn(150, 2, dtype=F64)}, torch.optim.Adam, kernel=kernel)
    x = settle(method, [(300, 0.1), (100, 0.02)])
    assert_within(x.mean(0), mean, 0.1)
    assert_within(torch.cov(x.T), covariance, 0.1)


def test_svgd_crosses_over_to_the_second_mode_of_a_mixture() -> None:
    """The example of Liu & Wang 2016, section 5: 1/3 N(-2, 1) + 2/3 N(2, 1), with all particles far to the left."""

    def mixture(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        x = p["x"]
        return torch.logaddexp(-0.5 * (x + 2).square(), math.log(2) - 0.5 * (x - 2).square())

    method = svgd(mixture, {"x": -10 + torch.randn(100, dtype=F64)}, momentum)
    x = settle(method, [(700, 1.0)])
    assert float((x < 0).double().mean()) == pytest.approx(1 / 3, abs=0.05)
    assert float(x[x < 0].mean()) == pytest.approx(-2, abs=0.2)
    assert float(x[x > 0].mean()) == pytest.approx(2, abs=0.2)
    assert float(x.mean()) == pytest.approx(2 / 3, rel=0.1)
    assert float(x.square().mean()) == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize(("memory", "temperature"), [(0.0, 1.0), (0.0, 0.25), (0.99, 0.5)])
def test_sgld_draws_from_a_gaussian_and_temperature_scales_its_variance(memory: float, temperature: float) -> None:
    mean, variance = torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([1.0, 0.25], dtype=F64)
    method = SGLD(
        value_and_grad(normal(mean, variance.diag())),
        {"x": torch.zeros(4000, 2, dtype=F64)},
        lr=0.02,
        memory=memory,
        temperature=temperature,
    )
    for _ in range(2000 if memory else 500):
        method.step(None)
    x = method.particles["x"].detach()
    torch.testing.assert_close(x.mean(0), mean, rtol=0.0, atol=0.05)
    torch.testing.assert_close(x.var(0), temperature * variance, rtol=0.1, atol=0.0)
    assert abs(float(torch.corrcoef(x.T)[0, 1])) < 0.06


@pytest.mark.parametrize("start", [0.0, 8.0])
def test_hmc_draws_from_a_gaussian_and_adapts_its_step(start: float) -> None:
    mean, covariance = torch.tensor([2.0, -1.0], dtype=F64), torch.tensor([[2.0, 0.9], [0.9, 1.0]], dtype=F64)
    method = HMC(
        value_and_grad(normal(mean, covariance)), {"x": torch.full((4000, 2), start, dtype=F64)},
        lr=1e-3, leapfrogs=8, warmup=60,
    )  # fmt: skip
    for _ in range(90):
        method.step(None)
    (group,) = method.optimizer.param_groups
    assert 0.6 < group["acceptance"] < 0.95
    adapted = group["lr"]
    method.step(None)
    assert group["lr"] == adapted > 0.1  # and stays
    x = method.particles["x"].detach()
    torch.testing.assert_close(x.mean(0), mean, rtol=0.0, atol=0.1)
    assert_within(torch.cov(x.T), covariance, 0.1)


def test_hmc_finds_the_weights_of_two_unequal_peaks_that_touch() -> None:
    """Tails that no Gaussian has: the acceptance must be right, not only the gradient."""

    def mixture(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return torch.logaddexp(-0.5 * (p["x"] + 1.5).square(), math.log(2) - 2 * (p["x"] - 1.5).square())

    method = HMC(value_and_grad(mixture), {"x": torch.randn(4000, dtype=F64)}, lr=0.5, leapfrogs=10, warmup=0)
    for _ in range(150):
        method.step(None)
    x = method.particles["x"].detach()
    grid = torch.linspace(-8, 6, 4001, dtype=F64)
    weight = mixture({"x": grid}, None).softmax(0)
    assert float(x.mean()) == pytest.approx(float(weight @ grid), abs=0.08)
    assert float(x.square().mean()) == pytest.approx(float(weight @ grid.square()), rel=0.06)
    assert float((x > 0).double().mean()) == pytest.approx(float(weight[grid > 0].sum()), abs=0.03)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": math.nan}, {"leapfrogs": 0}, {"warmup": -1}])
def test_hmc_refuses_settings_that_do_not_sample(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HMC(value_and_grad(normal(torch.zeros(2), torch.eye(2))), {"x": torch.zeros(3, 2)}, **options)
