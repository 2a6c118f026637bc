"""Memory: nothing is kept from estimates and steps; with `perf`, what cannot fit is refused and the chunk chosen."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import ConfigError
from bayestrain.nn.fast import fast
from bayestrain.posterior import Posterior, around, independent

needs_perf = pytest.mark.skipif(fast() is None, reason="perf is switched off")


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10))


def batch(size: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 100), torch.randint(0, 10, (size,))


class Watched(nn.Module):
    seen: list[weakref.ref[Tensor]] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        made = x.relu()
        self.seen.append(weakref.ref(made))
        return made


@needs_perf
def test_what_cannot_fit_is_refused_before_it_is_built_or_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build() -> nn.Module:
        built.append(wide())
        return built[-1]

    each = 4 * 4 * bt.count_parameters(wide())
    monkeypatch.setattr(fast().memory, "available_bytes", lambda _: 7 * each)
    message = r"1,000,000,000 particles need about .* MB free .*\. Use at most 7 particles"
    with pytest.raises(ConfigError, match=message):
        independent(build, 10**9)
    assert len(built) == 1
    with pytest.raises(ConfigError, match=message):
        around(wide(), 10**9)
    assert len(independent(build, 7)) == 7
    # Free memory is set to a small figure: the machine's own would take terabytes to exhaust.
    each = sum(p.numel() for p in wide().parameters()) * 4 * 4
    monkeypatch.setattr(fast().memory, "available_bytes", lambda _: 10 * each)
    with pytest.raises(ConfigError, match=r"cannot fit: 50 particles need about .* free.*Use at most \d+ particles"):
        Posterior(independent(wide, 50), 100).step(*batch(8))
    posterior = Posterior(independent(wide, 6), 100, chunk=6)
    with pytest.raises(ConfigError, match=r"(?s)cannot fit.*activations of 6 particles.*Use chunk=\d|smaller batches"):
        posterior.step(*batch(5_000))
    posterior = Posterior(independent(wide, 4), 100)
    posterior.step(*batch(8))
    assert posterior._training_chunk is not None


def test_estimates_steps_and_predictions_keep_no_activation_alive() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(100, 50), Watched(), nn.Linear(50, 10))

    posterior = Posterior(independent(build, 3), 100, chunk=1)
    x, y = batch()
    Watched.seen.clear()
    for _ in range(3):
        posterior.estimate_memory(x, y)
    for _ in range(2):
        posterior.step(x, y)
    posterior.predict(x)
    gc.collect()
    assert len(Watched.seen) > 3
    assert not [reference for reference in Watched.seen if reference() is not None]


@needs_perf
def test_estimates_grow_with_the_batch_leave_no_trace_and_follow_compaction() -> None:
    posterior = Posterior(independent(wide, 40), 100)
    small, large = posterior.estimate_memory(*batch(10)), posterior.estimate_memory(*batch(10_000))
    assert large.per_particle > 100 * small.per_particle
    assert small.chunk == 40
    assert 1 <= large.chunk < 40  # a CPU's cache
    assert Posterior(independent(wide, 6), 100, chunk=4).estimate_memory(*batch()).chunk == 4

    def build() -> nn.Module:
        layers = bt.TensorLinear(100, 60, max_rank=8), nn.BatchNorm1d(60), nn.Dropout(), nn.Linear(60, 10)
        return nn.Sequential(*layers)

    posterior, (x, y) = Posterior(independent(build, 3), 100), batch()
    tensors = {name: tensor.detach().clone() for name, tensor in {**posterior.particles, **posterior.carried}.items()}
    state = torch.get_rng_state()
    before = posterior.estimate_memory(x, y)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close({**posterior.particles, **posterior.carried}, tensors, rtol=0, atol=0)
    posterior.step(x, y)
    posterior.compact_(0.6)
    posterior.step(x, y)
    assert posterior.estimate_memory(x, y).held < before.held


@needs_perf
def test_predictions_make_no_tensor_too_large_for_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = [nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 26 * 26, 4)) for _ in range(3)]
    posterior, x = Posterior(networks, 10), torch.randn(400, 1, 28, 28)
    expected = posterior.outputs(x)
    monkeypatch.setattr(fast().memory, "PREDICTED_ENTRIES", 100 * 8 * 26 * 26)
    torch.testing.assert_close(posterior.outputs(x), expected)
    monkeypatch.setattr(fast().memory, "PREDICTED_ENTRIES", 1)
    posterior.refresh_statistics([x])  # no batch norm: nothing to do
    torch.testing.assert_close(posterior.outputs(x[:3], chunk=2), expected[:, :3])
