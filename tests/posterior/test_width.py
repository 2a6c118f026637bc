"""How wide particles lie: exact draws, anchored particles, and methods that collapse; defaults on few data."""

import math
import warnings
from typing import Any

import pytest
import torch
from posterior_kit import adam, batch, perceptron
from torch import Tensor, nn

from bayestrain.errors import ConfigError, ParticleWarning
from bayestrain.infer.anchored import keys, normals
from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.posterior import Posterior, Regression, independent
from bayestrain.prior import NormalPrior

DIMENSIONS, NOISE, F64 = 20, 0.5, torch.float64


def regression() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(80, DIMENSIONS, dtype=F64)
    y = x @ torch.randn(DIMENSIONS, 1, dtype=F64) + NOISE * torch.randn(80, 1, dtype=F64)
    return x, y, torch.linalg.inv(x.mT @ x / NOISE**2 + torch.eye(DIMENSIONS))


def trained(method: str, x: Tensor, y: Tensor, n: int = 50, steps: int = 300, **options: Any) -> Posterior:
    """Started at draws from the prior."""
    models = [nn.Linear(DIMENSIONS, 1, bias=False).double() for _ in range(n)]
    for model in models:
        model.weight.data.normal_()
    if method != "hmc":
        options["optimizer"] = lambda named: torch.optim.Adam(named, lr=0.1)
    prior = lambda net: NormalPrior(net, len(x), variance=1.0)  # noqa: E731
    posterior = Posterior(models, len(x), likelihood=Regression(NOISE), method=method, prior=prior, **options)
    for step in range(steps):
        if method != "hmc":
            posterior.method.optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / steps))
        posterior.step(x, y)
    return posterior


