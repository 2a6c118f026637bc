"""A posterior's state: one that fits is restored, any other is refused before anything changes."""

import copy
import math
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


ZEROS = {shape: torch.zeros(shape) for shape in ((3, 2), (3, 5), (3, 7), (4, 2), (3, 5, 3), (3, 4, 2))}
GROUP, CORE, LAMBDA = "method optimizer param_groups 0", "model.0.factorized.cores.0", "rank_state.log_lambda_0"
MISSING: dict[str, tuple[Any, ...]] = {
    "": ("prior", "temperature", "carried"), "prior": ("weight",), "method": ("steps", "broken"), GROUP: ("betas",),
    "method particles": ("model.3.bias",), f"{GROUP} params": (-1,), "method optimizer state 1": ("exp_avg",),
}  # fmt: skip
WRONG: dict[str, list[dict[Any, Any]]] = {
    "": [{"temperature": "warm"}, {"temperature": -1.0}, {"variance": math.inf}, {"ranks_fixed": True}],
    "prior": [{"weight": "heavy"}, {"weight": -1.0}, {"steps": math.inf}, {"steps": -1}],
    "method": [{"method": "ensemble"}, {"steps": "many"}, {"steps": math.inf}, {"steps": -1}, {"broken": ZEROS[3, 2]}],
    "method optimizer": [{"param_groups": []}, {"state": 5}],
    "method optimizer state": [{5: math.inf}], "method optimizer state 0": [{"exp_avg": ZEROS[3, 2]}],
    GROUP: [{"lr": None}, {"betas": []}], f"{GROUP} params": [{0: {}}],
    "method particles": [{CORE: ZEROS[3, 5, 3]}, {CORE: ZEROS[3, 4, 2]}, {"model.3.bias": ZEROS[3, 7]},
                         {"model.3.bias": ZEROS[4, 2]}],  # other modes, no fit, another size, a particle more
    "carried": [{f"model.0.factorized.{LAMBDA}": ZEROS[3, 5]}, {"model.1.running_mean": ZEROS[3, 7]}],
}  # fmt: skip
DAMAGES = [(where, None, key) for where, keys in MISSING.items() for key in keys]
DAMAGES += [(where, changes, None) for where, every in WRONG.items() for changes in every]


@pytest.mark.parametrize(("where", "changes", "missing"), DAMAGES)
def test_a_state_that_does_not_fit_is_refused_before_any_change(where: str, changes: Any, missing: Any) -> None:
    source, posterior = posterior_of(seed=1), posterior_of()
    source.step(X, Y)
    posterior.step(X, Y)
    posterior.calibrate_(X, Y)
    state = place = copy.deepcopy(source.state_dict())
    for key in where.split():
        place = place[int(key) if key.isdigit() else key]
    if changes is None:
        place.pop(missing)
    for key, value in (changes or {}).items():
        assert not isinstance(value, Tensor) or place[key].shape != value.shape
        place[key] = value
    before = kept(posterior)
    with pytest.raises(BayesTrainError):
        posterior.load_state_dict(state)
    assert same(kept(posterior), before)
    posterior.step(X, Y)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("width", "modes", "n"), [(16, (2, 3), 3), (8, (3, 2), 3), (8, (2, 3), 4)])
def test_a_state_of_another_network_is_refused(width: int, modes: tuple[int, int], n: int, frozen: bool) -> None:
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


def test_temperature_and_variance_are_state_and_a_refused_batch_is_not() -> None:
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
