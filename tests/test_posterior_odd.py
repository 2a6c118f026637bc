"""What particles may be made of: odd networks, frozen parts, broken ones, states that do not fit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayestrain as bt
from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.posterior import Posterior, around, independent

NUM_DATA = 50


def adam(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


def batch(size: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def half_frozen(layers: int = 1, cores: bool = False) -> nn.Module:
    """The first layer, or only its first core, is frozen and the same in every particle."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = bt.TTLinear(12, 8, in_modes=(3, 4), out_modes=(2, 4), max_rank=6)
    (first.cores[0] if cores else first).requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), bt.TTLinear(8, 3, max_rank=3 * layers))


def test_a_frozen_layer_that_was_cut_comes_back_with_the_state() -> None:
    x, y = batch()
    begun, fresh = (Posterior(independent(half_frozen, 3), NUM_DATA, optimizer=adam) for _ in range(2))
    begun.step(x, y)
    assert begun.compact_(0.6).changed
    fresh.load_state_dict(copy.deepcopy(begun.state_dict()))
    assert fresh.ranks == begun.ranks
    for posterior in (begun, fresh):
        posterior.step(x, y)
    assert torch.equal(begun.outputs(x), fresh.outputs(x))


def test_a_layer_frozen_in_part_is_not_cut() -> None:
    posterior = Posterior(independent(lambda: half_frozen(cores=True), 3), NUM_DATA, optimizer=adam)
    posterior.step(*batch())
    with pytest.raises(ConfigError, match=r"Layer '0' has cores that train and cores that are frozen"):
        posterior.compact_(0.5)


def test_a_network_may_be_a_single_layer_or_tie_its_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu())[:, :3]
            return out

    x, y = batch()
    for build in (lambda: bt.TTLinear(12, 3, max_rank=3), Tied):
        posterior = Posterior(independent(build, 3), NUM_DATA, optimizer=adam)
        for _ in range(3):
            posterior.step(x, y)
        with torch.no_grad():
            torch.testing.assert_close(posterior.particle(2)(x), posterior.outputs(x)[2])


