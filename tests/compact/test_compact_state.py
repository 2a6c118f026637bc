"""What follows the ranks: the optimiser's state, gradients, lambda, the identity of parameters, averages, wrappers."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compact_kit import FORMATS, NETWORKS, Particles, dense, planted, with_lambda
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import bayestrain as bt
from bayestrain.compact import compact_, restart_average_
from bayestrain.errors import ConfigError, DecayWarning
from bayestrain.nn import FactorizedWeight
from bayestrain.prior import RankPrior
from bayestrain.prior.density import conditional_mode

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "fused SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.01, amsgrad=True),
    "fused Adam": partial(torch.optim.Adam, lr=1e-2, fused=True),
    "foreach Adam": partial(torch.optim.Adam, lr=1e-2, foreach=True),
}


def test_weight_decay_on_cores_with_a_prior_is_warned_of_without_being_asked() -> None:
    model = nn.Sequential(bt.TensorLinear(12, 12, max_rank=4), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    compact_(model, 0.1, optimizer=optimizer)  # without a prior it does no harm
    RankPrior(model, 50)
    with pytest.warns(DecayWarning, match="weight decay to the cores of 0"):
        compact_(model, 0.1, optimizer=optimizer)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mask: list[Tensor] | None = None, steps: int = 10
) -> list[float]:
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, model[0].factorized.shape[1], generator=generator, dtype=torch.float64)
        loss = F.cross_entropy(model(x), torch.randint(0, 12, (32,), generator=generator))
        loss.backward()
        for core, kept in zip(model[0].factorized.cores, mask or (), strict=bool(mask)):
            core.grad.mul_(kept)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def masks(own: FactorizedWeight, kept: list[Tensor]) -> list[Tensor]:
    """Per core ones at the indices that are kept."""
    of = dict(zip(own.equation.bonds, kept, strict=True))
    result = [torch.ones_like(core) for core in own.cores]
    for mask, labels in zip(result, own.equation.cores, strict=True):
        for axis, label in enumerate(labels):
            if label in of:
                mask.movedim(axis, -1).mul_(of[label])
    return result


@pytest.mark.filterwarnings("ignore::bayestrain.errors.DecayWarning")  # AdamW decays the cores
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize(("name", "rule"), [*((name, "contribution") for name in OPTIMISERS), ("SGD", "lambda")])
def test_training_after_slicing_is_training_with_dropped_slices_at_zero(kind: str, name: str, rule: str) -> None:
    model = planted(kind, noise=1e-2)
    optimizer = OPTIMISERS[name](model.parameters())
    train(model, optimizer)
    with_lambda(model)
    held = copy.deepcopy(model)
    held_optimizer = OPTIMISERS[name](held.parameters())
    held_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    own, other = model[0].factorized, held[0].factorized
    tol = 0.3 if rule == "contribution" else float(own.rank_state.log_lambdas[0].exp().median())
    assert compact_(model, tol=tol, rule=rule, optimizer=optimizer).changed
    # The same choice, held at zero instead of cut out: found from the lambdas that survive.
    pairs = zip(other.rank_state.log_lambdas, own.rank_state.log_lambdas, strict=True)
    kept = [torch.isin(old, new) for old, new in pairs]
    assert tuple(int(index.sum()) for index in kept) == own.ranks
    mask = masks(other, kept)
    with torch.no_grad():
        for core, part in zip(other.cores, mask, strict=True):
            core.mul_(part)
            for value in held_optimizer.state[core].values():
                if isinstance(value, Tensor) and value.shape == core.shape:
                    value.mul_(part)
    torch.testing.assert_close(dense(held), dense(model), rtol=1e-12, atol=1e-12)
    assert train(model, optimizer) == pytest.approx(train(held, held_optimizer, mask), abs=1e-11)
    torch.testing.assert_close(dense(held), dense(model), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_particle_is_sliced_as_if_it_were_alone(kind: str) -> None:
    """Stacked optimiser state, each particle with surviving indices of its own."""
    models = [planted(kind) for _ in range(3)]
    for shift, model in enumerate(models):  # other particles, other places of the same ranks
        own = model[0].factorized
        for bond in own.equation.bonds:
            for core in own.equation.owners(bond):
                own.cores[core].data = own.cores[core].data.roll(shift, own.equation.axis(core, bond))
    particles = Particles([with_lambda(model) for model in models])
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in models]
    together = torch.optim.Adam(particles.particles.values(), 1e-3)

    def step() -> None:
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            for name, parameter in model.named_parameters():
                stacked = particles.particles[f"model.{name}"]
                stacked.grad = torch.zeros_like(stacked) if i == 0 else stacked.grad
                stacked.grad[i] = parameter.grad
            optimizer.step()
        together.step()

    step()
    identity = [id(tensor) for tensor in particles.particles.values()]
    report = compact_(particles, rule="contribution", optimizer=together)
    for model, optimizer in zip(models, optimizers, strict=True):
        assert compact_(model, rule="contribution", optimizer=optimizer).layers[0].ranks == report.layers[0].ranks
    assert [id(tensor) for tensor in particles.particles.values()] == identity
    step()
    for i, model in enumerate(models):
        torch.testing.assert_close(particles.particle(i).state_dict(), model.state_dict())


def test_rounding_restarts_the_optimisers_state_of_the_changed_cores_only() -> None:
    model = nn.Sequential(planted("tt")[0], nn.Linear(12, 3).double())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = model(torch.randn(4, 20).double()).square().sum()
    loss.backward()
    optimizer.step()
    assert compact_(model, optimizer=optimizer).changed
    assert all(core not in optimizer.state and core.grad is None for core in model[0].factorized.cores)
    assert model[1].weight in optimizer.state
    model(torch.randn(4, 20).double()).square().sum().backward()  # `loss` of the old shapes is still alive
    optimizer.step()
    assert loss.item() > 0


@pytest.mark.parametrize(
    "make", [partial(torch.optim.Adam, fused=True), partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)]
)
@pytest.mark.parametrize("kind", ["tt", "cp"])
def test_an_optimiser_continues_after_a_cut_to_a_budget(kind: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Sequential(planted(kind)[0], nn.Linear(12, 3).double())
    optimizer = make(model.parameters())
    x = torch.randn(16, 20).double()
    size = sum(core.numel() for core in model.parameters())
    for parameters in (10**6, size * 2 // 3, size // 2):
        compact_(model, optimizer=optimizer, parameters=parameters)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert sum(core.numel() for core in model.parameters()) <= size // 2


@pytest.mark.parametrize("kind", FORMATS)
def test_parameters_keep_their_identity_and_gradients_are_those_of_the_surviving_slices(kind: str) -> None:
    model = planted(kind)
    parameters = list(model.parameters())
    model(torch.ones(4, 20).double()).square().sum().backward()
    before = [core.grad.clone() for core in parameters]
    compact_(model, rule="contribution")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for core, old in zip(parameters, before, strict=True):  # planted: the first indices of every bond survive
        torch.testing.assert_close(core.grad, old[tuple(slice(n) for n in core.shape)])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rule", [None, "contribution"])
def test_lambda_follows_the_ranks(kind: str, rule: str | None) -> None:
    model = with_lambda(planted(kind))
    own = model[0].factorized
    state, before = own.rank_state, [u.clone() for u in own.rank_state.log_lambdas]
    state.a, state.b = 3.0, 200.0
    compact_(model, rule=rule)
    assert tuple(map(len, state.log_lambdas)) == own.ranks
    assert state.start == (6,) * len(own.ranks)
    if rule == "contribution":  # planted: the first indices survive
        assert all(torch.equal(u, old[: len(u)]) for u, old in zip(state.log_lambdas, before, strict=True))
        return
    cores = [core.detach() for core in own.cores]
    again = conditional_mode(own.equation, cores, state.log_lambdas, 3.0, 200.0, state.floor, start=state.start)
    torch.testing.assert_close(state.log_lambdas, again, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_an_optimiser_that_was_not_told_of_a_cut_refuses_its_next_step(
    kind: Callable[..., torch.optim.Optimizer], fused: bool
) -> None:
    """A fused one reads beyond the end of the new cores and says nothing."""
    model = planted("tt")
    optimizer = kind(model.parameters(), fused=fused)
    train(model, optimizer, steps=2)
    compact_(model)
    compact_(model, parameters=40, optimizer=kind(nn.Linear(2, 2).parameters()))  # another one
    with pytest.raises(ConfigError, match=r"has cut\. Call compact_\(model, optimizer=optimizer\)"):
        train(model, optimizer, steps=1)
    train(model, kind(model.parameters(), fused=fused), steps=2)


def test_every_optimiser_that_was_not_told_refuses_also_when_another_has_followed() -> None:
    model = planted("tt")
    first, second = (torch.optim.Adam(model.parameters(), fused=True) for _ in range(2))
    for optimizer in (first, second):
        train(model, optimizer, steps=2)
    compact_(model, optimizer=first)
    train(model, first, steps=2)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"Adam has state of shape .* which compact_ has cut"):
            train(model, second, steps=1)
    train(model, first, steps=1)


@pytest.mark.parametrize("told", [False, True])
def test_state_of_other_shapes_is_refused_or_restarts(told: bool) -> None:
    model = nn.Sequential(planted("tt")[0], nn.Linear(12, 3).double())
    optimizer = torch.optim.Adafactor(reversed(list(model.parameters())), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 20).double()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert compact_(model, 0.3, rule="contribution", optimizer=optimizer if told else None).changed
    if told:
        for _ in range(2):
            optimizer.step(closure)
    else:
        with pytest.raises(ConfigError, match=r"which compact_ has cut"):
            optimizer.step(closure)


def test_frozen_cores_are_cut_too_and_state_that_cannot_be_sliced_restarts() -> None:
    model = planted("tt").requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    assert compact_(model, optimizer=optimizer).changed
    assert not any(core.requires_grad for core in model.parameters())
    model = planted("tt")
    optimizer = torch.optim.Adafactor(model.parameters(), 0.1)  # has one moment per row and one per column
    train(model, optimizer, steps=2)
    assert compact_(model, rule="contribution", optimizer=optimizer).changed
    assert not optimizer.state
    train(model, optimizer, steps=2)


X = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))


EMA: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rule", [None, "contribution"])
@pytest.mark.parametrize("options", [{}, EMA], ids=["swa", "ema"])
def test_an_average_follows_or_says_what_to_do(rule: str | None, options: dict[str, Any]) -> None:
    model = network()
    prior, optimizer = bt.RankPrior(model, 100), torch.optim.Adam(model.parameters(), 1e-2)
    averaged = AveragedModel(model, **options)
    for _ in range(3):
        step(model, optimizer)
        prior.step()
        averaged.update_parameters(model)
    assert bt.compact_(model, 0.5, rule=rule, optimizer=optimizer).changed
    before = {name: value.clone() for name, value in averaged.state_dict().items()}
    with pytest.raises(ConfigError, match=r"cores\.\d has the shape .* average .*restart_average_\(averaged, model\)"):
        averaged.update_parameters(model)
    assert all(torch.equal(value, before[name]) for name, value in averaged.state_dict().items())
    restart_average_(averaged, model)
    for own, new in zip(averaged.module.parameters(), model.parameters(), strict=True):
        assert own.shape == new.shape
        assert own is not new
    assert torch.equal(averaged.module[0].bias, before["module.0.bias"])  # of what was not cut it continues
    assert not torch.equal(averaged.module[0].bias, model[0].bias)
    step(model, optimizer)
    averaged.update_parameters(model)
    assert not torch.equal(averaged.module[0].cores[0], model[0].cores[0])
    prior.remove_()
    restart_average_(averaged, model)
    assert averaged.module.state_dict().keys() == model.state_dict().keys()
    update_bn([X], averaged)
    assert averaged(X).isfinite().all()


def test_the_average_of_another_network_is_refused() -> None:
    other = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    bt.tensorize_(other)
    with pytest.raises(ConfigError, match="of another network"):
        restart_average_(AveragedModel(other), network())
    restart_average_(copy.deepcopy(network()), network())


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_data_parallel_is_wrapped_again() -> None:
    """The call of docs/loops.md: PyTorch's own suffices."""
    model = network()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters(), 1e-2)
    step(wrapped, optimizer)
    assert bt.compact_(model, 0.5, rule="contribution", optimizer=optimizer).changed
    wrapped = DistributedDataParallel(wrapped.module)
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        step(wrapped, optimizer)
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
