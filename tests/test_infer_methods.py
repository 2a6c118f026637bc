"""What all inference methods have in common, shown for every one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.infer import MAP, METHODS, SGLD, Ensemble, Langevin, Method, StepInfo

F64 = torch.float64
MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.05),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.05, momentum=0.9),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=0.05),
    "rmsprop": lambda tensors: torch.optim.RMSprop(tensors, lr=0.05),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "svgd": ("svgd", {}),
    "ensemble": ("ensemble", {}),
    "map": ("map", {}),
    "sgld": ("sgld", {"lr": 0.05, "seed": 3}),
    "preconditioned sgld": ("sgld", {"lr": 0.05, "seed": 3, "memory": 0.9}),
}
every_case = pytest.mark.parametrize("case", CASES)
OPTIMISED = [case for case, (name, _) in CASES.items() if name != "sgld"]
"""Those that take an optimiser; SGLD is one."""


def make(case: str, density: Any, start: dict[str, Tensor], optimizer: str = "adam", **options: Any) -> Method:
    name, own = CASES[case]
    kind: Any = METHODS[name]
    if name == "sgld":
        return kind(density, start, **{**own, **options})  # type: ignore[no-any-return]
    return kind(density, start, OPTIMIZERS[optimizer], **{**own, **options})  # type: ignore[no-any-return]


def number(case: str) -> int:
    return 1 if case == "map" else 5


def start_of(case: str, shift: float = 3.0) -> dict[str, Tensor]:
    n = number(case)
    return {"w": shift + torch.randn(n, 3, 2, dtype=F64), "b": shift + torch.randn(n, dtype=F64)}


def batches_of(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, dtype=F64), torch.randn(4, 2, dtype=F64)) for _ in range(count)]


def density(p: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    misfit: Tensor = (y - x @ p["w"] - p["b"][:, None, None]).square().sum((1, 2))
    return -0.5 * misfit - 0.5 * p["w"].square().sum((1, 2)) - 0.5 * p["b"].square()


def bowl(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    return -0.5 * p["w"].square().sum((1, 2)) - 0.5 * p["b"].square()


def assert_same(method: Method, other: Method) -> None:
    """Bit for bit."""
    for name, tensor in method.particles.items():
        assert torch.equal(tensor, other.particles[name]), name
    for name, tensor in method.carried.items():
        assert torch.equal(tensor, other.carried[name]), name


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
