"""Networks with peculiarities: shared modules, frozen parts, dropout, LSTMs, checkpoints, broken statistics."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from posterior_kit import adam, assert_same, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayestrain as bt
from bayestrain.errors import ConfigError, ParticleWarning
from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.posterior import Posterior, independent

NUM_DATA = 50


def batch(size: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def assert_predicts_as_its_particles(posterior: Posterior) -> None:
    x, y = batch()
    before = posterior.outputs(x)
    for _ in range(3):
        posterior.step(x, y)
    after = posterior.outputs(x)
    assert not torch.allclose(before, after)
    for i in range(len(posterior)):
        with torch.no_grad():
            torch.testing.assert_close(posterior.particle(i)(x), after[i])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())[:, :3]


class Branched(nn.Module):
    """Uses a layer and a batch norm twice, beside weights that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        layer, norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.body = nn.Sequential(layer, norm, nn.ReLU(), layer, norm, nn.ReLU())
        self.one, self.other = nn.Linear(12, 3), nn.Linear(12, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.one(hidden) + self.other(hidden)


def factorized_branched() -> nn.Module:
    network = Branched()
    tensorize_(network.body, TensorizeConfig(max_rank=4))
    return network


@pytest.mark.parametrize("build", [lambda: bt.TensorLinear(12, 3, max_rank=3), Tied, Branched, factorized_branched])
def test_modules_and_weights_may_be_used_twice(build: Callable[[], nn.Module]) -> None:
    posterior = Posterior(independent(build, 3), NUM_DATA, optimizer=adam)
    parameters = [id(p) for p in posterior.template.parameters()]
    assert_predicts_as_its_particles(posterior)
    assert [id(p) for p in posterior.template.parameters()] == parameters  # still its own
    assert "model.other.weight" not in posterior.particles
    resumed = Posterior(independent(build, 3, seed=1), NUM_DATA, optimizer=adam)
    resumed.load_state_dict(copy.deepcopy(posterior.state_dict()))
    for one in (posterior, resumed):
        one.step(*batch(seed=9))
    assert_same(posterior, resumed)


def test_buffers_and_references_are_a_particles_own() -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 3)
            self.register_buffer("shift", torch.randn(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    begun, resumed = (Posterior(independent(Shifted, 2, seed=seed), NUM_DATA) for seed in (0, 1))
    begun.step(*batch())
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    assert torch.equal(resumed.outputs(batch()[0]), begun.outputs(batch()[0]))

    # A copy to predict with must refer to itself, not to the template.
    class Indirect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)
            self.steps = [self.run, [self.layer]]

        def run(self, x: Tensor) -> Tensor:
            return self.steps[1][0](x)

        def forward(self, x: Tensor) -> Tensor:
            return self.steps[0](x)

    assert_predicts_as_its_particles(Posterior(independent(Indirect, 3), NUM_DATA, optimizer=adam))


def half_frozen(cores: bool = False) -> nn.Module:
    """The first layer, or only its first core, is frozen and the same in every particle."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = bt.TensorLinear(12, 8, in_modes=(3, 4), out_modes=(2, 4), max_rank=6)
    (first.cores[0] if cores else first).requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), bt.TensorLinear(8, 3, max_rank=3))


def test_frozen_parameters_are_shared_and_some_networks_are_refused_by_name() -> None:
    posterior = Posterior(independent(half_frozen, 3), NUM_DATA, optimizer=adam)
    assert not any(name.startswith("model.0.factorized.cores") for name in posterior.particles)
    assert_predicts_as_its_particles(posterior)
    models = independent(half_frozen, 3)
    with torch.no_grad():
        models[1].get_parameter("0.bias").add_(1.0)
    with pytest.raises(ConfigError, match=r"'0\.bias' is frozen.*particle 1 has other values"):
        Posterior(models, NUM_DATA)
    frozen = half_frozen().requires_grad_(False)
    with pytest.raises(ConfigError, match="No parameter of the network is trainable"):
        Posterior([frozen, copy.deepcopy(frozen)], NUM_DATA)
    in_part = Posterior(independent(lambda: half_frozen(cores=True), 3), NUM_DATA, optimizer=adam)
    in_part.step(*batch())
    with pytest.raises(ConfigError, match=r"Layer '0' has cores that train and cores that are frozen"):
        in_part.compact_(0.5)

    def averaging() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))

    with pytest.raises(ConfigError, match=r"'1' averages its statistics.*refresh_statistics"):
        Posterior(independent(averaging, 2), NUM_DATA)

    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    posterior = Posterior(independent(lambda: Two(12, 3), 2), NUM_DATA)
    with pytest.raises(ConfigError, match="one tensor, got tuple"):
        posterior.step(*batch())


def test_dropout_noise_and_grey_images() -> None:
    start = nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    posterior = Posterior([copy.deepcopy(start) for _ in range(3)], NUM_DATA, method="ensemble", optimizer=adam)
    x, y = batch()
    outputs = posterior.outputs(x)
    assert torch.equal(outputs[0], outputs[2])
    assert len(set(posterior.step(x, y).log_likelihood.tolist())) == 3
    networks = independent(lambda: nn.Linear(12, 1).double(), 3)
    posterior = Posterior(networks, NUM_DATA, likelihood="regression", optimizer=adam)
    x, _ = batch()
    posterior.step(x.double(), x[:, :1].double())
    assert posterior.particles["likelihood.log_variance"].dtype == torch.float64

    def build() -> nn.Module:
        body = nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*body, nn.Linear(8, 3))

    x, y = torch.randn(5, 1, 8, 8), torch.arange(5) % 3
    one, other = (Posterior(independent(build, 2), NUM_DATA, optimizer=adam) for _ in range(2))
    one.step(x, y)
    other.step(x.to(memory_format=torch.channels_last), y)
    torch.testing.assert_close(one.outputs(x), other.outputs(x))


def test_a_batch_that_breaks_a_particle_does_not_count_for_its_batch_norm() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    models = independent(build, 3)
    with torch.no_grad():
        models[1].get_parameter("0.weight").mul_(1e25)  # its variances overflow
    posterior = Posterior(models, NUM_DATA, optimizer=adam)
    with pytest.warns(ParticleWarning, match="Particle 1 of 3"):
        posterior.step(*batch())
    assert (posterior.carried["model.1.running_var"] != 1).all(1).tolist() == [True, False, True]


class Remembering(nn.Module):
    """An LSTM over the 12 inputs as a sequence, behind a factorised layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = bt.TensorLinear(12, 12, max_rank=3), nn.LSTM(1, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x)[:, :, None])[0][:, -1])


