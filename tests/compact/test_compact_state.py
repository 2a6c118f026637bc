"""What follows the ranks: the optimiser's state, gradients, lambda, and the identity of parameters."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compact_kit import FORMATS, NETWORKS, Particles, dense, planted, with_lambda
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.compact import compact_
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
def test_training_after_slicing_equals_training_with_the_dropped_slices_held_at_zero(
    kind: str, name: str, rule: str
) -> None:
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
        state = particles.particle(i).state_dict()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor)


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


def test_state_that_cannot_be_sliced_restarts() -> None:
    model = planted("tt")
    optimizer = torch.optim.Adafactor(model.parameters(), 0.1)  # has one moment per row and one per column
    train(model, optimizer, steps=2)
    assert compact_(model, rule="contribution", optimizer=optimizer).changed
    assert not optimizer.state
    train(model, optimizer, steps=2)


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


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.parametrize("told", [False, True])
def test_state_of_other_shapes_is_refused_or_restarts(kind: Callable[..., torch.optim.Optimizer], told: bool) -> None:
    model = nn.Sequential(planted("tt")[0], nn.Linear(12, 3).double())
    optimizer = kind(reversed(list(model.parameters())), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 20).double()).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    optimizer.step(closure)
    assert compact_(model, 0.3, rule="contribution", optimizer=optimizer if told else None).changed
    if told:
        for _ in range(2):
            optimizer.step(closure)
    else:
        with pytest.raises(ConfigError, match=r"which compact_ has cut"):
            optimizer.step(closure)


def test_frozen_cores_are_cut_too() -> None:
    model = planted("tt").requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    assert compact_(model, optimizer=optimizer).changed
    assert not any(core.requires_grad for core in model.parameters())
