"""Defaults that must work on few data: the data shape the weights before the prior judges the ranks."""

import math

import pytest
import torch
from torch import Tensor, nn

from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.posterior import Posterior, independent

pytestmark = pytest.mark.slow

torch.set_num_threads(1)  # the networks are tiny


def perceptron(inputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = nn.Sequential(*layers)
    tensorize_(model, TensorizeConfig(max_rank=8))
    return model


def trained(x: Tensor, y: Tensor, batch: int, steps: int, method: str) -> Posterior:
    """A posterior with every default but its likelihood."""
    models = independent(lambda: perceptron(x.shape[1]), 3)
    posterior = Posterior(models, len(x), likelihood="regression", method=method)
    generator, done = torch.Generator().manual_seed(0), 0
    while done < steps:
        for chosen in torch.randperm(len(x), generator=generator).split(batch):
            posterior.step(x[chosen], y[chosen])
            done += 1
    posterior.compact_()
    return posterior


def test_a_gap_between_data_is_where_the_uncertainty_is() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(50, 1, generator=generator) - 1.5, torch.rand(50, 1, generator=generator) + 0.5])
    y = torch.sin(3 * x) + 0.1 * torch.randn(x.shape, generator=generator)
    posterior = trained(x, y, 50, 1200, "ensemble")
    noise = posterior.particles["likelihood.log_variance"].detach().exp().sqrt()
    gap = posterior.predict(torch.linspace(-0.3, 0.3, 61)[:, None]).epistemic.mean()
    on_data = posterior.predict(x).epistemic.mean()
    print(f"\nnoise {noise.tolist()}, epistemic in the gap {float(gap / on_data):.1f} times that on the data")
    assert ((noise > 0.07) & (noise < 0.13)).all()
    assert gap > 5 * on_data


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
    posterior = trained(x, y, 32, 900, "svgd")
    found = posterior.predict(x_test).log_likelihood(y_test)
    linear = linear_log_likelihood(x, y, x_test, y_test)
    print(f"\ntest log likelihood {found:.3f}, of a linear model {linear:.3f}")
    assert found > linear - 0.02  # an overfitted one has -2 or less, an erased one -1.42


def linear_log_likelihood(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> float:
    """Of the predictive Gaussian of linear regression with a flat prior."""
    own, test = (torch.cat([each, torch.ones(len(each), 1)], 1) for each in (x, x_test))
    weights, inverse = torch.linalg.lstsq(own, y).solution, torch.linalg.inv(own.mT @ own)
    noise = (y - own @ weights).square().sum() / (len(own) - own.shape[1])
    variance = noise * (1 + ((test @ inverse) * test).sum(1, keepdim=True))
    each = (y_test - test @ weights).square() / variance + variance.log() + math.log(2 * math.pi)
    return float(-0.5 * each.mean())
