"""Every `bayestrain` command that the README and the help show is run for real."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from bayestrain import data
from bayestrain.cli.app import app

README = (Path(__file__).parent.parent / "README.md").read_text()
RESULTS = Path(__file__).parent.parent / "results"
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
COMMANDS = [
    line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.startswith("bayestrain")
]
SHORT = ["--set", "fit.epochs=1", "--set", "fit.finetune_epochs=0", "--set", "fit.batch_size=500"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with the picture that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    digits = data.load("mnist-mini").test
    seven = digits.images[int((digits.labels == 7).nonzero()[0])]
    Image.fromarray(seven[0].numpy()).save(folder / "seven.png")
    return folder


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bayestrain", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False)


def short(arguments: list[str]) -> list[str]:
    """The same command, kept short: one epoch, few particles, and the embedded digits instead of a download."""
    if arguments[:1] == ["train"]:
        if "--resume" in arguments:
            return [*arguments, "--quiet"]
        if "--particles" in arguments:  # the last one counts
            arguments = [*arguments, "--particles", "3"]
        if "mnist" in arguments:
            return [*arguments, "--set", 'data.name="mnist-mini"', "--set", 'posterior.outside="patches"', *SHORT]
        return [*arguments, *SHORT]
    return arguments


def test_the_readme_shows_every_command() -> None:
    shown = {shlex.split(command)[1] for command in COMMANDS}
    assert shown == {"train", "report", "inspect", "data", "predict", "evaluate", "table"}


def test_the_readmes_commands_run_one_after_the_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, for time."""
    monkeypatch.chdir(home)
    for command in COMMANDS:
        arguments = shlex.split(command)[1:]
        if arguments[:2] == ["data", "get"]:
            arguments = ["data", "get", "mnist-mini"]  # the others are fetched in test_data_registry.py
        if arguments == ["table"]:
            arguments = ["table", str(RESULTS), "--out", "."]
        done = CliRunner().invoke(app, short(arguments))
        assert done.exit_code == 0, (command, done.output)


def test_a_command_starts_by_itself(home: Path) -> None:
    done = run(home, *short(["train", "--out", "alone"]))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert (home / "alone" / "report.html").exists()


def test_the_helps_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in this process."""
    monkeypatch.chdir(tmp_path)
    text = run(tmp_path, "train", "--help").stdout
    examples = [line.split("#")[0].strip() for line in text.splitlines() if line.strip().startswith("bayestrain train")]
    assert len(examples) == 12
    for example in examples:
        words = shlex.split(example)[1:]
        target = None
        if ">" in words:
            words, target = words[: words.index(">")], words[-1]
        if "--config" in words:
            words += ["--set", 'data.name="mnist-mini"', *SHORT]
        elif "--print-config" not in words:
            words = short(words)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (example, done.output)
        if target:
            (tmp_path / target).write_text(done.stdout)
