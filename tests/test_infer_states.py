"""What inference methods remember: states in files, some particles only, restarted optimisers, noise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from infer_kit import (
    CASES,
    F64,
    OPTIMISED,
    OPTIMIZERS,
    assert_same,
    batches_of,
    bowl,
    density,
    every_case,
    make,
    number,
    start_of,
)
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.infer import MAP, SGLD, Ensemble, Langevin, Method


def running_density(p: dict[str, Tensor], batch: Any) -> Tensor:
    """A density with a memory of its own: a running mean of the data, as batch norm keeps."""
    with torch.no_grad():
        p["mean"].lerp_(batch[1].mean(0).expand_as(p["mean"]), 0.2)
    return density(p, batch) - (p["b"][:, None] - p["mean"]).square().sum(1)


def with_memory(case: str, optimizer: str) -> Method:
    carried = {"mean": torch.zeros(number(case), 2, dtype=F64)}
    return make(case, running_density, start_of(case), optimizer, carried=carried)


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        *((case, optimizer) for case in OPTIMISED for optimizer in OPTIMIZERS),
        *((case, "its own") for case in CASES if case not in OPTIMISED),
    ],
)
def test_a_state_from_a_file_goes_on_bit_for_bit(case: str, optimizer: str, tmp_path: Path) -> None:
    batches = batches_of(9)
    torch.manual_seed(1)
    whole = with_memory(case, optimizer)
    torch.manual_seed(1)
    first = with_memory(case, optimizer)
    for batch in batches:
        whole.step(batch)
    for batch in batches[:5]:
        first.step(batch)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = with_memory(case, optimizer)  # from another start
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(second, first)
    for batch in batches[5:]:
        second.step(batch)
    assert_same(second, whole)
    assert second.steps == whole.steps == 9


def chosen_only(value: Any, n: int, chosen: list[int]) -> Any:
    """A state with only some particles in it."""
    if isinstance(value, Tensor) and value.ndim and len(value) == n:
        return value[chosen]
    if isinstance(value, dict):
        return {key: entry if key == "noise" else chosen_only(entry, n, chosen) for key, entry in value.items()}
    return value


@every_case
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_keep_goes_on_with_some_particles_and_what_the_optimiser_knows_of_them(case: str, optimizer: str) -> None:
    batches = batches_of(6)
    chosen = [0] if case == "map" else [3, 0]
    method = with_memory(case, optimizer)
    for batch in batches[:3]:
        method.step(batch)
    state = chosen_only(copy.deepcopy(method.state_dict()), number(case), chosen)
    fewer = {name: tensor.detach()[chosen] for name, tensor in method.particles.items()}
    other = make(case, running_density, fewer, optimizer, carried={"mean": torch.zeros(len(chosen), 2, dtype=F64)})
    other.load_state_dict(state)
    method.keep_(chosen)
    assert method.n == len(chosen)
    assert_same(method, other)
    for batch in batches[3:]:
        assert method.step(batch).alive.tolist() == [True] * len(chosen)
        other.step(batch)
    assert_same(method, other)


def test_kept_members_of_an_ensemble_go_on_as_if_alone() -> None:
    start, batches = start_of("ensemble"), batches_of(8)
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


@every_case
def test_keep_refuses_too_few_and_the_same_twice(case: str) -> None:
    method = make(case, bowl, start_of(case))
    name, fewest = method.name, method.fewest
    with pytest.raises(ConfigError, match=rf"{name} needs at least {fewest} different particles, got \[\]\."):
        method.keep_([])
    with pytest.raises(ConfigError, match=rf"{name} needs at least {fewest} different particles, got \[0, 0\]\."):
        method.keep_([0, 0])
    assert method.n == number(case)
    if fewest == 2:
        with pytest.raises(ConfigError, match=r"at least 2 different particles, got \[1\]\."):
            method.keep_([1])


@pytest.mark.parametrize("case", OPTIMISED)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_restarted_optimiser_is_one_that_has_seen_nothing(case: str, optimizer: str) -> None:
    batches = batches_of(6)
    method, going_on = (make(case, density, start_of(case), optimizer) for _ in range(2))
    going_on.load_state_dict(copy.deepcopy(method.state_dict()))
    for batch in batches[:3]:
        method.step(batch)
        going_on.step(batch)
    method.restart_optimizer()
    fresh = make(case, density, {name: t.detach() for name, t in method.particles.items()}, optimizer)
    for batch in batches[3:]:
        for one in (method, fresh, going_on):
            one.step(batch)
    assert_same(method, fresh)
    assert not torch.equal(method.particles["w"], going_on.particles["w"])


def test_restarted_sgld_forgets_its_preconditioner_but_never_repeats_its_noise() -> None:
    start = {"x": torch.zeros(3, 4, dtype=F64)}

    def flat(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
        return 0.0 * p["x"].sum(1)

    method = SGLD(flat, start, lr=0.5)
    method.step(None)
    first = method.particles["x"].detach().clone()
    method.restart_optimizer()
    method.step(None)
    assert not torch.allclose(method.particles["x"].detach() - first, first)
    uninterrupted = SGLD(flat, start, lr=0.5)
    for _ in range(2):
        uninterrupted.step(None)
    assert torch.equal(uninterrupted.particles["x"], method.particles["x"])

    preconditioned = make("preconditioned sgld", bowl, start_of("sgld"))
    preconditioned.step(None)
    assert preconditioned.optimizer.state
    preconditioned.restart_optimizer()
    assert not preconditioned.optimizer.state


def test_chains_with_one_seed_are_the_same_and_with_another_are_not() -> None:
    start = start_of("sgld")
    one, two, other = (SGLD(bowl, start, lr=0.1, seed=seed) for seed in (1, 1, 2))
    for method in (one, two, other):
        torch.manual_seed(0)  # which has no part in it
        torch.randn(3 if method is one else 4)
        method.step(None)
    assert_same(one, two)
    assert not torch.equal(one.particles["w"], other.particles["w"])


def test_langevin_is_an_optimiser_on_its_own() -> None:
    x = torch.full((4,), 3.0, requires_grad=True)
    optimizer = Langevin([x], lr=0.1, temperature=0.0, scale=1.0, memory=0.0, seed=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * x.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 18.0
    torch.testing.assert_close(x.detach(), torch.full((4,), 2.7))


def test_a_state_of_other_particles_is_refused_before_anything_changes() -> None:
    method = with_memory("ensemble", "adam")
    before = {name: tensor.detach().clone() for name, tensor in method.particles.items()}
    state = with_memory("ensemble", "adam").state_dict()
    state["carried"] = {"mean": torch.zeros(5, 3, dtype=F64)}
    with pytest.raises(ShapeError, match="The saved carried do not have the names and shapes of those here"):
        method.load_state_dict(state)
    for name, tensor in before.items():
        assert torch.equal(method.particles[name], tensor)
    state = with_memory("ensemble", "adam").state_dict()
    state["particles"] = {"w": state["particles"]["w"]}
    with pytest.raises(ShapeError, match="The saved particles do not have the names and shapes of those here"):
        method.load_state_dict(state)
