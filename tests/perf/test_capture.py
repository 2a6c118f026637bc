"""When a step is recorded, replayed or taken as usual; what a GPU does with the recording is in test_cuda.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bayestrain import RankPrior
from bayestrain.errors import CaptureWarning
from bayestrain.nn import TensorLinear
from bayestrain.perf import capture


class Recorded:
    """Stands in for a CUDA graph: recording calls the step, a replay does not."""

    def __init__(self, step: Any, x: Tensor, y: Tensor, _: object) -> None:
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
        monkeypatch.setattr(capture.Capture, "_aside", lambda _, advance, x, y: advance(x, y))
        self.model = TensorLinear(8, 8, max_rank=2)
        self.prior = RankPrior(self.model, 10, align_every=7)
        self.prior.steps = 70  # alignments are more frequent at first
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
    assert steps.prior.steps == 78
    assert steps.take(1, batch=3) == "o"
    assert steps.take(3) == "rrr"
    assert steps.prior.steps == 82
    steps.capture.forget()
    assert steps.take(4) == "ooor"  # one of them aligns and does not count as a warm-up
    assert steps.prior.steps == 86


def test_what_cannot_be_recorded_continues_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: Any, x: Tensor, y: Tensor, _: object) -> None:
        step(x, y)
        steps.model.cores[0].grad = torch.full_like(steps.model.cores[0], torch.nan)
        raise RuntimeError("it depends on a value")

    steps = Steps(monkeypatch, refuse)
    assert steps.take(2) == "oo"
    with pytest.warns(CaptureWarning, match="cannot be captured in a CUDA graph.*it depends on a value"):
        assert steps.take(1) == "o"
    assert steps.model.cores[0].grad is None
    steps.capture.forget()
    assert steps.take(5) == "ooooo"
    assert steps.prior.steps == 78


def test_without_a_prior_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    x, y = torch.zeros(4, 8), torch.zeros(4)
    assert [steps.capture.step(steps.advance, x, y, None, steps.optimizer)[0] for _ in range(3)][-1] == "replayed"


def test_only_rates_on_a_gpu_can_be_captured() -> None:
    weight = [torch.zeros(2, requires_grad=True)]
    assert not capture.can_capture(torch.optim.Adam(weight, 0.1))
    assert not capture.can_capture(torch.optim.Adam(weight, torch.tensor(0.1), capturable=True))
    assert not capture.can_capture(torch.optim.SGD(weight, torch.tensor(0.1), fused=True))
