"""Many threads predict with one posterior: exactly the serial answers, and nothing changes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from posterior_kit import NUM_DATA, batch, convnet, perceptron
from torch import Tensor

from bayestrain.posterior import Joint, ParticleModel, Posterior, Regression, independent

THREADS = 8


def posterior_of() -> Posterior:
    posterior = Posterior(independent(convnet, 3), NUM_DATA)
    posterior.step(*batch(2, 4, 4))
    return posterior


def particle_model_of() -> ParticleModel:
    posterior = posterior_of()
    return ParticleModel(Joint(posterior.template, posterior.likelihood), posterior.particles, posterior.carried)


def together(work: Callable[[int], Any]) -> list[Any]:
    """`work` in all threads, which start at the same moment."""
    barrier = threading.Barrier(THREADS)

    def start(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(start, range(THREADS)))


@pytest.mark.parametrize("make", [posterior_of, particle_model_of])
def test_eight_threads_get_the_serial_answers_and_leave_no_trace(make: Callable[[], ParticleModel]) -> None:
    model = make()
    inputs = [batch(2, 4, 4, seed=seed, size=6)[0] for seed in range(THREADS)]
    model.template.train()
    model.template.get_submodule("2").eval()
    flags = [module.training for module in model.template.modules()]
    before = {name: tensor.detach().clone() for name, tensor in {**model.particles, **model.carried}.items()}
    own = {name: tensor.clone() for name, tensor in model.template.state_dict().items()}
    expected = [model.predict(x).mean for x in inputs]
    outputs = [model.outputs(x) for x in inputs]
    model.joint.forget_copies()  # so that all threads need new ones at the same moment

    def work(number: int) -> tuple[list[Tensor], list[Tensor]]:
        order = [(number + k) % THREADS for k in range(12)]
        return (
            [model.predict(inputs[k], batch_size=4).mean - expected[k] for k in order],
            [model.outputs(inputs[k], chunk=1 + k % 3) - outputs[k] for k in order],
        )

    for means, raw in together(work):
        assert max(float(difference.abs().max()) for difference in means) < 1e-12
        assert max(float(difference.abs().max()) for difference in raw) < 1e-12
    assert [module.training for module in model.template.modules()] == flags
    torch.testing.assert_close({**model.particles, **model.carried}, before, rtol=0, atol=0)
    torch.testing.assert_close(model.template.state_dict(), own, rtol=0, atol=0)


def test_threads_may_predict_while_another_trains() -> None:
    still = lambda named: torch.optim.SGD(named, lr=0.0)  # noqa: E731
    posterior = Posterior(independent(perceptron, 3), NUM_DATA, optimizer=still, method="ensemble")
    posterior.step(*batch())
    x = batch(seed=1)[0]
    expected = posterior.outputs(x)

    def work(number: int) -> float:
        if number == 0:
            for seed in range(20):
                posterior.step(*batch(seed=seed))  # at a learning rate of zero
            return 0.0
        return max(float((posterior.outputs(x) - expected).abs().max()) for _ in range(20))

    assert max(together(work)) < 1e-12
    assert posterior.template.training


def test_a_likelihood_changed_between_predictions_is_seen() -> None:
    posterior = Posterior(independent(perceptron, 2), NUM_DATA, likelihood=Regression(noise=1.0))
    x, _ = batch()
    assert bool((posterior.predict(x).aleatoric == 1.0).all())
    posterior.likelihood.noise = 2.0
    assert bool((posterior.predict(x).aleatoric == 4.0).all())
