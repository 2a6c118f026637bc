"""A posterior against networks trained one by one, and what it refuses."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from posterior_kit import NUM_DATA, adam, convnet, digits, perceptron, rank_prior, sgd
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import infer
from bayestrain.errors import ConfigError, ParticleWarning, ShapeError
from bayestrain.infer.kernels import rbf, squared_distances
from bayestrain.infer.svgd import stein_direction_
from bayestrain.posterior import Posterior, around, independent


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
            log_likelihood = -F.cross_entropy(model(x), y)
            density = NUM_DATA * log_likelihood + prior.current_weight * prior.log_prob()
            for name, found in zip(names, torch.autograd.grad(density, list(model.parameters())), strict=True):
                gradients.setdefault(name, found.new_empty(n, *found.shape))[i] = found
        if self.svgd:
            particles = {k: torch.stack([m.get_parameter(k).detach() for m in self.networks]) for k in names}
            alive = torch.ones(n, dtype=torch.bool)
            kernel = rbf(squared_distances(particles, alive))
            for name in names:
                stein_direction_(particles[name].view(n, -1), gradients[name].view(n, -1), *kernel, alive)
        for i, (model, optimizer) in enumerate(zip(self.networks, self.optimizers, strict=True)):
            for name in names:
                model.get_parameter(name).grad = -gradients[name][i] * (n if self.svgd else 1) / NUM_DATA
            optimizer.step()
        for prior in self.priors:
            prior.step()


@pytest.mark.parametrize("method", ["svgd", "ensemble"])
@pytest.mark.parametrize(("build", "shape"), [(perceptron, (12,)), (convnet, (2, 4, 4))])
def test_all_at_once_is_the_same_as_one_by_one(
    build: Callable[[], nn.Module], shape: tuple[int, ...], method: str
) -> None:
    """Likelihood, prior, warm-up, kernel, optimiser, lambda, alignment, held scale and batch norm's averages."""
    together = Posterior(independent(build, 4, seed=1), NUM_DATA, method=method, prior=rank_prior, optimizer=sgd)
    loop = Loop(independent(build, 4, seed=1), svgd=method == "svgd")
    for step in range(8):
        x, y = digits(shape, seed=step)
        together.step(x, y)
        loop.step(x, y)
    for i, model in enumerate(loop.networks):
        ours, theirs = together.particle(i).state_dict(), model.state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize(("build", "shape"), [(perceptron, (12,)), (convnet, (2, 4, 4))])
