"""`RankPrior` in a user's loop: what it adds to the loss, what it does after a step, and what it saves."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import bayestrain as bt
from bayestrain import shrinkage, tt
from bayestrain.errors import HoldWarning


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        bt.TTLinear(12, 8, in_modes=(4, 3), out_modes=(4, 2), max_rank=5), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def conv_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        bt.TTConv2d(4, 6, 3, padding=1, max_rank=4),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        bt.TTConv2d(6, 4, 3, padding=1, max_rank=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 25, 3),
    )


def test_loss_is_minus_weight_log_p_over_n() -> None:
    model = small_model()
    prior = bt.RankPrior(model, num_data=50, weight=0.5, other_variance=100.0)
    layer = model[0]
    others = [layer.bias, model[2].weight, model[2].bias]
    expected = shrinkage.log_prob(list(layer.cores), [torch.zeros(5).double()], 1.0, 5.0) + sum(
        Normal(0.0, 10.0).log_prob(p).sum() for p in others
    )
    torch.testing.assert_close(prior.log_prob(), expected)
    torch.testing.assert_close(prior.loss(), -0.5 * expected / 50)


def test_frozen_parameters_have_no_prior() -> None:
    model = small_model()
    full = bt.RankPrior(model, num_data=1).log_prob()
    model[2].weight.requires_grad_(False)
    left_out = Normal(0.0, 10.0).log_prob(model[2].weight).sum()
    torch.testing.assert_close(bt.RankPrior(model, num_data=1).log_prob(), full - left_out)


def test_warmup_raises_the_weight_linearly() -> None:
    prior = bt.RankPrior(small_model(), num_data=10, weight=0.8, warmup_steps=4)
    weights = []
    for _ in range(6):
        weights.append(prior.current_weight)
        prior.step()
    assert weights == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.8])


@pytest.mark.parametrize("update", ["newton", "gradient"])
def test_step_moves_lambda_to_its_conditional_mode(update: str) -> None:
    model = small_model()
    prior = bt.RankPrior(model, num_data=10, update=update, align_every=0, floor=1e-6)
    for _ in range(2000):
        prior.step()
    cores = [core.detach() for core in model[0].cores]
    expected = shrinkage.conditional_mode(cores, [torch.zeros(5).double()], 1.0, 5.0, 1e-6, sweeps=100)
    torch.testing.assert_close(model[0].rank_state.log_lambdas[0], expected[0], rtol=1e-5, atol=1e-5)


def test_alignment_changes_the_gauge_and_not_the_network() -> None:
    model = small_model()
    x = torch.randn(7, 12).double()
    before = model(x).detach()
    prior = bt.RankPrior(model, num_data=10, align_every=1)
    old = [core.clone() for core in model[0].cores]
    prior.step()
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-10, atol=1e-10)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(old, model[0].cores, strict=True))
    (left,), (right,) = tt.grams([core.detach() for core in model[0].cores])
    torch.testing.assert_close(left, left.diagonal().diag())
    torch.testing.assert_close(right, right.diagonal().diag())


def test_layers_before_a_batch_norm_are_found_and_held_without_changing_the_function() -> None:
    model = conv_model().double()
    prior = bt.RankPrior(model, num_data=10)
    assert list(prior.held) == ["0"]
    x = torch.randn(8, 4, 5, 5).double()
    model(x)  # running statistics of its own
    norm = model[0].weight.detach().norm()
    model[1].eps = 1e-12
    with torch.no_grad():
        for core in model[0].cores:
            core.mul_(1.3)
    model.eval()
    drifted = model(x).detach()
    model.train()
    drifted_training = copy.deepcopy(model)(x).detach()
    prior.step()
    torch.testing.assert_close(model[0].weight.detach().norm(), norm)
    model.eval()
    torch.testing.assert_close(model(x).detach(), drifted, rtol=1e-8, atol=1e-8)
    model.train()
    torch.testing.assert_close(model(x).detach(), drifted_training, rtol=1e-8, atol=1e-8)


def test_scale_can_be_told_and_unknown_names_are_refused() -> None:
    assert list(bt.RankPrior(conv_model(), num_data=10, hold_scale=()).held) == []
    assert list(bt.RankPrior(conv_model(), num_data=10, hold_scale=["3"]).held) == ["3"]
    with pytest.raises(bt.BayesTrainError, match=r"hold_scale names no TT layer: \['nope'\]"):
        bt.RankPrior(conv_model(), num_data=10, hold_scale=["nope"])


def test_lambda_is_saved_with_the_model_and_taken_off_for_deployment() -> None:
    model = small_model()
    names = set(model.state_dict())
    prior = bt.RankPrior(model, num_data=10, start=0.3)
    assert float(prior.lambdas()["0"][0][0]) == pytest.approx(0.3)
    prior.step()
    saved = model.state_dict()
    assert any("log_lambda" in key for key in saved)
    fresh = small_model()
    fresh.load_state_dict(saved)
    again = bt.RankPrior(fresh, num_data=10)
    torch.testing.assert_close(again.lambdas()["0"][0], prior.lambdas()["0"][0])
    prior.remove_()
    assert set(model.state_dict()) == names
    for use in (prior.loss, prior.step, prior.gradients, prior.move_lambdas_, prior.scales):
        with pytest.raises(bt.BayesTrainError, match=r"has lost its lambda: the prior was removed\. Make a new"):
            use()
    bt.RankPrior(fresh, num_data=1).remove_()  # as those do who have no prior any more
    with pytest.raises(bt.BayesTrainError, match="has lost its lambda"):
        again.loss()


def test_loading_lambda_keeps_the_settings_of_the_prior() -> None:
    model, saved = small_model(), small_model()
    bt.RankPrior(model, num_data=10, a=3.0, b=7.0, floor=1e-2)
    bt.RankPrior(saved, num_data=10)
    bt.compact_(saved, tol=0.5)
    model.load_state_dict(saved.state_dict())
    for layer in model.modules():
        if isinstance(layer, bt.TTLinear):
            state = layer.rank_state
            assert state is not None
            assert (state.a, state.b, state.floor) == (3.0, 7.0, 1e-2)
            assert [len(u) for u in state.log_lambdas] == list(layer.ranks[1:-1])


def test_a_second_prior_goes_on_with_the_lambda_that_is_there() -> None:
    model = small_model()
    first = bt.RankPrior(model, num_data=10)
    first.step()
    before = [u.clone() for u in first.lambdas()["0"]]
    second = bt.RankPrior(model, num_data=10)
    second.load_state_dict(first.state_dict())
    assert second.steps == 1
    torch.testing.assert_close(second.lambdas()["0"], before)


def test_parameter_count_ignores_lambda() -> None:
    model = small_model()
    before = bt.count_parameters(model)
    bt.RankPrior(model, num_data=10)
    assert bt.count_parameters(model) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_data": 0}, "num_data must be the number of training data, at least 1, got 0"),
        ({"num_data": 10, "weight": -1.0}, "weight cannot be negative, got -1.0"),
        ({"num_data": 10, "weight": math.nan}, "weight cannot be negative, got nan"),
        ({"num_data": 10, "b": 0.0}, "b must be positive, got 0.0"),
        ({"num_data": 10, "floor": 1.0}, r"floor is relative .* must lie in \(0, 1\), got 1.0"),
        ({"num_data": 10, "rate": 0.2}, "rate is the step size of update 'gradient', 'newton' has none"),
        ({"num_data": 10, "update": "gradient", "rate": 0.0}, "rate must be positive, got 0.0"),
        ({"num_data": 10, "update": "magic"}, "update must be one of .*newton.*, got 'magic'"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_left_alone(arguments: dict[str, float], message: str) -> None:
    model = small_model()
    before = model.state_dict()
    with pytest.raises(bt.BayesTrainError, match=message):
        bt.RankPrior(model, **arguments)
    assert set(model.state_dict()) == set(before)


def test_a_model_without_tt_layers_is_refused() -> None:
    with pytest.raises(bt.BayesTrainError, match="no tensor-train layer"):
        bt.RankPrior(nn.Sequential(nn.Linear(2, 2)), num_data=10)


def test_the_users_loop_is_three_lines_longer() -> None:
    """One line makes the prior, one term joins the loss, one line follows the optimiser's step."""
    model = small_model().float()
    x, y = torch.randn(64, 12), torch.randint(0, 3, (64,))
    prior = bt.RankPrior(model, num_data=64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            loss = F.cross_entropy(model(x), y) + prior.loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prior.step()
            losses.append(loss.detach())
    assert losses[-1] < losses[0]


def test_a_norm_that_was_not_held_before_is_held_from_now_on() -> None:
    model = nn.Sequential(bt.TTConv2d(4, 6, 3, max_rank=4), nn.BatchNorm2d(6))
    norm = model[0].weight.detach().norm()
    bt.RankPrior(model, num_data=10, hold_scale=())
    prior = bt.RankPrior(model, num_data=10)
    prior.step()
    torch.testing.assert_close(model[0].weight.detach().norm(), norm)
    with torch.no_grad():
        model[0].cores[0].mul_(3)
    prior.step()
    torch.testing.assert_close(model[0].weight.detach().norm(), norm)


def test_a_layer_that_starts_at_zero_is_held_once_it_has_a_norm() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3)
    nn.init.zeros_(conv.weight)
    model = nn.Sequential(bt.TTConv2d.from_dense(conv), nn.BatchNorm2d(6))
    prior = bt.RankPrior(model, num_data=10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        (model(torch.randn(4, 4, 5, 5)).square().mean() + prior.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        prior.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert all(torch.isfinite(u).all() for u in model[0].rank_state.log_lambdas)


def test_lambda_follows_when_the_scale_is_brought_back() -> None:
    """Cores and lambda together are only rescaled, so every slice keeps its place relative to its own variance."""
    model = conv_model().double()
    prior = bt.RankPrior(model, num_data=10, align_every=0)
    for _ in range(100):
        prior.step()
    before = [u.clone() for u in model[0].rank_state.log_lambdas]
    norm = model[0].weight.detach().norm()
    with torch.no_grad():
        for core in model[0].cores:
            core.mul_(1.5)
        for u in model[0].rank_state.log_lambdas:
            u.add_(math.log(1.5))
    prior.step()
    torch.testing.assert_close(model[0].weight.detach().norm(), norm)
    torch.testing.assert_close(model[0].rank_state.log_lambdas, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("update", ["newton", "gradient"])
def test_lambda_stays_finite_between_cores_that_are_zero(update: str) -> None:
    model = small_model().float()
    with torch.no_grad():
        for core in model[0].cores:
            core.zero_()
    prior = bt.RankPrior(model, num_data=10, update=update)
    for _ in range(200):
        prior.step()
    assert torch.isfinite(prior.loss())
    assert all(torch.isfinite(u).all() for u in model[0].rank_state.log_lambdas)


def test_frozen_cores_are_left_alone_and_autocast_changes_nothing() -> None:
    model = small_model()
    for core in model[0].cores:
        core.requires_grad_(False)
    before = [core.clone() for core in model[0].cores]
    bt.RankPrior(model, num_data=10, align_every=1).step()
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].cores, strict=True))

    with_autocast, without = conv_model(), conv_model()
    for net, enabled in ((with_autocast, True), (without, False)):
        prior = bt.RankPrior(net, num_data=10, align_every=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            prior.step()
    assert torch.equal(with_autocast[0].cores[1], without[0].cores[1])


def test_lambda_moves_with_the_cores_when_they_are_aligned() -> None:
    """Right after an alignment lambda is near the mode of the new cores, not of the old ones."""
    model = small_model()
    prior = bt.RankPrior(model, num_data=10, align_every=60, floor=1e-6)
    for _ in range(60):
        prior.step()
    cores = [core.detach() for core in model[0].cores]
    mode = shrinkage.conditional_mode(cores, [torch.zeros(5).double()], 1.0, 5.0, 1e-6, sweeps=100)
    torch.testing.assert_close(model[0].rank_state.log_lambdas[0], mode[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_held_by_what_it_can_hold_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(bt.TTLinear(64, 64, max_rank=4, dtype=dtype), nn.BatchNorm1d(64)).eval()
    prior = bt.RankPrior(model, num_data=10, align_every=0)
    prior.step()
    norm = float(model[0].weight.detach().float().norm())
    x = torch.randn(16, 64).to(dtype)
    with torch.no_grad():
        model[1].running_mean.uniform_()
        model[0].bias.uniform_()
        for share in (1.01, 0.99, 3.0, 0.2):
            for core in model[0].cores:
                core.mul_(share)
            before = model(x)
            for _ in range(100):
                prior.step()
            model[1].eps = 0.0
            assert (model(x) - before).abs().max() < 0.02 * before.abs().max()
            left = float(model[0].weight.float().norm()) / norm
            most = 1.01 * 2 ** (len(model[0].cores) / 2)  # every core is within the root of two
            assert 1 / most < left < most


def test_naming_a_layer_vouches_for_the_batch_norm_behind_it() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = bt.TTLinear(8, 8, max_rank=2), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bn(self.fc(x if x.sum() > 0 else -x))

    model = Untraceable()
    with pytest.warns(HoldWarning, match="outputs of fc could not be seen"):
        assert bt.RankPrior(model, num_data=10).held == {}
    assert bt.RankPrior(model, num_data=10, hold_scale=["fc"]).held == {"fc": [model.bn]}


def test_naming_a_layer_with_a_hook_takes_its_batch_norm_along() -> None:
    model = conv_model()
    model[0].register_forward_hook(lambda *_: None)
    with pytest.warns(HoldWarning, match="outputs of 0 could not be seen"):
        assert bt.RankPrior(model, num_data=10).held == {}
    assert bt.RankPrior(model, num_data=10, hold_scale=["0"]).held == {"0": [model[1]]}


def test_half_precision_has_a_finite_prior() -> None:
    model = nn.Sequential(bt.TTLinear(784, 625, dtype=torch.float16))
    assert torch.isfinite(bt.RankPrior(model, num_data=10).loss())
