"""Regression predictions against torch's and scipy's mixtures."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior import RegressionPrediction


def gaussians(*shape: int, spread: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    means = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    return means, torch.randn(shape, generator=generator, dtype=torch.float64).exp()


MEANS, VARIANCES = gaussians(4, 6, 2)
PREDICTION = RegressionPrediction(MEANS, VARIANCES)
TARGETS = gaussians(6, 2, seed=1)[0]
SCALAR = RegressionPrediction(MEANS[..., 0], VARIANCES[..., 0])


def mixture() -> MixtureSameFamily:
    """The same over all outputs of an input, by torch."""
    each = Independent(Normal(MEANS.transpose(0, 1), VARIANCES.sqrt().transpose(0, 1)), 1)
    return MixtureSameFamily(Categorical(torch.ones(6, 4, dtype=torch.float64)), each)


def test_moments_and_likelihoods_are_those_of_torchs_mixture() -> None:
    torch.testing.assert_close(PREDICTION.mean, mixture().mean)
    torch.testing.assert_close(PREDICTION.total, mixture().variance)
    torch.testing.assert_close(PREDICTION.std, mixture().stddev)
    torch.testing.assert_close(PREDICTION.epistemic, MEANS.var(0, correction=0))
    torch.testing.assert_close(PREDICTION.aleatoric, VARIANCES.mean(0))
    assert PREDICTION.log_likelihood(TARGETS) == pytest.approx(float(mixture().log_prob(TARGETS).mean()))
    each = Normal(MEANS, VARIANCES.sqrt()).log_prob(TARGETS).sum(2).mean()
    assert PREDICTION.mean_log_likelihood(TARGETS) == pytest.approx(float(each))
    assert PREDICTION.mean_log_likelihood(TARGETS) < PREDICTION.log_likelihood(TARGETS)


@given(st.integers(1, 6), st.floats(0.0, 1e3), st.floats(0.001, 0.999), st.integers(0, 99))
def test_both_ends_of_the_interval_are_quantiles(n: int, spread: float, level: float, seed: int) -> None:
    means, variances = gaussians(n, 3, spread=spread, seed=seed)
    for end, q in zip(RegressionPrediction(means, variances).interval(level), (-level, level), strict=True):
        found = stats.norm.cdf(end, means, variances.sqrt()).mean(0)
        np.testing.assert_allclose(found, (1 + q) / 2, rtol=0, atol=1e-9)


def test_metrics() -> None:
    found = PREDICTION.metrics(TARGETS.float())
    targets = TARGETS.float().double()
    assert list(found) == ["rmse", "log_likelihood", "mean_log_likelihood", "coverage_90"]
    assert found["rmse"] == pytest.approx(float(torch.nn.functional.mse_loss(PREDICTION.mean, targets).sqrt()))
    assert found["log_likelihood"] == PREDICTION.log_likelihood(targets)
    assert found["mean_log_likelihood"] == PREDICTION.mean_log_likelihood(targets)
    means, variances = gaussians(3, 1, spread=4.0)
    many = RegressionPrediction(means.expand(3, 20_000), variances.expand(3, 20_000))
    drawn = torch.randint(3, (20_000,))
    targets = Normal(means[drawn, 0], variances[drawn, 0].sqrt()).sample()
    assert many.metrics(targets)["coverage_90"] == pytest.approx(0.9, abs=0.0085)  # four standard errors
    assert SCALAR.log_likelihood(torch.full((6,), 1e4)) < -1e6  # the densities themselves are all 0


def test_shapes_precision_graph_and_repr() -> None:
    for name in ("mean", "total", "aleatoric", "epistemic", "std"):
        torch.testing.assert_close(getattr(SCALAR, name), getattr(PREDICTION, name)[:, 0])
    for found, expected in zip(SCALAR.interval(), PREDICTION.interval(), strict=True):
        torch.testing.assert_close(found, expected[:, 0])
    column = RegressionPrediction(MEANS[..., :1], VARIANCES[..., :1])
    assert column.mean.shape == (6, 1)
    assert column.metrics(TARGETS[:, :1]) == pytest.approx(SCALAR.metrics(TARGETS[:, 0]))
    prediction = RegressionPrediction(MEANS.float().requires_grad_(), VARIANCES.float())
    assert prediction.particle_means.dtype == torch.float32
    assert prediction.mean.dtype == prediction.std.dtype == torch.float64
    assert not prediction.mean.requires_grad
    assert repr(prediction).startswith("RegressionPrediction(particles=4, inputs=6, total=")


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda: RegressionPrediction(MEANS, VARIANCES[:, :1, :1]), r"\(4, 6, 2\), got \(4, 1, 1\).*variance.expand"),
    (lambda: RegressionPrediction(MEANS[0, :, 0], VARIANCES[0, :, 0]), r"got torch.float64 \(6,\).*_means\[None\]"),
    (lambda: RegressionPrediction(MEANS, VARIANCES - VARIANCES.min() - 2.5), r"must be positive .* from -2\.5"),
    (lambda: RegressionPrediction(torch.tensor([[torch.nan]]), torch.ones(1, 1)), "1 of them not finite"),
    (lambda: PREDICTION.metrics(TARGETS[:, 0]), r"shape of the outputs, \(6, 2\), got \(6,\)"),
    (lambda: SCALAR.log_likelihood(TARGETS[:, :1]), r"\(6,\), got \(6, 1\).*squeeze\(1\)"),
    (lambda: PREDICTION.interval(1.0), r"got 1\.0\. Try level=0\.9"),
    (lambda: RegressionPrediction.cat([PREDICTION, SCALAR]), "of one posterior"),
])  # fmt: skip
def test_errors_say_what_to_do(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=said):
        wrong()
