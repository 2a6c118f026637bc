"""Muon: what a step does to cores and to the rest, alone and stacked; that it goes along with cuts and checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import muon
from bayestrain.errors import ConfigError
from bayestrain.muon import Muon, muon_groups
from bayestrain.sizes import tt_layers

RATE = 1e-2


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(),
        nn.Linear(16 * 36, 12),
    )  # fmt: skip
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6), lambda _, name: name != "0")
    return model


def backward(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.randint(12, (8,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def unfolded(core: Tensor) -> Tensor:
    """The more nearly square unfolding, short side first."""
    tall, wide = core.reshape(-1, core.shape[-1]), core.reshape(core.shape[0], -1)
    found = tall if min(tall.shape) >= min(wide.shape) else wide
    return found if found.shape[0] <= found.shape[1] else found.mT


def cores_of(model: nn.Module) -> list[Tensor]:
    return [core for layer in tt_layers(model).values() for core in layer.cores]


def core_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if ".cores." in f".{name}"}


def test_a_core_moves_by_its_gradient_made_orthogonal() -> None:
    model = network()
    before = [core.detach().clone() for core in cores_of(model)]
    backward(model)
    Muon(model, RATE).step()
    for core, old in zip(cores_of(model), before, strict=True):
        assert core.grad is not None
        gradient, move = unfolded(core.grad.double()), unfolded((old - core.detach()).double() / (RATE * muon.SIZE))
        left, values, right = torch.linalg.svd(gradient, full_matrices=False)
        strong = values > 1e-2 * values[0]  # five rounds leave what is far weaker than the rest a little behind
        inside = left.mT @ move @ right.mT / move.shape[1] ** 0.5
        assert (inside - torch.diag(inside.diagonal())).abs().max() < 1e-3
        assert ((inside.diagonal()[strong] > 0.6) & (inside.diagonal()[strong] < 1.3)).all()


def test_all_else_moves_as_with_adamw() -> None:
    model, twin = network(), network()
    rest = [p for name, p in twin.named_parameters() if name not in core_names(twin)]
    ours, theirs = Muon(model, RATE, weight_decay=0.1), torch.optim.AdamW(rest, RATE, weight_decay=0.1)
    for seed in range(3):
        with torch.no_grad():
            for core, other in zip(cores_of(model), cores_of(twin), strict=True):
                other.copy_(core)
        for one, optimizer in ((model, ours), (twin, theirs)):
            backward(one, seed)
            optimizer.step()
    mine = dict(model.named_parameters())
    for name, p in twin.named_parameters():
        assert torch.equal(p, mine[name]) == (name not in core_names(twin)), name


@pytest.mark.parametrize("room", [0, 4_000_000])
def test_cores_do_not_mind_what_shares_their_stack(room: int) -> None:
    """Matrices are padded to one size, many or few together: each core moves as if it were alone."""
    cores = ((1, 9, 4), (4, 7, 6), (6, 2, 3, 5), (40, 30, 20), (5, 30, 1), (1, 2, 1))
    shapes = [muon._matrices(shape, stacked=False) for shape in cores]
    torch.manual_seed(0)
    flat = [torch.randn(s.rows * s.columns, dtype=torch.float64) for s in shapes]
    packs = muon._packed(shapes, room)
    assert sorted(i for pack in packs for i in pack) == list(range(len(shapes)))
    assert (len(packs) == 1) == bool(room)
    for pack in packs:
        together = muon._Layout([shapes[i] for i in pack], torch.device("cpu")).orthogonal(
            torch.cat([flat[i] for i in pack])
        )
        alone = [muon._Layout([shapes[i]], torch.device("cpu")).orthogonal(flat[i]) for i in pack]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_stacked_cores_move_each_as_if_alone() -> None:
    models = [network(seed) for seed in range(3)]
    stacked = {
        name: torch.stack([model.get_parameter(name).detach() for model in models]).requires_grad_()
        for name, _ in models[0].named_parameters()
    }
    together = Muon(muon_groups(stacked.items(), models[0]), RATE)
    apart = [Muon(model, RATE) for model in models]
    for seed in range(3):
        for model in models:
            backward(model, seed)
        for name, tensor in stacked.items():
            tensor.grad = torch.stack([model.get_parameter(name).grad for model in models])  # type: ignore[misc]
        for optimizer in (together, *apart):
            optimizer.step()
    for name, tensor in stacked.items():
        for i, model in enumerate(models):
            torch.testing.assert_close(tensor[i], model.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_weight_decay_shrinks_cores_that_have_no_gradient_to_speak_of() -> None:
    core = torch.ones(2, 3, 4, requires_grad=True)
    optimizer = Muon([{"params": [core], "orthogonal": True}], 0.5, weight_decay=0.1)
    core.grad = torch.zeros_like(core)
    optimizer.step()
    assert torch.equal(core.detach(), torch.full((2, 3, 4), 0.95))


def test_a_core_without_gradient_stays() -> None:
    model = network()
    cores = cores_of(model)
    backward(model)
    cores[0].grad = None
    kept = cores[0].detach().clone()
    optimizer = Muon(model, RATE)
    optimizer.step()
    assert torch.equal(cores[0], kept)
    optimizer.zero_grad()
    optimizer.step()  # nothing has one now
    assert torch.equal(cores[0], kept)


def test_a_frozen_layer_is_left_out() -> None:
    model = network()
    model[3].requires_grad_(False)
    held = {id(p) for group in Muon(model).param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_model_without_tensor_trains_is_trained_by_adamw_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Muon(model, RATE)
    assert [group["orthogonal"] for group in optimizer.param_groups] == [False]
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_model_that_is_one_tensor_train() -> None:
    layer = network()[5]
    cores, rest = muon_groups(layer.named_parameters(), layer)
    assert (cores["orthogonal"], rest["orthogonal"]) == (True, False)
    assert [name for name, _ in rest["params"]] == ["bias"]


def test_a_core_is_found_by_whatever_name_it_has() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alias = nn.ParameterList()
            self.net = network()
            self.alias.append(self.net[3].cores[1])  # the name that named_parameters() will know it by

    model = Twice()
    cores, _ = Muon(model).param_groups
    assert {id(p) for p in cores["params"]} == {id(core) for core in cores_of(model)}
    names = dict(model.named_parameters(remove_duplicate=False))
    assert names["alias.0"] is names["net.3.cores.1"]
    assert "alias.0" in cores["param_names"]


def test_particles_of_a_posterior_are_known_by_their_names() -> None:
    posterior = bt.Posterior(
        bt.independent(network, 3), 100, optimizer=lambda named: bt.Muon(bt.muon_groups(named, network()), 1e-3)
    )
    cores, rest = posterior.method.optimizer.param_groups
    assert (cores["orthogonal"], cores["stacked"], rest["orthogonal"]) == (True, True, False)
    assert set(cores["param_names"]) == {f"model.{name}" for name in core_names(network())}
    x, y = torch.randn(8, 3, 6, 6), torch.randint(12, (8,))
    before = float(posterior.step(x, y).log_likelihood.mean())
    for _ in range(20):
        seen = posterior.step(x, y)
    assert float(seen.log_likelihood.mean()) > before


@pytest.mark.parametrize("params", ["parameters", "named_parameters"])
def test_parameters_that_may_be_cores_or_not_are_refused(params: str) -> None:
    """What `torch.optim.Muon` takes would here train all by AdamW, without a word."""
    with pytest.raises(ConfigError, match=r"which parameters are cores.*Muon\(model\)"):
        Muon(getattr(network(), params)())


def test_what_has_not_the_shape_of_a_core_is_refused() -> None:
    optimizer = Muon(network())
    held = len(optimizer.param_groups)
    with pytest.raises(ConfigError, match=r"stacked=False at least 2 dimensions; there is one of shape \(3,\)"):
        optimizer.add_param_group({"params": [("odd", torch.zeros(3, requires_grad=True))], "orthogonal": True})
    assert len(optimizer.param_groups) == held


def test_a_core_without_gradients_any_more_comes_to_rest() -> None:
    """Its momentum fades; steps of full size along what is left of it would end in infinities."""
    torch.manual_seed(0)
    core = torch.randn(6, 5, 7, requires_grad=True)
    optimizer = Muon([{"params": [core], "orthogonal": True}], 1e-3)
    core.grad = torch.randn_like(core)
    optimizer.step()
    core.grad = torch.zeros_like(core)
    for _ in range(1000):
        optimizer.step()
    resting = core.detach().clone()
    for _ in range(2000):
        optimizer.step()
    assert core.isfinite().all()
    assert torch.equal(core, resting)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_steps_like_the_original(copied: Callable[[Muon], Muon]) -> None:
    core, bias = torch.ones(2, 3, 4, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = Muon([{"params": [core], "orthogonal": True}, {"params": [bias]}], RATE, weight_decay=0.1)
    for tensor in (core, bias):
        tensor.grad = torch.randn_like(tensor)
    optimizer.step()
    other = copied(optimizer)
    twins = [p for group in other.param_groups for p in group["params"]]
    for twin, tensor in zip(twins, (core, bias), strict=True):
        assert twin is not tensor
        assert tensor.grad is not None
        twin.grad = tensor.grad.clone()
    optimizer.step()
    other.step()
    for twin, tensor in zip(twins, (core, bias), strict=True):
        assert torch.equal(twin, tensor)


def test_layouts_are_made_once_per_group_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    start = muon._Layout.__init__

    def counting(self: muon._Layout, shapes: Any, device: torch.device) -> None:
        made.append(shapes)
        start(self, shapes, device)

    monkeypatch.setattr(muon._Layout, "__init__", counting)
    cores = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(12)]
    optimizer = Muon([{"params": [core], "orthogonal": True, "lr": 1e-3} for core in cores])
    for core in cores:
        core.grad = torch.randn_like(core)
    for _ in range(5):
        optimizer.step()
    assert len(made) == len(cores)


def test_steps_are_those_of_torchs_muon_on_a_matrix() -> None:
    torch.manual_seed(0)
    ours = torch.randn(6, 9, requires_grad=True)
    start = ours.detach().clone()
    theirs = start.clone().requires_grad_()
    one = Muon([{"params": [ours], "orthogonal": True}], RATE, weight_decay=0.1)
    other = torch.optim.Muon([theirs], RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        ours.grad = torch.randn(6, 9)
        theirs.grad = ours.grad.clone()
        one.step()
        other.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # theirs computes in bfloat16


def test_autocast_does_not_lower_the_steps_of_particles() -> None:
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().step(closure)

    posterior = bt.Posterior(
        bt.independent(lambda: nn.Linear(12, 6), 3), 100, optimizer=lambda named: Looking(named, 1e-3)
    )
    with torch.autocast("cpu", torch.bfloat16):
        posterior.step(torch.randn(8, 12), torch.randint(6, (8,)))
    assert seen[-1] is False


def test_a_closure_is_called_and_its_loss_returned() -> None:
    model = network()
    optimizer = Muon(model)

    def loss() -> float:
        backward(model)
        return 2.5

    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step(loss) == 2.5
    assert not any(torch.equal(p, old) for p, old in zip(cores_of(model), before, strict=False))


def test_a_step_after_a_cut_goes_on_with_the_momentum_of_the_kept_indices() -> None:
    model = network()
    optimizer = Muon(model, RATE)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
    with torch.no_grad():
        tt_layers(model)["3"].cores[2][1] = 0  # an index that contributes nothing
    momentum = {id(core): optimizer.state[core]["momentum_buffer"] for core in cores_of(model)}
    report = bt.compact_(model, 1e-6, "contribution", optimizer)
    assert report.changed
    cut = [
        core for core in cores_of(model) if optimizer.state[core]["momentum_buffer"].shape != momentum[id(core)].shape
    ]
    assert cut
    for core in cores_of(model):
        kept = optimizer.state[core]["momentum_buffer"]
        assert kept.shape == core.shape
        assert set(kept.flatten().tolist()) <= set(momentum[id(core)].flatten().tolist())
    backward(model, 4)
    optimizer.step()


def test_its_state_can_be_saved_and_loaded() -> None:
    one, other = network(), network()
    begun, fresh = Muon(one, RATE), Muon(other, RATE)
    for seed in range(2):
        backward(one, seed)
        begun.step()
    other.load_state_dict(one.state_dict())
    fresh.load_state_dict(copy.deepcopy(begun.state_dict()))
    for model, optimizer in ((one, begun), (other, fresh)):
        backward(model, 5)
        optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_that_is_none_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match="momentum"):
        Muon(network(), momentum=momentum)
