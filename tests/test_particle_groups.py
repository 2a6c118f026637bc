"""Particles of many small tensors are handled as a few large ones, without a difference to be seen."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bayestrain as bt
from bayestrain.infer import MAP, SVGD, Ensemble
from bayestrain.infer.particles import BLOCK, groups, matrices, matrix, parts
from bayestrain.posterior import Posterior


class Calls(TorchDispatchMode):
    """Counts the operations that are run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made[str(function)] += 1
        return function(*args, **(kwargs or {}))


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


def _deep() -> nn.Module:
    same = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(1, 8, 3), *same, nn.Flatten(), nn.Linear(8 * 36, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6))
    bt.compact_(model.get_submodule("2.0"), 0.5)  # equal modes, different ranks
    for i in (1, 2, 3):
        model.get_submodule(f"{i}.0").force_plan("kernel")  # type: ignore[operator]
    assert bt.ranks(model)["2.0"] != bt.ranks(model)["3.0"]
    return model


def _sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05)


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_particles_one_by_one_form_the_weights_of_equal_layers_together(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: there a particle whose convolutions keep it busy goes through the network by itself."""
    torch.manual_seed(0)
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    start = _deep()
    together = Posterior(bt.around(start, 3, 0.1), 100, optimizer=_sgd)
    for _ in range(4):
        together.step(x, y)
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: True)
    alone = Posterior(bt.around(start, 3, 0.1), 100, optimizer=_sgd, chunk=chunk)
    alone.step(x, y)
    assert alone.joint.alone == (chunk != 2)  # who wants them in twos gets them so
    forming = alone.joint.forming
    monkeypatch.setattr(alone.joint, "forming", nullcontext)
    with Calls() as each:
        alone.step(x, y)
    monkeypatch.setattr(alone.joint, "forming", forming)
    with Calls() as formed:
        alone.step(x, y)
    assert (formed.made["aten.mm.default"] < each.made["aten.mm.default"]) == (chunk != 2)
    alone.step(x, y)
    idle = {f"model.{i}.0.bias": f"model.{i}.1.running_mean" for i in (1, 2, 3)}  # a batch norm takes them away
    for name, tensor in together.particles.items():
        if name in idle and chunk != 2:
            assert tensor.any()
            assert not alone.particles[name].any()
        else:
            torch.testing.assert_close(alone.particles[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(alone.outputs(x), together.outputs(x), rtol=1e-4, atol=1e-4)
    for posterior in (together, alone):
        posterior.refresh_statistics([x, 2 * x])
        for bias, mean in idle.items():
            posterior.carried[mean] -= posterior.particles[bias].detach()
            posterior.particles[bias].detach().zero_()
    for name, tensor in together.carried.items():
        torch.testing.assert_close(alone.carried[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    with Calls() as predicting:
        outputs = alone.outputs(x)
    torch.testing.assert_close(outputs, together.outputs(x), rtol=1e-4, atol=1e-4)
    assert predicting.made["aten.convolution.default"] == (4 if chunk == 2 else 3 * 4)  # one by one here, too


@pytest.mark.parametrize("method", ["svgd", "ensemble", "sgld"])
def test_idle_biases_stay_at_zero_but_where_noise_moves_them(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: True)
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    start = _deep()
    posterior = Posterior(bt.around(start, 3, 0.1), 100, method=method)
    before = posterior.outputs(x)
    posterior.estimate_memory(x, y)
    assert posterior.joint.alone
    torch.testing.assert_close(posterior.outputs(x), before)  # the biases went into the running means
    for _ in range(3):
        posterior.step(x, y)
    posterior.drop_([1])
    posterior.step(x, y)  # which asks for memory anew
    biases = [posterior.particles[f"model.{i}.0.bias"] for i in (1, 2, 3)]
    assert all(bool(bias.any()) == (method == "sgld") for bias in biases)
    assert posterior.particles["model.0.bias"].any()  # no batch norm follows this one
    x = x.double()
    networks = [posterior.particle(i).double() for i in range(len(posterior))]
    ours = torch.stack([network(x) for network in networks]).float()
    torch.testing.assert_close(posterior.outputs(x.float()), ours, rtol=1e-3, atol=1e-3)


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
    method = Ensemble(lambda p, _: -sum(t.float().sum(1) for t in p.values()), large, _sgd)  # type: ignore[arg-type,return-value]
    assert bool(method.step(None).alive.all())
