"""`RankPrior` in a user's loop: what it adds to the loss, what it does after a step, and what it saves."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from prior_kit import layer
from torch import Tensor, nn
from torch.distributions import Normal

from bayestrain.errors import BayesTrainError, DecayWarning
from bayestrain.formats import algebra
from bayestrain.nn import TensorLinear
from bayestrain.prior import NormalPrior, RankPrior, check_weight_decay, density
from bayestrain.prior.density import log_prob


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    first = TensorLinear(12, 8, in_modes=(4, 3), out_modes=(4, 2), max_rank=5)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3)).double()


def loop_model() -> nn.Sequential:
    """The same with other networks: a loop, and a bond shared by three cores."""
    torch.manual_seed(0)
    return nn.Sequential(layer("xay, ybx -> ab"), nn.ReLU(), nn.Linear(6, 4), layer("ar, br, r -> ab")).double()


def train(model: nn.Module, prior: RankPrior | NormalPrior, steps: int = 30) -> list[Tensor]:
    x, y = torch.randn(64, 12 if isinstance(model[1], nn.ReLU) and len(model) == 3 else 4), torch.randint(0, 3, (64,))
    x = x.to(next(model.parameters()))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y) + prior.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        prior.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("build", [small_model, loop_model])
def test_the_users_loop_is_three_lines_longer(build) -> None:
    """One line makes the prior, one term joins the loss, one line follows the optimiser's step."""
    model = build().float()
    losses = train(model, RankPrior(model, num_data=64))
    assert losses[-1] < losses[0]


def test_loss_is_minus_weight_log_p_over_n() -> None:
    model = small_model()
    prior = RankPrior(model, num_data=50, weight=0.5, warmup_steps=0)
    weight, others = model[0].factorized, [model[0].bias, model[2].weight, model[2].bias]
    expected = log_prob(weight.equation, list(weight.cores), [torch.zeros(5).double()])
    expected += sum(Normal(0.0, 10.0).log_prob(p).sum() for p in others)
    torch.testing.assert_close(prior.log_prob(), expected)
    torch.testing.assert_close(prior.loss(), -0.5 * expected / 50)
    prior.weight = 2.0
    torch.testing.assert_close(prior.loss(), -2.0 * expected / 50)


def test_frozen_parameters_and_cores_have_no_prior() -> None:
    model = small_model()
    full = RankPrior(model, num_data=1).log_prob()
    model[2].weight.requires_grad_(False)
    left_out = Normal(0.0, 10.0).log_prob(model[2].weight).sum()
    torch.testing.assert_close(RankPrior(model, num_data=1).log_prob(), full - left_out)
    one = model[0].cores[0].requires_grad_(False)
    torch.testing.assert_close(RankPrior(model, num_data=1).log_prob(), full - left_out)
    model[0].requires_grad_(False)
    prior = RankPrior(model, num_data=1, align_every=1)
    torch.testing.assert_close(prior.log_prob(), Normal(0.0, 10.0).log_prob(model[2].bias).sum())
    before = one.clone()
    prior.step()
    assert torch.equal(one, before)
    assert (prior.lambdas()["0"][0] == 1).all()
    model.requires_grad_(False)
    assert RankPrior(model, num_data=1).loss() == NormalPrior(model, num_data=1).loss() == 0
    model = small_model()
    model[0].cores[0].requires_grad_(False)
    before = [core.clone() for core in model[0].cores]
    prior = RankPrior(model, num_data=1, align_every=1)
    prior.step()
    prior.loss().backward()
    assert all(map(torch.equal, model[0].cores, before))
    assert model[0].cores[0].grad is None
    assert model[0].cores[1].grad is not None
    assert (prior.lambdas()["0"][0] != 1).all()


def test_warm_up_is_linear_and_alignments_are_more_frequent_at_first() -> None:
    prior = RankPrior(small_model(), num_data=10, weight=0.8, warmup_steps=4)
    weights = []
    for _ in range(6):
        weights.append(prior.current_weight)
        prior.step()
    assert weights == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.8])
    prior = RankPrior(small_model(), num_data=10, align_every=8)
    due = []
    for step in range(1, 41):
        due += [step] if prior.aligns_next else []
        prior.step()
    assert due == [2, 4, 6, 8, 10, 12, 14, 16, 24, 32, 40]


