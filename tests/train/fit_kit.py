"""What tests of `fit` share: small data that need few ranks, networks, callbacks, and what resuming has to keep."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayestrain.errors import Interrupted
from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.train import Callback, FitResult, PriorConfig, fit

torch.set_num_threads(1)  # the networks are tiny


def classes(number: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes around three points in 24 dimensions, of which two matter; about 98 % can be right."""
    generator = torch.Generator().manual_seed(seed)
    points = 0.7 * torch.randn(3, 24, generator=torch.Generator().manual_seed(99))
    y = torch.randint(3, (number,), generator=generator)
    return points[y] + torch.randn(number, 24, generator=generator), y


TRAIN, HELD_OUT = classes(), classes(200, seed=1)


def network(*, dropout: float = 0.1, norm: bool = False, max_rank: int = 8, seed: int | None = 0) -> nn.Sequential:
    if seed is not None:
        torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(32)] if norm else []
    model = nn.Sequential(nn.Linear(24, 32), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3))
    tensorize_(model, TensorizeConfig(max_rank=max_rank))
    return model


def wide() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 3))
    tensorize_(model, TensorizeConfig(max_rank=12))
    return model


SHORT: dict[str, Any] = {
    "epochs": 4, "finetune_epochs": 2, "batch_size": 100, "lr": 1e-2, "compact_from": 1, "compact_every": 1,
    "compact_tol": 0.3, "round_tol": 0.3, "prior": PriorConfig(warmup_epochs=1, align_every=4), "progress": False,
}  # fmt: skip
"""Six epochs that cut ranks."""


def train(model: Any = None, data: Any = TRAIN, validation: Any = None, **changes: Any) -> FitResult:
    """`fit` with short settings."""
    return fit(network() if model is None else model, data, validation, **{**SHORT, **changes})


class StopAfter(Callback):
    """Presses Ctrl-C during the epoch after this one."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch

    def on_epoch(self, record: Any) -> None:
        if record["epoch"] >= self.last:
            raise KeyboardInterrupt


class Listener(Callback):
    def __init__(self) -> None:
        self.calls, self.messages, self.cuts = list[str](), list[str](), list[Any]()
        self.on_message = self.messages.append

    def on_start(self, plan: Any) -> None:
        self.calls.append("start")
        self.plan = plan

    def on_epoch(self, record: Any) -> None:
        self.calls.append(f"epoch {record['epoch']}")

    def on_cut(self, report: Any) -> None:
        self.calls.append("cut")
        self.cuts.append(report)

    def on_end(self, result: Any) -> None:  # noqa: ARG002
        self.calls.append("end")


def assert_same(one: nn.Module | dict[str, Tensor], other: nn.Module | dict[str, Tensor]) -> None:
    """The same names, and the same tensors bit for bit."""
    one, other = (each.state_dict() if isinstance(each, nn.Module) else each for each in (one, other))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def tensors(result: FitResult) -> dict[str, Tensor]:
    particles = result.posterior
    return result.model.state_dict() if particles is None else {**particles.particles, **particles.carried}


def without_seconds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def assert_resumes(
    build: Callable[[], Any], folder: Path, stop: int, data: Callable[[], Any] = lambda: TRAIN, **options: Any
) -> FitResult:
    """A run that is interrupted during the epoch after `stop`, and resumed, ends in the same bits."""
    expected = train(build, data(), **options)
    with pytest.raises(Interrupted, match=rf"epoch {stop} .*--resume.*resume=True") as stopped:
        train(build, data(), folder=folder, callbacks=[StopAfter(stop)], **options)
    assert stopped.value.folder == str(folder)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"epoch": 9}\n{"epo')  # killed while it wrote a line
    torch.rand(7)  # another program's use of the global generator does not matter
    result = train(build, data(), folder=folder, resume=True, **options)
    assert_same(tensors(result), tensors(expected))
    assert without_seconds(result.history) == without_seconds(expected.history)
    assert [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()] == result.history
    return result
