"""`bayestrain train` from end to end on tiny settings, mostly in processes of their own."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import bayestrain
from bayestrain import data
from bayestrain.cli.app import app
from bayestrain.train import toml

TINY = ["fit.epochs=1", "fit.finetune_epochs=1", "fit.batch_size=2500", "tensorize.max_rank=3"]
SET_TINY = [word for setting in TINY for word in ("--set", setting)]
FILES = {
    "config.toml", "environment.json", "history.jsonl", "checkpoint-last.pt", "model.safetensors",
    "model.json", "evaluation.safetensors", "spectra.json", "result.json", "report.html",
}  # fmt: skip
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(bayestrain.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def bayestrain_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bayestrain", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def answer(*arguments: str) -> str:
    """What a command in this process prints, once it has succeeded."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def first(home: Path) -> subprocess.CompletedProcess[str]:
    """The first thing a user does, made small."""
    return bayestrain_process("train", *SET_TINY, cwd=home)


@pytest.fixture(scope="module")
def run(home: Path, first: subprocess.CompletedProcess[str]) -> Path:
    assert first.returncode == 0, first.stderr
    return home / "runs" / "mnist-mini-seed0"


def test_plain_lines_and_a_full_folder(first: subprocess.CompletedProcess[str], run: Path) -> None:
    assert first.stderr == ""
    assert not [c for c in first.stdout if not c.isprintable() and c != "\n"]
    lines = first.stdout.splitlines()
    assert [line[:11] for line in lines if line.startswith("epoch")] == ["epoch   0/2", "epoch   1/2", "epoch   2/2"]
    assert lines[-1] == "report: runs/mnist-mini-seed0/report.html"
    assert {path.name for path in run.iterdir()} == FILES
    assert toml.load(run / "config.toml") == toml.named("mnist-mini", overrides=TINY)
    result = json.loads((run / "result.json").read_text())
    assert result["command"] == "python -m bayestrain " + shlex.join(["train", *SET_TINY])


def test_json_is_one_object_and_the_next_run_gets_the_next_folder(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    result = CliRunner().invoke(app, ["train", *SET_TINY, "--json"])
    assert result.exit_code == 0
    assert result.stderr == ""
    printed = json.loads(result.stdout)
    assert printed["folder"] == f"runs/{run.name}-2"
    assert printed["report"] == f"runs/{run.name}-2/report.html"
    before = json.loads((run / "result.json").read_text())
    for key in ("experiment", "preset", "kind", "seed", "dense_params", "params", "ratio", "ranks", "accuracy"):
        assert printed[key] == before[key]


def test_quiet_prints_the_report_and_a_finished_run_is_not_trained_again(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name != "report.html"}
    assert answer("train", "--resume", "--out", str(run), "--quiet") == f"{run}/report.html\n"
    assert "finished already" in answer("train", "--resume", "--out", str(run))
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name != "report.html"} == before


def test_overwrite_replaces_a_run_and_leaves_other_files(home: Path) -> None:
    out = home / "again"
    answer("train", *SET_TINY, "--out", str(out), "--quiet")
    (out / "notes.txt").write_text("mine")
    answer("train", *SET_TINY, "--out", str(out), "--seed", "5", "--quiet", "--overwrite")
    assert json.loads((out / "result.json").read_text())["seed"] == 5
    assert (out / "notes.txt").read_text() == "mine"


def test_print_config_is_a_config(home: Path) -> None:
    file = home / "my.toml"
    file.write_text(
        answer("train", "mnist", "--preset", "paper", "--seed", "4", "--set", "fit.lr=0.5", "--print-config")
    )
    expected = toml.named("mnist", "paper", ["fit.lr=0.5", "experiment.seed=4"])
    assert toml.load(file) == expected
    assert answer("train", "--config", str(file), "--print-config") == file.read_text()
    small = home / "small.toml"
    small.write_text("fit.lr = 0.5\n")
    assert "lr = 0.5 " in answer("train", "mnist", "--preset", "paper", "--config", str(small), "--print-config")


