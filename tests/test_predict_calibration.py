"""The temperature of a mixture."""

import pytest
import torch

import bayestrain as bt
from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict import at_temperature, fit_temperature


def mixture(sharpness: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn from the probabilities of logits; particles that say them `sharpness` times as sharp."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return (sharpness * logits).softmax(1)[None].expand(3, -1, -1), labels


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.5])
def test_the_true_temperature_is_found(sharpness: float) -> None:
    probs, labels = mixture(sharpness)
    assert fit_temperature(probs, labels) == pytest.approx(sharpness, rel=0.06)


def test_no_other_temperature_is_better() -> None:
    probs, labels = mixture(0.7)
    best = fit_temperature(probs, labels)
    likelihoods = [
        bt.ClassPrediction(probs, temperature).log_likelihood(labels)
        for temperature in (best, 0.97 * best, 1.03 * best)
    ]
    assert likelihoods[0] == max(likelihoods)


def test_a_prediction_reports_the_power_of_its_mixture() -> None:
    probs = torch.tensor([[[0.8, 0.1, 0.1]], [[0.4, 0.6, 0.0]]], dtype=torch.float64)
    found = bt.ClassPrediction(probs, 0.5)
    power = probs.mean(0) ** 2
    torch.testing.assert_close(found.mean, power / power.sum(1, keepdim=True))
    plain = bt.ClassPrediction(probs)
    for name in ("total", "aleatoric", "epistemic", "mixture", "classes"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name
    assert found.subset([0]).temperature == 0.5
    assert bt.ClassPrediction.cat([found, found]).temperature == 0.5


def test_nonsense_is_refused() -> None:
    probs, labels = mixture(1.0)
    with pytest.raises(ShapeError, match="one label per datum"):
        fit_temperature(probs, labels[:5])
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        bt.ClassPrediction(probs, 0.0)
    with pytest.raises(ConfigError, match="temperature must be above 0"):
        bt.Classification(float("inf"))
    with pytest.raises(ConfigError, match="different temperatures"):
        bt.ClassPrediction.cat([bt.ClassPrediction(probs), bt.ClassPrediction(probs, 2.0)])
    assert torch.equal(at_temperature(probs, 1.0), probs)
