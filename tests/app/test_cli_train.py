"""The command line from end to end, on networks and data of a user's own, mostly in processes of their own."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import bayestrain
from bayestrain.app import data
from bayestrain.app.cli.app import app
from bayestrain.train import config

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(bayestrain.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
NETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

def loaders():
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return [(x[part], y[part]) for part in (slice(0, 300), slice(300, 350), slice(350, 400))]
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
OWN = ["train", "--model", "ownnets:build", "--data", "ownnets:loaders"]
TINY = ["--set", "fit.epochs=2", "--set", "fit.finetune_epochs=1", "--set", "tensorize.max_rank=4"]
FILES = {
    "config.toml", "environment.json", "history.jsonl", "model.safetensors", "model.json", "predictions.safetensors",
    "spectra.json", "result.json", "report.html", "checksums.json",
}  # fmt: skip


def process(*arguments: str, cwd: Path, program: tuple[str, ...] = ("-m", "bayestrain")) -> str:
    """What a command in a process of its own prints, once it has succeeded."""
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def answer(*arguments: str) -> str:
    """What a command in this process prints, once it has succeeded."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "ownnets.py").write_text(NETS)
    return folder


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)


@pytest.fixture(scope="module")
def first(home: Path) -> str:
    return process(*OWN, *TINY, cwd=home)


@pytest.fixture(scope="module")
def run(home: Path, first: str) -> Path:
    assert first
    return home / "runs" / "build-seed0"


@pytest.fixture(scope="module")
def started(home: Path) -> Path:
    """The files of `bayestrain init`, trained as their README says, but shorter."""
    folder = home / "mine"
    printed = answer("init", str(folder))
    assert "bayestrain train --config run.toml --out first" in printed
    short = ("--set", "fit.epochs=6", "--set", "fit.finetune_epochs=2")
    process("train", "--config", "run.toml", "--out", "first", *short, cwd=folder)
    process("train", "--config", "run.toml", "--particles", "2", "--out", "posterior", *short, cwd=folder)
    return folder


def test_plain_lines_and_a_full_folder(first: str, run: Path) -> None:
    assert not [c for c in first if not c.isprintable() and c != "\n"]
    lines = first.splitlines()
    assert re.search(r"epoch 3/3 .*likelihood loss .*prior loss .*parameters", first)
    assert re.search(r"^Accuracy \(test\): +\d+\.\d\d%; validation \d+\.\d\d%$", first, re.MULTILINE)
    assert lines[-1].split() == ["Report:", "runs/build-seed0/report.html"]
    assert {path.name for path in run.iterdir()} >= FILES
    result = json.loads((run / "result.json").read_text())
    assert result["command"] == "python -m bayestrain " + shlex.join([*OWN, *TINY])
    assert result["task"] == "classification"


