"""Class predictions, metrics and calibration against numpy, scipy and plain loops."""

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior import ClassPrediction, auroc, fit_temperature
from bayestrain.posterior.prediction import at_temperature


def softened(n: int, inputs: int, classes: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n, inputs, classes, generator=generator, dtype=torch.float64)).softmax(2)


@st.composite
def any_probabilities(draw: st.DrawFn) -> Tensor:
    """Any sizes, from flat to one-hot, zeros included, in single or double precision."""
    n, inputs, classes = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    probs = softened(n, inputs, classes, draw(st.sampled_from([0.0, 1.0, 30.0, 1e4])), draw(st.integers(0, 99)))
    return probs.to(draw(st.sampled_from([torch.float32, torch.float64])))


PROBS = softened(5, 7, 3)
PREDICTION = ClassPrediction(PROBS)
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 1])


def test_means_are_numpys_and_uncertainties_scipys_entropies() -> None:
    p = PROBS.numpy()
    np.testing.assert_allclose(PREDICTION.total, stats.entropy(p.mean(0), axis=1))
    np.testing.assert_allclose(PREDICTION.aleatoric, stats.entropy(p, axis=2).mean(0))
    # The mutual information by its other definition: the mean divergence of a particle from the mean.
    divergence = np.mean([stats.entropy(particle, p.mean(0), axis=1) for particle in p], axis=0)
    np.testing.assert_allclose(PREDICTION.epistemic, divergence, rtol=1e-9)
    mean = p.mean(0)
    np.testing.assert_allclose(PREDICTION.mean, mean)
    assert PREDICTION.classes.tolist() == mean.argmax(1).tolist()
    np.testing.assert_allclose(PREDICTION.confidence, mean.max(1))


@given(any_probabilities())
def test_total_is_aleatoric_plus_epistemic_and_all_have_their_bounds(probs: Tensor) -> None:
    prediction = ClassPrediction(probs)
    total, aleatoric, epistemic = prediction.total, prediction.aleatoric, prediction.epistemic
    tolerance = 1e-5 if probs.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(total, aleatoric + epistemic, rtol=0, atol=tolerance)
    largest = np.log([probs.shape[2], min(probs.shape[0], probs.shape[2])])  # a particle holds at most log n nats
    for value, bound in ((total, largest[0]), (aleatoric, largest[0]), (epistemic, largest[1])):
        assert bool(((value >= 0) & (value <= bound + 1e-5)).all())
        assert value.dtype == torch.float64
    same = ClassPrediction(probs[:1].expand(3, -1, -1))
    assert bool((same.epistemic < 1e-12).all())
    torch.testing.assert_close(*same.interval(0.5))


def test_reasons_and_probabilities_of_zero() -> None:
    eye = torch.eye(4)[:, None, :]  # four particles, each confident, each of another class
    assert ClassPrediction(eye).reasons() == ["particles disagree"]
    torch.testing.assert_close(ClassPrediction(eye).epistemic, torch.full((1,), math.log(4), dtype=torch.float64))
    flat, sure = torch.full((4, 1, 4), 0.25), torch.eye(4)[:1].expand(4, 1, 4)
    assert ClassPrediction(torch.cat([flat, sure], dim=1)).reasons() == ["ambiguous input", "clear"]
    prediction = ClassPrediction(torch.tensor([[[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]]))
    assert float(prediction.total) == 0.0
    scores = prediction.metrics(torch.tensor([1]))
    assert all(np.isfinite(list(scores.values())))
    assert prediction.log_likelihood(torch.tensor([1])) == scores["log_likelihood"] < -600


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("level", [0.1, 0.9, 0.99])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_interval_is_numpys_quantiles_at_the_temperature(n: int, level: float, temperature: float) -> None:
    probs = softened(n, 4, 3)
    low, high = ClassPrediction(probs, temperature).interval(level)
    each = probs.numpy() ** (1 / temperature)
    expected = np.quantile(each / each.sum(2, keepdims=True), [(1 - level) / 2, (1 + level) / 2], axis=0)
    np.testing.assert_allclose(low, expected[0])
    np.testing.assert_allclose(high, expected[1])


def test_likelihoods_are_plain_sums_and_metrics_those_of_the_mean() -> None:
    each = PROBS.numpy()[:, np.arange(7), LABELS.numpy()]
    assert PREDICTION.log_likelihood(LABELS) == pytest.approx(np.log(each.mean(0)).mean())
    assert PREDICTION.mean_log_likelihood(LABELS) == pytest.approx(np.log(each).mean())
    np.testing.assert_allclose(PREDICTION.particle_log_likelihoods(LABELS), np.log(each))
    found = PREDICTION.metrics(LABELS.int())
    assert set(found) == {"accuracy", "log_likelihood", "mean_log_likelihood", "ece", "brier"}
    assert found["log_likelihood"] == PREDICTION.log_likelihood(LABELS)
    assert found["mean_log_likelihood"] == PREDICTION.mean_log_likelihood(LABELS)


def test_particles_keep_their_precision_and_lose_their_graph() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        prediction = ClassPrediction(PROBS.to(dtype).requires_grad_())
        assert prediction.particle_probabilities.dtype == dtype
        assert prediction.mean.dtype == prediction.interval()[0].dtype == torch.float64
        assert not prediction.total.requires_grad
        assert np.isfinite(prediction.metrics(LABELS)["ece"])
    assert repr(ClassPrediction(PROBS[:, :0])) == "ClassPrediction(particles=5, inputs=0)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        PREDICTION.particle_probabilities = PROBS


LOGITS = PROBS.clone()
LOGITS[3, 4] = torch.tensor([-1.0, 0.5, 2.5])


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda: ClassPrediction(PROBS[0]), r"at least 2 classes .* got \(7, 3\)"),
    (lambda: ClassPrediction(PROBS[:0]), r"\(particles, inputs.*got torch.float64 \(0, 7, 3\)"),
    (lambda: ClassPrediction(LOGITS), r"sum to 1, got \(5, 7, 3\) with 1 rows that do not.*softmax"),
    (lambda: ClassPrediction(torch.full((1, 1, 2), torch.nan)), "2 of them not finite"),
    (lambda: ClassPrediction(torch.eye(3, dtype=torch.int64)[None]), "floating-point numbers .* got torch.int64"),
    (lambda: ClassPrediction(PROBS, 0.0), "temperature must be positive"),
    (lambda: PREDICTION.interval(90), "between 0 and 1, got 90. Try level=0.9"),
    (lambda: PREDICTION.log_likelihood(LABELS[:6]), r"torch.int64 of shape \(6,\) for 7 inputs"),
    (lambda: PREDICTION.log_likelihood(torch.eye(3)[LABELS].long()), r"shape \(7, 3\) .*argmax\(1\) for one-hot"),
    (lambda: PREDICTION.metrics(LABELS.float()), r"got torch.float32 .*labels.long\(\)"),
    (lambda: PREDICTION.mean_log_likelihood(LABELS + 1), "between 0 and 2, got 1 to 3"),
    (lambda: ClassPrediction(PROBS[:, :0]).metrics(LABELS[:0]), "at least one input"),
    (lambda: fit_temperature(PROBS, LABELS[:5]), r"shape \(5,\) for 7 inputs"),
    (lambda: ClassPrediction.cat([]), "of one posterior"),
    (lambda: ClassPrediction.cat([PREDICTION, ClassPrediction(PROBS[:2])]), r"\(5, 3\).*\(2, 3\)"),
    (lambda: ClassPrediction.cat([PREDICTION, ClassPrediction(PROBS, 2.0)]), "one temperature"),
    (lambda: auroc(torch.tensor([]), torch.ones(1)), "at least one score inside and one outside"),
    (lambda: auroc(torch.ones(1), torch.tensor([])), "at least one score inside and one outside"),
    (lambda: auroc(torch.ones(1), torch.tensor([1.0, math.nan])), "none may be NaN"),
])  # fmt: skip
def test_errors_say_what_to_do(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=said):
        wrong()


