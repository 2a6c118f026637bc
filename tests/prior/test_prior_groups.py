"""The prior of all weights together: closed forms against autograd, steps weight by weight, many particles in vmap."""

import copy
import math

import pytest
import torch
from prior_kit import CLOSE, HELD, Holder, Mixed, layers, mixed
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, vmap

from bayestrain.formats import algebra
from bayestrain.nn import FactorizedWeight, TensorLinear
from bayestrain.prior import RankPrior, density
from bayestrain.prior.density import log_prob
from bayestrain.prior.rank_prior import ALIGN_SWEEPS, UPDATES


def slow_log_prob(model: nn.Module, prior: RankPrior) -> Tensor:
    total, cores = torch.zeros((), dtype=torch.float64), set()
    for name, own in layers(model).items():
        weight, state = own.factorized, own.factorized.rank_state
        cores |= {id(core) for core in weight.cores}
        if name != "still":
            us = state.log_lambdas
            total = total + log_prob(weight.equation, list(weight.cores), us, state.a, state.b, state.start)
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in cores:
            deviation = torch.full((), math.sqrt(prior.variance), dtype=torch.float64)
            total = total + Normal(torch.zeros_like(deviation), deviation).log_prob(parameter).sum()
    return total


@torch.no_grad()
def slow_step(model: nn.Module, move: density.Move = density.newton_step, align: bool = False) -> None:
    """Every layer for itself: its scale, its alignment with some sweeps of Newton steps, then its lambda."""
    behind = {"conv": model.bn, "deep": model.deep_bn, "loop": model.loop_norm}
    for name, layer in layers(model).items():
        if name == "still":
            continue
        weight, state = layer.factorized, layer.factorized.rank_state
        if name in HELD and (size := algebra.norm(weight.equation, list(weight.cores))) > 0:
            factor = state.held_norm / size
            for core in weight.cores:
                core *= factor ** (1 / len(weight.cores))
            for u in state.log_lambdas:
                u += factor.log() / len(weight.cores)
            if layer.bias is not None:
                layer.bias *= factor
            if name != "loop":
                behind[name].running_mean *= factor
                behind[name].running_var *= factor**2
        if align:
            weight.set_cores(weight.format.align(weight.equation, list(weight.cores)))
            slow_sweep(weight, density.newton_step, ALIGN_SWEEPS)
        slow_sweep(weight, move, 1)


def slow_sweep(weight: FactorizedWeight, move: density.Move, sweeps: int) -> None:
    cores, state = list(weight.cores), weight.rank_state
    args = state.a, state.b, state.floor, state.start, sweeps, move
    for u, new in zip(
        state.log_lambdas, density.conditional_mode(weight.equation, cores, state.log_lambdas, *args), strict=True
    ):
        u.copy_(new)


