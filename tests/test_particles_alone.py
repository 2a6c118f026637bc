"""Particles that go through a network one by one, as on a GPU where one alone keeps it busy, without a difference.

There is no such thing on a CPU: `Posterior._goes_alone` says yes here instead.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from layer_kit import Calls
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import ConfigError
from bayestrain.infer import Ensemble
from bayestrain.posterior import Posterior, memory

X, Y = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 10
IDLE = {f"model.{i}.0.bias": f"model.{i}.1.running_mean" for i in (1, 2, 3)}
"""Biases of the network below that a batch norm takes away again, and where the norm keeps its mean."""


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
    monkeypatch.setattr(alone.joint, "forming_to_predict", nullcontext)
    with Calls() as singly:
        alone.outputs(x)
    assert (predicting.made["aten.mm.default"] < singly.made["aten.mm.default"]) == (chunk != 2)


def trained(steps: int = 3, **options: Any) -> Posterior:
    """Three particles of the network above."""
    torch.manual_seed(0)
    posterior = Posterior(bt.around(_deep(), 3, 0.1), 100, **options)
    for _ in range(steps):
        posterior.step(X, Y)
    return posterior


@pytest.fixture
def going_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: True)


class Noisy(torch.optim.SGD):
    """Moves what has no gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for tensor in self.param_groups[0]["params"]:
            tensor += 0.01 * torch.randn_like(tensor)
        return found


class Elsewhere(bt.NormalPrior):
    """A prior around another value than zero."""

    def log_prob(self) -> Tensor:
        biases = [p for name, p in self.model.named_parameters() if name.endswith("bias")]
        return super().log_prob() - 10 * torch.stack([(bias - 0.5).square().sum() for bias in biases]).sum()


@pytest.mark.usefixtures("going_alone")
@pytest.mark.parametrize(
    "options",
    [
        {"method": "svgd"},
        {"method": "ensemble"},
        {"method": "sgld", "lr": 1e-3, "memory": 0.9},
        {"optimizer": lambda named: torch.optim.Adam(named, lr=1e-3, eps=0.0)},
        {"optimizer": lambda named: Noisy(named, lr=0.05, momentum=0.9)},
        {"prior": lambda model: Elsewhere(model, 100)},
    ],
    ids=["svgd", "ensemble", "sgld", "eps", "noise", "prior"],
)
def test_idle_biases_stay_at_zero_whatever_moves_them(options: dict[str, Any]) -> None:
    posterior = trained(0, **options)
    before = posterior.outputs(X)
    posterior.estimate_memory(X, Y)
    assert posterior.joint.alone
    torch.testing.assert_close(posterior.outputs(X), before)  # the biases went into the running means
    for _ in range(3):
        posterior.step(X, Y)
    posterior.drop_([1])
    posterior.step(X, Y)  # which asks for memory anew
    assert not any(posterior.particles[bias].any() for bias in IDLE)
    assert posterior.particles["model.0.bias"].any()  # no batch norm follows this one
    networks = [posterior.particle(i).double() for i in range(len(posterior))]
    ours = torch.stack([network(X.double()) for network in networks]).float()
    torch.testing.assert_close(posterior.outputs(X), ours, rtol=1e-3, atol=1e-3)


def test_biases_that_were_on_their_way_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = trained(optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9))
    before = posterior.outputs(X)
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: True)
    posterior.estimate_memory(X, Y)
    torch.testing.assert_close(posterior.outputs(X), before, rtol=1e-4, atol=1e-5)
    posterior.step(X, Y)
    assert not any(posterior.particles[bias].any() for bias in IDLE)


