"""When a step is recorded, replayed or taken as usual; what a GPU does with the recording is in test_cuda.py."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import capture, plans
from bayestrain.errors import CaptureWarning
from bayestrain.infer.method import load_optimizer
from bayestrain.layers.planned import machine
from bayestrain.train.arithmetic import channels_last, lowered, products, wants_channels_last


class Recorded:
    """Stands in for a CUDA graph: recording calls the step, a replay does not."""

    def __init__(self, step: Any, x: Tensor, y: Tensor) -> None:
        self.x = x
        step(x, y)

    def fits(self, x: Tensor, _: Tensor) -> bool:
        return x.shape == self.x.shape

    def replay(self, _: Tensor, __: Tensor) -> tuple[str]:
        return ("replayed",)


class Steps:
    """A network whose steps are written down, with a prior that aligns every seventh time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recorder: Any = Recorded) -> None:
        monkeypatch.setattr(capture, "can_capture", lambda _: True)
        monkeypatch.setattr(capture, "RecordedStep", recorder)
        self.model = bt.TTLinear(8, 8, max_rank=2)
        self.prior = bt.RankPrior(self.model, 10, align_every=7)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.capture = capture.Capture()

    def advance(self, _: Tensor, __: Tensor) -> tuple[Any, ...]:
        self.prior.step()
        return ("ordinary",)

    def take(self, number: int, batch: int = 4) -> str:
        """The first letters of what `number` steps were."""
        x, y = torch.zeros(batch, 8), torch.zeros(batch)
        found = [str(self.capture.step(self.advance, x, y, self.prior, self.optimizer)[0])[0] for _ in range(number)]
        return "".join(found)


def test_two_ordinary_steps_then_replays_but_for_alignments_and_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert steps.take(8) == "oorrrror"  # the seventh aligns
    assert steps.prior.steps == 8
    assert steps.take(1, batch=3) == "o"
    assert steps.take(3) == "rrr"
    assert steps.prior.steps == 12
    steps.capture.forget()
    assert steps.take(4) == "ooor"  # one of them aligns and does not count as a warm-up
    assert steps.prior.steps == 16


def test_what_cannot_be_recorded_goes_on_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: Any, x: Tensor, y: Tensor) -> None:
        step(x, y)
        steps.model.cores[0].grad = torch.full_like(steps.model.cores[0], torch.nan)
        raise RuntimeError("it looks at a value")

    steps = Steps(monkeypatch, refuse)
    assert steps.take(2) == "oo"
    with pytest.warns(CaptureWarning, match="goes on uncaptured, which is slower: it looks at a value"):
        assert steps.take(1) == "o"
    assert steps.model.cores[0].grad is None
    steps.capture.forget()
    assert steps.take(5) == "ooooo"
    assert steps.prior.steps == 8


def test_without_a_prior_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    x, y = torch.zeros(4, 8), torch.zeros(4)
    assert [steps.capture.step(steps.advance, x, y, None, steps.optimizer)[0] for _ in range(3)][-1] == "replayed"


def test_only_rates_on_a_gpu_can_be_captured() -> None:
    weight = [torch.zeros(2, requires_grad=True)]
    assert not capture.can_capture(torch.optim.Adam(weight, 0.1))
    assert not capture.can_capture(torch.optim.Adam(weight, torch.tensor(0.1), capturable=True))
    assert not capture.can_capture(torch.optim.SGD(weight, torch.tensor(0.1), fused=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimisers_state_of_a_gpu_goes_on_elsewhere(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    options: dict[str, Any] = {} if kind is torch.optim.Adam else {"momentum": 0.9}

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            F.mse_loss(net(x), torch.zeros(5, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = kind(model.parameters(), lr=0.25, **options)
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:  # as a checkpoint from a GPU has them
        group |= {"lr": torch.tensor(0.25), "fused": True} | ({"capturable": True} if "capturable" in group else {})
    twin = copy.deepcopy(model)
    other = kind(twin.parameters(), lr=0.5, **options)
    load_optimizer(other, state)
    assert other.param_groups[0]["lr"] == 0.25
    assert isinstance(other.param_groups[0]["lr"], float)
    train(model, optimizer)
    train(twin, other)
    assert torch.equal(twin.weight, model.weight)


def test_a_rate_that_is_a_tensor_takes_the_saved_value() -> None:
    weight = [torch.zeros(2, requires_grad=True)]
    here = torch.optim.SGD(weight, torch.tensor(0.5), fused=True)
    load_optimizer(here, torch.optim.SGD(weight, 0.25).state_dict())
    assert torch.equal(here.param_groups[0]["lr"], torch.tensor(0.25))
    assert here.param_groups[0]["fused"]


def test_tf32_does_not_outlast_the_step() -> None:
    before, elsewhere = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision
    newer = torch.backends.cuda.matmul.fp32_precision
    with contextlib.suppress(KeyError), products("tf32", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == newer
    assert torch.backends.mkldnn.matmul.fp32_precision == elsewhere
    with products("tf32", torch.device("cpu")), products("float32", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("asked", ["tf32", "ieee"])
def test_precision_may_be_asked_for_in_pytorchs_newer_way(asked: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = asked
    try:
        with products("tf32", torch.device("cuda")):
            assert matmul.fp32_precision == "tf32"
            assert machine("cuda", torch.float32) == plans.CUDA
        assert matmul.fp32_precision == asked
        assert (machine("cuda", torch.float32) == plans.CUDA) == (asked == "tf32")
    finally:
        matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_is_the_only_autocast() -> None:
    for precision in ("float32", "tf32", "bf16"):
        with lowered(precision, torch.device("cpu")):
            lower = torch.zeros(2, 2) @ torch.zeros(2, 2)
        assert (lower.dtype == torch.bfloat16) == (precision == "bf16")


def test_images_lie_channels_last_where_convolutions_are_on_a_gpu() -> None:
    dense, flat = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    assert wants_channels_last(dense, "cuda")
    assert wants_channels_last(bt.TTConv2d(3, 4, 3), torch.device("cuda:1"))
    assert not wants_channels_last(dense, "cpu")
    assert not wants_channels_last(flat, "cuda")
    x = torch.randn(2, 3, 4, 5)
    assert channels_last(x).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(channels_last(x), x)
    assert channels_last(x[0]) is not x
    assert channels_last(x[0]).shape == (3, 4, 5)
