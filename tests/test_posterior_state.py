"""What a posterior keeps: a state that fits or is refused, and statistics that a refused batch leaves alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior import Posterior, independent


def posterior_of(
    width: int = 8, rank: int = 3, modes: tuple[int, ...] = (2, 3), frozen: bool = False, seed: int = 0
) -> Posterior:
    def build() -> nn.Module:
        torch.manual_seed(seed)
        network = nn.Sequential(
            bt.TTLinear(6, width, in_modes=modes, max_rank=rank, out_modes=(2, width // 2)),
            nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2),
        )  # fmt: skip
        if frozen:
            network[0].requires_grad_(False)
        return network

    return Posterior(independent(build, 3), 50)


X, Y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


def kept(posterior: Posterior) -> dict[str, Tensor]:
    tensors = {**posterior.particles, **posterior.carried, **dict(posterior.template.named_parameters())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(posterior: Posterior, before: dict[str, Tensor]) -> bool:
    now = kept(posterior)
    return now.keys() == before.keys() and all(torch.equal(now[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("width", "modes"), [(16, (2, 3)), (8, (3, 2))])
def test_a_state_of_other_shapes_is_refused_before_any_change(width: int, modes: tuple[int, int], frozen: bool) -> None:
    posterior = posterior_of(frozen=frozen)
    posterior.step(X, Y)
    before = kept(posterior)
    with pytest.raises(ShapeError, match=r"one of another network: 'model\.[013]\.[\w.]+' has another shape"):
        posterior.load_state_dict(posterior_of(width, modes=modes, frozen=frozen).state_dict())
    assert same(posterior, before)
    posterior.step(X, Y)
    posterior.particle(0)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_of_other_ranks_is_taken(frozen: bool) -> None:
    small, posterior = posterior_of(rank=1, frozen=frozen, seed=1), posterior_of(frozen=frozen)
    small.step(X, Y)
    posterior.load_state_dict(small.state_dict())
    assert posterior.ranks == small.ranks != posterior_of().ranks
    torch.testing.assert_close(posterior.outputs(X), small.outputs(X))


def test_a_temperature_is_part_of_the_state_where_there_is_one() -> None:
    posterior, fresh = posterior_of(), posterior_of()
    posterior.calibrate_(X, Y)
    fresh.load_state_dict(posterior.state_dict())
    assert fresh.joint.likelihood.temperature == posterior.joint.likelihood.temperature != 1.0
    other = Posterior([posterior.particle(i) for i in range(3)], 50, likelihood=lambda outputs, _: outputs.sum(1))
    other.load_state_dict(posterior_of().state_dict())
    fresh.load_state_dict(other.state_dict())
    assert fresh.joint.likelihood.temperature == posterior.joint.likelihood.temperature


def test_a_batch_that_is_refused_leaves_no_trace() -> None:
    posterior = posterior_of()
    posterior.step(X, Y)
    before = kept(posterior)
    with pytest.raises(ConfigError, match="between 0 and 1, got 0 to 7"):
        posterior.step(X, torch.where(Y == 0, 0, 7))
    assert same(posterior, before)
    assert posterior.carried["model.1.num_batches_tracked"].tolist() == [1, 1, 1]
    posterior.step(X, Y)
    assert posterior.carried["model.1.num_batches_tracked"].tolist() == [2, 2, 2]


def test_batches_that_end_in_an_error_leave_no_trace_of_a_stein_discrepancy() -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield X, Y
        raise OSError("the disk is gone")

    posterior = posterior_of()
    posterior.step(X, Y)
    before = kept(posterior)
    with pytest.raises(OSError, match="the disk is gone"):
        posterior.stein_discrepancy(batches())
    assert same(posterior, before)
