"""A pass without idle biases gives the same outputs, gradients and statistics as one with them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from bayestrain.nn import TensorConv2d
from bayestrain.perf import IdleBiases


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


def test_biases_before_batch_norms_are_idle_and_no_others() -> None:
    net = network()
    assert idle(net) == ["0", "3"]  # a ReLU follows the third, and no norm the last
    net[1], net[4].momentum = nn.GroupNorm(2, 4).double(), None  # a group's mean depends on a bias
    assert idle(net) == []


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
    for (name, own), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, msg=name)


def test_an_error_on_the_way_brings_them_back() -> None:
    net = network()
    biases, statistics = [net[0].bias, net[3].bias], net[1].running_mean.clone()
    with pytest.raises(RuntimeError), IdleBiases(net)():
        raise RuntimeError
    assert [net[0].bias, net[3].bias] == biases
    torch.testing.assert_close(net[1].running_mean, statistics)
