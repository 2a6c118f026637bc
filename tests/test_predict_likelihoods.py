"""Likelihoods against torch.distributions, one particle at a time and all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call, grad, stack_module_state, vmap

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict import (
    Classification,
    ClassPrediction,
    Likelihood,
    Prediction,
    Regression,
    RegressionPrediction,
    check_log_prob,
)

LABELS = torch.tensor([2, 0, 1, 1, 2])


def test_classification_is_torchs_categorical() -> None:
    logits = torch.randn(5, 3)
    torch.testing.assert_close(Classification()(logits, LABELS), Categorical(logits=logits).log_prob(LABELS))
    assert torch.equal(Classification()(logits, LABELS), Classification()(logits, LABELS.to(torch.uint8)))
    described = Classification().describe(logits)["probabilities"]
    torch.testing.assert_close(described, Categorical(logits=logits.double()).probs)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3)])
@pytest.mark.parametrize("noise", [None, 0.3])
def test_regression_is_torchs_normal(shape: tuple[int, ...], noise: float | None) -> None:
    outputs, targets = torch.randn(shape), torch.randn(shape)
    likelihood = Regression(noise)
    if likelihood.log_variance is not None:
        assert likelihood.log_variance.item() == 0.0
        nn.init.constant_(likelihood.log_variance, -0.7)
    std = torch.tensor(math.exp(-0.35) if noise is None else noise)
    expected = Normal(outputs, std).log_prob(targets).reshape(5, -1).sum(1)
    torch.testing.assert_close(likelihood(outputs, targets), expected)
    described = likelihood.describe(outputs)
    assert torch.equal(described["mean"], outputs)
    torch.testing.assert_close(described["variance"], (std**2).expand(shape))


def test_the_noise_is_learned_only_if_it_is_not_given() -> None:
    assert [name for name, _ in Regression().named_parameters()] == ["log_variance"]
    assert not list(Regression(0.1).parameters())
    likelihood, residuals = Regression(), 0.2 * torch.randn(500)
    optimiser = torch.optim.LBFGS(likelihood.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -likelihood(torch.zeros(500), residuals).mean()
        value.backward()
        return value

    optimiser.step(loss)
    assert likelihood.log_variance is not None
    assert likelihood.log_variance.exp().item() == pytest.approx(float(residuals.square().mean()), rel=1e-3)


class Both(nn.Module):
    """A network and its likelihood: one particle."""

    def __init__(self, outputs: int, likelihood: Likelihood) -> None:
        super().__init__()
        self.network, self.likelihood = nn.Linear(4, outputs), likelihood

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        outputs = self.network(x)
        return self.likelihood.describe(outputs) if targets is None else self.likelihood(outputs, targets)


@pytest.mark.parametrize("kind", [Classification, Regression, lambda: Regression(0.5)])
def test_all_particles_at_once_are_each_by_itself(kind: type[Likelihood]) -> None:
    particles = [Both(3, kind()) for _ in range(4)]
    for particle in particles:
        if getattr(particle.likelihood, "log_variance", None) is not None:
            nn.init.normal_(particle.likelihood.log_variance)
    x = torch.randn(5, 4)
    targets = LABELS if kind is Classification else torch.randn(5, 3)
    state = stack_module_state(particles)

    def log_prob(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(particles[0], (parameters, {}), (x, targets))

    found = vmap(log_prob)(state[0])
    torch.testing.assert_close(found, torch.stack([particle(x, targets) for particle in particles]))
    slopes = vmap(grad(lambda parameters: log_prob(parameters).sum()))(state[0])
    for k, particle in enumerate(particles):
        particle(x, targets).sum().backward()
        for name, parameter in particle.named_parameters():
            torch.testing.assert_close(slopes[name][k], parameter.grad)

    described = vmap(lambda parameters: functional_call(particles[0], (parameters, {}), (x,)))(state[0])
    one_by_one = [particle(x) for particle in particles]
    for name, values in described.items():
        torch.testing.assert_close(values, torch.stack([one[name] for one in one_by_one]))
    prediction = particles[0].likelihood.prediction(described)
    assert isinstance(prediction, ClassPrediction if kind is Classification else RegressionPrediction)
    # What training sees and what the prediction reports are the same number.
    assert prediction.mean_log_likelihood(targets) == pytest.approx(found.mean().item(), rel=1e-5)


def test_a_confident_error_keeps_its_log_likelihood() -> None:
    logits = torch.tensor([[0.0, 300.0]])
    prediction = Classification().prediction(
        {"probabilities": Classification().describe(logits)["probabilities"][None]}
    )
    assert prediction.log_likelihood(torch.tensor([0])) == pytest.approx(-300.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_lifted_and_double_kept(dtype: torch.dtype) -> None:
    outputs = torch.randn(5, 3).to(dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert Classification()(outputs, LABELS).dtype == wanted
    assert Regression()(300 * outputs, torch.zeros(5, 3, dtype=torch.float64)).dtype == wanted
    assert bool(Regression()(300 * outputs, torch.zeros(5, 3)).isfinite().all())
    assert Regression(0.1).describe(outputs)["variance"].dtype == wanted


def test_shapes_that_do_not_fit_are_refused_also_under_vmap() -> None:
    with pytest.raises(ShapeError, match=r"shape \(5,\).*outputs \(5, 3\), got \(5, 3\).*targets.argmax\(1\)"):
        Classification()(torch.randn(5, 3), torch.eye(3)[LABELS])
    with pytest.raises(ShapeError, match=r"at least 2 classes, got \(5, 1\).*two outputs"):
        Classification()(torch.randn(5, 1), LABELS)
    with pytest.raises(ShapeError, match=r"got \(5, 3, 2\)"):
        Classification().describe(torch.randn(5, 3, 2))
    with pytest.raises(ConfigError, match=r"got torch.float32. Type targets.long\(\)"):
        Classification()(torch.randn(5, 3), LABELS.float())
    with pytest.raises((RuntimeError, IndexError)):  # no label is ignored
        Classification()(torch.randn(5, 3), torch.full((5,), -100))
    with pytest.raises(ShapeError, match=r"\(5, 1\), got \(5,\). For one output .* targets\[:, None\]"):
        Regression()(torch.randn(5, 1), torch.randn(5))
    targets = torch.randn(5)
    with pytest.raises(ShapeError, match=r"outputs, \(5, 1\), got \(5,\)"):
        vmap(lambda outputs: Regression()(outputs, targets))(torch.randn(4, 5, 1))
    with pytest.raises(ShapeError, match=r"\(B, K\), got \(5, 3, 2\).*flatten\(1\)"):
        Regression().describe(torch.randn(5, 3, 2))


@pytest.mark.parametrize("noise", [0.0, -1.0, math.inf, math.nan])
def test_noise_must_be_a_standard_deviation(noise: float) -> None:
    with pytest.raises(ConfigError, match=r"above 0 and finite, got .* Leave it out to learn it"):
        Regression(noise)


def test_repr_says_where_the_noise_comes_from() -> None:
    assert [repr(likelihood) for likelihood in (Regression(), Regression(0.5))] == [
        "Regression(noise learned)",
        "Regression(noise=0.5)",
    ]


def test_check_log_prob() -> None:
    values = torch.randn(5)
    assert check_log_prob(values, 5) is values
    with pytest.raises(ShapeError, match=r"tensor of shape \(5,\), got shape \(\).*reduction=\"none\""):
        check_log_prob(values.mean(), 5)
    with pytest.raises(ShapeError, match=r"got shape \(5, 1\)"):
        check_log_prob(values[:, None], 5)
    with pytest.raises(ShapeError, match="got a float"):
        check_log_prob(1.0, 5)
    with pytest.raises(ShapeError, match=r"shape \(3,\), got shape \(\)"):
        vmap(lambda row: check_log_prob(row.sum(), 3))(torch.randn(2, 3))


class Counts(Likelihood):
    """A likelihood of a user: Poisson counts with the log rates as outputs."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.poisson_nll_loss(outputs, targets, reduction="none", full=False)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"rate": outputs.exp()}

    def prediction(self, described: Mapping[str, Tensor]) -> Prediction:
        return RegressionPrediction(described["rate"], described["rate"])


def test_a_likelihood_of_ones_own() -> None:
    outputs, counts = torch.randn(2, 6), torch.arange(6.0)
    values = vmap(lambda one: check_log_prob(Counts()(one, counts), 6))(outputs)
    torch.testing.assert_close(values, outputs * counts - outputs.exp())
    torch.testing.assert_close(
        Counts().prediction(vmap(Counts().describe)(outputs)).mean, outputs.double().exp().mean(0)
    )
    with pytest.raises(TypeError, match="abstract"):
        Likelihood()  # type: ignore[abstract]
