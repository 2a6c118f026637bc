"""On a GPU a step leaves the move of lambda to the next one, and idle biases out: a run stays the same."""

import pytest
import torch
from torch import nn

from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.nn.fast import fast
from bayestrain.posterior import as_likelihood
from bayestrain.train import FitConfig, PosteriorConfig, PriorConfig
from bayestrain.train.distributed import World
from bayestrain.train.subject import Network, Setup

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
    assert len(ours.idle.found) == 2  # type: ignore[attr-defined]
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
