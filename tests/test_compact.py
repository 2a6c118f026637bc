"""`compact_`: what it promises about the weight, the optimiser, a second call and the report."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import tt


def planted(ranks: tuple[int, ...] = (3, 2, 3), noise: float = 1e-4, max_rank: int = 6, seed: int = 0) -> bt.TTLinear:
    """A layer with `max_rank` at every bond whose weight has the given ranks, plus a little."""
    torch.manual_seed(seed)
    modes = {"in_modes": (4, 3, 4, 3), "out_modes": (3, 4, 3, 4)}
    small = bt.TTLinear(144, 144, max_rank=ranks, **modes)
    layer = bt.TTLinear(144, 144, max_rank=max_rank, **modes)
    with torch.no_grad():
        for core, part in zip(layer.cores, small.cores, strict=True):
            core.mul_(noise)
            core[: part.shape[0], :, :, : part.shape[-1]] += part
    return layer.double()


@pytest.mark.parametrize("rule", ["rounding", "contribution"])
@pytest.mark.parametrize("tol", [1e-2, 0.2, 0.6])
def test_the_weight_stays_within_the_tolerance(rule: str, tol: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(bt.TTLinear(144, 144, max_rank=8)).double()  # no gap: the tolerance really cuts
    before = model[0].weight.detach()
    x = torch.randn(20, 144).double()
    outputs = model(x).detach()
    report = bt.compact_(model, tol=tol, rule=rule)
    error = float((model[0].weight.detach() - before).norm() / before.norm())
    assert error <= tol
    assert report.layers[0].error == pytest.approx(error, abs=1e-9)
    drift = (model(x).detach() - outputs).norm(dim=1)
    assert bool((drift <= tol * before.norm() * x.norm(dim=1)).all())
    if tol == 0.6:
        assert report.changed


@pytest.mark.parametrize("rule", ["rounding", "contribution"])
def test_planted_ranks_are_found_and_made_physical(rule: str) -> None:
    model = nn.Sequential(planted())
    report = bt.compact_(model, rule=rule)
    assert bt.ranks(model) == {"0": (1, 3, 2, 3, 1)}
    assert [tuple(core.shape) for core in model[0].cores] == [(1, 3, 4, 3), (3, 4, 3, 2), (2, 3, 4, 3), (3, 4, 3, 1)]
    assert report.parameters == bt.count_parameters(model) < report.parameters_before
    assert "1 6 6 6 1" in str(report)
    assert "1 3 2 3 1" in str(report)


@given(st.integers(0, 10_000))
def test_gauge_changes_alter_nothing_that_rounding_finds(seed: int) -> None:
    layer, turned = planted(), planted()
    generator = torch.Generator().manual_seed(seed)
    cores: list[Tensor] = [core.detach() for core in turned.cores]
    for bond in (1, 2, 3):
        turn = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
        scale = 10 ** torch.randn(6, generator=generator, dtype=torch.float64)
        cores = tt.change_gauge(cores, bond, turn * scale)
    turned.set_cores(cores)
    x = torch.randn(5, 144, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(turned(x), layer(x), rtol=1e-8, atol=1e-8)
    models = nn.Sequential(layer), nn.Sequential(turned)
    for model in models:
        bt.compact_(model)
    assert models[0][0].ranks == models[1][0].ranks == (1, 3, 2, 3, 1)
    torch.testing.assert_close(models[1][0].weight, models[0][0].weight, rtol=1e-7, atol=1e-9)


@given(st.integers(0, 10_000))
def test_rescaling_alters_nothing_that_the_contribution_rule_keeps(seed: int) -> None:
    layer, scaled = planted(), planted()
    generator = torch.Generator().manual_seed(seed)
    cores: list[Tensor] = [core.detach() for core in scaled.cores]
    for bond in (1, 2, 3):
        cores = tt.change_gauge(cores, bond, (10 ** torch.randn(6, generator=generator, dtype=torch.float64)).diag())
    scaled.set_cores(cores)
    models = nn.Sequential(layer), nn.Sequential(scaled)
    for model in models:
        bt.compact_(model, rule="contribution")
    assert models[0][0].ranks == models[1][0].ranks
    torch.testing.assert_close(models[1][0].weight, models[0][0].weight, rtol=1e-7, atol=1e-9)


def test_an_absolute_threshold_on_lambda_depends_on_the_gauge() -> None:
    """Why the paper's rule is not the default: one and the same network, two answers."""
    model = nn.Sequential(planted())
    prior = bt.RankPrior(model, num_data=10, align_every=0)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for core, scale in zip(scaled[0].cores, (1e-4, 1e-4, 1e4, 1e4), strict=True):
            core.mul_(scale)
    torch.testing.assert_close(scaled[0].weight, model[0].weight)
    other = bt.RankPrior(scaled, num_data=10, align_every=0)
    for _ in range(200):
        prior.step()
        other.step()
    reports = bt.compact_(model, rule="lambda"), bt.compact_(scaled, rule="lambda")
    assert bt.ranks(model) != bt.ranks(scaled)
    assert "collapsed" in str(reports[1])
    assert min(scaled[0].ranks) >= 1
    assert "gauge" in (bt.compact_.__doc__ or "")