def test_metrics_against_plain_loops() -> None:
    probs = (2 * torch.randn(200, 4)).double().softmax(1)
    labels = torch.randint(0, 4, (200,))
    found = ClassPrediction(probs[None]).metrics(labels)
    rows = list(zip(probs.tolist(), labels.tolist(), strict=True))
    assert found["accuracy"] == pytest.approx(sum(row.index(max(row)) == y for row, y in rows) / 200)
    assert found["log_likelihood"] == pytest.approx(sum(math.log(row[y]) for row, y in rows) / 200)
    brier = sum(sum((p - (k == y)) ** 2 for k, p in enumerate(row)) for row, y in rows) / 200
    assert found["brier"] == pytest.approx(brier)
    error = 0.0
    for place in range(15):
        inside = [(max(row), row.index(max(row)) == y) for row, y in rows if int(max(row) * 15) == place]
        error += abs(sum(confidence - right for confidence, right in inside)) / 200
    assert found["ece"] == pytest.approx(error)
    certain = torch.tensor([[[1.0 + 1e-6, 0.0], [0.1, 0.9]]])  # rounding may push a probability above 1
    assert ClassPrediction(certain).metrics(torch.tensor([0, 1]))["ece"] == pytest.approx(0.05, abs=1e-5)


FEW_VALUES = st.lists(st.sampled_from([-math.inf, 0.0, 0.1, 0.5, 2.0, math.inf]), min_size=1, max_size=12)


@given(FEW_VALUES, FEW_VALUES)
def test_auroc_counts_all_pairs(inside: list[float], outside: list[float]) -> None:
    pairs = [1.0 if b > a else 0.5 if b == a else 0.0 for a in inside for b in outside]
    found = auroc(torch.tensor(inside), torch.tensor(outside).double())
    assert found == pytest.approx(statistics.mean(pairs))
    assert found + auroc(torch.tensor(outside), torch.tensor(inside)) == pytest.approx(1.0)


def mixture(sharpness: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Labels drawn from the probabilities of logits; particles that report them `sharpness` times as sharp."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return (sharpness * logits).softmax(1)[None].expand(3, -1, -1), labels


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.5])
def test_the_true_temperature_is_found_and_no_other_is_better(sharpness: float) -> None:
    probs, labels = mixture(sharpness)
    best = fit_temperature(probs, labels)
    assert best == pytest.approx(sharpness, rel=0.06)
    found = [ClassPrediction(probs, t).log_likelihood(labels) for t in (best, 0.97 * best, 1.03 * best)]
    assert found[0] == max(found)


def test_a_prediction_reports_the_power_of_its_mixture() -> None:
    probs = torch.tensor([[[0.8, 0.1, 0.1]], [[0.4, 0.6, 0.0]]], dtype=torch.float64)
    found, plain = ClassPrediction(probs, 0.5), ClassPrediction(probs)
    power = probs.mean(0) ** 2
    torch.testing.assert_close(found.mean, power / power.sum(1, keepdim=True))
    for name in ("total", "aleatoric", "epistemic", "mixture", "classes"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name
    assert ClassPrediction.cat([found, found]).temperature == 0.5
    assert torch.equal(at_temperature(probs, 1.0), probs)
