"""A posterior's state: one that fits is restored, any other is refused before anything changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from posterior_kit import adam
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import BayesTrainError, ConfigError
from bayestrain.posterior import Posterior, independent
from bayestrain.prior import NormalPrior

X, Y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


def posterior_of(
    width: int = 8, rank: int = 3, modes: tuple[int, ...] = (2, 3), frozen: bool = False, seed: int = 0, n: int = 3
) -> Posterior:
    def build() -> nn.Module:
        if frozen:
            torch.manual_seed(seed)
        network = nn.Sequential(
            bt.TensorLinear(6, width, in_modes=modes, max_rank=rank, out_modes=(2, width // 2)),
            nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2),
        )  # fmt: skip
        network[0].requires_grad_(not frozen)
        return network

    return Posterior(independent(build, n, seed), 50)


def kept(posterior: Posterior) -> dict[str, Any]:
    """Everything a state holds, and the template's own tensors."""
    return copy.deepcopy({"state": posterior.state_dict(), "template": posterior.template.state_dict()})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


Damage = Callable[[dict[str, Any]], Any]

DAMAGES: dict[str, Damage] = {
    "no prior": lambda s: s.pop("prior"),
    "no temperature": lambda s: s.pop("temperature"),
    "no temperature at all": lambda s: s.update(temperature="warm"),
    "no buffers": lambda s: s.pop("carried"),
    "no step count": lambda s: s["method"].pop("steps"),
    "no noted failures": lambda s: s["method"].pop("broken"),
    "another method": lambda s: s["method"].update(method="ensemble"),
    "another optimiser": lambda s: s["method"]["optimizer"]["param_groups"][0].pop("betas"),
    "no optimiser groups": lambda s: s["method"]["optimizer"].update(param_groups=[]),
    "fewer optimised tensors": lambda s: s["method"]["optimizer"]["param_groups"][0]["params"].pop(),
    "a core of other modes": lambda s: _replace(s, "particles", "model.0.factorized.cores.0", (3, 5, 3)),
    "cores that do not fit": lambda s: _replace(s, "particles", "model.0.factorized.cores.0", (3, 4, 2)),
    "a lambda of another rank": lambda s: _replace(s, "carried", "model.0.factorized.rank_state.log_lambda_0", (3, 5)),
    "a bias of another size": lambda s: _replace(s, "particles", "model.3.bias", (3, 7)),
    "statistics of another size": lambda s: _replace(s, "carried", "model.1.running_mean", (3, 7)),
    "a missing tensor": lambda s: s["method"]["particles"].pop("model.3.bias"),
    "one particle more": lambda s: _replace(s, "particles", "model.3.bias", (4, 2)),
    "a bad temperature": lambda s: s.update(temperature=-1.0),
    "a prior without a weight": lambda s: s["prior"].pop("weight"),
    "an unusable weight": lambda s: s["prior"].update(weight="heavy"),
    "a negative weight": lambda s: s["prior"].update(weight=-1.0),
    "infinitely many steps of the prior": lambda s: s["prior"].update(steps=1e400),
    "less than no steps of the prior": lambda s: s["prior"].update(steps=-1),
    "no number of steps": lambda s: s["method"].update(steps="many"),
    "infinitely many steps": lambda s: s["method"].update(steps=1e400),
    "less than no steps": lambda s: s["method"].update(steps=-1),
    "failures of another shape": lambda s: s["method"].update(broken=torch.zeros(3, 2)),
    "no moments": lambda s: s["method"]["optimizer"].update(state=5),
    "moments that are a number": lambda s: s["method"]["optimizer"]["state"].update({5: 1e400}),
    "moments of another shape": lambda s: s["method"]["optimizer"]["state"][0].update(exp_avg=torch.zeros(3, 2)),
    "one moment less": lambda s: s["method"]["optimizer"]["state"][1].pop("exp_avg"),
    "no learning rate": lambda s: s["method"]["optimizer"]["param_groups"][0].update(lr=None),
    "no decay rates": lambda s: s["method"]["optimizer"]["param_groups"][0].update(betas=[]),
    "unhashable parameters": lambda s: s["method"]["optimizer"]["param_groups"][0]["params"].__setitem__(0, {}),
    "an infinite variance": lambda s: s.update(variance=1e400),
    "fixed ranks with lambda": lambda s: s.update(ranks_fixed=True),
}