@pytest.mark.parametrize("rule", ["rounding", "contribution", "lambda"])
def test_compacting_twice_is_a_no_op(rule: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(bt.TTLinear(144, 144, max_rank=8), nn.Linear(144, 2))
    prior = bt.RankPrior(model, num_data=10)
    prior.step()
    tol = 0.3
    bt.compact_(model, tol=tol, rule=rule)
    before = copy.deepcopy(model.state_dict())
    report = bt.compact_(model, tol=tol, rule=rule)
    assert not report.changed
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("kind", ["adam", "sgd", "rmsprop"])
@pytest.mark.parametrize("rule", ["contribution", "lambda"])
def test_training_after_slicing_equals_training_with_the_dropped_slices_held_at_zero(kind: str, rule: str) -> None:
    def optimiser(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "adam":
            return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        return torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.5)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, mask: list[Tensor] | None, steps: int) -> list[float]:
        generator = torch.Generator().manual_seed(7)
        losses = []
        for _ in range(steps):
            x = torch.randn(32, 144, generator=generator, dtype=torch.float64)
            y = torch.randint(0, 144, (32,), generator=generator)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if mask is not None:
                for core, keep in zip(model[0].cores, mask, strict=True):
                    core.grad.mul_(keep)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = nn.Sequential(planted(noise=1e-2))
    optimizer = optimiser(model)
    train(model, optimizer, None, 5)
    prior = bt.RankPrior(model, num_data=100, align_every=0)
    for _ in range(100):
        prior.step()
    held = copy.deepcopy(model)
    held_optimizer = optimiser(held)
    held_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    report = bt.compact_(model, tol=0.3, rule=rule, optimizer=optimizer)
    assert report.changed
    # The same choice, held at zero instead of cut out: found from the surviving values.
    keep = []
    for bond, core in enumerate(model[0].cores[1:], start=1):
        old = held[0].rank_state.log_lambdas[bond - 1]
        kept = torch.isin(old, model[0].rank_state.log_lambdas[bond - 1])
        assert int(kept.sum()) == core.shape[0]
        keep.append(kept.double())
    ones = torch.ones(1, dtype=torch.float64)
    mask = [
        left[:, None, None, None] * right[None, None, None, :]
        for left, right in zip([ones, *keep], [*keep, ones], strict=True)
    ]
    with torch.no_grad():
        for core, part in zip(held[0].cores, mask, strict=True):
            core.mul_(part)
            state = held_optimizer.state[core]
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == core.shape:
                    value.mul_(part)

    torch.testing.assert_close(held[0].weight, model[0].weight, rtol=1e-12, atol=1e-12)
    assert train(model, optimizer, None, 20) == pytest.approx(train(held, held_optimizer, mask, 20), abs=1e-11)
    torch.testing.assert_close(held[0].weight, model[0].weight, rtol=1e-9, atol=1e-10)


def test_rounding_restarts_the_optimisers_state_of_the_changed_cores_only() -> None:
    model = nn.Sequential(planted(), nn.Linear(144, 3).double())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = model(torch.randn(4, 144).double()).square().sum()
    loss.backward()
    optimizer.step()
    assert bt.compact_(model, optimizer=optimizer).changed
    assert all(core not in optimizer.state for core in model[0].cores)
    assert model[1].weight in optimizer.state
    model(torch.randn(4, 144).double()).square().sum().backward()  # `loss` of the old shapes is still alive
    optimizer.step()
    assert loss.item() > 0


def test_parameters_keep_their_identity_and_gradients_are_sliced() -> None:
    model = nn.Sequential(planted())
    parameters = list(model.parameters())
    model(torch.randn(4, 144).double()).square().sum().backward()
    bt.compact_(model, rule="contribution")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_lambda_follows_the_ranks_and_training_goes_on() -> None:
    for rule in ("rounding", "contribution"):
        model = nn.Sequential(planted())
        prior = bt.RankPrior(model, num_data=10)
        prior.step()
        bt.compact_(model, rule=rule)
        assert [len(u) for u in model[0].rank_state.log_lambdas] == [3, 2, 3]
        prior.loss().backward()
        prior.step()


def test_the_report_says_when_no_rank_moved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(bt.TTLinear(144, 144, max_rank=4))
    assert "no rank moved" in str(bt.compact_(model, tol=1e-6))


def test_the_report_says_when_a_layer_collapsed() -> None:
    model = nn.Sequential(planted(ranks=(1, 1, 1), noise=1e-9))
    assert "collapsed to rank 1 at every bond" in str(bt.compact_(model))
    zero = nn.Sequential(planted())
    with torch.no_grad():
        for core in zero[0].cores:
            core.zero_()
    bt.compact_(zero)
    assert zero[0].ranks == (1, 1, 1, 1, 1)
    assert torch.isfinite(zero[0].weight).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "magic"}, "rule must be one of"),
        ({"tol": 1.0}, r"tol must lie in \[0, 1\), got 1.0"),
        ({"tol": -0.1}, "got -0.1"),
        ({"rule": "lambda"}, "rule='lambda' needs lambda"),
    ],
)
def test_bad_arguments_leave_the_model_alone(arguments: dict[str, float], message: str) -> None:
    model = nn.Sequential(planted())
    with pytest.raises(bt.BayesTrainError, match=message):
        bt.compact_(model, **arguments)
    assert model[0].ranks == (1, 6, 6, 6, 1)


def test_nan_weights_and_strange_optimisers_are_refused_before_any_change() -> None:
    model = nn.Sequential(planted(), planted(seed=1))
    with pytest.raises(bt.BayesTrainError, match="does not hold core 0 of layer '1'"):
        bt.compact_(model, optimizer=torch.optim.SGD(model[0].parameters(), 0.1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model[1].cores[1]]["row"] = torch.zeros(6)
    with pytest.raises(bt.BayesTrainError, match=r"cannot be sliced\. Use rule='rounding'"):
        bt.compact_(model, rule="contribution", optimizer=optimizer)
    with torch.no_grad():
        model[1].cores[0][0, 0, 0, 0] = torch.nan
    with pytest.raises(bt.BayesTrainError, match="Layer '1' has NaN or infinite weights"):
        bt.compact_(model)
    assert bt.ranks(model) == {"0": (1, 6, 6, 6, 1), "1": (1, 6, 6, 6, 1)}
