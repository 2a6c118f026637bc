"""Metrics against plain loops."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict import ECE_BINS, auroc, classification_metrics, risk_coverage

FEW_VALUES = st.lists(st.sampled_from([-math.inf, 0.0, 0.1, 0.5, 2.0, math.inf]), min_size=1, max_size=12)


def test_classification_metrics_against_plain_loops() -> None:
    probs = (2 * torch.randn(200, 4)).double().softmax(1)
    labels = torch.randint(0, 4, (200,))
    found = classification_metrics(probs, labels)
    rows = list(zip(probs.tolist(), labels.tolist(), strict=True))
    assert found["accuracy"] == pytest.approx(sum(row.index(max(row)) == y for row, y in rows) / 200)
    assert found["log_likelihood"] == pytest.approx(sum(math.log(row[y]) for row, y in rows) / 200)
    brier = sum(sum((p - (k == y)) ** 2 for k, p in enumerate(row)) for row, y in rows) / 200
    assert found["brier"] == pytest.approx(brier)
    error = 0.0
    for place in range(ECE_BINS):
        inside = [(max(row), row.index(max(row)) == y) for row, y in rows if int(max(row) * ECE_BINS) == place]
        error += abs(sum(confidence - right for confidence, right in inside)) / 200
    assert found["ece"] == pytest.approx(error, abs=1e-6)


def test_a_probability_a_hair_above_one_is_not_taken_for_a_logit() -> None:
    probs = torch.tensor([[1.0 + 1e-6, 0.0], [0.1, 0.9]])
    assert classification_metrics(probs, torch.tensor([0, 1]))["ece"] == pytest.approx(0.05, abs=1e-5)


def test_bad_labels_are_refused() -> None:
    probs = torch.full((3, 2), 0.5)
    with pytest.raises(ShapeError, match=r"labels of shape \(3, 2\) for 3 inputs.*rather than one-hot rows"):
        classification_metrics(probs, torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="at least one input"):
        classification_metrics(probs[:0], torch.tensor([], dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"got torch.float32. Type labels.long\(\)"):
        classification_metrics(probs, torch.ones(3))
    with pytest.raises(ConfigError, match=r"between 0 and 1, got 1 to 2. Number the classes from 0"):
        classification_metrics(probs, torch.tensor([1, 1, 2]))


@given(FEW_VALUES, FEW_VALUES)
def test_auroc_counts_all_pairs(inside: list[float], outside: list[float]) -> None:
    pairs = [1.0 if b > a else 0.5 if b == a else 0.0 for a in inside for b in outside]
    found = auroc(torch.tensor(inside), torch.tensor(outside).double())
    assert found == pytest.approx(statistics.mean(pairs))
    assert found + auroc(torch.tensor(outside), torch.tensor(inside)) == pytest.approx(1.0)


def test_auroc_is_one_when_all_outside_are_less_certain() -> None:
    assert auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4, 0.5])) == 1.0
    assert auroc(torch.tensor([1, 2]), torch.tensor([0])) == 0.0


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 2.0]), st.booleans()), min_size=1, max_size=12))
def test_risk_coverage_is_the_mean_over_all_orders_of_equals(pairs: list[tuple[float, bool]]) -> None:
    found = risk_coverage(torch.tensor([u for u, _ in pairs]), torch.tensor([w for _, w in pairs]))
    expected = []
    for k in range(1, len(pairs) + 1):
        limit = sorted(u for u, _ in pairs)[k - 1]
        sure, tied = [w for u, w in pairs if u < limit], [w for u, w in pairs if u == limit]
        expected.append((sum(sure) + (k - len(sure)) * statistics.mean(map(float, tied))) / k)
    assert found.risk.tolist() == pytest.approx(expected)
    assert found.coverage.tolist() == pytest.approx([k / len(pairs) for k in range(1, len(pairs) + 1)])
    assert found.area == pytest.approx(statistics.mean(expected))
    assert float(found.risk[-1]) == pytest.approx(statistics.mean(float(w) for _, w in pairs))


def test_an_uncertainty_that_knows_the_errors_has_the_smaller_area() -> None:
    wrong = torch.arange(100) >= 90
    knows, opposite, nothing = (
        risk_coverage(u, wrong) for u in (torch.arange(100.0), -torch.arange(100.0), torch.ones(100))
    )
    assert knows.area < nothing.area < opposite.area
    assert nothing.area == pytest.approx(0.1)
    assert float(knows.risk[89]) == 0.0
    assert repr(nothing) == "RiskCoverage(100 inputs, error rate 0.1, area 0.1)"


def test_bad_scores_are_refused() -> None:
    good = torch.ones(3)
    with pytest.raises(ShapeError, match=r"scores_in must have shape \(N,\).*got \(3, 1\).*prediction.epistemic"):
        auroc(good[:, None], good)
    with pytest.raises(ShapeError, match=r"scores_out must .* got \(0,\)"):
        auroc(good, good[:0])
    with pytest.raises(ConfigError, match="scores_out must be numbers, got 1 NaN of 2"):
        auroc(good, torch.tensor([1.0, torch.nan]))
    with pytest.raises(ShapeError, match=r"got shapes \(2,\) and \(3,\). Pass prediction.classes != labels"):
        risk_coverage(good, good[:2])
    with pytest.raises(ConfigError, match="true or false, got other numbers"):
        risk_coverage(good, torch.tensor([0, 1, 7]))
