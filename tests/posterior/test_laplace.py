"""The Gaussian around a trained network, against the posterior of a linear model and finite differences."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import bayestrain as bt
from bayestrain.errors import ConfigError
from bayestrain.posterior import ClassPrediction, Regression, laplace

NOISE, F64 = 0.5, torch.float64


def linear(precision: float) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A linear model at the mean of its posterior, its data, and the posterior's covariance."""
    x = torch.randn(40, 5, dtype=F64)
    y = x @ torch.randn(5, 1, dtype=F64) + NOISE * torch.randn(40, 1, dtype=F64)
    covariance = torch.linalg.inv(x.mT @ x / NOISE**2 + precision * torch.eye(5, dtype=F64))
    model = nn.Linear(5, 1, bias=False).double()
    model.weight.data = (covariance @ x.mT @ y).mT / NOISE**2
    return model, x, y, covariance


def test_a_linear_model_has_its_exact_posterior_and_evidence() -> None:
    model, x, y, covariance = linear(2.0)
    found = laplace(model, zip(x.split(15), y.split(15), strict=True), Regression(NOISE), precision=2.0)
    draws = found.draws(20_000)["model.weight"].squeeze(1)
    torch.testing.assert_close(torch.cov(draws.mT), covariance, rtol=0.0, atol=0.04 * float(covariance.max()))
    new = torch.randn(7, 5, dtype=F64)
    predicted = found.predict(new, n=20_000, batch_size=3)
    torch.testing.assert_close(predicted.epistemic.squeeze(1), ((new @ covariance) * new).sum(1), rtol=0.05, atol=0.0)
    torch.testing.assert_close(predicted.mean, model(new).detach(), rtol=0.0, atol=0.01)
    marginal = MultivariateNormal(torch.zeros(40, dtype=F64), x @ x.mT / 2 + NOISE**2 * torch.eye(40))
    assert found.log_evidence == pytest.approx(float(marginal.log_prob(y.squeeze(1))))
    assert found.effective == pytest.approx(5 - 2 * float(covariance.trace()))
    sampled = found.sample(2000).predict(new).epistemic.squeeze(1)
    torch.testing.assert_close(sampled, ((new @ covariance) * new).sum(1), rtol=0.15, atol=0.0)


def test_precisions_and_parameters() -> None:
    model, x, y, _ = linear(1.0)
    best = laplace(model, [(x, y)], Regression(NOISE))
    for factor in (0.8, 1.25):
        other = laplace(model, [(x, y)], Regression(NOISE), precision=factor * best.precision)
        assert other.log_evidence < best.log_evidence - 1e-3
    assert f"precision={best.precision:.4g}" in repr(best)
    data = [(torch.randn(2, 200), torch.randint(3, (2,)))]
    with pytest.raises(ConfigError, match="names 0 trainable parameters"):
        laplace(nn.Linear(200, 3), data, include="head.*")
    with pytest.raises(ConfigError, match=r"names 40,401 trainable parameters; it must be 1 to 20,000"):
        laplace(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 1)), data, include="*")


def small() -> nn.Module:
    return nn.Sequential(bt.TensorLinear(6, 8, max_rank=2), nn.Tanh(), nn.Linear(8, 3)).double()


def test_the_curvature_is_that_of_the_linearised_network() -> None:
    model, x, y = small(), torch.randn(9, 6, dtype=F64), torch.randint(3, (9,))
    found = laplace(model, [(x[:4], y[:4]), (x[4:], y[4:])], include="*")
    curvature = found.vectors @ found.values.diag() @ found.vectors.mT
    step, expected = 1e-5, torch.zeros_like(curvature)
    parameters, jacobian = list(model.parameters()), torch.zeros(9, 3, len(curvature), dtype=F64)
    at = 0
    for p in parameters:  # by central differences
        for i in range(p.numel()):
            flat, ends = p.data.view(-1), []
            for way in (step, -2 * step):
                flat[i] += way
                ends.append(model(x).detach())
            flat[i] += step
            jacobian[:, :, at] = (ends[0] - ends[1]) / (2 * step)
            at += 1
    for own, p in zip(jacobian, model(x).detach().softmax(1), strict=True):
        expected += own.mT @ (p.diag() - p[:, None] * p) @ own
    torch.testing.assert_close(curvature, expected, rtol=1e-5, atol=1e-6)


def test_a_network_that_was_trained_alone_gets_uncertainty_and_can_be_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(200, 6, dtype=F64)
    y = (x[:, :3] + 0.3 * torch.randn(200, 3, dtype=F64)).argmax(1)
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole, last = laplace(model, [(x, y)], include="*"), laplace(model, [(x, y)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (len(whole.values), len(last.values)) == (sum(p.numel() for p in model.parameters()), 27)
    assert laplace(model[:1], [(x, y)]).names == [f"model.{name}" for name, _ in model[:1].named_parameters()]
    for found in (whole, last):
        inside, outside = found.predict(x), found.predict(10 * x.flip(1))
        assert isinstance(inside, ClassPrediction)
        assert (inside.classes == model(x).argmax(1)).double().mean() > 0.95
        assert float(outside.epistemic.mean()) > 1.3 * float(inside.epistemic.mean())
        assert torch.equal(found.predict(x).mean, inside.mean)  # the same seed
    sampled = last.sample(4)
    assert torch.equal(sampled.particles["model.0.factorized.cores.0"][3], model.get_parameter("0.factorized.cores.0"))
    bt.save(sampled, tmp_path / "posterior")
    loaded = bt.load(tmp_path / "posterior", into=small())
    assert torch.equal(loaded.predict(x).mean, sampled.predict(x).mean)
    assert math.isfinite(whole.log_evidence)
