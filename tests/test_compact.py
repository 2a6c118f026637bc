"""`compact_`: what it promises about the weight, the optimiser, a second call and the report."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import gauge, tt


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
        cores = gauge.change_gauge(cores, bond, turn * scale)
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
        cores = gauge.change_gauge(cores, bond, (10 ** torch.randn(6, generator=generator, dtype=torch.float64)).diag())
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


@pytest.mark.parametrize("rule", ["rounding", "contribution"])
@pytest.mark.parametrize("seed", range(20))
def test_the_tolerance_is_one_of_the_visible_weight_also_with_padded_modes(rule: str, seed: int) -> None:
    torch.manual_seed(seed)
    layer = bt.TTLinear(5, 5, in_modes=(3, 2), out_modes=(3, 2), max_rank=6)
    with torch.no_grad():
        layer.cores[0][:, 2] *= 30.0  # the last rows, of which one exists only inside
    model = nn.Sequential(layer, bt.TTConv2d(5, 7, 3, in_modes=(3, 2), out_modes=(2, 2, 2), max_rank=6))
    assert layer.is_padded
    before = [module.weight.detach().double() for module in model]
    report = bt.compact_(model, tol=0.3, rule=rule)
    for old, module, row in zip(before, model, report.layers, strict=True):
        error = float((module.weight.detach().double() - old).norm() / old.norm())
        assert error <= 0.3
        assert row.error == pytest.approx(error, abs=1e-5)


def test_small_tolerances_hold_in_single_precision() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        layer = bt.TTLinear(256, 256, max_rank=12)
        with torch.no_grad():
            layer.cores[1][..., 0] *= 5e-6
        before = tt.matrix_to_dense([core.detach().double() for core in layer.cores])
        bt.compact_(nn.Sequential(layer), tol=1e-6)
        after = tt.matrix_to_dense([core.detach().double() for core in layer.cores])
        assert float((after - before).norm() / before.norm()) <= 1e-6


def test_half_precision_can_be_compacted() -> None:
    model = nn.Sequential(planted().to(torch.bfloat16))
    assert bt.compact_(model, tol=0.05).changed
    assert model[0].cores[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_can_be_compacted_with_lambda(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(bt.TTLinear(64, 27, max_rank=6, dtype=dtype), bt.TTLinear(27, 4, max_rank=4, dtype=dtype))
    prior = bt.RankPrior(model, num_data=10)
    assert bt.compact_(model, 0.6).changed
    assert all(u.dtype == dtype and u.isfinite().all() for u in model[0].rank_state.log_lambdas)
    prior.step()


def test_slices_that_are_alike_are_not_dropped_together() -> None:
    """Each of two equal slices fits the tolerance, both together do not: the cross terms count."""
    torch.manual_seed(0)
    layer = bt.TTLinear(36, 36, in_modes=(6, 6), out_modes=(6, 6), max_rank=4).double()
    with torch.no_grad():
        first, second = layer.cores
        for core, axis in ((first, -1), (second, 0)):
            core.copy_(torch.nn.functional.normalize(core.transpose(0, axis).flatten(1), dim=1)
                       .view(core.transpose(0, axis).shape).transpose(0, axis))  # fmt: skip
        first[..., 2:] *= 0.3
        first[..., 3], second[3] = first[..., 2].clone(), second[2].clone()
    whole = layer.weight.detach()
    one = float(tt.contributions([c.detach() for c in layer.cores])[0][3] / whole.norm())
    model = nn.Sequential(layer)
    bt.compact_(model, tol=1.6 * one, rule="contribution")  # two of size `one`: 1.41 if unrelated, 2 if alike
    assert layer.ranks == (1, 3, 1)
    assert float((layer.weight.detach() - whole).norm() / whole.norm()) <= 1.6 * one


def test_after_more_training_compaction_looks_again() -> None:
    model = nn.Sequential(planted())
    bt.compact_(model, rule="contribution")
    with torch.no_grad():
        model[0].cores[1][..., 0] *= 1e-6
    assert bt.compact_(model, rule="contribution").changed
    other = nn.Sequential(planted())
    bt.RankPrior(other, num_data=10)
    bt.compact_(other, rule="lambda")
    other[0].rank_state.log_lambdas[0][2] = -20.0
    assert bt.compact_(other, rule="lambda").changed


def test_sliced_gradients_are_those_of_the_surviving_slices() -> None:
    model = nn.Sequential(planted())
    model(torch.ones(4, 144).double()).square().sum().backward()
    before = [core.grad.clone() for core in model[0].cores]
    bt.compact_(model, rule="contribution")
    for k, core in enumerate(model[0].cores):  # planted: the first indices of every bond survive
        torch.testing.assert_close(core.grad, before[k][: core.shape[0], :, :, : core.shape[-1]])


def test_after_rounding_lambda_is_at_its_mode_under_the_priors_own_settings() -> None:
    model = nn.Sequential(planted())
    prior = bt.RankPrior(model, num_data=10, a=3.0, b=200.0, align_every=0)
    bt.compact_(model)
    after = [u.clone() for u in model[0].rank_state.log_lambdas]
    for _ in range(50):
        prior.step()
    torch.testing.assert_close(model[0].rank_state.log_lambdas, after, rtol=1e-4, atol=1e-4)


def test_lbfgs_is_refused_and_lambda_less_state_dicts_do_not_break_the_prior() -> None:
    model = nn.Sequential(planted())
    with pytest.raises(bt.BayesTrainError, match="LBFGS keeps one flat vector"):
        bt.compact_(model, optimizer=torch.optim.LBFGS(model.parameters()))
    small = nn.Sequential(planted())
    bt.compact_(small)
    prior = bt.RankPrior(model, num_data=10)
    model.load_state_dict(small.state_dict(), strict=False)
    prior.loss().backward()
    prior.step()