class Attending(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 3)
        tensorize_(self, TensorizeConfig(3, layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        words = x[:, :, None].expand(-1, -1, 16)
        return self.out(self.attend(words, words, words, need_weights=False)[0].mean(1))


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.bias.sum() > 0 else -x)


@pytest.mark.parametrize("build", [Remembering, lambda: Branching(12, 3)])
def test_a_network_that_vmap_cannot_run_runs_one_by_one(build: Callable[[], nn.Module]) -> None:
    x, y = batch()
    posterior = Posterior(independent(build, 2), NUM_DATA, optimizer=sgd)
    for run in (lambda: posterior.step(x, y), lambda: posterior.predict(x)):
        with pytest.raises(ConfigError, match=r"cannot run for several particles at once.*chunk=1.*PyTorch says: "):
            run()
    posterior = Posterior(independent(build, 3), NUM_DATA, optimizer=sgd, method="ensemble", chunk=1)
    networks = independent(build, 3)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9) for network in networks]
    make = bt.RankPrior if build is Remembering else bt.prior.NormalPrior
    priors = [make(network, NUM_DATA) for network in networks]
    for _ in range(4):
        posterior.step(x, y)
        for network, prior, optimizer in zip(networks, priors, optimizers, strict=True):
            optimizer.zero_grad()
            (F.cross_entropy(network(x), y) + prior.loss()).backward()
            optimizer.step()
            prior.step()
    with torch.no_grad():
        expected = torch.stack([network(x) for network in networks])
    torch.testing.assert_close(posterior.outputs(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [Remembering, lambda: Attending("paired"), lambda: Attending("split")])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap over PyTorch's own attention
def test_posteriors_of_memory_and_of_attention_are_exported(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    x, y = batch()
    memory = build is Remembering
    how: dict[str, Any] = {"method": "ensemble", "chunk": 1} if memory else {}
    posterior = Posterior(independent(build, 2), NUM_DATA, optimizer=sgd, **how)
    posterior.step(x, y)
    torch.testing.assert_close(posterior.predict(x).mean, posterior.predict(x, chunk=1).mean)
    assert bt.export(posterior, tmp_path / "posterior.onnx", example=x).error < 1e-5


class Recomputing(nn.Module):
    """Keeps nothing of its hidden layer, which is a module or a bare product."""

    def __init__(self, bare: bool, reentrant: bool) -> None:
        super().__init__()
        self.bare, self.reentrant = bare, reentrant
        self.first, self.hidden, self.last = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        def part(inputs: Tensor) -> Tensor:
            return torch.tanh(inputs @ self.hidden.weight.mT if self.bare else self.hidden(inputs))

        return self.last(checkpoint(part, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_a_network_that_recomputes_going_back_is_refused(bare: bool, reentrant: bool, chunk: int | None) -> None:
    """Its gradients would be those of other weights."""
    posterior, fresh = (
        Posterior(independent(lambda: Recomputing(bare, reentrant), 3), NUM_DATA, optimizer=adam, chunk=chunk)
        for _ in range(2)
    )
    at_once = "|cannot run for several particles at once" if reentrant and chunk is None else ""
    said = "recomputes or moves its activations" + at_once
    for lowered in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered), pytest.raises(ConfigError, match=said):
            posterior.step(*batch())
    assert_same(posterior, fresh)
    if not reentrant:  # predictions need no backward pass, but some versions of PyTorch have no vmap of checkpoints
        assert posterior.outputs(batch()[0], chunk=1).shape == (3, 20, 3)
