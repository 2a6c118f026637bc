"""Every likelihood passes the kit; what each of them refuses."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from likelihood_kit import LikelihoodKit
from torch import Tensor
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


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(outputs - targets).abs()


def test_likelihoods_by_name_or_function_and_learned_noise() -> None:
    assert isinstance(as_likelihood("classification"), Classification)
    assert isinstance(as_likelihood("regression"), Regression)
    own = Regression(0.1)
    assert as_likelihood(own) is own
    assert as_likelihood(absolute).log_prob(torch.zeros(3), torch.ones(3)).tolist() == [-1, -1, -1]
    assert [name for name, _ in Regression().named_parameters()] == ["log_variance"]
    assert not list(Regression(0.1).parameters())
    likelihood, residuals = Regression(), 0.2 * torch.randn(500)
    optimizer = torch.optim.Adam(likelihood.parameters(), 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (-likelihood(torch.zeros(500), residuals).mean()).backward()
        optimizer.step()
    assert likelihood.log_variance.exp().item() == pytest.approx(float(residuals.square().mean()), rel=1e-2)


CLASSES, REGRESSION, OUTPUTS, TARGETS = Classification(), Regression(), torch.randn(5, 3), torch.randn(5)


def returning(values: Any) -> Any:
    return FunctionLikelihood(lambda *_: values).log_prob(torch.zeros(5), torch.zeros(5))


@pytest.mark.parametrize(("wrong", "said"), [
    *((lambda own=own: as_likelihood(own), f'"regression", a Likelihood, or a function .* got {own!r}')
      for own in ("poisson", 3, None)),
    (lambda: FunctionLikelihood(absolute).prediction({}), r"does not say what to predict.*posterior\.outputs"),
    (lambda: returning(torch.zeros(())), r'shape \(5,\), got torch.Size\(\[\]\).*reduction="none"'),
    (lambda: returning(torch.zeros(5, 3)), r"got torch.Size\(\[5, 3\]\).*values.flatten\(1\).sum\(1\)"),
    (lambda: returning(torch.zeros(5, 1)), r"shape \(5,\), got torch.Size\(\[5, 1\]\)"),
    (lambda: returning(1.0), r"shape \(5,\), got 1.0"),
    (lambda: vmap(lambda row: FunctionLikelihood(lambda o, _: o.sum()).log_prob(row, TARGETS[:3]))(OUTPUTS),
     r"shape \(3,\), got torch.Size\(\[\]\)"),
    (lambda: CLASSES.log_prob((OUTPUTS,), LABELS), "must return one tensor, got tuple"),
    (lambda: CLASSES(OUTPUTS, torch.eye(3)[LABELS]), r"shape \(5, 3\) for 5 inputs.*labels.argmax\(1\)"),
    (lambda: vmap(lambda outputs: CLASSES(outputs, LABELS))(torch.randn(4, 5, 1)), r"2 classes, got \(5, 1\).*two"),
    (lambda: CLASSES.describe(torch.randn(5, 3, 2)), r"got \(5, 3, 2\)"),
    (lambda: CLASSES(OUTPUTS, LABELS.float()), r"got torch.float32 .*labels.long\(\)"),
    (lambda: CLASSES(OUTPUTS, torch.full((5,), -100)), "between 0 and 2, got -100 to -100"),  # none is ignored
    (lambda: REGRESSION(OUTPUTS[:, :1], TARGETS), r"\(5, 1\), got \(5,\). For one output .* targets\[:, None\]"),
    (lambda: vmap(lambda o: REGRESSION(o, TARGETS))(torch.randn(4, 5, 1)), r"outputs, \(5, 1\), got \(5,\)"),
    (lambda: REGRESSION.describe(torch.randn(5, 3, 2)), r"\(B, K\), got \(5, 3, 2\).*flatten\(1\)"),
    *((lambda own=own: Classification(own), "temperature must be positive and finite")
      for own in (0.0, -1.0, math.inf, math.nan)),
    *((lambda own=own: Regression(own), "positive and finite, got .* Omit it to learn it")
      for own in (0.0, -1.0, math.inf, math.nan)),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_also_under_vmap(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=said):
        wrong()


def test_labels_of_any_integer_type_and_confident_errors() -> None:
    assert torch.equal(CLASSES(OUTPUTS, LABELS), CLASSES(OUTPUTS, LABELS.to(torch.uint8)))
    described = Classification().describe(torch.tensor([[0.0, 300.0]]))
    prediction = Classification().prediction({"probabilities": described["probabilities"][None]})
    assert prediction.log_likelihood(torch.tensor([0])) == pytest.approx(-300.0)
