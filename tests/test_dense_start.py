"""Tensor trains that start from a dense network: it is trained first, in the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bayestrain as bt
from bayestrain.errors import ConfigError, Interrupted
from bayestrain.report.load import load_run
from bayestrain.report.write import write_report
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.experiment import fit_settings, run_experiment
from bayestrain.train.progress import Silent

SHORT = ("fit.epochs=2", "fit.finetune_epochs=1", "fit.batch_size=500", "fit.compact_from=1", "fit.dense_epochs=2")


def config(*overrides: str) -> RunConfig:
    return toml.named("mnist-mini", "default", [*SHORT, *overrides])


def run(out: Path, *overrides: str, resume: bool = False, progress: Silent | None = None) -> dict[str, Any]:
    watcher = progress or Silent()
    return run_experiment(
        config(*overrides), out, device="cpu", resume=resume, progress=watcher, command="test"
    ).summary


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


class StopIn(Silent):
    """Ctrl-C after some epoch of some phase."""

    def __init__(self, phase: str, epoch: int) -> None:
        self.when = (phase, epoch)

    def epoch(self, record: Mapping[str, Any]) -> None:
        if (record["phase"], record["epoch"]) == self.when:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["low-rank", "tensorized"])
def test_the_tensor_trains_know_what_the_dense_network_has_learned(kind: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"experiment.kind={kind}")
    dense, own = history(tmp_path / "dense" / "0"), history(tmp_path)
    assert [line["epoch"] for line in dense] == [0, 1, 2]
    assert dense[-1]["params"] == result["dense_params"]
    assert own[0]["params"] < 0.1 * result["dense_params"]
    assert own[0]["validation"]["accuracy"] > 0.3 > 2 * dense[0]["validation"]["accuracy"]
    assert result["max_ranks"] == {"1": [1, 20, 20, 20, 1], "3": [1, 20, 1]}
    assert result["seconds"] == pytest.approx(dense[-1]["seconds"] + own[-1]["seconds"], abs=0.1)
    assert not list((tmp_path / "dense").rglob("*.pt")), "of no use any more"
    assert bt.count_parameters(bt.load_model(tmp_path)) == result["params"]


@pytest.mark.parametrize(
    ("phase", "epoch"), [("train", 1), ("train", 2), ("search", 0), ("search", 1), ("finetune", 3)]
)
def test_a_run_that_is_stopped_anywhere_ends_in_the_same_bits(phase: str, epoch: int, tmp_path: Path) -> None:
    run(tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", progress=StopIn(phase, epoch))
    run(tmp_path / "parts", resume=True)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_every_particle_starts_from_a_dense_network_of_its_own(tmp_path: Path) -> None:
    options = ("posterior.particles=2", "posterior.outside=none", "posterior.compare_map=false")
    result = run(tmp_path, *options)
    ends = [history(tmp_path / "dense" / str(i))[-1]["train_loss"] for i in range(2)]
    assert ends[0] != ends[1]
    assert result["posterior"]["particles"] == 2
    assert history(tmp_path)[0]["validation"]["accuracy"] > 0.3


def test_a_posterior_around_a_map_point_needs_no_dense_networks(tmp_path: Path) -> None:
    options = ("posterior.particles=2", "posterior.start=jitter", "posterior.jitter_epochs=1", "posterior.outside=none")
    run(tmp_path, *options)
    assert (tmp_path / "map" / "dense" / "0" / "history.jsonl").exists()
    assert not (tmp_path / "dense").exists()


def test_a_dense_network_has_the_same_budget_in_one_piece(tmp_path: Path) -> None:
    settings = fit_settings(config("experiment.kind=dense", "fit.dense_lr=2e-3"))
    assert (settings.epochs, settings.finetune_epochs, settings.lr) == (5, 0, 2e-3)
    assert fit_settings(config("experiment.kind=dense")).lr == config().fit.lr
    run(tmp_path, "experiment.kind=dense")
    assert [line["epoch"] for line in history(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "dense").exists()


def test_a_folder_with_a_dense_network_in_training_is_not_taken_over(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, progress=StopIn("train", 1))
    with pytest.raises(ConfigError, match="already holds a run"):
        run(tmp_path)


def test_the_report_says_where_the_network_started(tmp_path: Path) -> None:
    run(tmp_path)
    assert load_run(tmp_path).dense_epochs == 2
    assert "dense, 2 epochs" in write_report([tmp_path], tmp_path / "page.html").read_text()
    run(tmp_path / "other", "experiment.kind=dense")
    other = load_run(tmp_path / "other")
    assert (other.dense_epochs, other.total_epochs) == (0, 5)


def test_the_command_line_goes_on_and_overwrites(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(out, progress=StopIn("train", 1))
    command = [sys.executable, "-m", "bayestrain", "train", "mnist-mini", "--out", str(out), "--quiet"]
    sets = [word for value in SHORT for word in ("--set", value)]
    resumed = subprocess.run([*command, *sets, "--resume"], capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    (out / "dense" / "notes.txt").write_text("mine")
    changed = [*sets, "--set", "fit.dense_epochs=0", "--overwrite"]
    done = subprocess.run([*command, *changed], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (out / "dense").rglob("*")] == ["notes.txt"]