def test_chains_that_no_longer_go_alone_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLD scales its noise by past gradients, and those of idle biases were zero."""
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: True)
    posterior = trained(60, method="sgld", lr=1e-3, memory=0.9)
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: False)
    posterior.estimate_memory(X, Y)
    before = posterior.outputs(X)
    posterior.step(X, Y)
    assert not posterior.joint.alone
    assert not any(posterior.particles[bias].any() for bias in IDLE)
    assert float((posterior.outputs(X) - before).abs().max()) < 2.0


def test_gradients_of_what_a_density_does_not_know_are_not_made() -> None:
    def density(particles: dict[str, Tensor], _: Any) -> Tensor:
        return -particles["x"].square().sum(1)

    method = Ensemble(density, {"x": torch.randn(2, 3), "y": torch.randn(2, 3)}, _sgd, chunk=1)
    with Calls() as calls:
        _, found = method.gradients(None)
    assert not found["y"].any()
    assert found["x"].all()
    assert calls.made["aten.zeros_like.default"] == 2  # the two sums, and none in the two passes
    start = method.particles["y"].clone()
    method.step(None)
    assert torch.equal(method.particles["y"], start)


@pytest.mark.usefixtures("going_alone")
def test_predictions_in_groups_are_the_same() -> None:
    posterior = trained()
    whole = posterior.outputs(X)
    for chunk in (1, 2, 3):
        torch.testing.assert_close(posterior.outputs(X, chunk=chunk), whole, rtol=1e-4, atol=1e-5)
    elsewhere = posterior.to("cpu")
    with Calls() as calls:
        torch.testing.assert_close(elsewhere.outputs(X), whole, rtol=1e-4, atol=1e-5)
    assert calls.made["aten.convolution.default"] == 4  # all together: that one is not known to keep it busy


def test_images_lie_channels_last_for_particles_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    images, found = torch.randn(16, 3, 8, 8), []
    for alone in (False, True):
        monkeypatch.setattr(Posterior, "_goes_alone", lambda *_, alone=alone: alone)
        posterior, seen = Posterior(bt.around(model, 3, 0.1), 100), []
        posterior.estimate_memory(images, Y)
        posterior.template[0].register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].stride()))
        posterior.refresh_statistics([images[:8], images[8:]])
        found.append(posterior.predict(images).particle_probabilities)
        assert set(seen) == {(192, 1, 24, 3) if alone else (192, 64, 8, 1)}
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    flat = Posterior([nn.Linear(4, 2)] * 3, 10)
    flat.joint.alone = True
    assert flat.outputs(torch.randn(5, 4)).shape == (3, 5, 2)


@pytest.mark.usefixtures("going_alone")
def test_predictions_do_not_decide_what_training_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's plan for a prediction may be another one."""

    def never() -> Any:
        raise AssertionError("a prediction formed the weights of training")

    posterior = trained()
    monkeypatch.setattr(posterior.joint, "forming", never)
    posterior.outputs(X)
    with pytest.raises(AssertionError, match="of training"):
        posterior.step(X, Y)


@pytest.mark.usefixtures("going_alone")
def test_what_one_particle_makes_is_measured_before_it_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x, found = trained(1), X.repeat(25, 1, 1, 1), []
    expected, whole = posterior.outputs(x), memory.predicted_at_once
    monkeypatch.setattr("bayestrain.posterior.model.predicted_at_once", lambda *a: found.append(whole(*a)) or found[-1])
    for limit, inputs in ((400 * 8 * 36, 400), (100 * 8 * 36, 100)):
        monkeypatch.setattr(memory, "PREDICTED_ENTRIES", limit)
        torch.testing.assert_close(posterior.outputs(x), expected, rtol=1e-4, atol=1e-5)
        assert found[-1] == (1, inputs)


def test_a_refused_estimate_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = trained()
    before = {name: tensor.clone() for name, tensor in (posterior.particles | posterior.carried).items()}
    with monkeypatch.context() as patch:
        patch.setattr(Posterior, "_goes_alone", lambda *_: True)
        patch.setattr(memory, "available_bytes", lambda _: 1000)
        with pytest.raises(ConfigError, match="cannot fit"):
            posterior.estimate_memory(X, Y)
    assert not posterior.joint.alone
    for name, tensor in (posterior.particles | posterior.carried).items():
        assert torch.equal(tensor, before[name])
    posterior.step(X, Y)


@pytest.mark.parametrize("alone", [False, True])
def test_statistics_are_means_over_inputs_not_over_batches(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch counts little, and a large one that would take too much memory goes in parts."""
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: alone)
    posterior = trained(1)
    x = torch.randn(630, 1, 8, 8) + torch.linspace(-1, 1, 630).view(-1, 1, 1, 1)
    norm = "model.1.1.running_mean"
    posterior.refresh_statistics([x])
    expected = posterior.carried[norm].clone()
    posterior.refresh_statistics([x[:600], x[600:]])
    torch.testing.assert_close(posterior.carried[norm], expected, rtol=1e-4, atol=1e-5)
    posterior.refresh_statistics([x[:0], x[:2], x[2:]])  # a small first one does not say how many fit
    torch.testing.assert_close(posterior.carried[norm], expected, rtol=1e-4, atol=1e-5)
    variance = "model.1.1.running_var"
    found = posterior.carried[variance].clone()
    posterior.refresh_statistics([x])
    torch.testing.assert_close(posterior.carried[variance], found, rtol=2e-2, atol=1e-3)
    posterior.refresh_statistics([])  # nothing to go by
    torch.testing.assert_close(posterior.carried[norm], expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(memory, "PREDICTED_ENTRIES", 100 * 8 * 36)
    with Calls() as calls:
        posterior.refresh_statistics([x])
    torch.testing.assert_close(posterior.carried[norm], expected, rtol=1e-4, atol=1e-5)
    assert calls.made["aten.convolution.default"] == 4 + 3 * 4 * 7  # the first four to measure, then parts of 90


def test_statistics_of_few_inputs_at_a_time() -> None:
    """Many particles, a batch norm over vectors: a single input has no variance."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    posterior = Posterior(bt.around(network, 130, 0.1), 100)
    x = torch.randn(13, 4)
    posterior.refresh_statistics([x[:8], x[8:10], x[10:]])  # the first is tried with a part of it
    assert posterior.outputs(x).isfinite().all()
