"""Every likelihood passes the kit; what each of them refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from likelihood_kit import LikelihoodKit
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, Poisson
from torch.func import vmap

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior import (
    Classification,
    FunctionLikelihood,
    Likelihood,
    Prediction,
    Regression,
    RegressionPrediction,
    as_likelihood,
)

LABELS = torch.tensor([2, 0, 1, 1, 2])


class TestClassification(LikelihoodKit):
    def make(self) -> Likelihood:
        return Classification()

    def targets(self, number: int) -> Tensor:
        return torch.arange(number) % 3

    def reference(self, likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        return Categorical(logits=outputs).log_prob(targets)


class TestRegression(LikelihoodKit):
    width = None

    def make(self) -> Likelihood:
        return Regression()

    def targets(self, number: int) -> Tensor:
        return 3 + torch.randn(number) if self.width is None else 3 + torch.randn(number, self.width)

    def reference(self, likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        std = math.exp(likelihood.log_variance.item() / 2) if likelihood.noise is None else likelihood.noise
        return Normal(outputs, std).log_prob(targets).reshape(len(targets), -1).sum(1)


class TestRegressionOfSeveralOutputs(TestRegression):
    width = 3


class TestRegressionWithGivenNoise(TestRegression):
    width = 1

    def make(self) -> Likelihood:
        return Regression(noise=0.8)


class Counts(Likelihood):
    """A user's own: Poisson counts, the outputs their log rates."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets * outputs - outputs.exp() - torch.lgamma(targets + 1.0)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"rate": outputs.exp()}

    def prediction(self, described: Mapping[str, Tensor]) -> Prediction:
        return RegressionPrediction(described["rate"], described["rate"])  # a normal of the same mean and variance


class TestOwnLikelihood(LikelihoodKit):
    width = None

    def make(self) -> Likelihood:
        return Counts()

    def targets(self, number: int) -> Tensor:
        return (torch.arange(number) % 7).float()

    def reference(self, likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        return Poisson(outputs.exp()).log_prob(targets)

    def check_prediction(self, prediction: Any, targets: Tensor, mean_log_likelihood: float) -> None:
        pass  # it reports the log density of a normal

    def test_a_posterior_learns_with_it(self) -> None:
        pass


def test_a_likelihood_by_name_or_function() -> None:
    assert isinstance(as_likelihood("classification"), Classification)
    assert isinstance(as_likelihood("regression"), Regression)
    own = Regression(0.1)
    assert as_likelihood(own) is own
    function = as_likelihood(lambda outputs, targets: -(outputs - targets).abs())
    assert isinstance(function, FunctionLikelihood)
    assert function.log_prob(torch.zeros(3), torch.ones(3)).tolist() == [-1, -1, -1]
    with pytest.raises(ConfigError, match=r"does not say what to predict.*posterior\.outputs"):
        function.prediction({})
    for wrong in ("poisson", 3, None):
        with pytest.raises(ConfigError, match=f'"regression", a Likelihood, or a function .* got {wrong!r}'):
            as_likelihood(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        Likelihood()  # type: ignore[abstract]


def test_what_a_network_and_a_likelihood_return_is_checked() -> None:
    targets = torch.zeros(5)
    for values, found in (
        (torch.zeros(()), "shape ()"), (torch.zeros(5, 1), "shape (5, 1)"), (1.0, "a float"),
    ):  # fmt: skip
        with pytest.raises(ShapeError) as caught:
            FunctionLikelihood(lambda *_, values=values: values).log_prob(torch.zeros(5), targets)  # type: ignore[misc]
        assert f"shape (5,), got {found}" in str(caught.value)
        assert 'reduction="none"' in str(caught.value)
    with pytest.raises(ConfigError, match="must return one tensor, got tuple"):
        Classification().log_prob((torch.zeros(5, 3),), targets)
    with pytest.raises(ShapeError, match=r"shape \(3,\), got shape \(\)"):
        vmap(lambda row: FunctionLikelihood(lambda o, _: o.sum()).log_prob(row, torch.zeros(3)))(torch.randn(2, 3))


def test_classification_refuses_what_it_cannot_use_also_under_vmap() -> None:
    classes = Classification()
    with pytest.raises(ShapeError, match=r"got labels of shape \(5, 3\) for 5 inputs.*labels.argmax\(1\)"):
        classes(torch.randn(5, 3), torch.eye(3)[LABELS])
    with pytest.raises(ShapeError, match=r"at least 2 classes, got \(5, 1\).*two outputs"):
        vmap(lambda outputs: classes(outputs, LABELS))(torch.randn(4, 5, 1))
    with pytest.raises(ShapeError, match=r"got \(5, 3, 2\)"):
        classes.describe(torch.randn(5, 3, 2))
    with pytest.raises(ConfigError, match=r"got torch.float32. Type labels.long\(\)"):
        classes(torch.randn(5, 3), LABELS.float())
    with pytest.raises(ConfigError, match="between 0 and 2, got -100 to -100"):  # no label is ignored
        classes(torch.randn(5, 3), torch.full((5,), -100))
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="temperature must be positive and finite"):
            Classification(temperature)
    outputs = torch.randn(5, 3)
    assert torch.equal(classes(outputs, LABELS), classes(outputs, LABELS.to(torch.uint8)))
    assert repr(Classification(0.5)) == "Classification(temperature=0.5)"


def test_a_confident_error_keeps_its_log_likelihood() -> None:
    described = Classification().describe(torch.tensor([[0.0, 300.0]]))
    prediction = Classification().prediction({"probabilities": described["probabilities"][None]})
    assert prediction.log_likelihood(torch.tensor([0])) == pytest.approx(-300.0)


def test_regression_refuses_what_it_cannot_use_also_under_vmap() -> None:
    regression, targets = Regression(), torch.randn(5)
    with pytest.raises(ShapeError, match=r"\(5, 1\), got \(5,\). For one output .* targets\[:, None\]"):
        regression(torch.randn(5, 1), targets)
    with pytest.raises(ShapeError, match=r"outputs, \(5, 1\), got \(5,\)"):
        vmap(lambda outputs: regression(outputs, targets))(torch.randn(4, 5, 1))
    with pytest.raises(ShapeError, match=r"\(B, K\), got \(5, 3, 2\).*flatten\(1\)"):
        regression.describe(torch.randn(5, 3, 2))
    for noise in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"positive and finite, got .* Omit it to learn it"):
            Regression(noise)
    assert [repr(each) for each in (regression, Regression(0.5))] == [
        "Regression(noise learned)", "Regression(noise=0.5)",
    ]  # fmt: skip


def test_noise_is_learned_unless_it_is_given() -> None:
    assert [name for name, _ in Regression().named_parameters()] == ["log_variance"]
    assert not list(Regression(0.1).parameters())
    likelihood, residuals = Regression(), 0.2 * torch.randn(500)
    optimizer = torch.optim.LBFGS(likelihood.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -likelihood(torch.zeros(500), residuals).mean()
        value.backward()
        return value

    optimizer.step(loss)
    assert isinstance(likelihood.log_variance, nn.Parameter)
    assert likelihood.log_variance.exp().item() == pytest.approx(float(residuals.square().mean()), rel=1e-3)
