"""The command line from end to end, on networks and data of a user's own, mostly in processes of their own."""

import json
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
from processes import ENVIRONMENT, python
from safetensors.torch import load_file
from typer.testing import CliRunner

import bayestrain
from bayestrain.app import data
from bayestrain.app.cli.app import app
from bayestrain.train import config
from bayestrain.train.run import load_run

NETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

class Data:
    classes = ("left", "middle", "right")
    mean, std = [0.5], [2.0]
    def __init__(self):
        x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
        parts = (slice(0, 300), slice(300, 350), slice(350, 400))
        self.train, self.validation, self.test = ((x[part], x[part, :3].argmax(1)) for part in parts)
"""
TEXTS = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Data:
    """Sentences of nine token numbers, most of them small or most of them large."""
    classes = ("large", "small")
    def __init__(self):
        x = torch.randint(50, (900, 9), generator=torch.Generator().manual_seed(0))
        y = ((x < 25).sum(1) > 4).long()
        self.train = DataLoader(TensorDataset(x[:600], y[:600]), batch_size=50, shuffle=True)
        self.validation, self.test = (x[600:750], y[600:750]), (x[750:], y[750:])

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 2))
    def forward(self, tokens):
        return self.head(self.table(tokens).mean(1))
'''
OWN = ["train", "--model", "ownnets:build", "--data", "ownnets:Data"]
TINY = ["--set", "fit.epochs=2", "--set", "fit.finetune_epochs=1", "--set", "tensorize.max_rank=4"]
FILES = {
    "config.toml", "environment.json", "history.jsonl", "model.safetensors", "model.json", "predictions.safetensors",
    "result.json", "report.html", "checksums.json",
}  # fmt: skip


def process(*arguments: str, cwd: Path, program: tuple[str, ...] = ("-m", "bayestrain")) -> str:
    """What a command in a process of its own prints, once it has succeeded."""
    done = python(*program, *arguments, cwd=cwd)
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
def run(home: Path, first: str) -> Path:  # noqa: ARG001
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


def test_plain_lines_a_full_folder_and_its_figures_again(first: str, run: Path) -> None:
    assert not [c for c in first if not c.isprintable() and c != "\n"]
    lines = first.splitlines()
    assert re.search(r"epoch 3/3 .*likelihood loss .*prior loss .*parameters", first)
    assert re.search(r"^Accuracy \(test\): +\d+\.\d\d%; validation \d+\.\d\d%$", first, re.MULTILINE)
    assert lines[-1].split() == ["Report:", "runs/build-seed0/report.html"]
    assert {path.name for path in run.iterdir()} >= FILES
    result = json.loads((run / "result.json").read_text())
    assert result["command"] == "python -m bayestrain " + shlex.join([*OWN, *TINY])
    assert result["task"] == "classification"
    text = answer("inspect", str(run))
    result = json.loads((run / "result.json").read_text())
    for words in ("layer", "ranks", "whole network", f"{result['parameters']:,}", f"{result['dense_parameters']:,}"):
        assert words in text
    before = json.loads((run / "result.json").read_text())
    assert f"Report:                 {run}/report.html" in answer("evaluate", str(run))
    after = json.loads((run / "result.json").read_text())
    assert after["metrics"] == pytest.approx(before["metrics"])
    assert answer("report", str(run)) == f"{run}/report.html\n"


def test_json_is_one_object_and_runs_are_overwritten_when_told(run: Path, home: Path) -> None:
    result = CliRunner().invoke(app, [*OWN, *TINY, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    printed = json.loads(result.stdout)
    assert printed["folder"] == f"runs/{run.name}-2"
    before = json.loads((run / "result.json").read_text())
    for key in ("seed", "dense_parameters", "parameters", "ranks", "metrics"):
        assert printed[key] == before[key]
    out = home / "again"
    assert answer(*OWN, *TINY, "--out", str(out), "--quiet") == f"{out}/report.html\n"
    (out / "notes.txt").write_text("mine")
    answer(*OWN, *TINY, "--out", str(out), "--seed", "5", "--quiet", "--overwrite")
    assert json.loads((out / "result.json").read_text())["seed"] == 5
    assert (out / "notes.txt").read_text() == "mine"


def test_print_config_is_a_config_whose_settings_can_be_changed(home: Path) -> None:
    file = home / "my.toml"
    file.write_text(answer(*OWN, "--seed", "4", "--set", "fit.lr=0.5", "--print-config"))
    found = config.load(file)
    assert (found.run.model, found.run.seed, found.fit.lr) == ("ownnets:build", 4, 0.5)
    assert answer("train", "--config", str(file), "--print-config") == file.read_text()
    assert "lr = 0.25" in answer("train", "--config", str(file), "--set", "fit.lr=0.25", "--print-config")
    assert "seed = 7" in answer("train", "--config", str(file), "--seed", "7", "--print-config")
    assert f'from_run = "{"a" * 90}"' in answer(*OWN, "--from", "a" * 90, "--print-config")  # whole


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
    assert answer("report", "first", "posterior").split() == ["first/report.html", "posterior/report.html"]
    assert "RMSE (test)" in answer("evaluate", "posterior")
    assert "each of 2 particles" in answer("inspect", "posterior")
    assert "Predicted and true values" in (started / "posterior/report.html").read_text()
    (started / "short.py").write_text((started / "task.py").read_text().replace("epochs=40", "epochs=4"))
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


@pytest.mark.parametrize("particles", [1, 2])
def test_an_exported_run_predicts_what_the_run_does(run: Path, particles: int) -> None:
    if particles > 1:
        answer(*OWN, *TINY, "--particles", "2", "--out", "two", "--quiet")
    out = run if particles == 1 else Path("two")
    assert f"{out}/model.pt2: pt2," in answer("export", str(out), "--format", "pt2")
    extra, x = {"metadata.json": ""}, torch.randn(5, 6)
    found = torch.export.load(out / "model.pt2", extra_files=extra).module()(x)
    told, result = json.loads(extra["metadata.json"]), json.loads((out / "result.json").read_text())
    assert (told["classes"], told["mean"], told["particles"]) == (["left", "middle", "right"], [0.5], particles)
    assert told["temperature"] == result["calibrated"]["temperature"]
    model = load_run(out)
    model.likelihood.temperature = told["temperature"]
    expected = model.predict(x)
    for name in ("mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(found[name].double(), getattr(expected, name), rtol=1e-4, atol=1e-6)
    assert CliRunner().invoke(app, ["export", str(out), "--format", "pdf"]).exit_code == 2
    answer("report", str(out))  # the run is whole


def test_ctrl_c_stops_with_a_checkpoint_and_the_command_to_resume(home: Path) -> None:
    long = [*OWN, *TINY, "--set", "fit.epochs=100", "--set", "fit.compact_every=0", "--out", "my runs/one"]
    command = [sys.executable, "-m", "bayestrain", *long, "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, cwd=home, env=ENVIRONMENT, **pipes)
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
    (home / "new.csv").write_text("8,9,10,0,11,1,12,2,49\n38,9,30,44,11,45,32,46,28\n")
    rows = json.loads(process("predict", "texts", "new.csv", "--json", cwd=home))
    assert [row["class"] for row in rows] == ["small", "large"]