def test_ctrl_c_stops_with_a_checkpoint_and_the_command_to_go_on(home: Path) -> None:
    settings = ["--set", "fit.epochs=60", *SET_TINY[2:]]
    command = [sys.executable, "-m", "bayestrain", "train", *settings, "--out", "my runs/one", "--device", "cpu"]
    process = subprocess.Popen(
        command, cwd=home, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    history = home / "my runs" / "one" / "history.jsonl"
    until = time.monotonic() + 120
    while not (history.exists() and history.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    said = re.search(r"stopped by Ctrl-C\. Go on with: (.*)\n", errors)
    assert said
    assert said[1] == "python -m bayestrain train --resume --out 'my runs/one' --device cpu"
    resumed = bayestrain_process(*shlex.split(said[1])[3:], cwd=home)
    assert resumed.returncode == 0, resumed.stderr
    assert "epoch   1/61" not in resumed.stdout
    epochs = [json.loads(line)["epoch"] for line in history.read_text().splitlines()]
    assert epochs == list(range(62))


def test_a_run_killed_before_its_first_checkpoint_is_resumed_from_the_start(home: Path) -> None:
    out = home / "early"
    out.mkdir()
    toml.save(toml.named("mnist-mini", overrides=TINY), out / "config.toml")
    (out / ".environment.json.partial").write_text("{")
    answer("train", "--resume", "--out", str(out), "--quiet")
    assert (out / "result.json").exists()


def test_in_a_terminal_the_view_is_drawn_and_the_cursor_comes_back(home: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "bayestrain", "train", *SET_TINY, "--out", "drawn"]
    environment = ENVIRONMENT | {"TERM": "xterm-256color", "COLUMNS": "90", "LINES": "30"}
    process = subprocess.Popen(command, cwd=home, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        screen += chunk
    os.close(ours)
    text = screen.decode()
    assert process.wait(60) == 0, text
    assert "\x1b[?25h" in text  # the cursor is shown again
    for words in ("epochs", "steps", "ranks at the start", "report: drawn/report.html"):
        assert words in text


def test_predict_agrees_with_the_runs_own_evaluation(run: Path, home: Path) -> None:
    test = data.load("mnist-mini").test
    names = []
    for index in range(3):
        names.append(str(home / f"{index}.png"))
        Image.fromarray(test.images[index, 0].numpy()).save(names[-1])
    temperature = json.loads((run / "model.json").read_text())["temperature"]
    assert temperature == json.loads((run / "result.json").read_text())["calibrated"]["temperature"] != 1.0
    flatter = load_file(run / "evaluation.safetensors")["probabilities"][:3] ** (1 / temperature)
    expected = flatter / flatter.sum(1, keepdim=True)
    for place in (run, run / "model.json", run / "model.safetensors"):
        answers = json.loads(answer("predict", str(place), *names, "--json"))
        rows = torch.tensor([[row["probabilities"][str(digit)] for digit in range(10)] for row in answers])
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)
        assert [row["class"] for row in answers] == [str(int(row.argmax())) for row in expected]
        assert not any(row["inverted"] for row in answers)
    table = answer("predict", str(run), names[0], "--invert").splitlines()
    assert table[0].split() == ["picture", "class", "probability", "next", "inverted", "changed"]
    assert table[2].split()[-2:] == ["yes", "no"]


def test_predict_of_no_image_answers_nothing(run: Path, home: Path) -> None:
    (home / "no.png").write_text("no image")
    result = CliRunner().invoke(app, ["predict", str(run), str(home / "no.png")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no.png is no image" in result.stderr


def test_inspect_shows_the_ranks(run: Path) -> None:
    description = json.loads(answer("inspect", str(run / "model.json"), "--json"))
    result = json.loads((run / "result.json").read_text())
    assert {name: layer["ranks"] for name, layer in description["layers"].items()} == result["ranks"]
    table = answer("inspect", str(run))
    assert table == answer("inspect", str(run / "model.safetensors"))
    assert f"{result['params']:,}" in table.splitlines()[-1]


def test_inspect_shows_how_layers_run(run: Path) -> None:
    table = answer("inspect", str(run), "--plan", "--batch", "1")
    assert table.startswith("Forward pass, 1 image, ")
    assert "forward pass" in table.splitlines()[-1]
    rows = [line.split() for line in table.splitlines() if "1x784" in line or "1x625" in line]
    assert [row[0] for row in rows] == ["1", "3"]
    assert answer("inspect", str(run), "--plan", "--training").startswith("Training step, 128 images, ")
    refused = CliRunner().invoke(app, ["inspect", str(run), "--plan", "--json"])
    assert refused.exit_code != 0
    assert "Leave one of --json and --plan out" in f"{refused.output} {refused.exception}"


def test_report_again_and_compared(run: Path, home: Path) -> None:
    assert answer("report", str(run)) == f"{run}/report.html\n"
    other = shutil.copytree(run, home / "other")
    both = answer("report", str(run), str(other), "--out", str(home / "both.html")).strip()
    assert Path(both).read_text().lstrip().lower().startswith("<!doctype html")


def test_data_list_and_get() -> None:
    assert "mnist-mini" in answer("data", "list")
    assert {entry["name"] for entry in json.loads(answer("data", "list", "--json"))} == set(data.datasets.SPECS)
    assert "every checksum right (shipped with BayesTrain)" in answer("data", "get", "mnist-mini")


def test_version() -> None:
    assert answer("--version") == f"bayestrain {bayestrain.__version__}\n"


@pytest.mark.parametrize("columns", [80, 120])
def test_help_breaks_no_example_and_names_every_experiment(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    lines = [line.rstrip() for line in answer("train", "--help").splitlines()]
    for name in toml.names():
        assert any(re.match(rf" +{name} +{re.escape(toml.about(name))}$", line) for line in lines)
    assert sum(line.startswith("   bayestrain train") for line in lines) == 12
    assert any(line.endswith("# after Ctrl-C or a power cut") for line in lines)


def test_the_command_line_itself_does_not_wait_for_torch() -> None:
    package = Path(bayestrain.__file__).parent
    code = (
        "import sys, types\n"
        f"package = types.ModuleType('bayestrain'); package.__path__ = [{str(package)!r}]; package.__version__ = '0'\n"
        "sys.modules['bayestrain'] = package\n"
        "import bayestrain.cli.app\n"
        "heavy = {'torch', 'numpy', 'PIL', 'matplotlib', 'jinja2', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
