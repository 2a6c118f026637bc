"""What all inference methods have in common, shown for every one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infer_kit import (
    CASES,
    F64,
    OPTIMISED,
    OPTIMIZERS,
    batches_of,
    bowl,
    density,
    every_case,
    make,
    number,
    start_of,
)
from torch import Tensor

from bayestrain.infer import MAP, METHODS, Ensemble, StepInfo


def test_every_method_takes_part() -> None:
    assert {name for name, _ in CASES.values()} == set(METHODS)
    assert all(kind.name == name for name, kind in METHODS.items())


@every_case
def test_the_start_is_copied_and_left_as_it_is(case: str) -> None:
    start = start_of(case)
    before = {name: tensor.clone() for name, tensor in start.items()}
    method = make(case, bowl, start)
    assert method.n == number(case)
    for name, tensor in before.items():
        assert torch.equal(method.particles[name], tensor)
    method.step(None)
    for name, tensor in before.items():
        assert torch.equal(start[name], tensor)
        assert not torch.equal(method.particles[name], tensor)


@every_case
def test_a_start_that_is_a_view_of_something_else_is_taken_too(case: str) -> None:
    start = start_of(case)
    turned = {"w": start["w"].mT.contiguous().mT.requires_grad_(), "b": start["b"]}
    assert not turned["w"].is_contiguous()
    plain, other = make(case, density, start), make(case, density, turned)
    (batch,) = batches_of(1)
    plain.step(batch)
    other.step(batch)
    for name, tensor in plain.particles.items():
        torch.testing.assert_close(other.particles[name], tensor, rtol=1e-12, atol=1e-12)


@every_case
def test_a_step_tells_the_log_densities_from_before_it(case: str) -> None:
    start = start_of(case)
    (batch,) = batches_of(1)
    info = make(case, density, start).step(batch)
    assert isinstance(info, StepInfo)
    assert info.alive.tolist() == [True] * number(case)
    assert not info.log_density.requires_grad
    torch.testing.assert_close(info.log_density, density(start, batch))


@every_case
def test_particles_move_uphill(case: str) -> None:
    method = make(case, bowl, start_of(case))
    first = method.step(None).log_density
    for _ in range(30):
        last = method.step(None).log_density
    assert float((last - first).mean()) > 3


@pytest.mark.parametrize("case", OPTIMISED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_torch_optimiser_can_move_them(case: str, optimizer: str) -> None:
    method = make(case, bowl, start_of(case), optimizer)
    first = method.step(None).log_density
    for _ in range(100):
        last = method.step(None).log_density
    assert bool((last > first).all())
    assert bool((last > -8).all())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_map_is_the_usual_training_loop(optimizer: str) -> None:
    start = start_of("map")
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


@every_case
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 99])
def test_chunks_change_nothing(case: str, chunk: int) -> None:
    start, batches = start_of(case), batches_of(6)
    whole, parts = make(case, density, start), make(case, density, start, chunk=chunk)
    for batch in batches:
        torch.testing.assert_close(parts.step(batch).log_density, whole.step(batch).log_density, rtol=1e-12, atol=0.0)
    for name, tensor in whole.particles.items():
        torch.testing.assert_close(parts.particles[name], tensor, rtol=0.0, atol=1e-12)


@every_case
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_log_prior_of_its_own_is_a_part_of_the_density_and_asked_once_for_all(case: str, chunk: int | None) -> None:
    asked: list[int] = []

    def log_prior(p: dict[str, Tensor]) -> Tensor:
        asked.append(len(p["w"]))
        return -((p["w"][:, 0, 0] + p["b"] - p["offset"]) ** 2)

    def together(p: dict[str, Tensor], batch: Any) -> Tensor:
        return density(p, batch) - ((p["w"][:, 0, 0] + p["b"] - p["offset"]) ** 2)

    start, n = start_of(case), number(case)
    carried = {"offset": torch.arange(n, dtype=F64)}
    apart = make(case, density, start, log_prior=log_prior, carried=carried, chunk=chunk)
    whole = make(case, together, start, carried=carried, chunk=chunk)
    for batch in batches_of(4):
        torch.testing.assert_close(apart.step(batch).log_density, whole.step(batch).log_density)
    for name, tensor in whole.particles.items():
        torch.testing.assert_close(apart.particles[name], tensor, rtol=1e-9, atol=1e-9)
    assert asked == [n] * 4


def test_a_log_prior_with_one_gradient_for_two_tensors_counts_once() -> None:
    def nothing(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return 0.0 * p["x"].sum(1)

    start = {"x": torch.randn(3, 2, dtype=F64), "y": torch.randn(3, 2, dtype=F64)}
    method = Ensemble(nothing, start, OPTIMIZERS["sgd"], log_prior=lambda p: -0.5 * (p["x"] + p["y"]).square().sum(1))
    method.step(None)
    for name, tensor in start.items():
        expected = tensor - 0.05 * (start["x"] + start["y"])
        torch.testing.assert_close(method.particles[name].detach(), expected)


@every_case
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_carried_tensors_come_along_in_chunks_and_may_be_changed_in_place(case: str, chunk: int | None) -> None:
    n = number(case)
    sizes: list[int] = []

    def counting(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        assert set(p) == {"x", "centre", "calls"}
        assert not p["centre"].requires_grad
        sizes.append(len(p["x"]))
        assert p["centre"].shape == p["x"].shape
        p["calls"] += 1
        return -0.5 * (p["x"] - p["centre"]).square().sum(1)

    centre = 100.0 * torch.arange(n, dtype=F64)[:, None].expand(n, 2)
    carried = {"centre": centre.clone(), "calls": torch.zeros(n, dtype=torch.int64)}
    method = make(case, counting, {"x": torch.zeros(n, 2, dtype=F64)}, "sgd", carried=carried, chunk=chunk)
    info = method.step(None)
    torch.testing.assert_close(info.log_density, -0.5 * centre.square().sum(1))  # everybody met the own centre
    method.step(None)
    assert method.carried["calls"].tolist() == [2] * n
    assert torch.equal(method.carried["centre"], centre)
    assert sizes[: len(sizes) // 2] == [min(chunk or n, n - i) for i in range(0, n, chunk or n)]


@every_case
def test_a_tensor_that_the_density_ignores_has_no_gradient_and_does_no_harm(case: str) -> None:
    def half(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return -0.5 * p["b"].square()

    method = make(case, half, start_of(case), "sgd", **({"temperature": 0.0} if "sgld" in case else {}))
    before = method.particles["w"].detach().clone()
    method.step(None)
    assert bool(method.particles["w"].isfinite().all())
    if case != "svgd":  # which pushes particles apart all the same
        assert torch.equal(method.particles["w"], before)


@every_case
def test_a_learning_rate_of_zero_stops_everybody(case: str) -> None:
    method = make(case, bowl, start_of(case))
    method.step(None)
    before = {name: tensor.detach().clone() for name, tensor in method.particles.items()}
    method.set_lr(0.0)
    method.step(None)
    for name, tensor in before.items():
        assert torch.equal(method.particles[name], tensor)


def test_a_learning_rate_that_is_a_tensor_is_changed_where_it_is() -> None:
    method = MAP(bowl, start_of("map"), lambda tensors: torch.optim.Adam(tensors, lr=torch.tensor(0.1)))
    lr = method.optimizer.param_groups[0]["lr"]
    method.set_lr(0.0)
    assert method.optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.0


@pytest.mark.parametrize("case", [*OPTIMISED, "sgld"])  # a preconditioner comes after the clipping
def test_clip_limits_how_far_a_particle_goes_and_turns_nobody(case: str) -> None:
    n = number(case)
    lengths = torch.tensor([50.0, 20.0, 0.02, 0.01, 3.0], dtype=F64)[:n]
    angle = torch.linspace(0, 3, n, dtype=F64)
    start = {"x": lengths * angle.cos(), "y": torch.stack([lengths * angle.sin()] * 2, dim=1)}

    def plane(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return -0.5 * p["x"].square() - 0.5 * p["y"].square().sum(1)

    cold = {"temperature": 0.0} if "sgld" in case else {}
    moved = {}
    for clip in (None, 0.25):
        method = make(case, plane, start, "sgd", clip=clip, scale=0.1, **cold)
        method.set_lr(1.0)
        method.step(None)
        steps = {name: tensor.detach() - start[name] for name, tensor in method.particles.items()}
        moved[clip] = torch.cat([steps["x"][:, None], steps["y"]], dim=1)
    free, clipped = moved[None], moved[0.25]
    length = free.norm(dim=1, keepdim=True)
    assert bool((length > 0.25).any())
    torch.testing.assert_close(clipped, free * (0.25 / length).clamp_max(1.0), rtol=1e-10, atol=1e-12)
