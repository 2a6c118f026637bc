"""`bayestrain export`: a finished run as a file that predicts what the run does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bayestrain.app.cli.app import app
from bayestrain.train.run import load_run

NETS = """
import torch
from torch import nn

class Data:
    classes = ("left", "middle", "right")
    mean, std = [0.5], [2.0]
    def __init__(self):
        x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
        y = x[:, :3].argmax(1)
        self.train, self.validation, self.test = ((x[k::3], y[k::3]) for k in range(3))

def build():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
"""


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


@pytest.mark.parametrize("particles", [1, 2])
def test_a_run_becomes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, particles: int) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exported", raising=False)
    (tmp_path / "exported.py").write_text(NETS)
    own = [
        "--model",
        "exported:build",
        "--data",
        "exported:Data",
        "--particles",
        str(particles),
        "--out",
        "run",
        "--quiet",
    ]
    short = ["--set", "fit.epochs=1", "--set", "fit.finetune_epochs=0", "--set", "tensorize.max_rank=3"]
    code, text = run("train", *own, *short)
    assert code == 0, text
    code, text = run("export", "run", "--format", "pt2")
    assert code == 0, text
    assert "run/model.pt2: pt2," in text
    extra, x = {"metadata.json": ""}, torch.randn(5, 6)
    found = torch.export.load("run/model.pt2", extra_files=extra).module()(x)
    told, result = json.loads(extra["metadata.json"]), json.loads(Path("run/result.json").read_text())
    assert (told["classes"], told["mean"], told["particles"]) == (["left", "middle", "right"], [0.5], particles)
    assert told["temperature"] == result["calibrated"]["temperature"]
    model = load_run("run")
    model.likelihood.temperature = told["temperature"]
    expected = model.predict(x)
    for name in ("mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name].double(), getattr(expected, name), rtol=1e-4, atol=1e-6)
    assert run("export", "run", "--format", "pdf")[0] == 2
    assert run("report", "run")[0] == 0  # the run is whole


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    code, text = run("export", str(tmp_path))
    assert code == 2
    assert "holds no finished run" in " ".join(text.split())