@pytest.mark.parametrize("update", ["newton", "gradient"])
def test_step_moves_lambda_to_its_conditional_mode(update: str) -> None:
    model = small_model()
    prior = RankPrior(model, num_data=10, update=update, align_every=0, floor=1e-6)
    for _ in range(2000):
        prior.step()
    weight = model[0].factorized
    (expected,) = density.conditional_mode(weight.equation, list(weight.cores), [torch.zeros(5).double()], floor=1e-6)
    torch.testing.assert_close(weight.rank_state.log_lambdas[0], expected, rtol=1e-5, atol=1e-5)


def test_alignment_changes_the_gauge_and_not_the_network() -> None:
    model = small_model()
    x = torch.randn(7, 12).double()
    before, old = model(x).detach(), [core.clone() for core in model[0].cores]
    prior = RankPrior(model, num_data=10, align_every=60, floor=1e-6)
    assert [prior.aligns_next, prior.steps] == [False, 0]
    for _ in range(60):
        prior.step()
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-10, atol=1e-10)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(old, model[0].cores, strict=True))
    weight = model[0].factorized
    gram = algebra.gram(weight.equation, list(weight.cores), weight.equation.bonds[0]).detach()
    torch.testing.assert_close(gram, gram.diagonal().diag())
    # Lambda has followed: right after an alignment it is near the mode of the new cores, not of the old ones.
    (mode,) = density.conditional_mode(weight.equation, list(weight.cores), [torch.zeros(5).double()], floor=1e-6)
    torch.testing.assert_close(weight.rank_state.log_lambdas[0], mode, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("build", [small_model, loop_model])
def test_lambda_is_saved_with_the_model_and_removed_for_deployment(build) -> None:
    model = build()
    names = set(model.state_dict())
    prior = RankPrior(model, num_data=10)
    prior.step()
    saved = model.state_dict()
    assert any("rank_state.log_lambda_0" in key for key in saved)
    fresh = build()
    fresh.load_state_dict(saved)
    again = RankPrior(fresh, num_data=10)
    torch.testing.assert_close(again.lambdas(), prior.lambdas())
    prior.remove_()
    assert set(model.state_dict()) == names
    for use in (prior.loss, prior.log_prob, prior.step):
        with pytest.raises(BayesTrainError, match=r"has lost its lambda: the prior was removed\. Make a new"):
            use()
    RankPrior(fresh, num_data=1).remove_()
    with pytest.raises(BayesTrainError, match="has lost its lambda"):
        again.loss()


def test_a_run_resumes_exactly_and_other_ranks_keep_the_settings() -> None:
    def start() -> tuple[nn.Sequential, RankPrior]:
        model = small_model()
        return model, RankPrior(model, num_data=64, warmup_steps=50, align_every=7)

    (model, prior), (half, first), (rest, second) = start(), start(), start()
    for _ in range(30):
        prior.step()
    for _ in range(12):
        first.step()
    first.weight = prior.weight = 0.4
    rest.load_state_dict(half.state_dict())
    second.load_state_dict(first.state_dict())
    for _ in range(18):
        second.step()
    assert all(map(torch.equal, rest.state_dict().values(), model.state_dict().values()))
    assert second.loss() == prior.loss()
    model, saved = small_model(), small_model()
    prior = RankPrior(model, num_data=10, a=3.0, b=7.0, floor=1e-2)
    saved[0].factorized.set_cores([core[..., :2] if k == 0 else core[:2] for k, core in enumerate(saved[0].cores)])
    RankPrior(saved, num_data=10)
    model.load_state_dict(saved.state_dict())
    state = model[0].factorized.rank_state
    assert (state.a, state.b, state.floor, state.start) == (3.0, 7.0, 1e-2, (2,))
    prior.step()
    prior.loss().backward()


def test_a_normal_prior_is_used_the_same_way() -> None:
    model = small_model()
    prior = NormalPrior(model, num_data=64, variance=4.0, weight=0.5, warmup_steps=2)
    expected = sum(Normal(0.0, 2.0).log_prob(p).sum() for p in model.parameters())
    torch.testing.assert_close(prior.log_prob(), expected)
    assert prior.loss() == 0
    losses = train(model, prior)
    assert losses[-1] < losses[5]
    prior.remove_()
    again = NormalPrior(model, num_data=64)
    again.load_state_dict(prior.state_dict())
    assert (again.steps, again.current_weight, again.aligns_next, again.lambdas()) == (30, 0.5, False, {})


@pytest.mark.parametrize(("arguments", "message"), [
    ({"num_data": 0}, "num_data must be the number of training examples, such as len.* at least 1, got 0"),
    ({"num_data": 2.5}, "num_data must be .* at least 1, got 2.5"),
    ({"num_data": 10, "weight": -1.0}, "weight cannot be negative, got -1.0"),
    ({"num_data": 10, "weight": math.nan}, "weight cannot be negative, got nan"),
    ({"num_data": 10, "warmup_steps": -1}, "warmup_steps cannot be negative, got -1"),
    ({"num_data": 10, "align_every": -1}, "align_every cannot be negative, got -1"),
    ({"num_data": 10, "b": 0.0}, "b must be positive, got 0.0"),
    ({"num_data": 10, "other_variance": 0.0}, "other_variance must be positive, got 0.0"),
    ({"num_data": 10, "floor": 1.0}, r"floor is relative .* must lie in \(0, 1\), got 1.0"),
    ({"num_data": 10, "update": "magic"}, "update must be one of .*newton.*, got 'magic'"),
])  # fmt: skip
def test_bad_arguments_are_refused_and_the_model_left_alone(arguments: dict[str, float], message: str) -> None:
    model = small_model()
    before = set(model.state_dict())
    with pytest.raises(BayesTrainError, match=message):
        RankPrior(model, **arguments)
    assert set(model.state_dict()) == before


def test_models_that_have_no_or_not_yet_a_prior() -> None:
    with pytest.raises(BayesTrainError, match=r"no factorised weight\. Call bayestrain.tensorize_"):
        RankPrior(nn.Sequential(nn.Linear(2, 2)), num_data=10)
    model = small_model().half()
    assert RankPrior(model, num_data=10).loss().isfinite()
    model = nn.Sequential(TensorLinear(6, 8, max_rank=2), nn.LazyLinear(2))
    prior = RankPrior(model, num_data=10)
    model(torch.randn(3, 6))
    assert prior.loss().isfinite()


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["0.factorized.cores.1", "0.bias", "2.weight", "2.bias"])
def test_parameters_that_are_not_finite_are_named(name: str, dtype: torch.dtype, value: float) -> None:
    model = nn.Sequential(TensorLinear(6, 8, max_rank=2), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
    before = set(model.state_dict())
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    with pytest.raises(BayesTrainError, match=rf"must be finite, but '{name}' \({dtype}\) has NaN or infinite"):
        RankPrior(model, num_data=10)
    assert set(model.state_dict()) == before
    model[2].requires_grad_(False)
    if name.startswith("2."):
        RankPrior(model, num_data=10)  # which does not cover it


def test_weight_decay_on_cores_is_warned_of() -> None:
    model = small_model()
    with pytest.warns(DecayWarning, match=r"cores of 0, .* AdamW\(\[\{'params': cores, 'weight_decay': 0.0\}") as told:
        check_weight_decay(torch.optim.AdamW(model.parameters()), model)
    assert "cores = [p for n, p in model.named_parameters() if 'cores.' in n]" in str(told[0].message)
    cores = [p for n, p in model.named_parameters() if "cores." in n]
    others = [p for n, p in model.named_parameters() if "cores." not in n]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_weight_decay(torch.optim.Adam(model.parameters()), model)
        check_weight_decay(torch.optim.AdamW([{"params": cores, "weight_decay": 0.0}, {"params": others}]), model)
    assert {id(p) for p in cores} == {id(core) for core in model[0].cores}
