"""Bad input to the inference methods, and particles that break on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.infer import MAP, METHODS, SGLD, SVGD, Ensemble, Kernel, count, imq, rbf, stack

F64 = torch.float64


def sgd(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.1)


def bowl(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    return -0.5 * p["x"].square().sum(1)


def points(n: int, size: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(n, size, dtype=F64)}


@pytest.mark.parametrize(
    ("make", "n", "said"),
    [
        (lambda p: SVGD(bowl, p, sgd), 0, "svgd needs at least 2 particles, got 0. One particle has nobody"),
        (lambda p: SVGD(bowl, p, sgd), 1, "got 1. One particle has nobody to keep a distance from: use MAP for"),
        (lambda p: Ensemble(bowl, p, sgd), 0, "ensemble needs at least 2 particles, got 0. Use MAP for a single point"),
        (lambda p: Ensemble(bowl, p, sgd), 1, "ensemble needs at least 2 particles, got 1. Use MAP for a single point"),
        (lambda p: SGLD(bowl, p), 0, "sgld needs at least 1 particles, got 0."),
        (lambda p: MAP(bowl, p, sgd), 0, "map needs at least 1 particles, got 0."),
        (lambda p: MAP(bowl, p, sgd), 2, "MAP is a single point, got 2 particles. Use Ensemble for several."),
    ],
)
def test_a_wrong_number_of_particles_is_refused(make: Callable[[Any], Any], n: int, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make(points(n))


def test_particles_that_are_not_alike_cannot_be_stacked() -> None:
    one = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    with pytest.raises(ShapeError, match=r"Particle 1 and particle 0 .* \['b', 'c'\] is in only one"):
        stack([one, {"w": torch.zeros(2, 3), "c": torch.zeros(2)}])
    with pytest.raises(ShapeError, match=r"(?s)Particle 2 has 'w' of shape \(3, 2\).*particle 0 has \(2, 3\).*same ra"):
        stack([one, one, {"w": torch.zeros(3, 2), "b": torch.zeros(2)}])
    with pytest.raises(ShapeError, match=r"Particle 1 has 'b' of shape \(2,\) and torch\.float64, .* torch\.float32"):
        stack([one, {"w": torch.zeros(2, 3), "b": torch.zeros(2, dtype=F64)}])
    with pytest.raises(ShapeError, match="There is no particle to stack"):
        stack([])
    with pytest.raises(ShapeError, match="There is no tensor in these particles"):
        count({})
    with pytest.raises(ShapeError, match=r"the same number of particles .* got \{'x': 2, 'y': 3\}"):
        SVGD(bowl, {"x": torch.zeros(2, 1), "y": torch.zeros(3, 1)}, sgd)


def test_stack_puts_points_side_by_side() -> None:
    single = [{"w": torch.randn(2, 3, requires_grad=True)} for _ in range(4)]
    stacked = stack(single)
    assert count(stacked) == 4
    assert not stacked["w"].requires_grad
    for i, point in enumerate(single):
        assert torch.equal(stacked["w"][i], point["w"])


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_log_density_of_the_wrong_shape_is_refused(chunk: int | None) -> None:
    many = chunk or 4
    for density, shape in (
        (lambda p, _: p["x"].sum(), "()"),
        (lambda p, _: p["x"], f"({many}, 3)"),
        (lambda p, _: p["x"].sum(1, keepdim=True), f"({many}, 1)"),
    ):
        said = f"log_density must return one number per particle, shape ({many},), got {shape}."
        with pytest.raises(ShapeError, match=re.escape(said)):
            SVGD(density, points(4), sgd, chunk=chunk).step(None)


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_no_particles_is_refused(chunk: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk is a number of particles and must be at least 1, got {chunk}"):
        Ensemble(bowl, points(3), sgd, chunk=chunk)


def test_carried_tensors_for_other_particles_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"There are 3 particles but carried tensors for 2\."):
        Ensemble(bowl, points(3), sgd, carried={"mean": torch.zeros(2)})


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"temperature": -1.0}, {"memory": 1.0}, {"lr": math.nan}])
def test_sgld_refuses_settings_that_do_not_sample(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"lr must be positive, temperature not negative and memory in \[0, 1\), got"):
        SGLD(bowl, points(2), **options)  # type: ignore[arg-type]


def test_a_state_of_another_method_is_refused() -> None:
    state = Ensemble(bowl, points(3), sgd).state_dict()
    with pytest.raises(ConfigError, match="This is a state of 'ensemble' and cannot be continued by 'svgd'"):
        SVGD(bowl, points(3), sgd).load_state_dict(state)


def cone(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    """Finite at its tip, where its gradient is not."""
    return -p["x"].square().sum(1).sqrt() - 0.1 * p["x"].pow(4).sum(1)


def make(name: str, start: dict[str, Tensor], density: Any = cone, **options: Any) -> Any:
    kind: Any = METHODS[name]
    return kind(density, start, **({"lr": 0.1} if name == "sgld" else {"optimizer": sgd}), **options)


BREAKS: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda x: x.fill_(0.0),
    "nan": lambda x: x.fill_(math.nan),
    "one nan": lambda x: x[1].fill_(math.nan),
    "infinite": lambda x: x[0].fill_(math.inf),
}


@pytest.mark.parametrize("kernel", [rbf, imq])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("how", BREAKS)
def test_svgd_goes_on_as_if_a_broken_particle_were_not_there(
    how: str, n: int, chunk: int | None, kernel: Kernel
) -> None:
    whole = points(n)["x"]
    start = torch.cat([whole[:1], torch.zeros(1, 3, dtype=F64), whole[1:]])
    BREAKS[how](start[1])
    others = [0, *range(2, n + 1)]
    broken = SVGD(cone, {"x": start}, sgd, kernel=kernel, chunk=chunk)
    without = SVGD(cone, {"x": whole}, sgd, kernel=kernel, chunk=chunk)
    said = f"Particle 1 of {n + 1} has a log density or gradient that is not finite. It gets no push then, the others"
    with pytest.warns(ParticleWarning, match=re.escape(said)) as warned:
        info = broken.step(None)
    assert len(warned) == 1
    assert info.alive.nonzero().flatten().tolist() == others
    without.step(None)
    for _ in range(4):  # no second warning, which would be an error here
        broken.step(None)
        without.step(None)
    torch.testing.assert_close(broken.particles["x"][others], without.particles["x"], rtol=0.0, atol=1e-12)
    torch.testing.assert_close(broken.particles["x"][1].detach(), start[1], rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", ["svgd", "ensemble", "sgld"])
@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_particle_stays_where_it_is_and_the_others_move(name: str, how: str) -> None:
    start = points(4)
    BREAKS[how](start["x"][2])
    method = make(name, start)
    with pytest.warns(ParticleWarning, match="Particle 2 of 4 has"):
        method.step(None)
    after = method.particles["x"].detach()
    torch.testing.assert_close(after[2], start["x"][2], rtol=0.0, atol=0.0, equal_nan=True)
    moved = (after - start["x"]).norm(dim=1)[[0, 1, 3]]
    assert bool((moved > 1e-3).all())


@pytest.mark.parametrize("name", ["ensemble", "sgld"])
def test_chains_and_members_do_not_notice_a_broken_one(name: str) -> None:
    start = points(4)
    spoilt = {"x": start["x"].clone()}
    spoilt["x"][2] = math.nan
    broken, whole = make(name, spoilt), make(name, start)
    with pytest.warns(ParticleWarning, match="Particle 2 of 4 has"):
        broken.step(None)
    whole.step(None)
    for _ in range(3):
        broken.step(None)
        whole.step(None)
    others = [0, 1, 3]
    assert torch.equal(broken.particles["x"][others], whole.particles["x"][others])


def test_with_one_survivor_svgd_climbs_its_own_gradient() -> None:
    start = points(3)
    start["x"][:2] = math.nan
    method = SVGD(bowl, start, sgd)
    with pytest.warns(ParticleWarning) as warned:
        method.step(None)
    assert sorted(str(warning.message)[:10] for warning in warned) == ["Particle 0", "Particle 1"]
    torch.testing.assert_close(method.particles["x"][2].detach(), 0.9 * start["x"][2])


def test_times_n_counts_the_living_only() -> None:
    whole = points(3)
    start = {"x": torch.cat([whole["x"], torch.full((1, 3), math.nan, dtype=F64)])}
    broken, without = SVGD(cone, start, sgd, times_n=True), SVGD(cone, whole, sgd, times_n=True)
    with pytest.warns(ParticleWarning, match="Particle 3 of 4"):
        broken.step(None)
    without.step(None)
    torch.testing.assert_close(broken.particles["x"][:3], without.particles["x"], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_the_density_does_not_even_look_at_spreads_to_nobody(value: float) -> None:
    def half(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return -0.5 * p["x"].square().sum(1) + 0.0 * torch.tanh(p["y"].nan_to_num()).sum(1)

    start = {**points(4), "y": torch.randn(4, 2, dtype=F64)}
    spoilt = {"x": start["x"], "y": start["y"].clone()}
    spoilt["y"][3, 1] = value
    broken = SVGD(half, spoilt, sgd)
    without = SVGD(half, {name: tensor[:3] for name, tensor in start.items()}, sgd)
    with pytest.warns(ParticleWarning, match="Particle 3 of 4"):
        broken.step(None)
    without.step(None)
    for name, tensor in without.particles.items():
        torch.testing.assert_close(broken.particles[name][:3], tensor, rtol=0.0, atol=1e-12)


def test_a_particle_that_was_broken_for_one_batch_comes_back() -> None:
    def stumbling(p: dict[str, Tensor], batch: Tensor) -> Tensor:
        return bowl(p, None) + batch

    method = Ensemble(stumbling, points(3), sgd)
    fine, bad = torch.zeros(3, dtype=F64), torch.tensor([0.0, math.nan, 0.0], dtype=F64)
    before = method.particles["x"].detach().clone()
    with pytest.warns(ParticleWarning, match="Particle 1 of 3"):
        assert method.step(bad).alive.tolist() == [True, False, True]
    assert method.step(fine).alive.tolist() == [True, True, True]
    factors = torch.tensor([0.81, 0.9, 0.81], dtype=F64)[:, None]
    torch.testing.assert_close(method.particles["x"].detach(), factors * before)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("good_steps", [0, 3])
def test_when_all_are_broken_training_ends_and_nobody_has_moved(name: str, good_steps: int) -> None:
    def sometimes(p: dict[str, Tensor], batch: float) -> Tensor:
        return bowl(p, None) * batch

    method = make(name, points(1 if name == "map" else 3), sometimes)
    for _ in range(good_steps):
        method.step(1.0)
    before = method.particles["x"].detach().clone()
    said = "No particle has a finite log density and gradient. Try a smaller learning rate, and look for a log of zero"
    with pytest.raises(TrainingError, match=re.escape(said)):
        method.step(math.nan)
    assert torch.equal(method.particles["x"], before)


def test_a_dropped_particle_is_not_spoken_of_again_and_the_others_have_new_numbers() -> None:
    start = points(4)
    start["x"][1] = math.nan
    method = SVGD(bowl, start, sgd)
    with pytest.warns(ParticleWarning, match="Particle 1 of 4"):
        method.step(None)
    method.keep_([0, 2, 3])
    assert method.step(None).alive.tolist() == [True, True, True]
    with torch.no_grad():
        method.particles["x"][1].fill_(math.nan)
    with pytest.warns(ParticleWarning, match="Particle 1 of 3"):
        method.step(None)
