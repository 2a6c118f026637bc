"""Convolutions on a GPU: their two forms, and posteriors over networks of them. Left out where there is none."""

import math
from pathlib import Path

import pytest
import torch
from fit_kit import settings
from torch import nn

import bayestrain as bt
from bayestrain import data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("rank", [5, 8, 13])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_two_step_form_computes_the_same_for_every_number_of_filters(rank: int, channels_last: bool) -> None:
    torch.manual_seed(0)
    layer = bt.TTConv2d(32, 48, 3, stride=2, padding=1, max_rank=rank, device="cuda", dtype=torch.float64)
    x = torch.randn(4, 32, 9, 9, device="cuda", dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    found = []
    for plan in ("kernel", "two-step"):
        layer.force_plan(plan)
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        found.append([out.detach(), *(core.grad for core in layer.cores), layer.eval()(x).detach()])
        layer.train()
        assert layer.plan is not None
        assert layer.plan.kind == plan
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_particles_with_large_convolutions_go_one_by_one_to_the_same_end() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
        model.append(nn.Linear(32 * 32 * 32, 10))
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
        return model

    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 32, 32, device="cuda"), torch.randint(10, (64,), device="cuda")
    alone, together = (
        bt.Posterior([net.cuda() for net in bt.independent(build, 3)], 640, chunk=chunk) for chunk in (None, 3)
    )
    for _ in range(4):
        seen = alone.step(x, y)
        torch.testing.assert_close(seen.log_likelihood, together.step(x, y).log_likelihood, rtol=1e-3, atol=1e-3)
    assert alone.joint.alone
    assert alone.estimate_memory(x, y).chunk == 1
    assert not alone.particles["model.0.bias"].any()  # batch norm would take it away again
    for posterior in (alone, together):
        posterior.carried["model.1.running_mean"] -= posterior.particles["model.0.bias"].detach()
    for name, tensor in alone.carried.items():
        torch.testing.assert_close(tensor, together.carried[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_posterior_of_the_papers_convolutional_network_trains(precision: str, tmp_path: Path) -> None:
    """The whole way, on made-up images: the shapes, types and memory layouts are those of CIFAR-10."""

    def build() -> nn.Module:
        model = bt.models.cifar10_cnn()
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=8), lambda _, name: name != "conv1")
        return model

    images = data.Images(torch.randint(256, (256, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (256,)))
    config = settings(epochs=2, batch_size=128, finetune_epochs=1, precision=precision, lr=1e-3)
    posterior, result = bt.fit_posterior(bt.independent(build, 3), images, None, config, device="cuda", folder=tmp_path)
    assert all(math.isfinite(line["train_loss"]) for line in result.history[1:])
    assert posterior.outputs(images.images.float() / 255).isfinite().all()