@pytest.mark.parametrize("tensorized", [False, True])
def test_a_network_may_use_a_module_twice(tensorized: bool) -> None:
    """Also beside weights that two modules share."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer, norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
            self.body = nn.Sequential(layer, norm, nn.ReLU(), layer, norm, nn.ReLU())
            if tensorized:
                bt.tensorize_(self.body, bt.TensorizeConfig(max_rank=4))
            self.one, self.other = nn.Linear(12, 3), nn.Linear(12, 3)
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            out: Tensor = self.one(hidden) + self.other(hidden)
            return out

    x, y = batch()
    posterior = Posterior(independent(Branched, 3), NUM_DATA, optimizer=adam)
    parameters = list(posterior.template.parameters())
    before = posterior.outputs(x)
    for _ in range(3):
        posterior.step(x, y)
    assert [id(p) for p in posterior.template.parameters()] == [id(p) for p in parameters]  # still its own
    after = posterior.outputs(x)
    assert not torch.allclose(before, after)
    with torch.no_grad():
        torch.testing.assert_close(posterior.particle(2)(x), after[2])
    for name in ("one.weight", "one.bias", "other.bias"):
        assert f"model.{name}" in posterior.particles
    assert "model.other.weight" not in posterior.particles


def test_learned_noise_has_the_networks_precision_and_the_users_likelihood_stays_as_it_is() -> None:
    likelihood = bt.Regression()
    posterior = Posterior(
        independent(lambda: nn.Linear(12, 1).double(), 3), NUM_DATA, likelihood=likelihood, optimizer=adam
    )
    x, _ = batch()
    posterior.step(x.double(), x[:, :1].double())
    assert posterior.particles["likelihood.log_variance"].dtype == torch.float64
    assert likelihood.log_variance is not None
    assert float(likelihood.log_variance.detach()) == 0.0


def test_a_batch_that_breaks_a_particle_does_not_count_for_its_batch_norm() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    models = independent(build, 3)
    with torch.no_grad():
        models[1].get_parameter("0.weight").mul_(1e25)  # its variances overflow
    posterior = Posterior(models, NUM_DATA, optimizer=adam)
    x, y = batch()
    with pytest.warns(ParticleWarning, match="Particle 1 of 3"):
        posterior.step(x, y)
    changed = (posterior.carried["model.1.running_var"] != 1).all(1)
    assert changed.tolist() == [True, False, True]
    posterior.drop_([1])
    posterior.carried["model.1.running_mean"].fill_(float("nan"))
    posterior.refresh_statistics([x])
    assert bool(posterior.outputs(x).isfinite().all())


def test_states_that_do_not_fit_change_nothing() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 3))

    five, three = (Posterior(independent(build, n), NUM_DATA, optimizer=adam) for n in (5, 3))
    before = {name: tensor.detach().clone() for name, tensor in three.particles.items()}
    with pytest.raises(ShapeError, match="has 5 particles, this one 3"):
        three.load_state_dict(five.state_dict())
    other = Posterior(independent(build, 3), NUM_DATA, method="ensemble", optimizer=adam)
    with pytest.raises(ConfigError, match="state of 'ensemble', not of 'svgd'"):
        three.load_state_dict(other.state_dict())
    another = Posterior(independent(lambda: nn.Linear(12, 3), 3), NUM_DATA, optimizer=adam)
    with pytest.raises(ShapeError, match="other names"):
        three.load_state_dict(another.state_dict())
    assert all(torch.equal(three.particles[name], tensor) for name, tensor in before.items())
    one, two = (
        Posterior(independent(build, 3), NUM_DATA, prior=lambda m, v=v: bt.NormalPrior(m, NUM_DATA, variance=v))
        for v in (3.0, 7.0)
    )
    two.load_state_dict(one.state_dict())
    assert isinstance(two.prior, bt.NormalPrior)
    assert two.prior.variance == 3.0


def test_networks_that_cannot_be_batched_are_refused_by_name() -> None:
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

    class Remembering(nn.LSTM):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)[0]

    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x if self.bias.sum() > 0 else -x)

    for build in (lambda: Remembering(12, 3), lambda: Branching(12, 3)):
        posterior = Posterior(independent(build, 2), NUM_DATA)
        for refused in (posterior.estimate_memory, posterior.step):
            with pytest.raises(ConfigError, match=r"cannot run for many particles at once.*PyTorch says: "):
                refused(*batch())


def test_grey_images_may_lie_channels_last() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        )

    x, y = torch.randn(5, 1, 8, 8), torch.arange(5) % 3
    one, other = (Posterior(independent(build, 2), NUM_DATA, optimizer=adam) for _ in range(2))
    one.step(x, y)
    other.step(x.to(memory_format=torch.channels_last), y)
    torch.testing.assert_close(one.outputs(x), other.outputs(x))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.5}, "svgd has no option 'temperature'"),
        ({"method": "sgld", "step": 3}, "sgld has no option 'step'"),
        ({"clip": 0.0}, "clip is a largest norm"),
        ({"optimizer": lambda tensors: torch.optim.LBFGS(tensors)}, "LBFGS evaluates its loss several times"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Posterior(independent(lambda: nn.Linear(12, 3), 2), NUM_DATA, **options)


def test_an_optimisers_state_of_another_form_starts_anew() -> None:
    posterior = Posterior(
        independent(lambda: nn.Sequential(bt.TTLinear(12, 3, max_rank=3)), 3), NUM_DATA,
        optimizer=lambda tensors: torch.optim.Adafactor(tensors, lr=0.01),
    )  # fmt: skip
    x, y = batch()
    for _ in range(3):
        posterior.step(x, y)
    assert posterior.compact_(0.7, "contribution").changed
    posterior.step(x, y)


def test_particles_that_have_become_one_are_told_of() -> None:
    close = Posterior(around(nn.Linear(12, 3), 4, scale=1e-3), NUM_DATA)
    with pytest.warns(ParticleWarning, match=r"collapsed: of 4, only about 1\.0 are different.*independent"):
        close.diagnostics()


def test_calibration_checks_its_labels() -> None:
    posterior = Posterior(independent(lambda: nn.Linear(12, 3), 2), NUM_DATA)
    x, y = batch()
    with pytest.raises((ConfigError, ShapeError)):
        posterior.calibrate_(x, y + 5)


def test_a_batch_without_data_or_with_labels_that_are_no_classes_is_refused() -> None:
    posterior = Posterior(independent(half_frozen, 2), NUM_DATA, optimizer=adam)
    x, y = batch()
    for _ in range(2):  # at the first step, and later on
        with pytest.raises(ConfigError, match=r"Labels must lie between 0 and 2, got 1 to 3\. Number the classes"):
            posterior.step(x, y + 1)
        with pytest.raises(ConfigError, match="Labels must lie between 0 and 2, got -1 to 1"):
            posterior.step(x, y - 1)
        with pytest.raises(ConfigError, match=r"no datum in this batch\. Leave empty batches out"):
            posterior.step(x[:0], y[:0])
        posterior.step(x, y)


class Recomputing(nn.Module):
    """Keeps nothing of its hidden layer, a module or a bare product, which comes first or second."""

    def __init__(self, bare: bool, first: bool) -> None:
        super().__init__()
        self.bare, self.first = bare, nn.Identity() if first else nn.Linear(12, 12)
        self.hidden, self.last = nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        def part(inputs: Tensor) -> Tensor:
            return torch.tanh(inputs @ self.hidden.weight.mT if self.bare else self.hidden(inputs))

        hidden: Tensor = checkpoint(part, self.first(x), use_reentrant=False)
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.fixture(params=[False, True], ids=["vmap", "alone"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether particles go one by one, as large convolutions do on a GPU."""
    monkeypatch.setattr(Posterior, "_goes_alone", lambda *_: request.param)
    return bool(request.param)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_a_network_that_runs_again_on_the_way_back_is_refused(bare: bool, first: bool, alone: bool) -> None:
    """Its gradients would be those of other weights."""
    posterior = Posterior(independent(lambda: Recomputing(bare, first), 3), NUM_DATA, optimizer=adam)
    before = {name: p.detach().clone() for name, p in posterior.template.named_parameters()}
    x, y = batch()
    said = "runs parts of itself again in the backward pass"
    for lowered in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered), pytest.raises(ConfigError, match=said):
            posterior.step(x, y)
    for name, p in posterior.template.named_parameters():
        assert torch.equal(p, before[name])
    if alone:  # a batch that tells nothing is not taken for an answer
        with pytest.raises(TrainingError):
            posterior.step(x * torch.nan, y)
        with pytest.raises(ConfigError, match=said):
            posterior.step(x, y)


class Root(nn.Module):
    """Of what dropout leaves of a few numbers, perhaps nothing, where the root has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        left = nn.functional.dropout(x[:1, :2], 0.7) * self.weight.sum()
        return x[:, :3] * self.weight * left.square().sum().sqrt()


@pytest.mark.parametrize("seed", range(8))
def test_a_network_that_only_draws_badly_is_not_refused(seed: int, alone: bool) -> None:
    posterior = Posterior([Root() for _ in range(2)], NUM_DATA, method="ensemble", optimizer=adam)
    torch.manual_seed(seed)
    with torch.no_grad():
        posterior.estimate_memory(*batch())
    assert posterior.joint.alone == alone
