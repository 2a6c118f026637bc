"""The prior of all layers at once against one layer after the other (`bonds_reference`)."""

import copy
import math

import pytest
import torch
from bonds_reference import CLOSE, HELD, NUM_DATA, assert_same, mixed, slow_log_prob, slow_step
from layer_kit import Calls, relative_error
from torch import Tensor, nn
from torch.func import functional_call, vmap

import bayestrain as bt
from bayestrain import bonds, shrinkage
from bayestrain.layers import TTConv2d, TTLinear
from bayestrain.sizes import tt_layers

# --- values, gradients, steps -----------------------------------------------------------------------------------------


def test_log_prob_and_its_gradient_are_those_of_the_layers_one_by_one() -> None:
    model, prior = mixed()
    torch.testing.assert_close(prior.log_prob(), slow_log_prob(model, prior), **CLOSE)
    chosen = [p for p in model.parameters() if p.requires_grad]
    fast = torch.autograd.grad(prior.log_prob(), chosen, allow_unused=True)
    slow = torch.autograd.grad(slow_log_prob(model, prior), chosen, allow_unused=True)
    torch.testing.assert_close(fast, slow, **CLOSE)


@pytest.mark.parametrize(
    "weight", [None, 0.25, torch.tensor(0.25, dtype=torch.float64)], ids=["own", "float", "tensor"]
)
@pytest.mark.parametrize("kind", ["rank", "normal"])
def test_add_gradients_is_autograd_of_the_loss(weight: Tensor | float | None, kind: str) -> None:
    model, prior = mixed()
    if kind == "normal":
        prior = bt.NormalPrior(model, NUM_DATA, weight=0.7)
    expected = prior.loss() * (1 if weight is None else float(weight) / 0.7)
    expected.backward()
    slow = {name: p.grad for name, p in model.named_parameters()}
    for i, parameter in enumerate(model.parameters()):  # some have a gradient already
        parameter.grad = torch.ones_like(parameter) if i % 2 and parameter.requires_grad else None
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found = prior.gradients(weight).add_()
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), **CLOSE)
    for name, parameter in model.named_parameters():
        if slow[name] is None:
            assert not parameter.requires_grad
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, slow[name] + before.get(name, 0.0), **CLOSE)


def test_gradients_of_tied_cores_and_tied_layers_add_up() -> None:
    torch.manual_seed(0)
    first, second = (TTLinear(8, 8, in_modes=(2, 2, 2), out_modes=(2, 2, 2), max_rank=3).double() for _ in range(2))
    for k in range(3):
        second.cores[k] = first.cores[k]
    second.bias = first.bias
    model = nn.Sequential(first, second, first)
    prior = bt.RankPrior(model, NUM_DATA)
    with torch.no_grad():
        for u in second.rank_state.log_lambdas:
            u.add_(1.0)
    prior.loss().backward()
    slow = [p.grad.clone() for p in model.parameters()]
    for grad in (None, 1.0):
        for p in model.parameters():
            p.grad = None if grad is None else torch.full_like(p, grad)
        prior.gradients().add_()
        for p, expected in zip(model.parameters(), slow, strict=True):
            torch.testing.assert_close(p.grad, expected + (grad or 0.0), **CLOSE)


@pytest.mark.parametrize("update", ["newton", "gradient"])
def test_steps_are_those_of_the_layers_one_by_one(update: str) -> None:
    model, prior = mixed(update=update)
    slow = copy.deepcopy(model)
    slow_prior = bt.RankPrior(slow, NUM_DATA, hold_scale=HELD, weight=0.7, a=1.3, align_every=0, update=update)
    before = copy.deepcopy(model)
    for _ in range(5):
        prior.step()
        slow_step(slow, slow_prior)
        assert_same(model, slow)
    assert torch.equal(model.still.cores[0], before.still.cores[0])  # frozen
    assert not torch.equal(model.conv.cores[0], before.conv.cores[0])
    assert not torch.equal(model.conv.bias, before.conv.bias)
    assert not torch.equal(model.deep_bn.running_var, before.deep_bn.running_var)


@pytest.mark.parametrize("update", ["newton", "gradient"])
def test_alignments_are_those_of_the_layers_one_by_one(update: str) -> None:
    model, prior = mixed(update=update, align_every=1, hold_scale=HELD)
    slow = copy.deepcopy(model)
    slow_prior = bt.RankPrior(slow, NUM_DATA, hold_scale=HELD, weight=0.7, a=1.3, update=update)
    before = copy.deepcopy(model)
    for _ in range(2):
        prior.step()
        slow_step(slow, slow_prior, align=True)
        assert_same(model, slow, tolerance=1e-8)
        for name, layer in tt_layers(model).items():
            torch.testing.assert_close(layer.weight, slow.get_submodule(name).weight, **CLOSE)
    for own, old in zip(model.still.cores, before.still.cores, strict=True):  # frozen
        assert torch.equal(own, old)
    for name in ("two", "three"):  # not held
        own, old = model.get_submodule(name), before.get_submodule(name)
        torch.testing.assert_close(own.weight, old.weight, **CLOSE)
        assert not torch.allclose(own.cores[0], old.cores[0])


