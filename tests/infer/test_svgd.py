"""SVGD against what is printed (Liu & Wang 2016, eq. 8), in loops over pairs; all samplers against known moments."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from infer_kit import batches_of, bowl, build, density, set_lr
from operations import Operations
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer import HMC, SGLD, SVGD, Kernel, count, imq, rbf, stack, value_and_grad
from bayestrain.infer.particles import flatten, unflatten
from bayestrain.infer.svgd import BLOCK

F64 = torch.float64


MakeKernel = Callable[[list[Tensor]], Callable[[Tensor], Tensor]]
"""Makes a kernel, a function of a squared distance, from all points."""


def median_rule(points: list[Tensor]) -> float:
    """``median(|x - y|^2) / log n`` over the pairs of different points; of an even number of pairs the lower median."""
    n = len(points)
    pairs = [float((points[i] - points[j]).square().sum()) for i in range(n) for j in range(i)]
    return statistics.median_low(pairs) / math.log(n)


def rbf_of(points: list[Tensor]) -> Callable[[Tensor], Tensor]:
    h = median_rule(points)
    return lambda d2: torch.exp(-d2 / h)


def imq_of(points: list[Tensor]) -> Callable[[Tensor], Tensor]:
    h = median_rule(points)
    return lambda d2: 1 / torch.sqrt(1 + d2 / h)


def scores(particles: Mapping[str, Tensor], log_density: Callable[..., Tensor], batch: object) -> list[Tensor]:
    """The gradient of every particle's log density, one particle after the other."""
    found = []
    for i in range(len(flatten(particles))):
        one = {name: tensor[i : i + 1].detach().clone().requires_grad_() for name, tensor in particles.items()}
        gradients = torch.autograd.grad(log_density(one, batch)[0], list(one.values()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return found


def direction(
    particles: Mapping[str, Tensor], log_density: Callable[..., Tensor], batch: object, make: MakeKernel = rbf_of
) -> dict[str, Tensor]:
    """The direction of one SVGD step, in the particles' shapes."""
    points, gradients = list(flatten(particles)), scores(particles, log_density, batch)
    kernel, directions = make(points), []
    for y in points:
        total = torch.zeros_like(y)
        for point, gradient in zip(points, gradients, strict=True):
            x = point.clone().requires_grad_()
            value = kernel((x - y).square().sum())
            (repulsion,) = torch.autograd.grad(value, x)
            total += value.detach() * gradient + repulsion
        directions.append(total / len(points))
    return unflatten(torch.stack(directions), particles)


def svgd(density: Any, particles: dict[str, Tensor], optimizer: Any, scale: float = 1.0, **options: Any) -> SVGD:
    """As it is printed: phi is a mean over the particles; an optimiser, or a learning rate."""
    own = optimizer if callable(optimizer) else lambda named: torch.optim.SGD(named, lr=optimizer)
    return build("svgd", density, particles, own, scale=scale / count(particles), **options)


def own_kernel(d2: Tensor) -> tuple[Tensor, Tensor]:
    """A user's kernel: two scales added, no bandwidth to adapt."""
    return torch.exp(-d2 / 8) + 0.5 / (1 + d2), -torch.exp(-d2 / 8) / 8 - 0.5 / (1 + d2) ** 2


KERNELS: dict[str, tuple[Kernel, MakeKernel]] = {
    "rbf": (rbf, rbf_of),
    "imq": (imq, imq_of),
    "own": (own_kernel, lambda _: lambda d2: own_kernel(d2)[0]),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("n", [2, 3, 9])
def test_ten_steps_are_ten_steps_of_the_double_loop(n: int, name: str) -> None:
    kernel, make_kernel = KERNELS[name]
    expected = {"w": torch.randn(n, 3, 2, dtype=F64), "b": torch.randn(n, dtype=F64)}
    method = svgd(density, expected, 0.05, kernel=kernel, scale=0.3)
    for batch in batches_of(10):
        method.step(batch)
        moved = direction(expected, density, batch, make_kernel)
        expected = {key: tensor + 0.05 * 0.3 * moved[key] for key, tensor in expected.items()}
    torch.testing.assert_close(dict(method.particles), expected, rtol=1e-10, atol=1e-10)


def test_long_particles_move_the_same_way_and_autocast_changes_nothing() -> None:
    before = {"x": torch.randn(3, BLOCK + 11, dtype=F64)}
    expected = direction(before, bowl, None)["x"]
    method = svgd(bowl, before, 1.0)
    method.step(None)
    torch.testing.assert_close(method.particles["x"].detach() - before["x"], expected, rtol=1e-10, atol=1e-10)
    before = {"x": torch.randn(6, 40)}
    plain, autocast = svgd(bowl, before, 1.0), svgd(bowl, before, 1.0)
    plain.step(None)
    with torch.autocast("cpu", torch.bfloat16):
        autocast.step(None)
    assert torch.equal(plain.particles["x"], autocast.particles["x"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [rbf, imq])
def test_one_particle_apart_from_many_copies_pushes_none_away(kernel: Kernel, dtype: torch.dtype) -> None:
    """The median distance is zero here; what rounding leaves of it must not become the bandwidth."""
    point, other = torch.randn(2, 1000, dtype=dtype)
    method = svgd(bowl, stack([{"x": point}] * 12 + [{"x": other}]), 1.0, kernel=kernel)
    method.step(None)
    moved = method.particles["x"].detach()
    assert float(moved.norm(dim=1).max()) < 2 * float(point.norm())
    torch.testing.assert_close(moved[:12], moved[:1].expand(12, -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", [rbf, imq])
def test_nothing_in_a_step_is_larger_than_the_particles_themselves(kernel: Kernel) -> None:
    n, size = 12, 5000
    method = svgd(bowl, {"x": torch.randn(n, size)}, 0.1, kernel=kernel)
    with Operations() as seen:
        method.step(None)
    assert n * size <= max(seen.stored) <= 1.5 * n * size  # and not n * n * size


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
    start, options = {"x": torch.zeros(4000, 2, dtype=F64)}, {"memory": memory, "temperature": temperature}
    method = SGLD(value_and_grad(normal(mean, variance.diag())), start, lr=0.02, **options)
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