def test_json_is_one_object_and_the_next_run_gets_the_next_folder(run: Path) -> None:
    result = CliRunner().invoke(app, [*OWN, *TINY, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    printed = json.loads(result.stdout)
    assert printed["folder"] == f"runs/{run.name}-2"
    before = json.loads((run / "result.json").read_text())
    for key in ("seed", "dense_parameters", "parameters", "ranks", "metrics"):
        assert printed[key] == before[key]


def test_overwrite_replaces_a_run_and_leaves_other_files(home: Path) -> None:
    out = home / "again"
    assert answer(*OWN, *TINY, "--out", str(out), "--quiet") == f"{out}/report.html\n"
    (out / "notes.txt").write_text("mine")
    answer(*OWN, *TINY, "--out", str(out), "--seed", "5", "--quiet", "--overwrite")
    assert json.loads((out / "result.json").read_text())["seed"] == 5
    assert (out / "notes.txt").read_text() == "mine"


def test_a_run_starts_from_the_network_of_another(run: Path) -> None:
    far = Path("a" * 90)  # settings are passed on whole
    far.symlink_to(run)
    answer(*OWN, *TINY, "--from", str(far), "--out", "smaller", "--quiet")
    result, before = (json.loads((folder / "result.json").read_text()) for folder in (Path("smaller"), run))
    assert result["start_ranks"] == before["ranks"]
    assert "Started from aaa" in Path("smaller/report.html").read_text()


def test_print_config_is_a_config_whose_settings_can_be_changed(home: Path) -> None:
    file = home / "my.toml"
    file.write_text(answer(*OWN, "--seed", "4", "--set", "fit.lr=0.5", "--print-config"))
    found = config.load(file)
    assert (found.run.model, found.run.seed, found.fit.lr) == ("ownnets:build", 4, 0.5)
    assert answer("train", "--config", str(file), "--print-config") == file.read_text()
    assert "lr = 0.25" in answer("train", "--config", str(file), "--set", "fit.lr=0.25", "--print-config")
    assert "seed = 7" in answer("train", "--config", str(file), "--seed", "7", "--print-config")


def test_the_embedded_example_trains() -> None:
    text = process("train", "--set", "fit.epochs=1", "--set", "fit.finetune_epochs=0", cwd=Path.cwd())
    assert "496,885" in text
    accuracy = re.search(r"^Accuracy \(test\): +([\d.]+)%", text, re.MULTILINE)
    assert accuracy
    assert float(accuracy[1]) > 70
    run = Path("runs/digits-seed0")
    assert json.loads((run / "result.json").read_text())["classes"] == list("0123456789")
    names = ["0.png", "1.png", "2.png"]
    for pixels, name in zip(data.load("mnist-mini").test.images[:, 0].numpy(), names, strict=False):
        Image.fromarray(pixels).save(name)
    rows = json.loads(answer("predict", str(run), *names, "--json"))
    found = torch.tensor([[row["probabilities"][str(digit)] for digit in range(10)] for row in rows])
    temperature = json.loads((run / "result.json").read_text())["calibrated"]["temperature"]
    flatter = load_file(run / "predictions.safetensors")["probabilities"][:3].double()
    expected = flatter ** (1 / temperature)  # the file has those of the network as it was trained
    torch.testing.assert_close(found.double(), expected / expected.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)
    assert not any(row["changed"] for row in rows)
    table = answer("predict", str(run), names[0], "--invert")
    assert "inverted" in table


def test_the_files_of_init_train_and_predict(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(started)
    monkeypatch.syspath_prepend(started)  # where `task` is, as the console script looks for it
    result = json.loads((started / "first" / "result.json").read_text())
    assert result["task"] == "regression"
    assert result["metrics"]["rmse"] < 4
    assert result["parameters"] < result["dense_parameters"] / 5
    table = answer("predict", "first", "new.csv").splitlines()
    assert table[0].split() == ["input", "prediction", "90%", "interval"]
    assert len(table) == 2 + 3
    rows = json.loads(process("predict", "posterior", "new.csv", "--json", cwd=started))
    for row in rows:
        assert row["low"] < row["prediction"] < row["high"]
        assert row["total"] == pytest.approx(row["aleatoric"] + row["epistemic"])
    assert "of the variance" in answer("predict", "posterior", "new.csv")
    lines = answer("report", "first", "posterior").splitlines()
    assert lines[:2] == ["first/report.html", "posterior/report.html"]
    assert any(line.split() == ["posterior.particles", "1", "2"] for line in lines)
    assert "RMSE (test)" in answer("evaluate", "posterior")
    assert "each of 2 particles" in answer("inspect", "posterior")
    assert "Predicted and true values" in (started / "posterior/report.html").read_text()


def test_the_script_of_init_runs(started: Path) -> None:
    text = (started / "task.py").read_text()
    (started / "short.py").write_text(text.replace("epochs=40", "epochs=4"))
    assert "validation: {'rmse'" in process(cwd=started, program=("short.py",))


def test_inputs_of_every_kind_give_the_same_prediction(run: Path) -> None:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(5))
    Path("rows.csv").write_text("\n".join(",".join(repr(float(v)) for v in row) for row in x) + "\n")
    np.save("rows.npy", x.double().numpy())
    torch.save(x, "rows.pt")
    Path("rows.json").write_text(json.dumps({"inputs": x.tolist()}))
    torch.save(x[0], "row.pt")
    answers = [
        json.loads(answer("predict", str(run), f"rows.{kind}", "--json")) for kind in ("csv", "json", "npy", "pt")
    ]
    for rows in answers:
        for row, same in zip(rows, answers[0], strict=True):
            assert row["probabilities"] == pytest.approx(same["probabilities"])
    single = json.loads(answer("predict", str(run), "row.pt", "--json"))[0]
    assert single["probabilities"] == pytest.approx(answers[0][0]["probabilities"])
    assert single["input"] == "row.pt"
    assert answers[0][1]["input"] == "rows.csv, row 2"


def test_inspect_shows_ranks(run: Path) -> None:
    text = answer("inspect", str(run))
    result = json.loads((run / "result.json").read_text())
    for words in ("layer", "ranks", "whole network", f"{result['parameters']:,}", f"{result['dense_parameters']:,}"):
        assert words in text
    assert all(name in text for name in result["ranks"])


def test_evaluate_gives_the_same_figures_again(run: Path) -> None:
    before = json.loads((run / "result.json").read_text())
    assert f"Report:                 {run}/report.html" in answer("evaluate", str(run))
    after = json.loads((run / "result.json").read_text())
    assert after["metrics"] == pytest.approx(before["metrics"])
    assert answer("report", str(run)) == f"{run}/report.html\n"


def test_ctrl_c_stops_with_a_checkpoint_and_the_command_to_resume(home: Path) -> None:
    long = [*OWN, *TINY, "--set", "fit.epochs=100", "--set", "fit.compact_every=0", "--out", "my runs/one"]
    command = [sys.executable, "-m", "bayestrain", *long, "--device", "cpu"]
    running = subprocess.Popen(
        command, cwd=home, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    history = home / "my runs" / "one" / "history.jsonl"
    until = time.monotonic() + 120
    while not (history.exists() and history.read_text().count("\n") >= 3):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    said = re.search(r"stopped by Ctrl-C\. Continue with: (.*)\n", errors)
    assert said
    assert said[1] == "python -m bayestrain train --resume --out 'my runs/one' --device cpu"
    process(*shlex.split(said[1])[3:], cwd=home)
    epochs = [json.loads(line)["epoch"] for line in history.read_text().splitlines()]
    assert epochs == list(range(102))


def test_the_version() -> None:
    assert bayestrain.__version__ in answer("--version")


@pytest.mark.slow
def test_a_classifier_of_texts(home: Path) -> None:
    (home / "texts.py").write_text(TEXTS)
    options = ("--set", "fit.epochs=12", "--set", "fit.finetune_epochs=2", "--set", "tensorize.max_rank=8")
    own = ("train", "--model", "texts:Classifier", "--data", "texts:Data", *options)
    text = process(*own, "--out", "texts", cwd=home)
    assert re.search(r"^Accuracy \(test\): +(100\.00|9\d\.\d\d)%", text, re.MULTILINE)
    (home / "new.csv").write_text("8,9,10,0,11,1,12,2,8,9\n8,9,10,4,11,5,12,6,8,9\n")
    rows = json.loads(process("predict", "texts", "new.csv", "--json", cwd=home))
    assert [row["class"] for row in rows] == ["good", "bad"]