def test_alignment_keeps_weights_in_every_precision() -> None:
    torch.manual_seed(0)
    dtypes = (torch.float16, torch.float32, torch.float64)
    model = nn.Sequential(*(TTLinear(64, 64, max_rank=4 + i, dtype=dtype) for i, dtype in enumerate(dtypes)))
    before = [layer.weight.detach().clone() for layer in model]
    old = [layer.cores[0].detach().clone() for layer in model]
    bt.RankPrior(model, NUM_DATA, align_every=1).step()
    for layer, weight, core, dtype, eps in zip(model, before, old, dtypes, (2e-3, 1e-5, 1e-12), strict=True):
        assert layer.cores[0].dtype == dtype
        assert relative_error(layer.weight.detach(), weight) < eps
        assert relative_error(layer.cores[0].detach(), core) > 0.1


def test_zero_cores_and_indices_that_contribute_nothing_stay_where_they_are() -> None:
    model, prior = mixed(align_every=1)
    with torch.no_grad():
        model.three.cores[1].zero_()
        model.two.cores[0][..., 2] *= 1e-6
    before = copy.deepcopy(model)
    prior.step()
    for own, old in zip(model.three.cores, before.three.cores, strict=True):
        assert torch.equal(own, old)
    torch.testing.assert_close(model.two.cores[1][2], before.two.cores[1][2], rtol=1e-12, atol=0)
    assert not torch.allclose(model.two.cores[1][3], before.two.cores[1][3])
    torch.testing.assert_close(model.two.weight, before.two.weight, **CLOSE)


def test_small_lambdas_stop_at_the_floor_and_zero_cores_at_the_limit() -> None:
    model, prior = mixed(floor=0.3)
    with torch.no_grad():
        for core in (*model.conv.cores, *model.two.cores):
            core.zero_()
    slow = copy.deepcopy(model)
    slow_prior = bt.RankPrior(slow, NUM_DATA, hold_scale=HELD, a=1.3, align_every=0, floor=0.3)
    for _ in range(40):
        prior.step()
        slow_step(slow, slow_prior)
    assert_same(model, slow)
    assert float(model.two.rank_state.log_lambdas[0].max()) == -shrinkage.LIMIT
    for us in prior.lambdas().values():
        assert all(float(u.min() / u.max()) > 0.3 - 1e-9 for u in us)


@pytest.mark.parametrize("align", [False, True])
def test_a_broken_layer_does_not_touch_the_others(align: bool) -> None:
    model, prior = mixed(align_every=int(align))
    slow = copy.deepcopy(model)
    slow_prior = bt.RankPrior(slow, NUM_DATA, hold_scale=HELD, a=1.3)
    with torch.no_grad():
        model.deep.cores[2].fill_(math.nan)
        model.three.cores[1][0, 0, 0, 0] = math.inf
    broken = copy.deepcopy(model.three)
    prior.step()
    slow_step(slow, slow_prior, align)
    for name in ("two", "conv", "still"):
        assert_same(model.get_submodule(name), slow.get_submodule(name), 1e-8)
    for own, old in zip(model.three.cores, broken.cores, strict=True):
        assert torch.equal(own, old)


def test_half_precision_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TTLinear(64, 64, max_rank=4, dtype=torch.float16), TTLinear(64, 64, max_rank=4).double())
    prior = bt.RankPrior(model, NUM_DATA, hold_scale=["0", "1"])
    exact = copy.deepcopy(model).double()
    slow_prior = bt.RankPrior(exact, NUM_DATA, hold_scale=["0", "1"])
    loss = prior.gradients().add_()
    torch.testing.assert_close(loss.double(), slow_prior.loss().detach(), rtol=1e-3, atol=0)
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in model.parameters()]
    prior.step()
    slow_step(exact, slow_prior)
    for own, other in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(own.double(), other.double(), rtol=5e-3, atol=5e-3)


# --- the layout follows the model -------------------------------------------------------------------------------------