def assert_same(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(model.state_dict(), other.state_dict(), **close)


@pytest.mark.parametrize("weight", [None, torch.tensor(0.25).double()], ids=["own", "tensor"])
def test_the_loss_and_its_gradients_are_those_of_the_weights_one_by_one(weight: Tensor | None) -> None:
    model, prior = mixed()
    chosen = [p for p in model.parameters() if p.requires_grad]
    slow = slow_log_prob(model, prior) * (-(0.7 if weight is None else 0.25) / 50)
    torch.testing.assert_close(prior.loss(weight), slow, **CLOSE)
    pair = (torch.autograd.grad(value, chosen) for value in (prior.loss(weight), slow))
    torch.testing.assert_close(*pair, **CLOSE)
    with torch.inference_mode():
        prior.log_prob()
    prior.loss().backward()  # nothing that the last call made is in the way


@pytest.mark.parametrize("update", ["newton", "gradient"])
def test_steps_are_those_of_the_weights_one_by_one(update: str) -> None:
    model, prior = mixed(update=update)
    slow, before = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(5):
        prior.step()
        slow_step(slow, UPDATES[update])
        assert_same(model, slow)
    for (name, value), old in zip(model.still.state_dict().items(), before.still.state_dict().values(), strict=True):
        assert torch.equal(value, old), f"{name} is frozen"
    for changed in ("conv.bias", "deep_bn.running_var", "loop.bias", "two.factorized.rank_state.log_lambda_0"):
        assert not torch.equal(model.state_dict()[changed], before.state_dict()[changed])


def test_alignments_are_those_of_the_weights_one_by_one_and_change_no_weight() -> None:
    model, prior = mixed(align_every=1)
    slow, before = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(2):
        prior.step()
        slow_step(slow, align=True)
        assert_same(model, slow, tolerance=1e-8)
    for name in ("two", "cp"):
        own, old = model.get_submodule(name), before.get_submodule(name)
        torch.testing.assert_close(own.weight, old.weight, **CLOSE)
        assert not torch.allclose(own.cores[0], old.cores[0])


@pytest.mark.parametrize("align", [False, True])
def test_a_weight_that_is_not_finite_does_not_touch_the_others(align: bool) -> None:
    model, prior = mixed(align_every=int(align))
    slow = copy.deepcopy(model)
    with torch.no_grad():
        model.deep.cores[2].fill_(math.nan)
        model.two.cores[1][0] = math.inf
    broken = copy.deepcopy(model.two)
    prior.step()
    slow_step(slow, align=align)
    for name in ("conv", "loop", "cp", "still"):
        assert_same(model.get_submodule(name), slow.get_submodule(name), 1e-8)
    assert all(map(torch.equal, model.two.cores, broken.cores))


def test_cuts_other_precision_and_loading_are_followed() -> None:
    model, prior = mixed()
    saved = copy.deepcopy(model.state_dict())
    weight = model.two.factorized
    (bond,) = weight.equation.bonds
    kept = torch.tensor([0, 3])
    weight.set_cores(algebra.keep(weight.equation, [core.detach() for core in weight.cores], bond, kept))
    weight.rank_state.set_log_lambda(0, weight.rank_state.log_lambdas[0][kept])
    for change in (lambda: None, lambda: model.float(), lambda: model.double(), lambda: model.load_state_dict(saved)):
        change()
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if model.two.bias.dtype == torch.float32 else CLOSE
        torch.testing.assert_close(prior.log_prob(), slow_log_prob(model, prior).to(prior.log_prob()), **tolerance)
        slow = copy.deepcopy(model)
        prior.step()
        slow_step(slow)
        assert_same(model, slow, tolerance["rtol"])
        prior.loss().backward()


@pytest.mark.parametrize("align", [False, True])
def test_vmap_over_particles_is_a_loop_over_them(align: bool) -> None:
    pairs = [mixed(seed, align_every=int(align)) for seed in range(3)]
    model, prior = pairs[0]
    with torch.no_grad():
        for other, _ in pairs[1:]:
            for name, parameter in other.named_parameters():
                if not parameter.requires_grad:  # frozen: common to all
                    parameter.copy_(model.get_parameter(name))
    own = {name for name, p in model.named_parameters() if p.requires_grad} | {n for n, _ in model.named_buffers()}
    stacked = {name: torch.stack([dict(m.state_dict())[name].detach() for m, _ in pairs]) for name in own}

    def run(what: str) -> Tensor:
        tensors = {f"model.{name}": tensor for name, tensor in stacked.items()}
        return vmap(lambda own: functional_call(Holder(model, prior), own, (what,)))(tensors)

    loop = copy.deepcopy(pairs)
    for what in ("log_prob", "loss"):
        torch.testing.assert_close(run(what), torch.stack([getattr(p, what)() for _, p in loop]), **CLOSE)
    run("step")
    for _, other in loop:
        other.step()
    close = {"rtol": 1e-8, "atol": 1e-8} if align else CLOSE
    for name, tensor in stacked.items():
        torch.testing.assert_close(tensor, torch.stack([m.state_dict()[name] for m, _ in loop]), **close, msg=name)


def test_steps_by_torch_func_and_of_shared_cores() -> None:
    model, prior = mixed()
    holder = Holder(model, prior)
    own = {name: p.detach() for name, p in holder.named_parameters() if p.requires_grad}
    found = torch.func.grad(lambda tensors: functional_call(holder, tensors, ("loss",)))(own)
    slow = torch.autograd.grad(prior.loss(), [holder.get_parameter(name) for name in own])
    torch.testing.assert_close(list(found.values()), list(slow), **CLOSE)
    first, second = (TensorLinear(8, 8, in_modes=(2,) * 3, out_modes=(2,) * 3, max_rank=3).double() for _ in range(2))
    for k in range(3):
        second.cores[k] = first.cores[k]
    second.bias = first.bias
    model = nn.Sequential(first, second, first)
    prior = RankPrior(model, 50, warmup_steps=0)
    with torch.no_grad():
        for u in second.factorized.rank_state.log_lambdas:
            u.add_(1.0)
    prior.loss().backward()
    own = [layer.factorized for layer in (first, second)]
    expected = sum(log_prob(w.equation, list(w.cores), w.rank_state.log_lambdas) for w in own)
    expected = expected + Normal(0.0, 10.0).log_prob(first.bias).sum()
    torch.testing.assert_close(prior.loss(), -expected / 50)
    gradients = torch.autograd.grad(-expected / 50, list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_steps(dtype: torch.dtype) -> None:
    model = nn.Sequential(TensorLinear(64, 64, max_rank=4, dtype=dtype), TensorLinear(64, 64, max_rank=4).double())
    prior = RankPrior(model, 50, hold_scale=["0", "1"], align_every=0)
    exact = copy.deepcopy(model).double()
    slow = RankPrior(exact, 50, hold_scale=["0", "1"], align_every=0)
    loss = prior.loss()
    loss.backward()
    torch.testing.assert_close(loss.double(), slow.loss(), rtol=1e-3, atol=0)
    assert [p.grad.dtype for p in model.parameters()] == [p.dtype for p in model.parameters()]
    prior.step()
    slow.step()
    tolerance = 5e-3 if dtype == torch.float16 else 4e-2
    for own, other in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(own.double(), other.double(), rtol=tolerance, atol=tolerance)


def test_alignment_keeps_weights_in_every_precision_and_autocast_changes_nothing() -> None:
    dtypes = (torch.float16, torch.float32, torch.float64)
    model = nn.Sequential(*(TensorLinear(64, 64, max_rank=4 + i, dtype=dtype) for i, dtype in enumerate(dtypes)))
    before = [layer.weight.detach().double() for layer in model]
    old = [layer.cores[0].detach().clone() for layer in model]
    RankPrior(model, 50, align_every=1).step()
    for layer, weight, core, dtype, eps in zip(model, before, old, dtypes, (2e-3, 1e-5, 1e-12), strict=True):
        assert layer.cores[0].dtype == dtype
        assert (layer.weight.double() - weight).norm() < eps * weight.norm()
        assert (layer.cores[0] - core).norm() > 0.1 * core.norm()
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        model = Mixed()
        prior = RankPrior(model, 10, hold_scale=HELD, align_every=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            prior.step()
            loss = prior.loss()
        loss.backward()
        found.append([loss.detach(), *model.state_dict().values(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
