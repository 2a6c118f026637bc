"""What a posterior predicts, of classes and of numbers, its temperature, and inputs that it refuses."""

import numpy as np
import pytest
import torch
from posterior_kit import NUM_DATA, adam, convnet, digits, perceptron
from torch import nn

import bayestrain as bt
from bayestrain.errors import ConfigError
from bayestrain.posterior import Posterior, independent


def test_the_posterior_predicts_what_its_particles_predict() -> None:
    posterior = Posterior(independent(convnet, 3), NUM_DATA, optimizer=adam)
    x, y = digits((2, 4, 4))
    for _ in range(3):
        posterior.step(x, y)
    found = posterior.predict(x)
    assert isinstance(found, bt.ClassPrediction)
    for i in range(3):
        with torch.no_grad():
            torch.testing.assert_close(found.particle_probabilities[i], posterior.particle(i)(x).softmax(1))
    assert posterior.template.training  # as it was


def test_regression_learns_its_noise_and_is_unsure_away_from_the_data() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.rand(60, 1) - 1.5, torch.rand(60, 1) + 0.5])
    y = x.sin() + 0.1 * torch.randn_like(x)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    posterior = Posterior(
        independent(build, 8), len(x), likelihood=bt.Regression(),
        optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.02),
    )  # fmt: skip
    for _ in range(800):
        posterior.step(x, y)
    found = posterior.predict(x)
    assert isinstance(found, bt.RegressionPrediction)
    noise = posterior.particles["likelihood.log_variance"].detach().exp().sqrt()
    assert bool(((noise > 0.05) & (noise < 0.2)).all())
    assert found.metrics(y)["rmse"] < 0.15
    far = posterior.predict(torch.tensor([[4.0]]))
    assert float(far.epistemic.mean()) > 5 * float(found.epistemic.mean())


def test_calibration_finds_a_temperature_and_keeps_the_classes() -> None:
    posterior = Posterior(independent(perceptron, 4), NUM_DATA, optimizer=adam)
    x, y = digits((12,))
    for _ in range(60):
        posterior.step(x, y)
    plain = posterior.predict(x)
    temperature = posterior.calibrate_(x, y)
    after = posterior.predict(x)
    assert isinstance(plain, bt.ClassPrediction)
    assert isinstance(after, bt.ClassPrediction)
    assert temperature < 1.0  # fitted on what it was trained on, it can be surer
    assert after.log_likelihood(y) > plain.log_likelihood(y)
    assert torch.equal(after.classes, plain.classes)
    torch.testing.assert_close(after.epistemic, plain.epistemic)
    resumed = Posterior(independent(perceptron, 4), NUM_DATA, optimizer=adam)
    resumed.load_state_dict(posterior.state_dict())
    assert torch.equal(resumed.predict(x).mean, after.mean)
    regression = Posterior(independent(perceptron, 2), NUM_DATA, likelihood=bt.Regression())
    with pytest.raises(ConfigError, match="Only a Classification has a temperature"):
        regression.calibrate_(x, y)


def test_predict_wants_a_tensor() -> None:
    posterior = Posterior(independent(perceptron, 2), NUM_DATA, optimizer=adam)
    with pytest.raises(ConfigError, match="Inputs must be a tensor, got a ndarray"):
        posterior.predict(np.zeros((3, 4)))


def test_predict_refuses_nonsense() -> None:
    posterior = Posterior(independent(perceptron, 2), NUM_DATA)
    x, _ = digits((12,))
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        posterior.predict(x, batch_size=0)
    with pytest.raises(ConfigError, match="no input"):
        posterior.predict(x[:0])
    with pytest.raises(ConfigError, match="particles 0 to 1, but no 2"):
        posterior.particle(2)


def test_sizes_of_batches_may_be_numpys() -> None:
    posterior = Posterior(independent(perceptron, 2), NUM_DATA)
    x, _ = digits((12,))
    found = posterior.outputs(x, batch_size=np.int64(7), chunk=np.int32(1))
    torch.testing.assert_close(found, posterior.outputs(x))
    with pytest.raises(ConfigError, match=r"integers of at least 1, got 2\.5 and None"):
        posterior.predict(x, batch_size=2.5)  # type: ignore[arg-type]
