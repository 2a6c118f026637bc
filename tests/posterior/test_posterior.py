"""A posterior against networks trained one by one, and everything it offers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from posterior_kit import NUM_DATA, adam, assert_same, batch, convnet, perceptron, rank_prior, sgd
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import formats, infer
from bayestrain.errors import ConfigError, ParticleWarning, ShapeError
from bayestrain.infer.particles import flatten, unflatten
from bayestrain.posterior import ClassPrediction, Posterior, around, independent


class Loop:
    """SVGD as a user would write it with a list of networks and no vmap."""

    def __init__(self, networks: list[nn.Module], svgd: bool = True) -> None:
        self.networks, self.svgd = networks, svgd
        self.priors = [rank_prior(model) for model in networks]
        self.optimizers = [sgd(list(model.parameters())) for model in networks]

    def step(self, x: Tensor, y: Tensor) -> None:
        n = len(self.networks)
        names = [name for name, _ in self.networks[0].named_parameters()]
        gradients: dict[str, Tensor] = {}
        for i, (model, prior) in enumerate(zip(self.networks, self.priors, strict=True)):
            model.train()
            density = -NUM_DATA * F.cross_entropy(model(x), y) + prior.current_weight * prior.log_prob()
            for name, found in zip(names, torch.autograd.grad(density, list(model.parameters())), strict=True):
                gradients.setdefault(name, found.new_empty(n, *found.shape))[i] = found
        if self.svgd:
            particles = {k: torch.stack([m.get_parameter(k).detach() for m in self.networks]) for k in names}
            method = infer.SVGD(lambda *_: (torch.zeros(0), {}), particles, sgd)
            moves = method.direction(flatten(particles), flatten(gradients), torch.ones(n, dtype=torch.bool))
            gradients = unflatten(moves, particles)
        for i, (model, optimizer) in enumerate(zip(self.networks, self.optimizers, strict=True)):
            for name in names:
                model.get_parameter(name).grad = -gradients[name][i] / NUM_DATA
            optimizer.step()
        for prior in self.priors:
            prior.step()


@pytest.mark.parametrize("method", ["svgd", "ensemble"])
@pytest.mark.parametrize("network", [*(format.name for format in formats.FORMATS), "convnet"])
def test_all_at_once_is_the_same_as_one_by_one(network: str, method: str) -> None:
    """Likelihood, prior, warm-up, kernel, optimiser, lambda, alignment, held scale and batch norm's averages."""
    build: Callable[[], nn.Module] = convnet if network == "convnet" else lambda: perceptron(network)
    shape = (2, 4, 4) if network == "convnet" else (12,)
    together = Posterior(independent(build, 4, seed=1), NUM_DATA, method=method, prior=rank_prior, optimizer=sgd)
    loop = Loop(independent(build, 4, seed=1), svgd=method == "svgd")
    for step in range(8):
        x, y = batch(*shape, seed=step)
        together.step(x, y)
        loop.step(x, y)
    assert together.prior.steps == loop.priors[0].steps == 8
    for i, model in enumerate(loop.networks):
        torch.testing.assert_close(together.particle(i).state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9)


class Branching(formats.TensorTrain):
    """A format whose alignment looks at values, which torch.vmap refuses."""

    def align(self, equation: formats.Equation, cores: Any) -> list[Tensor]:
        assert float(cores[0].norm()) >= 0
        return super().align(equation, cores)