def test_chunks_change_memory_but_no_result(build: Callable[[], nn.Module], shape: tuple[int, ...], chunk: int) -> None:
    whole, parts = (
        Posterior(independent(build, 5), NUM_DATA, optimizer=adam, prior=rank_prior, chunk=size) for size in (5, chunk)
    )
    x, y = digits(shape)
    for _ in range(5):
        a, b = whole.step(x, y), parts.step(x, y)
        torch.testing.assert_close(a.log_likelihood, b.log_likelihood, rtol=1e-10, atol=1e-12)
    for group in ("particles", "carried"):
        for name, tensor in getattr(whole, group).items():
            torch.testing.assert_close(getattr(parts, group)[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    ours = whole.predict(x)
    theirs = parts.predict(x, batch_size=7, chunk=chunk)
    torch.testing.assert_close(ours.mean, theirs.mean)


@pytest.mark.parametrize("method", ["svgd", "ensemble", "sgld", "map"])
def test_every_method_learns_saves_and_goes_on_exactly(method: str, tmp_path: Path) -> None:
    def new() -> Posterior:
        torch.manual_seed(3)
        n = 1 if method == "map" else 4
        options: dict[str, Any] = {"lr": 3e-3, "memory": 0.9, "temperature": 0.1} if method == "sgld" else {
            "optimizer": adam
        }  # fmt: skip
        return Posterior(independent(convnet, n), NUM_DATA, method=method, prior=rank_prior, **options)

    x, y = digits((2, 4, 4))
    whole = new()
    first = whole.step(x, y)
    for _ in range(29):
        last = whole.step(x, y)
    assert bool((last.log_likelihood > first.log_likelihood).all())
    begun = new()
    for _ in range(11):
        begun.step(x, y)
    assert begun.compact_(0.5, "contribution").changed
    begun.step(x, y)
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    resumed = new()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.ranks == begun.ranks != new().ranks
    for posterior in (begun, resumed):
        for _ in range(6):  # an alignment among them
            posterior.step(x, y)
        posterior.compact_(0.3)
        posterior.fix_ranks_()
        posterior.step(x, y)
    for group in ("particles", "carried"):
        for name, tensor in getattr(begun, group).items():
            assert torch.equal(getattr(resumed, group)[name], tensor), name
    assert torch.equal(begun.predict(x).mean, resumed.predict(x).mean)
    torch.save(begun.state_dict(), tmp_path / "fixed.pt")  # with ranks that are given
    again = new()
    again.load_state_dict(torch.load(tmp_path / "fixed.pt", weights_only=True))
    begun.step(x, y)
    again.step(x, y)
    assert torch.equal(begun.predict(x).mean, again.predict(x).mean)


def test_a_plain_function_will_do_as_a_likelihood() -> None:
    posterior = Posterior(
        independent(perceptron, 3), NUM_DATA, optimizer=adam,
        likelihood=lambda outputs, y: -F.cross_entropy(outputs, y, reduction="none"),
    )  # fmt: skip
    x, y = digits((12,))
    posterior.step(x, y)
    assert posterior.outputs(x).shape == (3, 20, 3)
    with pytest.raises(ConfigError, match=r"says nothing of predictions.*posterior\.outputs"):
        posterior.predict(x)


def test_a_likelihood_of_the_wrong_shape_is_refused() -> None:
    x, y = digits((12,))
    for wrong, said in (
        (lambda outputs, y: -F.cross_entropy(outputs, y), "()"),
        (lambda outputs, y: outputs, "(20, 3)"),  # noqa: ARG005
    ):
        posterior = Posterior(independent(perceptron, 2), NUM_DATA, likelihood=wrong)
        with pytest.raises(ShapeError) as caught:
            posterior.step(x, y)
        assert said in str(caught.value)
        assert "(20,)" in str(caught.value)


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        ([], {}, "svgd needs at least 2 particles, got 0"),
        ([perceptron()], {}, "svgd needs at least 2 particles, got 1.*MAP"),
        ([perceptron()], {"method": "ensemble"}, "ensemble needs at least 2 particles"),
        ([perceptron(), perceptron()], {"method": "map"}, "MAP is a single point, got 2"),
        ([perceptron(), perceptron()], {"method": "hmc"}, "method must be one of"),
        ([perceptron(), perceptron()], {"method": "sgld", "optimizer": adam}, "its own optimiser"),
        ([perceptron(), perceptron()], {"method": "ensemble", "kernel": rbf}, "Only svgd has a kernel"),
        ([perceptron(), perceptron()], {"num_data": 0}, "num_data must be the number of training data"),
        ([perceptron(), perceptron()], {"chunk": 0}, "chunk is a number of particles"),
    ],
)
def test_bad_arguments_are_told_at_once(models: list[nn.Module], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        Posterior(models, **{"num_data": NUM_DATA, **options})


def test_particles_of_different_shapes_are_refused_by_name() -> None:
    other = nn.Sequential(bt.TTLinear(12, 8, max_rank=3), nn.ReLU(), bt.TTLinear(8, 3, max_rank=4)).double()
    with pytest.raises(ShapeError, match=r"Particle 1 has 'model\.0\.cores\.0' of shape .*same ranks"):
        Posterior([perceptron(), other], NUM_DATA)


def test_one_broken_particle_is_named_and_the_others_go_on_as_if_it_were_not_there() -> None:
    starts = independent(perceptron, 4)
    sane = Posterior([starts[0], starts[1], starts[3]], NUM_DATA, prior=rank_prior, optimizer=sgd)
    starts = independent(perceptron, 4)
    with torch.no_grad():
        starts[2].get_parameter("0.cores.1").fill_(float("nan"))
    broken = Posterior(starts, NUM_DATA, prior=rank_prior, optimizer=sgd)
    x, y = digits((12,))
    with pytest.warns(ParticleWarning, match="Particle 2 of 4 .*not finite"):
        seen = broken.step(x, y)
    assert seen.alive.tolist() == [True, True, False, True]
    sane.step(x, y)
    for step in range(7):
        broken.step(*digits((12,), step))
        sane.step(*digits((12,), step))
    for name, tensor in sane.particles.items():
        torch.testing.assert_close(broken.particles[name][[0, 1, 3]], tensor, rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigError, match=r"Particle 2 has NaN .*drop_"):
        broken.compact_()
    broken.drop_([2])
    assert len(broken) == 3
    broken.compact_()
    broken.step(x, y)
    assert bool(broken.predict(x).mean.isfinite().all())
    with pytest.raises(ConfigError, match=r"particles 0 to 2, but no \[7\]"):
        broken.drop_([7])


def test_frozen_parameters_are_shared_and_must_be_the_same() -> None:
    def build() -> nn.Module:
        model = perceptron()
        model.get_submodule("0").requires_grad_(False)
        return model

    with pytest.raises(ConfigError, match=r"'0\..*' is frozen.*particle 1 has other values"):
        Posterior(independent(build, 3), NUM_DATA)
    backbone = build()
    models = independent(build, 3)
    for model in models:
        model.get_submodule("0").load_state_dict(backbone.get_submodule("0").state_dict())
    posterior = Posterior(models, NUM_DATA, optimizer=adam)
    assert not any(name.startswith("model.0.cores") for name in posterior.particles)
    x, y = digits((12,))
    posterior.step(x, y)
    with torch.no_grad():
        torch.testing.assert_close(posterior.particle(1)(x), posterior.outputs(x)[1])
    with pytest.raises(ConfigError, match="No parameter of the network trains"):
        Posterior([copy.deepcopy(backbone).requires_grad_(False) for _ in range(2)], NUM_DATA)


def test_dropout_draws_anew_for_every_particle_and_is_off_in_predictions() -> None:
    start = nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    posterior = Posterior([copy.deepcopy(start) for _ in range(3)], NUM_DATA, method="ensemble", optimizer=adam)
    x, y = digits((12,))
    seen = posterior.step(x, y)
    assert len(set(seen.log_likelihood.tolist())) == 3
    again = Posterior([copy.deepcopy(start) for _ in range(3)], NUM_DATA, method="ensemble")
    assert torch.equal(again.outputs(x)[0], again.outputs(x)[2])


def test_batch_norm_statistics_are_estimated_anew_per_particle() -> None:
    posterior = Posterior(independent(convnet, 3), NUM_DATA, optimizer=adam)
    batches = [digits((2, 4, 4), seed)[0] for seed in range(4)]
    for seed in range(3):
        posterior.step(*digits((2, 4, 4), seed))
    posterior.refresh_statistics(batches)
    for i in range(3):
        conv, norm = (posterior.particle(i).get_submodule(name) for name in ("0", "1"))
        with torch.no_grad():
            outputs = [conv(x).transpose(0, 1).flatten(1) for x in batches]
        torch.testing.assert_close(norm.running_mean, torch.stack([o.mean(1) for o in outputs]).mean(0))
        torch.testing.assert_close(norm.running_var, torch.stack([o.var(1) for o in outputs]).mean(0))
    momentum = posterior.template.get_submodule("1").momentum
    assert momentum == nn.BatchNorm2d(1).momentum


def test_starts_are_reproducible_apart_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = independent(perceptron, 3, seed=7), independent(perceptron, 3, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    first = [model.get_parameter("0.cores.0") for model in one]
    assert torch.equal(first[2], two[2].get_parameter("0.cores.0"))
    assert not torch.equal(first[0], first[1])
    near = around(one[0], 3, scale=0.01, seed=1)
    for twin in near:
        away = (twin.get_parameter("0.cores.0") - first[0]).detach().norm() / first[0].detach().norm()
        assert 0.003 < float(away) < 0.03
    with pytest.raises(ConfigError, match="scale must be positive"):
        around(one[0], 3, scale=0.0)
    with pytest.raises(ConfigError, match="at least one particle, got 0"):
        independent(perceptron, 0)


def test_diagnostics_tell_copies_from_different_particles() -> None:
    apart = Posterior(independent(perceptron, 6), NUM_DATA).diagnostics()
    with pytest.warns(ParticleWarning, match="collapsed"):
        close = Posterior(around(perceptron(), 6, scale=1e-3), NUM_DATA).diagnostics()
    assert apart.effective_particles > 5.5
    assert close.effective_particles < 1.1
    assert close.spread < 0.01 < 0.5 < apart.spread


def test_the_stein_discrepancy_leaves_no_trace() -> None:
    posterior = Posterior(independent(convnet, 3), NUM_DATA, optimizer=adam)
    batch = digits((2, 4, 4))
    posterior.step(*batch)
    before = copy.deepcopy(posterior.state_dict())
    assert posterior.stein_discrepancy([batch, digits((2, 4, 4), 1)]) != 0.0
    for kind in ("particles", "carried"):
        for name, tensor in before["method"][kind].items():
            assert torch.equal(posterior.state_dict()["method"][kind][name], tensor)
    with pytest.raises(ConfigError, match="no batch"):
        posterior.stein_discrepancy([])


def test_any_kernel_and_its_options_reach_svgd() -> None:
    x, y = digits((12,))
    ends = []
    for kernel in (infer.rbf, infer.imq, lambda d2: infer.rbf(d2, bandwidth=1e-6)):
        posterior = Posterior(independent(perceptron, 4), NUM_DATA, kernel=kernel, optimizer=sgd)
        posterior.step(x, y)
        ends.append(posterior.particles["model.0.cores.0"].detach())
    alone = Posterior(independent(perceptron, 4), NUM_DATA, method="ensemble", optimizer=sgd)
    alone.step(x, y)
    assert not torch.allclose(ends[0], ends[1])
    torch.testing.assert_close(ends[2], alone.particles["model.0.cores.0"].detach())  # nobody feels anybody


def test_the_users_networks_stay_as_they_are() -> None:
    models = independent(convnet, 3)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    posterior = Posterior(models, NUM_DATA, optimizer=adam)
    posterior.step(*digits((2, 4, 4)))
    posterior.compact_(0.5)
    for model, state in zip(models, before, strict=True):
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