def _replace(state: dict[str, Any], kind: str, name: str, shape: tuple[int, ...]) -> None:
    place = state["carried"] if kind == "carried" else state["method"][kind]
    assert place[name].shape != shape
    place[name] = torch.zeros(shape)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_does_not_fit_is_refused_before_any_change(damage: str) -> None:
    source, posterior = posterior_of(seed=1), posterior_of()
    source.step(X, Y)
    posterior.step(X, Y)
    posterior.calibrate_(X, Y)
    state = copy.deepcopy(source.state_dict())
    DAMAGES[damage](state)
    before = kept(posterior)
    with pytest.raises(BayesTrainError):
        posterior.load_state_dict(state)
    assert same(kept(posterior), before)
    posterior.step(X, Y)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("width", "modes", "n"), [(16, (2, 3), 3), (8, (3, 2), 3), (8, (2, 3), 4)])
def test_a_state_of_another_network_is_refused_before_any_change(
    width: int, modes: tuple[int, int], n: int, frozen: bool
) -> None:
    posterior = posterior_of(frozen=frozen)
    posterior.step(X, Y)
    before = kept(posterior)
    with pytest.raises(BayesTrainError, match="saved"):
        posterior.load_state_dict(posterior_of(width, modes=modes, frozen=frozen, n=n).state_dict())
    assert same(kept(posterior), before)
    posterior.step(X, Y)
    posterior.particle(0)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_of_other_ranks_is_restored(frozen: bool) -> None:
    small, posterior = posterior_of(rank=1, frozen=frozen, seed=1), posterior_of(frozen=frozen)
    small.step(X, Y)
    assert posterior.outputs(X).shape == (3, 20, 2)
    posterior.load_state_dict(copy.deepcopy(small.state_dict()))
    assert posterior.ranks == small.ranks != posterior_of().ranks
    torch.testing.assert_close(posterior.outputs(X), small.outputs(X))
    for one in (small, posterior):
        one.compact_(0.1)
        one.step(X, Y)
    torch.testing.assert_close(posterior.outputs(X), small.outputs(X), rtol=0, atol=0)


def test_a_temperature_and_a_variance_are_part_of_the_state() -> None:
    posterior, fresh = posterior_of(), posterior_of()
    posterior.calibrate_(X, Y)
    fresh.load_state_dict(posterior.state_dict())
    assert fresh.likelihood.temperature == posterior.likelihood.temperature != 1.0

    def with_variance(variance: float) -> Posterior:
        return Posterior(
            independent(lambda: nn.Linear(6, 2), 3), 50, optimizer=adam,
            prior=lambda model: NormalPrior(model, 50, variance=variance), likelihood=lambda outputs, _: outputs.sum(1),
        )  # fmt: skip

    one, two = with_variance(3.0), with_variance(7.0)
    two.load_state_dict(one.state_dict())
    assert two.prior.variance == 3.0


def test_a_refused_batch_leaves_no_trace() -> None:
    posterior = posterior_of()
    for _ in range(2):  # at the first step, and later
        before = kept(posterior)
        for wrong, said in ((torch.where(Y == 0, 0, 7), "between 0 and 1, got 0 to 7"), (Y - 1, "got -1 to 0")):
            with pytest.raises(ConfigError, match=said):
                posterior.step(X, wrong)
        with pytest.raises(ConfigError, match="at least one datum"):
            posterior.step(X[:0], Y[:0])
        assert same(kept(posterior), before)
        posterior.step(X, Y)
    assert posterior.carried["model.1.num_batches_tracked"].tolist() == [2, 2, 2]