def test_alignment_may_branch_on_values() -> None:
    def build(format: formats.Format) -> Posterior:
        layers = independent(lambda: bt.TensorLinear(12, 3, format=format, max_rank=4).double(), 3)
        return Posterior(layers, NUM_DATA, prior=rank_prior, optimizer=sgd)

    plain, branching = build(formats.TensorTrain()), build(Branching())
    for step in range(7):
        plain.step(*batch(seed=step))
        branching.step(*batch(seed=step))
    assert_same(plain, branching, rtol=1e-9, atol=1e-10)  # all particles at once, and one after the other


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize(("build", "shape"), [(perceptron, (12,)), (convnet, (2, 4, 4))])
def test_chunks_change_memory_but_no_result(build: Callable[[], nn.Module], shape: tuple[int, ...], chunk: int) -> None:
    whole, parts = (
        Posterior(independent(build, 5), NUM_DATA, optimizer=adam, prior=rank_prior, chunk=size) for size in (5, chunk)
    )
    x, y = batch(*shape)
    for _ in range(5):
        ours, theirs = whole.step(x, y), parts.step(x, y)
        torch.testing.assert_close(ours.log_likelihood, theirs.log_likelihood, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-9, atol=1e-9)
    assert_same(whole, parts, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(whole.predict(x).mean, parts.predict(x, batch_size=7, chunk=chunk).mean)


@pytest.mark.parametrize("method", ["svgd", "anchored", "ensemble", "sgld"])
def test_every_method_learns_saves_and_resumes_exactly(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": adam}
    if method == "sgld":
        options = {"lr": 3e-3, "memory": 0.9, "temperature": 0.1}

    def new() -> Posterior:
        return Posterior(independent(convnet, 4), NUM_DATA, method=method, prior=rank_prior, **options)

    x, y = batch(2, 4, 4)
    whole = new()
    first = whole.step(x, y)
    for _ in range(29):
        last = whole.step(x, y)
    assert bool((last.log_likelihood > first.log_likelihood).all())
    begun = new()
    for _ in range(11):
        begun.step(x, y)
    assert begun.compact_(0.5, rule="contribution").changed
    begun.step(x, y)
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    resumed = new()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.ranks == begun.ranks != new().ranks
    for posterior in (begun, resumed):
        for _ in range(6):  # with an alignment among them
            posterior.step(x, y)
        posterior.compact_(0.3)
        posterior.fix_ranks_()
        posterior.step(x, y)
    assert_same(begun, resumed)
    assert torch.equal(begun.predict(x).mean, resumed.predict(x).mean)
    torch.save(begun.state_dict(), tmp_path / "fixed.pt")  # without lambda
    again = new()
    again.load_state_dict(torch.load(tmp_path / "fixed.pt", weights_only=True))
    begun.step(x, y)
    again.step(x, y)
    assert_same(begun, again)


@pytest.mark.parametrize(("n", "options", "said"), [
    (1, {}, "svgd needs at least 2 .* got 1"),
    (0, {"method": "ensemble"}, "ensemble needs at least 1 .* got 0"),
    (2, {"method": "vi"}, "method must be one of"),
    (2, {"method": "sgld", "optimizer": adam}, "sgld has no option 'optimizer'"),
    (2, {"method": "ensemble", "kernel": infer.rbf}, "ensemble has no option 'kernel'"),
    (2, {"num_data": 0}, "num_data must be an integer of at least 1, got 0"),
    (2, {"chunk": 0}, "chunk must be an integer of at least 1, got 0"),
    (2, {"method": "sgld", "step": 3}, "sgld has no option 'step'"),
    (2, {"clip": 0.0}, "clip must be positive"),
    (2, {"likelihood": "poisson"}, "likelihood must be"),
])  # fmt: skip
def test_bad_arguments_are_refused_at_once(n: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        Posterior([perceptron() for _ in range(n)], **{"num_data": NUM_DATA, **options})


def test_particles_of_different_shapes_are_refused_by_name() -> None:
    other = nn.Sequential(bt.TensorLinear(12, 8, max_rank=3), nn.ReLU(), bt.TensorLinear(8, 3, max_rank=4)).double()
    with pytest.raises(ShapeError, match=r"'model\.0\.factorized\.cores\.0' is .* in particle 1 .*same ranks"):
        Posterior([perceptron(), other], NUM_DATA)


def test_a_broken_particle_is_named_and_the_others_continue_as_if_it_were_not_there() -> None:
    starts, spoilt = independent(perceptron, 4), independent(perceptron, 4)
    sane = Posterior([starts[0], starts[1], starts[3]], NUM_DATA, prior=rank_prior, optimizer=sgd)
    broken = Posterior(spoilt, NUM_DATA, prior=rank_prior, optimizer=sgd)
    with torch.no_grad():
        broken.particles["model.0.factorized.cores.1"][2] = torch.nan
    x, y = batch()
    with pytest.warns(ParticleWarning, match="Particle 2 of 4 .*not finite"):
        seen = broken.step(x, y)
    assert seen.alive.tolist() == [True, True, False, True]
    sane.step(x, y)
    for step in range(7):
        broken.step(*batch(seed=step))
        sane.step(*batch(seed=step))
    for name, tensor in sane.particles.items():
        torch.testing.assert_close(broken.particles[name][[0, 1, 3]], tensor, rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigError, match=r"particle 2\b.*drop_"):
        broken.compact_()
    broken.drop_([2])
    assert len(broken) == 3
    broken.compact_()
    broken.step(x, y)
    assert bool(broken.predict(x).mean.isfinite().all())
    with pytest.raises(ConfigError, match=r"from 0 to 2, got \[7\]"):
        broken.drop_([7])


def test_the_posterior_predicts_what_its_particles_predict() -> None:
    posterior = Posterior(independent(convnet, 3), NUM_DATA, optimizer=adam)
    x, y = batch(2, 4, 4)
    for _ in range(3):
        posterior.step(x, y)
    found = posterior.predict(x)
    assert isinstance(found, ClassPrediction)
    moved = posterior.to("cpu").predict(x)
    for i in range(3):
        with torch.no_grad():
            expected = posterior.particle(i)(x)
        torch.testing.assert_close(posterior.outputs(x, batch_size=7)[i], expected)
        torch.testing.assert_close(found.particle_probabilities[i], expected.softmax(1))
    assert torch.equal(moved.mean, found.mean)
    for size in (0, 2.5):
        with pytest.raises(ConfigError, match=f"batch_size must be an integer of at least 1, got {size}"):
            posterior.predict(x, batch_size=size)
    with pytest.raises(ConfigError, match=r"at least one input, got shape \(0, 2, 4, 4\)"):
        posterior.predict(x[:0])
    with pytest.raises(ConfigError, match=r"must be a tensor .* got a ndarray"):
        posterior.predict(x.numpy())
    with pytest.raises(ConfigError, match="from 0 to 2, got 3"):
        posterior.particle(3)


def test_calibration_finds_a_temperature_and_keeps_the_classes() -> None:
    posterior = Posterior(independent(perceptron, 4), NUM_DATA, optimizer=adam)
    x, y = batch()
    for _ in range(60):
        posterior.step(x, y)
    plain = posterior.predict(x)
    assert posterior.calibrate_(x, y) < 1.0  # fitted to its training data, it may be more confident
    after = posterior.predict(x)
    assert after.log_likelihood(y) > plain.log_likelihood(y)
    assert torch.equal(after.classes, plain.classes)
    torch.testing.assert_close(after.epistemic, plain.epistemic)
    with pytest.raises(ConfigError, match="Labels must lie between 0 and 2"):
        posterior.calibrate_(x, y + 5)
    other = Posterior(independent(perceptron, 2), NUM_DATA, likelihood="regression")
    with pytest.raises(ConfigError, match="Only a Classification has a temperature"):
        other.calibrate_(x, y)


def test_batch_norm_statistics_are_estimated_again_per_particle() -> None:
    posterior = Posterior(independent(convnet, 3), NUM_DATA, optimizer=adam)
    batches = [batch(2, 4, 4, seed=seed)[0] for seed in range(4)]
    for seed in range(3):
        posterior.step(*batch(2, 4, 4, seed=seed))
    posterior.carried["model.1.running_mean"][0] = torch.nan  # gone afterwards
    posterior.refresh_statistics(batches)
    for i in range(3):
        conv, norm = (posterior.particle(i).get_submodule(name) for name in ("0", "1"))
        with torch.no_grad():
            outputs = [conv(x).transpose(0, 1).flatten(1) for x in batches]
        torch.testing.assert_close(norm.running_mean, torch.stack([o.mean(1) for o in outputs]).mean(0))
        torch.testing.assert_close(norm.running_var, torch.stack([o.var(1) for o in outputs]).mean(0))
    for network in (posterior.template, posterior.particle(0)):
        assert network.get_submodule("1").momentum == nn.BatchNorm2d(1).momentum
    assert posterior.template.training


def test_starts_are_reproducible_and_the_users_networks_stay_as_they_are() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = independent(perceptron, 3, seed=7), independent(perceptron, 3, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    first = [model.get_parameter("0.factorized.cores.0").detach() for model in one]
    assert torch.equal(first[2], two[2].get_parameter("0.factorized.cores.0"))
    assert not torch.equal(first[0], first[1])
    for twin in around(one[0], 3, scale=0.01, seed=1):
        away = (twin.get_parameter("0.factorized.cores.0").detach() - first[0]).norm() / first[0].norm()
        assert 0.003 < float(away) < 0.03
    with pytest.raises(ConfigError, match="scale must be positive"):
        around(one[0], 3, scale=0.0)
    models = independent(convnet, 3)
    models[0].eval()
    before = [copy.deepcopy(model.state_dict()) for model in models]
    posterior = Posterior(models, NUM_DATA, optimizer=adam)
    posterior.step(*batch(2, 4, 4))
    posterior.compact_(0.5)
    assert not models[0].training
    for model, state in zip(models, before, strict=True):
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_compaction_to_a_budget_and_fixed_ranks_have_another_prior() -> None:
    posterior = Posterior(independent(perceptron, 3), NUM_DATA, optimizer=adam)
    for _ in range(3):
        posterior.step(*batch())
    budget = posterior.parameters_each - 20
    posterior.compact_(parameters=budget)
    assert posterior.parameters_each <= budget
    posterior.prior.variance, posterior.prior.weight = 7.0, 0.5
    posterior.fix_ranks_()
    assert (posterior.prior.variance, posterior.prior.weight) == (7.0, 0.5)
    assert not any("rank_state" in name for name in (*posterior.carried, *posterior.template.state_dict()))
    assert not posterior.method.optimizer.state
    posterior.step(*batch())
    prior = bt.prior.NormalPrior(posterior.particle(1), NUM_DATA, variance=7.0)
    posterior.method.optimizer.param_groups[0]["lr"] = 0.0
    torch.testing.assert_close(posterior.step(*batch()).log_prior[1], prior.log_prob().detach())