def test_the_layout_follows_compaction_precision_and_loading() -> None:
    model, prior = mixed()
    prior.step()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.conv.cores[1][..., 2:] = 0
        model.deep.cores[3][..., 1] = 0
    assert bt.compact_(model, rule="contribution").changed
    cut_state = copy.deepcopy(model.state_dict())
    for change in (
        lambda: None,
        lambda: model.float(),
        lambda: model.double(),
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(cut_state),
    ):
        change()
        slow = copy.deepcopy(model)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if model.two.bias.dtype == torch.float32 else CLOSE
        torch.testing.assert_close(prior.log_prob(), slow_log_prob(slow, prior).to(prior.log_prob()), **tolerance)
        prior.step()
        slow_prior = bt.RankPrior(copy.deepcopy(slow), NUM_DATA, hold_scale=HELD, a=1.3, align_every=0)
        slow_prior.held = {
            name: [slow.get_submodule(other) for other, norm in model.named_modules() if norm in norms]
            for name, norms in prior.held.items()
        }
        slow_step(slow, slow_prior)
        for (name, own), other in zip(model.state_dict().items(), slow.state_dict().values(), strict=True):
            torch.testing.assert_close(own, other, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_very_unlike_layers_go_into_several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = [(1, 4, 2), (2, 4, 1)], [(1, 60, 30), (30, 60, 30), (30, 60, 1)]
    assert bonds.groups([small, large, small]) == [[0, 1, 2]]
    monkeypatch.setattr(bonds, "SPACIOUS", 0)
    assert bonds.groups([small] * 3) == [[0, 1, 2]]
    monkeypatch.setattr(bonds, "WASTE", 2)
    assert bonds.groups([small, large, small]) == [[0, 2], [1]]
    monkeypatch.setattr(bonds, "WASTE", 0)
    model, prior = mixed()
    assert len(prior._groups.now()) == 5
    slow = copy.deepcopy(model)
    slow_prior = bt.RankPrior(slow, NUM_DATA, hold_scale=HELD, a=1.3, align_every=0)
    torch.testing.assert_close(prior.log_prob(), slow_log_prob(model, prior), **CLOSE)
    prior.step()
    slow_step(slow, slow_prior)
    assert_same(model, slow)
    prior.align_every = 1
    prior.step()
    slow_step(slow, slow_prior, align=True)
    assert_same(model, slow, tolerance=1e-8)


# --- many at once -----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """What `functional_call` needs: the prior's functions as calls of a module."""

    def __init__(self, model: nn.Module, prior: bt.RankPrior) -> None:
        super().__init__()
        self.model, self.prior = model, prior

    def forward(self, what: str) -> Tensor:
        if what == "log_prob":
            return self.prior.log_prob()
        self.prior.step()
        return torch.zeros(())


@pytest.mark.parametrize("align", [False, True])
def test_vmap_over_particles_is_a_loop_over_them(align: bool) -> None:
    pairs = [mixed(seed, align_every=int(align)) for seed in range(3)]
    model, prior = pairs[0]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for other, _ in pairs[1:]:
            for name, p in other.named_parameters():
                if name not in trained:  # frozen: common to all
                    p.copy_(model.get_parameter(name))
    stacked = {
        name: torch.stack([dict(m.state_dict())[name].detach() for m, _ in pairs])
        for name in model.state_dict()
        if name in trained or name in dict(model.named_buffers())
    }

    def run(what: str) -> Tensor:
        tensors = {f"model.{name}": tensor for name, tensor in stacked.items()}
        return vmap(lambda own: functional_call(Holder(model, prior), own, (what,)))(tensors)

    own = copy.deepcopy(pairs)
    torch.testing.assert_close(run("log_prob"), torch.stack([p.log_prob() for _, p in own]), **CLOSE)
    with torch.no_grad():
        run("step")
    for _, other in own:
        other.step()
    close = {"rtol": 1e-8, "atol": 1e-8} if align else CLOSE
    for name, tensor in stacked.items():
        torch.testing.assert_close(tensor, torch.stack([m.state_dict()[name] for m, _ in own]), **close, msg=name)


def test_a_layout_made_inside_of_a_transform_does_not_outlive_it() -> None:
    model, prior = mixed()
    holder = Holder(model, prior)
    names = [name for name, p in holder.named_parameters() if p.requires_grad]
    own = {name: holder.get_parameter(name).detach() for name in names}
    gradients = torch.func.grad(lambda tensors: functional_call(holder, tensors, ("log_prob",)))(own)
    slow = torch.autograd.grad(slow_log_prob(model, prior), [holder.get_parameter(name) for name in names])
    prior.step()
    with torch.inference_mode():
        prior.log_prob()
    prior.loss().backward()
    for name, expected in zip(names, slow, strict=True):
        torch.testing.assert_close(gradients[name], expected, **CLOSE, msg=name)


VIEWS = {"view", "slice", "detach", "unsqueeze", "expand", "_unsafe_view"}


def work(calls: Calls) -> int:
    """The operations that were run, views aside."""
    return sum(number for name, number in calls.made.items() if name.split(".")[1] not in VIEWS)


def operations(layers: int) -> dict[str, int]:
    torch.manual_seed(0)
    blocks = [(TTConv2d(8, 8, 3, padding=1, max_rank=4), nn.BatchNorm2d(8)) for _ in range(layers)]
    model = nn.Sequential(*(module for block in blocks for module in block))
    prior = bt.RankPrior(model, NUM_DATA)
    assert len(prior.held) == layers
    prior.step()
    prior.loss().backward()
    found = {}
    for name in ("log_prob", "gradients", "step"):
        with Calls() as calls, torch.no_grad():
            getattr(prior, name)()
        found[name] = work(calls)
    prior.steps = prior.align_every - 1
    assert prior.aligns_next
    with Calls() as calls:
        prior.step()
    found["alignment"] = work(calls)
    return found


def test_the_number_of_operations_does_not_grow_with_the_number_of_layers() -> None:
    few, many = operations(5), operations(40)
    assert few == many
    assert many["step"] < 150
    assert many["alignment"] < 1200
