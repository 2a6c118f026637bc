"""Class predictions against numpy and scipy, and what must hold for any probabilities."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict import ClassPrediction


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


def test_uncertainties_are_scipys_entropies() -> None:
    p = PROBS.numpy()
    total, aleatoric = stats.entropy(p.mean(0), axis=1), stats.entropy(p, axis=2).mean(0)
    np.testing.assert_allclose(PREDICTION.total, total)
    np.testing.assert_allclose(PREDICTION.aleatoric, aleatoric)
    # The mutual information by its other definition: the mean divergence of a particle from the mean.
    divergence = np.mean([stats.entropy(particle, p.mean(0), axis=1) for particle in p], axis=0)
    np.testing.assert_allclose(PREDICTION.epistemic, divergence, rtol=1e-9)


@given(any_probabilities())
def test_total_is_aleatoric_and_epistemic_and_all_have_their_bounds(probs: Tensor) -> None:
    prediction = ClassPrediction(probs)
    total, aleatoric, epistemic = prediction.total, prediction.aleatoric, prediction.epistemic
    torch.testing.assert_close(
        total, aleatoric + epistemic, rtol=0, atol=1e-5 if probs.dtype == torch.float32 else 1e-12
    )
    largest = np.log([probs.shape[2], min(probs.shape[0], probs.shape[2])])  # a particle holds no more than log n nats
    for value, bound in ((total, largest[0]), (aleatoric, largest[0]), (epistemic, largest[1])):
        assert bool(((value >= 0) & (value <= bound + 1e-5)).all())
        assert value.dtype == torch.float64


@given(any_probabilities(), st.integers(1, 5))
def test_identical_particles_know_no_epistemic_uncertainty(probs: Tensor, copies: int) -> None:
    prediction = ClassPrediction(probs[:1].expand(copies, -1, -1))
    assert bool((prediction.epistemic < 1e-12).all())
    assert bool((prediction.disagreement == 0).all())
    low, high = prediction.interval(0.5)
    torch.testing.assert_close(low, high)
    if copies == 1:
        assert torch.equal(prediction.epistemic, torch.zeros_like(prediction.total))


def test_rounding_makes_no_uncertainty_negative() -> None:
    prediction = ClassPrediction(softened(1, 200, 3).expand(3, -1, -1))
    assert bool((prediction.total < prediction.aleatoric).any())  # by the last bit, somewhere
    assert bool((prediction.epistemic >= 0).all())


def test_sure_particles_that_differ_are_all_epistemic() -> None:
    prediction = ClassPrediction(torch.eye(4)[:, None, :])  # four particles, each sure of another class
    torch.testing.assert_close(prediction.epistemic, torch.full((1,), np.log(4), dtype=torch.float64))
    assert float(prediction.aleatoric) == 0.0
    assert float(prediction.disagreement) == 0.75


def test_mean_classes_confidence_and_disagreement() -> None:
    p = PROBS.numpy()
    mean = p.mean(0)
    np.testing.assert_allclose(PREDICTION.mean, mean)
    assert PREDICTION.classes.tolist() == mean.argmax(1).tolist()
    np.testing.assert_allclose(PREDICTION.confidence, mean.max(1))
    np.testing.assert_allclose(PREDICTION.disagreement, (p.argmax(2) != mean.argmax(1)).mean(0))
    assert 0 < float(PREDICTION.disagreement.mean()) < 1


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("level", [0.1, 0.9, 0.99])
def test_interval_is_numpys_quantiles(n: int, level: float) -> None:
    probs = softened(n, 4, 3)
    low, high = ClassPrediction(probs).interval(level)
    expected = np.quantile(probs.numpy(), [(1 - level) / 2, (1 + level) / 2], axis=0)
    np.testing.assert_allclose(low, expected[0])
    np.testing.assert_allclose(high, expected[1])


@given(any_probabilities(), st.floats(0.01, 0.98))
def test_intervals_are_nested_and_within_the_particles(probs: Tensor, level: float) -> None:
    prediction = ClassPrediction(probs)
    (low, high), (lower, higher) = prediction.interval(level), prediction.interval(level + 0.01)
    smallest, largest = probs.double().amin(0), probs.double().amax(0)
    for ordered in ((smallest, lower), (lower, low), (low, high), (high, higher), (higher, largest)):
        assert bool((ordered[0] <= ordered[1] + 1e-12).all())


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_intervals_are_at_the_temperature_as_the_mean_is(temperature: float) -> None:
    probs = softened(9, 50, 2).double()
    prediction = ClassPrediction(probs, temperature)
    low, high = prediction.interval(0.9)
    each = probs.numpy() ** (1 / temperature)
    expected = np.quantile(each / each.sum(2, keepdims=True), [0.05, 0.95], axis=0)
    np.testing.assert_allclose(low, expected[0])
    np.testing.assert_allclose(high, expected[1])
    widest = prediction.interval(1 - 1e-9)
    assert bool(((prediction.mean >= widest[0] - 1e-6) & (prediction.mean <= widest[1] + 1e-6)).all())
    assert torch.equal(prediction.total, ClassPrediction(probs).total)
    rounded = ClassPrediction(torch.eye(10, dtype=torch.half)[None, :1], temperature)  # not in its own precision
    assert float(rounded.interval()[0][0, 0]) == pytest.approx(float(rounded.mean[0, 0]))


def test_likelihoods_are_plain_sums() -> None:
    p, labels = PROBS.numpy(), LABELS.numpy()
    each = p[:, np.arange(7), labels]
    assert PREDICTION.log_likelihood(LABELS) == pytest.approx(np.log(each.mean(0)).mean())
    assert PREDICTION.mean_log_likelihood(LABELS) == pytest.approx(np.log(each).mean())
    assert PREDICTION.particle_log_likelihood(LABELS).tolist() == pytest.approx(np.log(each).mean(1).tolist())
    assert PREDICTION.mean_log_likelihood(LABELS) < PREDICTION.log_likelihood(LABELS)


def test_metrics_are_those_of_the_mean_and_the_particles() -> None:
    found = PREDICTION.metrics(LABELS.int())
    assert list(found) == ["accuracy", "log_likelihood", "mean_log_likelihood", "ece", "brier"]
    assert found["accuracy"] == pytest.approx(float((PREDICTION.classes == LABELS).double().mean()))
    assert found["log_likelihood"] == PREDICTION.log_likelihood(LABELS)
    assert found["mean_log_likelihood"] == PREDICTION.mean_log_likelihood(LABELS)


def test_a_probability_of_zero_keeps_everything_finite() -> None:
    prediction = ClassPrediction(torch.tensor([[[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]]))
    assert float(prediction.total) == 0.0
    scores = prediction.metrics(torch.tensor([1]))
    assert all(np.isfinite(list(scores.values())))
    assert prediction.log_likelihood(torch.tensor([1])) == scores["log_likelihood"]
    assert scores["log_likelihood"] == scores["mean_log_likelihood"] < -600


# --- the joint density ------------------------------------------------------------------------------------------------


def test_joint_density_is_mirrored_scipy_kernels() -> None:
    found = PREDICTION.joint_density(2, (2, 0), grid=21)
    points = PROBS[:, 2, [2, 0]].numpy()
    np.testing.assert_allclose(found.points, points)
    assert found.classes == (2, 0)
    axis = np.linspace(0, 1, 21)
    np.testing.assert_allclose(found.axis, axis)
    width = np.maximum(points.std(0, ddof=1) * 5 ** (-1 / 6), 0.05)
    expected = np.zeros((21, 21))
    for x, y in points:
        marginals = [
            sum(stats.norm.pdf(axis, 2 * k + sign * centre, w) for k in range(-9, 10) for sign in (-1, 1))
            for centre, w in zip((x, y), width, strict=True)
        ]
        expected += np.outer(*marginals) / 5
    np.testing.assert_allclose(found.density, expected, rtol=1e-9, atol=1e-12)


@given(any_probabilities(), st.integers(5, 60))
def test_joint_density_is_a_density_on_the_unit_square(probs: Tensor, grid: int) -> None:
    found = ClassPrediction(probs).joint_density(0, grid=grid)
    assert bool((found.density >= 0).all())
    mass = torch.trapezoid(torch.trapezoid(found.density, found.axis, dim=1), found.axis, dim=0)
    assert float(mass) == pytest.approx(1.0, abs=1e-6)


def test_joint_density_takes_the_two_leading_classes_and_peaks_at_coinciding_particles() -> None:
    one = ClassPrediction(torch.tensor([0.1, 0.6, 0.3]).expand(8, 2, 3))
    found = one.joint_density(-1)
    assert found.classes == (1, 2)
    row, column = divmod(int(found.density.argmax()), 100)
    assert float(found.axis[row]) == pytest.approx(0.6, abs=0.01)
    assert float(found.axis[column]) == pytest.approx(0.3, abs=0.01)
    assert repr(found) == "JointDensity(classes 1 and 2, 100 x 100, 8 particles)"


# --- the object -------------------------------------------------------------------------------------------------------


def test_subset_and_cat_are_each_others_reverse() -> None:
    parts = [PREDICTION.subset(slice(0, 3)), PREDICTION.subset(np.int64(3)), PREDICTION.subset([4, 5, 6])]
    assert [len(part) for part in parts] == [3, 1, 3]
    assert torch.equal(ClassPrediction.cat(parts).particle_probabilities, PROBS)
    wrong = PREDICTION.classes != LABELS
    assert torch.equal(PREDICTION.subset(wrong).particle_probabilities, PROBS[:, wrong])
    assert torch.equal(PREDICTION.subset(3).particle_probabilities, PROBS[:, [3]])
    assert repr(PREDICTION.subset([])) == "ClassPrediction(5 particles, 0 inputs, 3 classes)"


def test_the_particles_keep_their_precision_and_lose_their_graph() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        prediction = ClassPrediction(PROBS.to(dtype).requires_grad_())
        assert prediction.particle_probabilities.dtype == dtype
        assert prediction.mean.dtype == prediction.interval()[0].dtype == torch.float64
        assert not prediction.total.requires_grad
        assert np.isfinite(prediction.metrics(LABELS)["ece"])


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PREDICTION.particle_probabilities = PROBS  # type: ignore[misc]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"got \(7, 3\).*pass probabilities\[None\]"):
        ClassPrediction(PROBS[0])
    with pytest.raises(ShapeError, match=r"at least 1 particle and 2 classes, got \(0, 7, 3\)"):
        ClassPrediction(PROBS[:0])
    with pytest.raises(ShapeError, match=r"got \(5, 7, 1\)"):
        ClassPrediction(torch.ones(5, 7, 1))
    logits = PROBS.clone()
    logits[3, 4] = torch.tensor([-1.0, 0.5, 2.5])
    with pytest.raises(ConfigError, match=r"smallest entry -1 and sum 2 \(particle 3, input 4\).*softmax"):
        ClassPrediction(logits)
    with pytest.raises(ConfigError, match="inputs or weights that are not finite"):
        ClassPrediction(torch.full((1, 1, 2), torch.nan))
    with pytest.raises(ConfigError, match=r"floating-point numbers, got torch.int64"):
        ClassPrediction(torch.eye(3, dtype=torch.int64)[None])
    with pytest.raises(ConfigError, match=r"between 0 and 1, got 90. Try level=0.9"):
        PREDICTION.interval(90)
    with pytest.raises(ConfigError, match=r"two different classes between 0 and 2, got \(1, 3\)"):
        PREDICTION.joint_density(0, (1, 3))
    with pytest.raises(ConfigError, match=r"got \(1, 1\)"):
        PREDICTION.joint_density(0, (1, 1))
    with pytest.raises(ConfigError, match=r"below 7, got 7"):
        PREDICTION.joint_density(7)
    with pytest.raises(ConfigError, match=r"got grid=1. Try grid=100"):
        PREDICTION.joint_density(0, grid=1)
    with pytest.raises(ShapeError, match=r"labels of shape \(6,\) for 7 inputs"):
        PREDICTION.log_likelihood(LABELS[:6])
    with pytest.raises(ConfigError, match=r"between 0 and 2, got 1 to 3"):
        PREDICTION.mean_log_likelihood(LABELS + 1)
    with pytest.raises(ShapeError, match="at least one prediction"):
        ClassPrediction.cat([])
    with pytest.raises(ShapeError, match=r"\[\(5, 7, 3\), \(2, 7, 3\)\].*one posterior only"):
        ClassPrediction.cat([PREDICTION, ClassPrediction(PROBS[:2])])
