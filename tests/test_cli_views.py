"""The three ways to watch a run, fed with a made-up one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bayestrain.cli.live import LiveView
from bayestrain.cli.plain import PlainLines
from bayestrain.cli.screen import duration, inner
from bayestrain.train import toml
from bayestrain.train.progress import Progress, Silent

CONFIG = toml.named("mnist")
RESULT = {
    "accuracy": 0.9856, "log_likelihood": -0.0458, "params": 3055, "dense_params": 496885, "ratio": 162.6,
    "ranks": {"1": [1, 3, 2, 3, 1], "3": [1, 11, 1]}, "seconds": 75.2,
}  # fmt: skip


def record(epoch: int, ranks: dict[str, list[int]], params: int, phase: str = "search") -> dict[str, Any]:
    known = epoch > 0
    return {
        "epoch": epoch, "phase": phase, "seconds": 10.0 * epoch, "train_loss": 0.25 if known else None,
        "train_accuracy": 0.93 if known else None, "validation": {"accuracy": 0.95} if known else None,
        "params": params, "ranks": ranks,
    }  # fmt: skip


def play(view: Progress, layers: int = 2) -> None:
    ranks = {"1": [1, 20, 20, 20, 1], "3": [1, 20, 1]} | {f"conv{i}": [1, 9, 20, 1] for i in range(layers - 2)}
    view.start(2, 4, CONFIG, 496885)
    view.epoch(record(0, ranks, 27235))
    for step in range(1, 5):
        view.step(1, step, 0.5, 0.9, 1e-2)
    view.message("ranks were cut")
    view.epoch(record(1, ranks | {"1": [1, 3, 2, 3, 1]}, 5000))
    view.epoch(record(2, ranks | {"1": [1, 3, 2, 3, 1], "3": [1, 11, 1]}, 3055, "finetune"))


def test_plain_lines_are_one_per_epoch_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainLines()
    play(view)
    view.finish(RESULT)
    text = capsys.readouterr().out
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert text.splitlines()[1:5] == [
        "epoch   0/2  27,235 parameters (18.2x)  ranks 1: 20 20 20, 3: 20  0:00",
        "ranks were cut",
        "epoch   1/2  loss 0.2500  train 93.00 %  validation 95.00 %  5,000 parameters (99.4x)  "
        "ranks 1: 3 2 3, 3: 20  0:10",
        "epoch   2/2  loss 0.2500  train 93.00 %  validation 95.00 %  3,055 parameters (162.6x)  "
        "ranks 1: 3 2 3, 3: 11  fine-tuning  0:20",
    ]
    assert "3,055 instead of 496,885: 163x smaller" in text


def test_plain_lines_of_a_deep_network_stay_short(capsys: pytest.CaptureFixture[str]) -> None:
    play(PlainLines(), layers=74)
    assert "mean rank" in capsys.readouterr().out


def test_the_live_view_shows_bars_numbers_and_ranks() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)
    with LiveView(console) as view:
        play(view)
        console.file = shown = io.StringIO()
        console.print(view.picture())
        text = shown.getvalue()
        for words in ("epochs", "2/2", "steps", "loss 0.2500", "accuracy 93.00 %", "validation 95.00 %", "fine-tuning",
                      "3,055 of 27,235 at the start", "162.6x smaller", "20 20 20", "3 2 3"):  # fmt: skip
            assert words in text
        view.finish(RESULT)
    assert "98.56 %" in shown.getvalue()
    assert shown.getvalue().endswith("\n")


@pytest.mark.parametrize(("width", "height"), [(100, 30), (60, 20), (40, 10)])
def test_the_live_view_fits_the_terminal_however_deep_the_network(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    with LiveView(console) as view:
        play(view, layers=74)
        lines = console.render_lines(view.picture())
    assert len(lines) <= max(height, 14)


def test_a_resumed_run_counts_from_where_it_was() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system=None)
    first = record(0, {"1": [1, 20, 1]}, 27235)
    with LiveView(console, first) as view:
        view.start(10, 4, CONFIG, 496885)
        view.step(8, 2, 0.5, 0.9, 1e-2)
        view.epoch(record(8, {"1": [1, 4, 1]}, 3000))
        assert (view.epochs_before, view.epochs_done, view.params_at_start) == (7, 8, 27235)
        assert view.ranks_at_start == {"1": [1, 20, 1]}


def test_an_error_leaves_the_terminal_usable() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)

    def fail() -> None:
        with LiveView(console) as view:
            play(view)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert console.file.getvalue().count("\x1b[?25l") == console.file.getvalue().count("\x1b[?25h") == 1  # type: ignore[attr-defined]


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    play(Silent())
    assert capsys.readouterr().out == ""


def test_how_numbers_are_written() -> None:
    assert [duration(s) for s in (0.4, 59.6, 75, 4000)] == ["0:00", "1:00", "1:15", "1:06:40"]
    assert inner([1, 8, 1, 5, 1]) == "8 1 5"
    assert inner([1, 1]) == "-"
