"""Steps as a GPU makes them: without idle biases, with lambda's move left to the next one, and captured."""

import copy

import pytest
import torch
from torch import Tensor, nn

from bayestrain.nn import TensorConv2d, TensorizeConfig, tensorize_
from bayestrain.nn.fast import fast
from bayestrain.perf import IdleBiases, capture
from bayestrain.posterior import as_likelihood
from bayestrain.train import FitConfig, PosteriorConfig, PriorConfig
from bayestrain.train.distributed import World
from bayestrain.train.subject import Network, Setup


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), TensorConv2d(4, 6, 3, max_rank=3), nn.BatchNorm2d(6)
    net = nn.Sequential(*layers, nn.Conv2d(6, 2, 1), nn.ReLU(), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.Flatten())
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return net.double()


def idle(net: nn.Module) -> list[str]:
    names = {module: name for name, module in net.named_modules()}
    return [names[layer] for layer in IdleBiases(net).found]


def test_idle_biases_come_back_and_only_rates_on_a_gpu_are_captured() -> None:
    net = network()
    assert idle(net) == ["0", "3"]  # a ReLU follows the third, and no norm the last
    net[1], net[4].momentum = nn.GroupNorm(2, 4).double(), None  # a group's mean depends on a bias
    assert idle(net) == []
    net = network()
    biases, statistics = [net[0].bias, net[3].bias], net[1].running_mean.clone()
    with pytest.raises(RuntimeError), IdleBiases(net)():
        raise RuntimeError
    assert [net[0].bias, net[3].bias] == biases
    torch.testing.assert_close(net[1].running_mean, statistics)
    weight = [torch.zeros(2, requires_grad=True)]
    assert not capture.can_capture(torch.optim.Adam(weight, 0.1))
    assert not capture.can_capture(torch.optim.Adam(weight, torch.tensor(0.1), capturable=True))
    assert not capture.can_capture(torch.optim.SGD(weight, torch.tensor(0.1), fused=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_leaving_them_out_changes_no_result(frozen: bool) -> None:
    ours, x = network(), torch.randn(5, 3, 6, 6, dtype=torch.float64)
    if frozen:
        ours[4].eval()
        ours[0].bias.requires_grad_(False)
    theirs = copy.deepcopy(ours)
    without, seen = IdleBiases(ours), list[Tensor | None]()
    ours[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.bias))
    for _ in range(2):
        with without():
            (found := ours(x)).square().sum().backward()
        (wanted := theirs(x)).square().sum().backward()
        torch.testing.assert_close(found, wanted)
    assert seen == [None, None]
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


CPU = torch.device("cpu")


def subject(left: bool) -> Network:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(),
        nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 3),
    ).double()  # fmt: skip
    tensorize_(net, TensorizeConfig(max_rank=3), lambda _, name: name != "0")
    config = FitConfig(optimizer="sgd", clip_norm=1.0)
    prior = PriorConfig(weight=0.5, align_every=12, warmup_epochs=0.0)
    setup = Setup(config, prior, PosteriorConfig(), 32, 4, World(CPU))
    found = Network(net, as_likelihood("classification"), setup)
    if left:  # as on a GPU, but for the recording
        perf = fast()
        found.capture, found.idle, found._due = perf.Capture(), perf.IdleBiases(net), torch.tensor(False)
    return found


@pytest.mark.skipif(fast() is None, reason="perf is switched off")
def test_moves_that_are_left_to_the_next_step_are_made_in_time() -> None:
    ours, theirs = subject(True), subject(False)
    generator = torch.Generator().manual_seed(0)
    assert len(ours.idle.found) == 2
    for step in range(16):
        x = torch.randn(10, 2, 6, 6, generator=generator, dtype=torch.float64)
        batches = [(part, torch.randint(0, 3, (5,), generator=generator)) for part in x.split(5)]
        batches = batches if step % 3 else batches[:1]
        torch.testing.assert_close(ours.step(batches), theirs.step(batches), rtol=1e-9, atol=1e-9)
        assert bool(ours._due), "lambda has yet to move"
        if step == 9:
            reports = [own.compact_(0.6, rule="contribution") for own in (ours, theirs)]
            assert reports[0].parameters == reports[1].parameters
            assert reports[0].changed
        if step in (5, 15):
            assert ours.repair() == ""
            assert not bool(ours._due)
            torch.testing.assert_close(ours.template.state_dict(), theirs.template.state_dict(), rtol=1e-9, atol=1e-9)
