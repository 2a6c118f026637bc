"""A user's own data and networks through the command line, in real processes: a table of numbers, and short texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bayestrain

pytestmark = pytest.mark.slow
SOURCE = str(Path(bayestrain.__file__).parents[1])

TABLE = """
import csv, torch
from torch import nn

def loaders():
    with open("houses.csv") as file:
        rows = torch.tensor([[float(cell) for cell in row] for row in list(csv.reader(file))[1:]])
    rows = (rows - rows.mean(0)) / rows.std(0)
    return [(part[:, :-1], part[:, -1:]) for part in rows.split([600, 100, 100])]

def build():
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
"""
TEXTS = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GOOD, BAD = "good great lovely superb".split(), "bad awful poor dull".split()
REST = "the film was a story and i saw it".split()
WORDS = {word: k for k, word in enumerate([*GOOD, *BAD, *REST])}

class Data:
    """Sentences of ten words, three of which say whether the film was good, as token numbers."""
    classes = ("bad", "good")
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        y = torch.randint(2, (900,), generator=draw)
        x = torch.randint(8, len(WORDS), (900, 10), generator=draw)
        x[:, 3:9:2] = torch.randint(4, (900, 3), generator=draw) + 4 * (1 - y[:, None])
        self.train = DataLoader(TensorDataset(x[:600], y[:600]), batch_size=50, shuffle=True)
        self.validation, self.test = (x[600:750], y[600:750]), (x[750:], y[750:])

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 32)
        self.head = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 2))
    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))
'''


def bayestrain_(home: Path, *arguments: str) -> str:
    """What the command prints; it must succeed without a word on stderr."""
    command, environment = [sys.executable, "-m", "bayestrain", *arguments], {"PYTHONPATH": SOURCE, "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_regression_on_a_table(tmp_path: Path) -> None:
    import torch

    x = torch.rand(800, 6, generator=torch.Generator().manual_seed(0))
    y = 3 * x[:, :1] + (4 * x[:, 1:2]).sin() + 0.1 * torch.randn(800, 1, generator=torch.Generator().manual_seed(1))
    rows = [",".join(f"{v:.5f}" for v in row) for row in torch.cat([x, y], 1).tolist()]
    (tmp_path / "houses.csv").write_text("\n".join(["a,b,c,d,e,f,price", *rows]) + "\n")
    (tmp_path / "new.csv").write_text("a,b,c,d,e,f\n-1.5,-1.5,0,0,0,0\n1.5,-0.3,0,0,0,0\n")
    (tmp_path / "houses.py").write_text(TABLE)
    (tmp_path / "run.toml").write_text(
        '[run]\nmodel = "houses:build"\ndata = "houses:loaders"\nlikelihood = "regression"\n'
        "[tensorize]\nmax_rank = 8\n[fit]\nepochs = 20\nfinetune_epochs = 4\nlr = 5e-3\nbatch_size = 32\n"
    )
    text = bayestrain_(tmp_path, "train", "--config", "run.toml", "--particles", "3", "--out", "run")
    assert re.search(r"epoch \d+/24 .*likelihood loss .*prior loss .*validation rmse .* left$", text, re.MULTILINE)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["metrics"]["rmse"] < 0.35  # of standardised targets
    assert result["parameters"] < result["dense_parameters"] / 3
    rows = json.loads(bayestrain_(tmp_path, "predict", "run", "new.csv", "--json"))
    assert rows[0]["low"] < rows[0]["prediction"] < rows[0]["high"] < rows[1]["prediction"]
    assert all(row["epistemic"] > 0 for row in rows)
    assert "RMSE (test)" in bayestrain_(tmp_path, "evaluate", "run")
    assert "whole network" in bayestrain_(tmp_path, "inspect", "run")
    assert "Calibration of the intervals" in (tmp_path / "run/report.html").read_text()


def test_a_classifier_of_texts(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text(TEXTS)
    options = ("--set", "fit.epochs=12", "--set", "fit.finetune_epochs=2", "--set", "tensorize.max_rank=8")
    own = ("--model", "texts:Classifier", "--data", "texts:Data", *options)
    text = bayestrain_(tmp_path, "train", *own, "--out", "run")
    assert re.search(r"^Accuracy \(test\): +(100\.00|9\d\.\d\d)%", text, re.MULTILINE)
    (tmp_path / "new.csv").write_text("8,9,10,0,11,1,12,2,8,9\n8,9,10,4,11,5,12,6,8,9\n")
    rows = json.loads(bayestrain_(tmp_path, "predict", "run", "new.csv", "--json"))
    assert [row["class"] for row in rows] == ["good", "bad"]
    smaller = bayestrain_(tmp_path, "train", *own, "--from", "run", "--set", "fit.target_ratio=3", "--out", "smaller")
    assert "Started from run" in (tmp_path / "smaller/report.html").read_text()
    assert smaller
    assert bayestrain_(tmp_path, "report", "run", "smaller", "--out", "both.html") == "both.html\n"
    assert "uncertainty (nats)" in (tmp_path / "run/report.html").read_text()
