"""Particles of many small tensors are handled as a few large ones, without a difference to be seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_kit import Calls
from torch import Tensor

from bayestrain.infer import MAP, SVGD, Ensemble, diagnose
from bayestrain.infer.particles import BLOCK, groups, matrices, matrix, parts


def bowl(particles: dict[str, Tensor], _: Any) -> Tensor:
    return torch.stack([-t.double().square().flatten(1).sum(1) for t in particles.values()]).sum(0)


def test_small_tensors_stand_together_and_large_ones_alone() -> None:
    widths = {"a": 3, "b": BLOCK + 1, "c": 5, "d": BLOCK - 2, "e": 2, "f": 0, "g": 1}
    particles = {name: torch.zeros(2, width) for name, width in widths.items()}
    particles["h"] = torch.zeros(2, dtype=torch.float64)
    assert groups(particles) == [["a", "c"], ["b"], ["d", "e", "f"], ["g"], ["h"]]
    assert [whole.shape[1] for whole in matrices(particles)] == [8, BLOCK + 1, BLOCK, 1, 1]
    assert groups({"empty": torch.zeros(4, 0)}) == [["empty"]]


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.integers(1, 4), SHAPES)
def test_a_matrix_is_made_of_its_parts(n: int, shapes: list[tuple[int, ...]]) -> None:
    tensors = [torch.randn(n, *shape) for shape in shapes]
    whole = matrix(tensors)
    assert whole.shape == (n, sum(tensor[0].numel() for tensor in tensors))
    again = parts(whole, tensors)
    assert all(torch.equal(one, other) for one, other in zip(again, tensors, strict=True))
    assert all(part.is_contiguous() for part in again)


def _calls(number: int) -> Counter[str]:
    """The operations of a step of 4 particles, each of so many tensors, whose gradients are there already."""
    particles = {f"{i}": torch.randn(4, 3) for i in range(number)}
    method = SVGD(bowl, particles, lambda named: torch.optim.SGD(named, lr=0.1), clip=1.0)
    found = method.gradients(None)
    method.gradients = lambda _: found  # type: ignore[method-assign]
    method.optimizer.step = lambda _=None: None  # type: ignore[method-assign,assignment]
    with Calls() as calls:
        method.step(None)
    return Counter({name: made for name, made in calls.made.items() if "view" not in name and "detach" not in name})


def test_a_step_does_not_take_longer_because_there_are_many_tensors() -> None:
    few, many = _calls(3), _calls(300)
    few.pop("aten.clone.default"), many.pop("aten.clone.default")  # each tensor gets its own gradient in the end
    assert few == many


@pytest.mark.parametrize("kind", [SVGD, Ensemble])
def test_tensors_side_by_side_move_as_one_tensor_does(kind: type[SVGD] | type[Ensemble]) -> None:
    whole = torch.randn(4, 30, dtype=torch.float64)
    pieces = {f"{i}": whole[:, 3 * i : 3 * i + 3].clone().view(4, 1, 3) for i in range(10)}
    one = kind(bowl, {"x": whole}, lambda named: torch.optim.SGD(named, lr=0.1), clip=2.0, chunk=3)
    many = kind(bowl, pieces, lambda named: torch.optim.SGD(named, lr=0.1), clip=2.0, chunk=3)
    for _ in range(5):
        one.step(None)
        many.step(None)
    joined = torch.cat([tensor.detach().flatten(1) for tensor in many.particles.values()], 1)
    torch.testing.assert_close(joined, one.particles["x"].detach(), rtol=1e-12, atol=1e-12)


def test_particles_may_have_tensors_of_different_precision() -> None:
    """They move as if all were of the higher one."""
    torch.manual_seed(0)
    start = {"x": torch.randn(5, 3), "y": torch.randn(5, 2, dtype=torch.float64)}
    mixed, high = (
        SVGD(bowl, {name: t.to(dtype) for (name, t), dtype in zip(start.items(), dtypes, strict=True)},
             lambda named: torch.optim.SGD(named, lr=0.02), clip=2.0)
        for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float64))
    )  # fmt: skip
    for _ in range(20):
        mixed.step(None)
        high.step(None)
    for name, tensor in high.particles.items():
        torch.testing.assert_close(mixed.particles[name].double(), tensor, rtol=1e-5, atol=1e-5)
    assert mixed.particles["x"].dtype == torch.float32
    theirs = diagnose(high.particles)
    assert diagnose(mixed.particles).bandwidth == pytest.approx(theirs.bandwidth, rel=1e-5)


@pytest.mark.parametrize("width", [3, BLOCK + 1])
@pytest.mark.parametrize("with_prior", [False, True])
def test_gradients_that_overlap_in_memory_are_kept_apart(width: int, with_prior: bool) -> None:
    """Of x + cat(y, z), the gradients of y and z lie within that of x."""

    def density(particles: dict[str, Tensor], _: Any = None) -> Tensor:
        x, y, z = particles["x"], particles["y"], particles["z"]
        return -(x + torch.cat([y, z], 1) - 1.0).square().sum(1)

    def make(kind: type[Ensemble] | type[MAP], n: int) -> Ensemble | MAP:
        generator = torch.Generator().manual_seed(0)
        start = {name: torch.randn(1, size, generator=generator) for name, size in (("x", 2 * width), ("y", width))}
        start["z"] = torch.randn(1, width, generator=generator)
        options: dict[str, Any] = {"log_prior": density} if with_prior else {}
        same = {name: tensor.expand(n, -1) for name, tensor in start.items()}
        return kind(density, same, lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9), clip=2.0, **options)

    one, two = make(MAP, 1), make(Ensemble, 2)
    for _ in range(4):
        one.step(None)
        two.step(None)
    for name, tensor in one.particles.items():
        torch.testing.assert_close(tensor[0], two.particles[name][1], msg=name)


def test_norms_of_many_half_precision_tensors_do_not_overflow() -> None:
    large = {f"{i}": torch.full((2, 1), 3e4, dtype=torch.half) for i in range(10)}
    method = Ensemble(
        lambda p, _: -sum(t.float().sum(1) for t in p.values()), large, lambda named: torch.optim.SGD(named, lr=0.05)
    )  # type: ignore[arg-type,return-value]
    assert bool(method.step(None).alive.all())
