"""Every inference method passes the kit; what is particular to one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from infer_kit import F64, OPTIMIZERS, InferenceKit, assert_same, batches_of, bowl, cone, density
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError
from bayestrain.infer import MAP, METHODS, SGLD, SVGD, Ensemble, imq, rbf, stack


class TestSVGD(InferenceKit):
    name = "svgd"


class TestEnsemble(InferenceKit):
    name = "ensemble"


class TestMAP(InferenceKit):
    name = "map"
    n = 1


class TestSGLD(InferenceKit):
    name = "sgld"
    optimizers = ()
    options: ClassVar[dict[str, Any]] = {"lr": 0.05, "seed": 3}


class TestPreconditionedSGLD(InferenceKit):
    name = "sgld"
    optimizers = ()
    options: ClassVar[dict[str, Any]] = {"lr": 0.05, "seed": 3, "memory": 0.9}


def test_every_method_takes_part() -> None:
    assert {kit.name for kit in InferenceKit.__subclasses__()} == set(METHODS)
    assert all(kind.name == name for name, kind in METHODS.items())


def points(n: int, size: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(n, size, dtype=F64)}


@pytest.mark.parametrize(
    ("kind", "n", "said"),
    [
        (SVGD, 1, "svgd needs at least 2 .* got 1. .* use MAP for a single point"),
        (Ensemble, 1, "ensemble needs at least 2 .* got 1. Use MAP for a single point"),
        (MAP, 0, "map needs at least 1 .* got 0"),
        (MAP, 2, "map needs at most 1 .* got 2. Use Ensemble for several"),
    ],
)
def test_a_wrong_number_of_particles_is_refused(kind: Any, n: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(cone, points(n), OPTIMIZERS["sgd"])


def test_particles_that_are_not_alike_cannot_be_stacked() -> None:
    one = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    with pytest.raises(ShapeError, match=r"Particles 1 and 0 .* only one of them has \['b', 'c'\]"):
        stack([one, {"w": torch.zeros(2, 3), "c": torch.zeros(2)}])
    with pytest.raises(ShapeError, match=r"(?s)'w' is \(3, 2\).*in particle 2 and \(2, 3\).*same ranks"):
        stack([one, one, {"w": torch.zeros(3, 2), "b": torch.zeros(2)}])
    with pytest.raises(ShapeError, match=r"'b' is \(2,\) torch\.float64 .* torch\.float32"):
        stack([one, {"w": torch.zeros(2, 3), "b": torch.zeros(2, dtype=F64)}])
    single = [{"w": torch.randn(2, 3, requires_grad=True)} for _ in range(4)]
    stacked = stack(single)["w"]
    assert not stacked.requires_grad
    assert all(torch.equal(stacked[i], point["w"]) for i, point in enumerate(single))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_map_is_the_usual_training_loop(optimizer: str) -> None:
    start = {"w": torch.randn(1, 3, 2, dtype=F64), "b": torch.randn(1, dtype=F64)}
    method = MAP(density, start, OPTIMIZERS[optimizer])
    usual = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    stepper = OPTIMIZERS[optimizer](list(usual.values()))
    for batch in batches_of(10):
        method.step(batch)
        stepper.zero_grad()
        (-density(usual, batch).sum()).backward()
        stepper.step()
    for name, tensor in usual.items():
        torch.testing.assert_close(method.particles[name], tensor, rtol=1e-12, atol=1e-12)


def test_an_ensemble_is_separate_runs_exactly_also_after_some_are_dropped() -> None:
    start, batches = {"w": torch.randn(5, 3, 2, dtype=F64), "b": torch.randn(5, dtype=F64)}, batches_of(8)
    method = Ensemble(density, start, OPTIMIZERS["adam"])
    alone = {i: MAP(density, {k: t[i : i + 1] for k, t in start.items()}, OPTIMIZERS["adam"]) for i in (4, 1)}
    for step, batch in enumerate(batches):
        if step == 4:
            method.keep_([4, 1])
        for one in (method, *alone.values()):
            one.step(batch)
    for place, one in enumerate(alone.values()):
        for name, tensor in one.particles.items():
            torch.testing.assert_close(method.particles[name][place], tensor[0], rtol=1e-12, atol=1e-12)


def test_a_log_prior_with_one_gradient_for_two_tensors_counts_once() -> None:
    start = {"x": torch.randn(3, 2, dtype=F64), "y": torch.randn(3, 2, dtype=F64)}
    method = Ensemble(
        lambda p, _: -0.5 * p["x"].square().sum(1), start, OPTIMIZERS["sgd"],
        log_prior=lambda p: -0.5 * (p["x"] + p["y"]).square().sum(1),
    )  # fmt: skip
    method.step(None)
    total = start["x"] + start["y"]
    torch.testing.assert_close(method.particles["x"].detach(), start["x"] - 0.05 * (total + start["x"]))
    torch.testing.assert_close(method.particles["y"].detach(), start["y"] - 0.05 * total)


def test_a_learning_rate_that_is_a_tensor_is_changed_in_place() -> None:
    method = MAP(bowl, {"w": torch.ones(1, 3, 2), "b": torch.ones(1)}, lambda named: torch.optim.Adam(
        named, lr=torch.tensor(0.1)
    ))  # fmt: skip
    lr = method.optimizer.param_groups[0]["lr"]
    method.set_lr(0.0)
    assert method.optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.0
    state = MAP(bowl, {"w": torch.ones(1, 3, 2), "b": torch.ones(1)}, lambda named: torch.optim.Adam(
        named, lr=0.25
    )).state_dict()  # fmt: skip
    method.load_state_dict(state)  # from a device where it was a number
    assert isinstance(method.optimizer.param_groups[0]["lr"], Tensor)
    assert float(method.optimizer.param_groups[0]["lr"]) == 0.25


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS evaluates its loss several times"):
        Ensemble(cone, points(3), lambda named: torch.optim.LBFGS([tensor for _, tensor in named]))


@pytest.mark.parametrize("kind", [MAP, Ensemble, SVGD, SGLD])
def test_clip_limits_how_far_a_particle_moves_but_not_where_to(kind: Any) -> None:
    n = 1 if kind is MAP else 5
    lengths = torch.tensor([50.0, 20.0, 0.02, 0.01, 3.0], dtype=F64)[:n]
    angle = torch.linspace(0, 3, n, dtype=F64)
    start = {"x": lengths * angle.cos(), "y": torch.stack([lengths * angle.sin()] * 2, dim=1)}
    options = {"temperature": 0.0} if kind is SGLD else {"optimizer": OPTIMIZERS["sgd"]}
    moved = {}
    for clip in (None, 0.25):
        method = kind(
            lambda p, _: -0.5 * p["x"].square() - 0.5 * p["y"].square().sum(1), start, clip=clip, scale=0.1, **options
        )
        method.set_lr(1.0)
        method.step(None)
        steps = {name: tensor.detach() - start[name] for name, tensor in method.particles.items()}
        moved[clip] = torch.cat([steps["x"][:, None], steps["y"]], dim=1)
    length = moved[None].norm(dim=1, keepdim=True)
    assert bool((length > 0.25).any())
    torch.testing.assert_close(moved[0.25], moved[None] * (0.25 / length).clamp_max(1.0), rtol=1e-10, atol=1e-12)


# --- SVGD with broken particles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [rbf, imq])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_svgd_continues_as_if_a_broken_particle_were_not_there(
    value: float, n: int, chunk: int | None, kernel: Any
) -> None:
    whole = points(n)["x"]
    start = torch.cat([whole[:1], torch.full((1, 3), value, dtype=F64), whole[1:]])
    others = [0, *range(2, n + 1)]
    broken, without = (
        SVGD(cone, {"x": x}, OPTIMIZERS["sgd"], kernel=kernel, chunk=chunk, times_n=True) for x in (start, whole)
    )
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
    broken = SVGD(half, spoilt, OPTIMIZERS["sgd"])
    without = SVGD(half, {name: tensor[:3] for name, tensor in start.items()}, OPTIMIZERS["sgd"])
    with pytest.warns(ParticleWarning, match="Particle 3 of 4"):
        broken.step(None)
    without.step(None)
    for name, tensor in without.particles.items():
        torch.testing.assert_close(broken.particles[name][:3], tensor, rtol=0.0, atol=1e-12)


def test_with_one_survivor_svgd_climbs_its_own_gradient() -> None:
    start = points(3)
    start["x"][:2] = math.nan
    method = SVGD(lambda p, _: -0.5 * p["x"].square().sum(1), start, OPTIMIZERS["sgd"])
    with pytest.warns(ParticleWarning) as warned:
        method.step(None)
    assert sorted(str(warning.message)[:10] for warning in warned) == ["Particle 0", "Particle 1"]
    torch.testing.assert_close(method.particles["x"][2].detach(), 0.95 * start["x"][2])


def test_a_dropped_particle_is_forgotten_and_the_others_have_new_numbers() -> None:
    start = points(4)
    start["x"][1] = math.nan
    method = SVGD(cone, start, OPTIMIZERS["sgd"])
    with pytest.warns(ParticleWarning, match="Particle 1 of 4"):
        method.step(None)
    method.keep_([0, 2, 3])
    assert method.step(None).alive.tolist() == [True, True, True]
    with torch.no_grad():
        method.particles["x"][1].fill_(math.nan)
    with pytest.warns(ParticleWarning, match="Particle 1 of 3"):
        method.step(None)


# --- SGLD -------------------------------------------------------------------------------------------------------------


def test_a_step_of_sgld_is_the_printed_formula() -> None:
    start, lr, temperature, scale = torch.randn(3, 2, dtype=F64), 0.1, 0.7, 0.5
    noise = torch.randn(3, 2, dtype=F64, generator=torch.Generator().manual_seed(5))
    log_density: Callable[..., Tensor] = lambda p, _: -1.5 * p["x"].square().sum(1)  # noqa: E731
    plain = SGLD(log_density, {"x": start}, lr=lr, temperature=temperature, scale=scale, seed=5)
    plain.step(None)
    step = lr * scale  # of the density itself
    expected = start - 3 * step * start + (2 * step * temperature) ** 0.5 * noise
    torch.testing.assert_close(plain.particles["x"].detach(), expected)

    preconditioned = SGLD(log_density, {"x": start}, lr=lr, temperature=temperature, scale=scale, seed=5, memory=0.9)
    preconditioned.step(None)
    steps = step / (3 * scale * start.abs())  # after one step, its gradient is the whole memory
    expected = start - 3 * steps * start + (2 * steps * temperature).sqrt() * noise
    torch.testing.assert_close(preconditioned.particles["x"].detach(), expected, rtol=1e-6, atol=1e-6)


def test_sgld_at_temperature_zero_is_gradient_ascent() -> None:
    start = points(3)
    cold = SGLD(cone, start, lr=0.05, temperature=0.0)
    ascent = Ensemble(cone, start, OPTIMIZERS["sgd"])
    for _ in range(5):
        cold.step(None)
        ascent.step(None)
    assert_same(cold, ascent)


def test_noise_depends_on_the_seed_alone_and_is_never_repeated() -> None:
    flat: Callable[..., Tensor] = lambda p, _: 0.0 * p["x"].sum(1)  # noqa: E731
    start = {"x": torch.zeros(3, 4, dtype=F64)}
    one, two, other = (SGLD(flat, start, lr=0.5, seed=seed) for seed in (1, 1, 2))
    for number, method in enumerate((one, two, other)):
        torch.manual_seed(number)  # which has no part in it
        method.step(None)
    assert_same(one, two)
    assert not torch.equal(one.particles["x"], other.particles["x"])
    first = one.particles["x"].detach().clone()
    one.restart_optimizer()
    one.step(None)
    assert not torch.allclose(one.particles["x"].detach() - first, first)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"temperature": -1.0}, {"memory": 1.0}, {"lr": math.nan}])
def test_sgld_refuses_settings_that_do_not_sample(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"lr must be positive, temperature at least 0 and memory in \[0, 1\), got"):
        SGLD(cone, points(2), **options)  # type: ignore[arg-type]


def test_a_state_without_usable_noise_is_refused_before_any_change() -> None:
    method = SGLD(cone, points(3), lr=0.1)
    method.step(None)
    before = method.particles["x"].detach().clone()
    state = {**method.state_dict(), "noise": torch.zeros(3, dtype=torch.uint8)}
    state["particles"] = {"x": torch.zeros(3, 3, dtype=F64)}
    with pytest.raises((ConfigError, RuntimeError)):
        method.load_state_dict(state)
    assert torch.equal(method.particles["x"], before)
