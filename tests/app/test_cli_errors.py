"""What the command line refuses: one message on stderr, exit code 2, no traceback, nothing overwritten."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import python
from run_folders import write_run
from typer.testing import CliRunner

from bayestrain.app.cli.app import app, out_of_memory
from bayestrain.app.cli.predict import read_inputs
from bayestrain.errors import DataError

NETS = """
import torch
from torch import nn
def build(): return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
def loaders():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return (x, x[:, :3].argmax(1)), (x, x[:, :3].argmax(1))
def broken(): raise MemoryError
"""
OWN = ["train", "--model", "nets:build", "--data", "nets:loaders"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    (tmp_path / "nets.py").write_text(NETS)


def refused(*arguments: str) -> str:
    """Run the command, check that it fails as a user's error should, and return its message."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(("words", "exit_code", "message"), [
    ("inspect nowhere", 2, "nowhere holds no finished run"), ("--help", 0, ""), ("--version", 0, ""),
    ("train -h", 0, ""), ("predict -h", 0, ""),
])  # fmt: skip
def test_help_and_a_run_that_does_not_exist_need_no_torch(words: str, exit_code: int, message: str) -> None:
    code = f"import sys; from bayestrain.app.cli import main; sys.argv = ['bayestrain', *{words.split()}]\n"
    code += f"try: main()\nexcept SystemExit as e: assert e.code == {exit_code} and 'torch' not in sys.modules"
    assert message in python("-c", code).stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model", "nope:build", "--data", "nets:loaders", "--out", "run"], "nope"),
    (["--model", "nets:nope", "--data", "nets:loaders", "--out", "run"], "nets"),
    (["--model", "nets", "--data", "nets:loaders", "--out", "run"], "nets"),
    (["--model", "nets:build"], "--model and --data go together"),
    (["--config", "no.toml"], "no.toml cannot be read: No such file"),
    (["--config", "bad.toml"], "bad.toml is not valid TOML"),
    (["--config", "wrong.toml"], 'wrong.toml: There is no setting "fit.epocs". Did you mean "fit.epochs"?'),
    ([*OWN[1:], "--set", "fit.epochs=many"], "fit.epochs must be an integer"),
    ([*OWN[1:], "--set", "fit"], "fit.epochs=3"),
    ([*OWN[1:], "--seed", "-1"], "run.seed must be an integer"),
    ([*OWN[1:], "--seed", "x"], "'--seed'"),
    ([*OWN[1:], "--particles", "0"], "posterior.particles must be an integer at least 1, got 0"),
    ([*OWN[1:], "--device", "cuda:99"], "Choose auto, cpu, cuda, cuda:N or mps."),
    ([*OWN[1:], "--device", "mps"], "--device mps: "),
    ([*OWN[1:], "--device", "gpu"], "--device gpu: "),
    (["--resume", "--out", "nowhere"], "nowhere/config.toml cannot be read"),
], ids=str)  # fmt: skip
def test_options_that_cannot_be_meant(arguments: list[str], message: str) -> None:
    Path("bad.toml").write_text("[fit\n")
    Path("wrong.toml").write_text("[fit]\nepocs = 1\n")
    assert message in refused("train", *arguments)
    assert not Path("runs").exists()
    assert not Path("nowhere").exists()
    assert not Path("run/result.json").exists()


def test_nothing_is_overwritten_unless_told() -> None:
    run = write_run(Path("run"))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert "already holds a run" in refused(*OWN, "--out", "run")
    refused(*OWN, "--out", "run", "--resume", "--overwrite")
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name in before} == before
    Path("mine").mkdir()
    text = '# mine\n[run]\nmodel = "nets:build"\ndata = "nets:loaders"\n'
    Path("mine/config.toml").write_text(text)
    assert "overwrite your own mine/config.toml" in refused("train", "--config", "mine/config.toml", "--out", "mine")
    assert Path("mine/config.toml").read_text() == text
    Path("file").write_text("precious")
    assert "file" in refused(*OWN, "--out", "file/run")
    assert "file" in refused(*OWN, "--out", "file", "--overwrite")
    assert Path("file").read_text() == "precious"
    Path("task.py").write_text("mine")
    assert "already has task.py" in refused("init")
    assert {path.name for path in Path().iterdir()} == {"run", "mine", "file", "task.py", "nets.py"}
    assert Path("task.py").read_text() == "mine"


def test_running_out_of_memory_is_a_message() -> None:
    message = refused("train", "--model", "nets:broken", "--data", "nets:loaders")
    assert "out of memory. Try fewer --particles" in message
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("shapes do not match"))


def test_finished_runs_are_wanted() -> None:
    Path("empty").mkdir()
    Image.new("L", (28, 28)).save("a.png")
    for command in (["inspect"], ["evaluate"], ["export"], ["predict"]):
        rest = ["a.png"] if command == ["predict"] else []
        assert "nowhere holds no finished run" in refused(*command, "nowhere", *rest)
        assert "empty holds no finished run" in refused(*command, "empty", *rest)
    assert "nowhere is not a run folder" in refused("report", "nowhere")
    assert "empty" in refused("report", "empty")
    Path("empty/result.json").write_text("{")
    assert "result.json is damaged" in refused("inspect", "empty")


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("text.csv", "a,b\n1,2\nx,3\n", "cannot be read as rows of numbers"),
    ("ragged.csv", "1,2\n1,2,3\n", "cannot be read as rows of numbers"),
    ("wide.csv", "1,2,3\n", "has the shape 1x3, but an input of this network has the shape 2"),
    ("empty.csv", "a,b\n", "it has no row"),
    ("nan.csv", "1,2\n3,nan\n", "has values that are not finite"),
    ("object.npy", np.array([{}], dtype=object), "cannot be read"),
    ("broken.npy", "\x93NUMPY", "cannot be read"),
    ("dict.pt", {"x": 1}, "cannot be read"),
    ("code.pt", refused, "cannot be read"),  # a function: loading it would import code
    ("broken.pt", "no", "cannot be read"),
    ("a.png", "", "must be a .csv, .json, .npy or .pt file: an input has the shape 2"),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)  # fmt: skip
def test_files_that_cannot_be_predicted(name: str, content: Any, reason: str) -> None:
    if isinstance(content, str):
        Path(name).write_text(content)
    elif name.endswith(".npy"):
        np.save(name, content, allow_pickle=True)
    else:
        torch.save(content, name)
    with pytest.raises(DataError, match=f"^{re.escape(name)} .*{re.escape(reason)}"):
        read_inputs([Path(name)], {"input_shape": [2], "input_dtype": "float32"}, None)
