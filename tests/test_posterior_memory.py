"""The memory estimate: near the truth, and a refusal with a figure and a way out."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import bayestrain as bt
from bayestrain.errors import ConfigError
from bayestrain.posterior import Posterior, independent, memory


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10))


def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 100), torch.randint(0, 10, (size,))


@pytest.mark.parametrize(
    ("optimizer", "states"), [(torch.optim.Adam, 2), (torch.optim.SGD, 0), (torch.optim.RMSprop, 1)]
)
def test_what_is_held_is_counted_exactly(optimizer: type[torch.optim.Optimizer], states: int) -> None:
    posterior = Posterior(independent(wide, 5), 100, optimizer=lambda t: optimizer(t, lr=1e-3))  # type: ignore[call-arg]
    x, y = batch()
    estimate = posterior.estimate_memory(x, y)
    each = sum(p.numel() for p in wide().parameters())
    assert estimate.held == 5 * each * 4 * (2 + states)
    posterior.step(x, y)
    kept = sum(
        value.numel()
        for state in posterior.method.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    assert kept == 5 * each * states


def test_activations_grow_with_the_batch_and_set_the_chunk() -> None:
    posterior = Posterior(independent(wide, 40), 100)
    small, large = posterior.estimate_memory(*batch(10)), posterior.estimate_memory(*batch(10_000))
    assert large.per_particle > 100 * small.per_particle
    assert small.chunk == 40
    assert 1 <= large.chunk < 40  # a CPU's cache
    assert Posterior(independent(wide, 6), 100, chunk=4).estimate_memory(*batch()).chunk == 4


def test_looking_leaves_no_trace() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(100, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10))

    posterior = Posterior(independent(build, 3), 100)
    before = {name: tensor.clone() for name, tensor in posterior.carried.items()}
    state = torch.get_rng_state()
    x, y = batch()
    state = torch.get_rng_state()
    posterior.estimate_memory(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(posterior.carried[name], tensor) for name, tensor in before.items())


def test_what_cannot_fit_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory is set to a small figure: the machine's own would need terabytes to be exhausted."""
    each = sum(p.numel() for p in wide().parameters()) * 4 * 4
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10 * each)  # noqa: ARG005
    with pytest.raises(ConfigError, match=r"cannot fit: 50 particles need about .* free.*Use at most 9 particles"):
        Posterior(independent(wide, 50), 100)
    posterior = Posterior(independent(wide, 6), 100, chunk=6)
    with pytest.raises(ConfigError, match=r"(?s)cannot fit.*activations of 6 particles.*Use chunk=\d|smaller batches"):
        posterior.step(*batch(5_000))
    posterior = Posterior(independent(wide, 4), 100)
    posterior.step(*batch(8))
    assert posterior.method.chunk is not None


def test_free_memory_is_known_here() -> None:
    free = memory.available_bytes(torch.device("cpu"))
    assert free is not None
    assert 1e6 < free < 1e14
    assert memory.available_bytes(torch.device("meta")) is None


def test_the_estimate_is_near_the_peak_of_a_real_process() -> None:
    """In a process of its own: what 30 particles of a wide network add to it, against the estimate."""
    script = """
        import torch
        from torch import nn
        from bayestrain.posterior import Posterior, independent

        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

        def build():
            return nn.Sequential(nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))

        x, y = torch.randn(128, 784), torch.randint(0, 10, (128,))
        small = Posterior(independent(build, 2), 100)
        small.step(x, y)
        del small
        before = peak()
        posterior = Posterior(independent(build, 30), 100)
        for _ in range(3):
            posterior.step(x, y)
        print(peak() - before, posterior.estimate_memory(x, y).total)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True, timeout=300
    )
    grown, estimated = map(int, done.stdout.split())
    assert 0.5 * estimated < grown < 2.0 * estimated


def test_compaction_makes_the_estimate_anew() -> None:
    def build() -> nn.Module:
        return nn.Sequential(bt.TTLinear(100, 60, max_rank=8), nn.ReLU(), nn.Linear(60, 10))

    posterior = Posterior(independent(build, 4), 100)
    x, y = batch()
    posterior.step(x, y)
    before = posterior.estimate_memory(x, y)
    posterior.compact_(0.6)
    assert posterior.estimate_memory(x, y).held < before.held


def test_predictions_make_no_tensor_too_large_for_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three networks with wide feature maps: with a small limit they go one by one, and inputs in parts."""
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 26 * 26, 4)) for _ in range(3)]
    posterior, x = bt.Posterior(networks, num_data=10), torch.randn(400, 1, 28, 28)
    expected, found = posterior.outputs(x), {}
    each = 8 * 26 * 26  # entries that one image makes in one network

    def at_once(*arguments: Any) -> tuple[int, int]:
        found["at once"] = whole(*arguments)
        return found["at once"]

    whole = memory.predicted_at_once
    monkeypatch.setattr("bayestrain.posterior.model.predicted_at_once", at_once)
    for limit, wanted in ((3 * 400 * each, (3, 400)), (2 * 400 * each, (2, 400)), (100 * each, (1, 100))):
        monkeypatch.setattr(memory, "PREDICTED_ENTRIES", limit)
        torch.testing.assert_close(posterior.outputs(x), expected)
        assert found["at once"] == wanted


def test_a_step_takes_no_more_particles_at_once_than_the_libraries_can() -> None:
    from bayestrain.posterior.memory import MOST_ENTRIES, Activations, plan

    estimate = plan(20, 0, 0, Activations(1, MOST_ENTRIES // 7), torch.device("cpu"), None)
    assert estimate.chunk == 7
