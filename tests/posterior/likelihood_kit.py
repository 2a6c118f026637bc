"""The likelihood kit: what every likelihood must do. A new likelihood inherits `LikelihoodKit` and passes."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from bayestrain.posterior import ClassPrediction, Likelihood, Posterior, RegressionPrediction, independent


class Particle(nn.Module):
    def __init__(self, width: int | None, likelihood: Likelihood) -> None:
        super().__init__()
        self.network: nn.Module = nn.Linear(4, width or 1)
        if width is None:
            self.network = nn.Sequential(self.network, nn.Flatten(0))
        self.likelihood = likelihood

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        outputs = self.network(x)
        return self.likelihood.describe(outputs) if targets is None else self.likelihood(outputs, targets)


class LikelihoodKit:
    """Inherit, and say how to make the likelihood, targets for it, and its reference."""

    width: ClassVar[int | None] = 3
    """Outputs of the network for a datum; None for outputs of shape ``(B,)``."""

    half: ClassVar[bool] = True

    def make(self) -> Likelihood:
        raise NotImplementedError

    def targets(self, number: int) -> Tensor:
        raise NotImplementedError

    def reference(self, likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        """The log probability of each datum, by other means."""
        raise NotImplementedError

    def outputs(self, number: int) -> Tensor:
        return torch.randn(number) if self.width is None else torch.randn(number, self.width)

    def particle(self) -> Particle:
        particle = Particle(self.width, self.make())
        for parameter in particle.likelihood.parameters():
            nn.init.normal_(parameter)
        return particle

    def test_it_is_its_reference(self) -> None:
        likelihood, outputs, targets = self.particle().likelihood, self.outputs(5), self.targets(5)
        expected = self.reference(likelihood, outputs, targets)
        torch.testing.assert_close(likelihood(outputs, targets), expected)
        assert torch.equal(likelihood.log_prob(outputs, targets), likelihood(outputs, targets))

    def test_all_particles_at_once_are_each_by_itself(self) -> None:
        particles, x, targets = [self.particle() for _ in range(4)], torch.randn(5, 4), self.targets(5)
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
            assert values.shape[:2] == (4, 5)
            torch.testing.assert_close(values, torch.stack([one[name] for one in one_by_one]))
        self.check_prediction(particles[0].likelihood.prediction(described), targets, float(found.detach().mean()))

    def check_prediction(self, prediction: Any, targets: Tensor, mean_log_likelihood: float) -> None:
        assert len(prediction) == 5
        torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic)
        low, high = prediction.interval(0.5)
        assert bool((low <= high).all())
        # What training sees is what the prediction reports.
        assert prediction.mean_log_likelihood(targets) == pytest.approx(mean_log_likelihood, rel=1e-4)
        assert prediction.log_likelihood(targets) >= prediction.mean_log_likelihood(targets)
        assert prediction.metrics(targets)["log_likelihood"] == prediction.log_likelihood(targets)
        twice = type(prediction).cat([prediction, prediction])
        assert torch.equal(twice.mean, torch.cat([prediction.mean, prediction.mean]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_half_precision_is_lifted_and_double_kept(self, dtype: torch.dtype) -> None:
        likelihood, outputs, targets = self.make(), self.outputs(5).to(dtype), self.targets(5)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert likelihood.log_prob(outputs, targets).dtype == wanted
        assert bool(likelihood.log_prob(outputs, targets).isfinite().all())

    def test_a_posterior_learns_with_it(self) -> None:
        x, targets = torch.randn(20, 4), self.targets(20)
        likelihood = self.make()
        before = [parameter.clone() for parameter in likelihood.parameters()]
        posterior = Posterior(
            independent(lambda: Particle(self.width, likelihood).network, 3), 20, likelihood=likelihood,
            optimizer=lambda named: torch.optim.Adam(named, lr=0.05),
        )  # fmt: skip
        first = posterior.step(x, targets).log_likelihood
        for _ in range(40):
            last = posterior.step(x, targets).log_likelihood
        assert bool((last > first).all())
        prediction = posterior.predict(x)
        assert isinstance(prediction, ClassPrediction | RegressionPrediction)
        assert prediction.mean_log_likelihood(targets) == pytest.approx(float(last.mean()), abs=0.5)
        assert all(torch.equal(a, b) for a, b in zip(likelihood.parameters(), before, strict=True))  # the user's own