@pytest.mark.parametrize(
    ("method", "options"), [("anchored", {}), ("hmc", {"steps": 80, "warmup": 40, "leapfrogs": 12})]
)
def test_particles_of_a_linear_model_have_the_variance_of_its_posterior(method: str, options: dict[str, Any]) -> None:
    x, y, covariance = regression()
    posterior = trained(method, x, y, **options)
    new = torch.randn(200, DIMENSIONS, dtype=F64)
    found = posterior.predict(new).epistemic.mean() * 50 / 49
    assert float(found / ((new @ covariance) * new).sum(1).mean()) == pytest.approx(1.0, abs=0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert posterior.width(x, y) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(("method", "low", "high"), [("svgd", 0.1, 0.4), ("ensemble", -0.05, 0.05)])
def test_a_posterior_that_is_too_narrow_says_so(method: str, low: float, high: float) -> None:
    x, y, _ = regression()
    posterior = trained(method, x, y)
    before = {name: tensor.clone() for name, tensor in posterior.particles.items()}
    with pytest.warns(ParticleWarning, match="of the posterior's width"):
        assert low < posterior.width(x, y) < high
    assert all(torch.equal(posterior.particles[name], tensor) for name, tensor in before.items())
    with pytest.raises(ConfigError, match="One particle has no width"):
        trained("ensemble", x, y, n=1, steps=1).width(x, y)


def test_minibatches_and_chunks_meet_the_same_noise() -> None:
    """Noise belongs to the datum: one epoch's gradients of minibatches add up to those of all data."""
    x, y, _ = regression()
    posterior = trained("anchored", x, y, n=5, steps=1)
    order = torch.randperm(80)
    whole = posterior._gradients(posterior.particles, (x, y))[1]
    parts = [posterior._gradients(posterior.particles, (x[own], y[own]))[1] for own in order.split(20)]
    for name, gradient in whole.items():
        torch.testing.assert_close(torch.stack([part[name] for part in parts]).mean(0), gradient)
    posterior._training_chunk = 2
    torch.testing.assert_close(posterior._gradients(posterior.particles, (x, y))[1], whole)


def test_noise_is_normal_and_differs_between_data_particles_and_outputs() -> None:
    own = keys([torch.randn(300, 4), torch.randint(3, (300,))], torch.arange(20))
    noise = torch.stack([normals(row, (5,)) for row in own]).double()  # (20, 300, 5)
    assert bool(noise.isfinite().all())
    flat = noise.flatten()
    moments = [float((flat**k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.12)
    for axis in range(3):
        rows = noise.movedim(axis, 0).flatten(1)
        off = torch.corrcoef(rows).fill_diagonal_(0)
        assert float(off.abs().max()) < 6 / rows.shape[1] ** 0.5


def test_anchors_of_cores_are_left_to_lambda_and_particles_may_be_dropped() -> None:
    posterior = Posterior(independent(perceptron, 4), 200, method="anchored", optimizer=adam)
    method: Any = posterior.method
    assert set(method.anchors) == {name for name in posterior.particles if ".cores." not in name}
    posterior.step(*batch())
    posterior.drop_([1])
    assert method.numbers.tolist() == [0, 2, 3]
    assert all(len(anchor) == 3 for anchor in method.anchors.values())
    posterior.step(*batch())


def network(inputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = nn.Sequential(*layers)
    tensorize_(model, TensorizeConfig(max_rank=8))
    return model


def with_defaults(x: Tensor, y: Tensor, batch: int, steps: int, method: str) -> Posterior:
    """A posterior with every default but its likelihood."""
    models = independent(lambda: network(x.shape[1]), 3)
    posterior = Posterior(models, len(x), likelihood="regression", method=method)
    generator, done = torch.Generator().manual_seed(0), 0
    while done < steps:
        for chosen in torch.randperm(len(x), generator=generator).split(batch):
            posterior.step(x[chosen], y[chosen])
            done += 1
    posterior.compact_()
    return posterior


@pytest.mark.slow
def test_a_gap_between_data_is_where_the_uncertainty_is() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(50, 1, generator=generator) - 1.5, torch.rand(50, 1, generator=generator) + 0.5])
    y = torch.sin(3 * x) + 0.1 * torch.randn(x.shape, generator=generator)
    posterior = with_defaults(x, y, 50, 1200, "ensemble")
    noise = posterior.particles["likelihood.log_variance"].detach().exp().sqrt()
    gap = posterior.predict(torch.linspace(-0.3, 0.3, 61)[:, None]).epistemic.mean()
    on_data = posterior.predict(x).epistemic.mean()
    assert ((noise > 0.07) & (noise < 0.13)).all()
    assert gap > 5 * on_data


@pytest.mark.slow
def test_a_noisy_regression_is_as_good_as_a_bayesian_linear_model() -> None:
    """As scikit-learn's diabetes data: 353 x 10, correlated inputs, half of the variance is noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1353, 10, generator=generator) @ torch.randn(10, 10, generator=generator) / 10**0.5
    x = (x - x.mean(0)) / x.std(0)
    one, other = (x @ torch.randn(10, 1, generator=generator) for _ in range(2))
    y = one + other.relu()
    y = y / y.std() + torch.randn(1353, 1, generator=generator)
    y = (y - y.mean()) / y.std()
    (x, x_test), (y, y_test) = x.split([353, 1000]), y.split([353, 1000])
    posterior = with_defaults(x, y, 32, 900, "svgd")
    found = posterior.predict(x_test).log_likelihood(y_test)
    linear = linear_log_likelihood(x, y, x_test, y_test)
    assert found > linear - 0.02  # an overfitted one has -2 or less, an erased one -1.42


def linear_log_likelihood(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> float:
    """Of the predictive Gaussian of linear regression with a flat prior."""
    own, test = (torch.cat([each, torch.ones(len(each), 1)], 1) for each in (x, x_test))
    weights, inverse = torch.linalg.lstsq(own, y).solution, torch.linalg.inv(own.mT @ own)
    noise = (y - own @ weights).square().sum() / (len(own) - own.shape[1])
    variance = noise * (1 + ((test @ inverse) * test).sum(1, keepdim=True))
    each = (y_test - test @ weights).square() / variance + variance.log() + math.log(2 * math.pi)
    return float(-0.5 * each.mean())
