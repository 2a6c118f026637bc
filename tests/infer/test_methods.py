"""Every inference method passes the kit; what is particular to one of them."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from infer_kit import F64, OPTIMIZERS, InferenceKit, assert_same, batches_of, bowl, build, cone, density, points
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError
from bayestrain.infer import METHODS, imq, rbf, stack


class TestSVGD(InferenceKit):
    name = "svgd"


class TestEnsemble(InferenceKit):
    name = "ensemble"


class TestAnchored(InferenceKit):
    name = "anchored"


class TestHMC(InferenceKit):
    name = "hmc"
    options: ClassVar[dict[str, Any]] = {"lr": 0.05, "leapfrogs": 8, "seed": 3}


class TestEnsembleOfOne(InferenceKit):
    name = "ensemble"
    n = 1


class TestSGLD(InferenceKit):
    name = "sgld"
    options: ClassVar[dict[str, Any]] = {"lr": 0.05, "seed": 3}


class TestPreconditionedSGLD(InferenceKit):
    name = "sgld"
    options: ClassVar[dict[str, Any]] = {"lr": 0.05, "seed": 3, "memory": 0.9}


def test_every_method_takes_part() -> None:
    assert {kit.name for kit in InferenceKit.__subclasses__()} == set(METHODS)
    assert all(kind.name == name for name, kind in METHODS.items())


def test_particles_that_are_not_alike_cannot_be_stacked() -> None:
    one = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    with pytest.raises(ShapeError, match=r"'b' is None in particle 1 and \(\(2,\), torch.float32\) in particle 0"):
        stack([one, {"w": torch.zeros(2, 3), "c": torch.zeros(2)}])
    with pytest.raises(ShapeError, match=r"'w' is \(\(3, 2\).*in particle 2 and \(\(2, 3\).*same ranks"):
        stack([one, one, {"w": torch.zeros(3, 2), "b": torch.zeros(2)}])
    with pytest.raises(ShapeError, match=r"'b' is .* torch\.float64\) .* torch\.float32\)"):
        stack([one, {"w": torch.zeros(2, 3), "b": torch.zeros(2, dtype=F64)}])
    single = [{"w": torch.randn(2, 3, requires_grad=True)} for _ in range(4)]
    stacked = stack(single)["w"]
    assert not stacked.requires_grad
    assert all(torch.equal(stacked[i], point["w"]) for i, point in enumerate(single))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_ensemble_of_one_is_the_usual_training_loop(optimizer: str) -> None:
    start = {"w": torch.randn(1, 3, 2, dtype=F64), "b": torch.randn(1, dtype=F64)}
    method = build("ensemble", density, start, optimizer)
    usual = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    stepper = OPTIMIZERS[optimizer](list(usual.values()))
    for batch in batches_of(10):
        method.step(batch)
        stepper.zero_grad()
        (-density(usual, batch).sum()).backward()
        stepper.step()
    torch.testing.assert_close(dict(method.particles), usual, rtol=1e-12, atol=1e-12)


def test_an_ensemble_is_separate_runs_exactly_also_after_some_are_dropped() -> None:
    start, batches = {"w": torch.randn(5, 3, 2, dtype=F64), "b": torch.randn(5, dtype=F64)}, batches_of(8)
    method = build("ensemble", density, start, "adam")
    alone = {i: build("ensemble", density, {k: t[i : i + 1] for k, t in start.items()}, "adam") for i in (4, 1)}
    for step, batch in enumerate(batches):
        if step == 4:
            method.keep_([4, 1])
        for one in (method, *alone.values()):
            one.step(batch)
    for place, one in enumerate(alone.values()):
        for name, tensor in one.particles.items():
            torch.testing.assert_close(method.particles[name][place], tensor[0], rtol=1e-12, atol=1e-12)


def test_a_learning_rate_that_is_a_tensor_stays_one() -> None:
    start = {"w": torch.ones(1, 3, 2), "b": torch.ones(1)}
    method = build("ensemble", bowl, start, optimizer=lambda named: torch.optim.Adam(named, lr=torch.tensor(0.1)))
    state = build("ensemble", bowl, start, optimizer=lambda named: torch.optim.Adam(named, lr=0.25)).state_dict()
    method.load_state_dict(state)  # from a device where it was a number
    assert isinstance(method.optimizer.param_groups[0]["lr"], Tensor)
    assert float(method.optimizer.param_groups[0]["lr"]) == 0.25


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS evaluates its loss several times"):
        build("ensemble", cone, points(3), optimizer=lambda named: torch.optim.LBFGS([t for _, t in named]))


@pytest.mark.parametrize("kernel", [rbf, imq])
@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_svgd_continues_as_if_a_broken_particle_were_not_there(value: float, n: int, kernel: Any) -> None:
    whole = points(n)["x"]
    start = torch.cat([whole[:1], torch.full((1, 3), value, dtype=F64), whole[1:]])
    others = [0, *range(2, n + 1)]
    broken, without = (build("svgd", cone, {"x": x}, kernel=kernel) for x in (start, whole))
    with pytest.warns(ParticleWarning, match=f"Particle 1 of {n + 1}"):
        broken.step(None)
    without.step(None)
    for _ in range(4):
        broken.step(None)
        without.step(None)
    torch.testing.assert_close(broken.particles["x"][others], without.particles["x"], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_the_density_does_not_look_at_spreads_to_no_other_particle(value: float) -> None:
    def half(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return -0.5 * p["x"].square().sum(1) + 0.0 * torch.tanh(p["y"].nan_to_num()).sum(1)

    start = {**points(4), "y": torch.randn(4, 2, dtype=F64)}
    spoilt = {"x": start["x"], "y": start["y"].clone()}
    spoilt["y"][3, 1] = value
    broken = build("svgd", half, spoilt)
    without = build("svgd", half, {name: tensor[:3] for name, tensor in start.items()})
    with pytest.warns(ParticleWarning, match="Particle 3 of 4"):
        broken.step(None)
    without.step(None)
    for name, tensor in without.particles.items():
        torch.testing.assert_close(broken.particles[name][:3], tensor, rtol=0.0, atol=1e-12)


def test_a_step_of_sgld_is_the_printed_formula() -> None:
    start, lr, temperature, scale = torch.randn(3, 2, dtype=F64), 0.1, 0.7, 0.5
    noise = torch.randn(3, 2, dtype=F64, generator=torch.Generator().manual_seed(5 * 1_000_003))
    log_density: Callable[..., Tensor] = lambda p, _: -1.5 * p["x"].square().sum(1)  # noqa: E731
    settings = {"lr": lr, "temperature": temperature, "scale": scale, "seed": 5}
    plain = build("sgld", log_density, {"x": start}, **settings)
    plain.step(None)
    step = lr * scale  # of the density itself
    expected = start - 3 * step * start + (2 * step * temperature) ** 0.5 * noise
    torch.testing.assert_close(plain.particles["x"].detach(), expected)

    preconditioned = build("sgld", log_density, {"x": start}, **settings, memory=0.9)
    preconditioned.step(None)
    steps = step / (3 * scale * start.abs())  # after one step, its gradient is the whole memory
    expected = start - 3 * steps * start + (2 * steps * temperature).sqrt() * noise
    torch.testing.assert_close(preconditioned.particles["x"].detach(), expected, rtol=1e-6, atol=1e-6)


def test_noise_depends_on_the_seed_alone_and_is_never_repeated() -> None:
    flat: Callable[..., Tensor] = lambda p, _: 0.0 * p["x"].sum(1)  # noqa: E731
    start = {"x": torch.zeros(3, 4, dtype=F64)}
    one, two, other = (build("sgld", flat, start, lr=0.5, seed=seed) for seed in (1, 1, 2))
    for number, method in enumerate((one, two, other)):
        torch.manual_seed(number)  # which has no part in it
        method.step(None)
    assert_same(one, two)
    assert not torch.equal(one.particles["x"], other.particles["x"])
    first = one.particles["x"].detach().clone()
    one.optimizer.state.clear()
    one.step(None)
    assert not torch.allclose(one.particles["x"].detach() - first, first)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"temperature": -1.0}, {"memory": 1.0}, {"lr": math.nan}])
def test_sgld_refuses_settings_that_do_not_sample(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"lr must be positive, temperature at least 0 and memory in \[0, 1\), got"):
        build("sgld", cone, points(2), **options)
