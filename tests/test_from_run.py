"""A run that begins with the network of a finished one: `bayestrain train --from RUN`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fit_kit import StopAfter
from typer.testing import CliRunner

from bayestrain.cli.app import app
from bayestrain.errors import ConfigError, Interrupted
from bayestrain.report import write_report
from bayestrain.report.compare import seed_groups
from bayestrain.report.load import load_run
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.experiment import run_experiment
from bayestrain.train.progress import Silent

ROOT = Path(__file__).parents[1]
SHORT = (
    "fit.epochs=2", "fit.finetune_epochs=1", "fit.batch_size=1000", "fit.compact_from=0", "fit.compact_every=1",
    "fit.lr_warmup_epochs=0", "tensorize.max_rank=6", "posterior.outside=none",
)  # fmt: skip


def config(*changes: str) -> RunConfig:
    return toml.named("mnist-mini", "default", [*SHORT, *changes])


def trained(chosen: RunConfig, folder: Path, **options: Any) -> dict[str, Any]:
    options = {"resume": False, "progress": Silent(), "command": "a test", **options}
    return run_experiment(chosen, folder, device="cpu", **options).summary


def words(*changes: str) -> list[str]:
    return ["train", "mnist-mini", *(word for change in (*SHORT, *changes) for word in ("--set", change))]


def refused(*arguments: str) -> str:
    """What a command says that ends with an error, on one line."""
    shown = CliRunner().invoke(app, list(arguments))
    assert shown.exit_code in (1, 2)
    assert "Traceback" not in shown.output
    return " ".join(shown.output.split())


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of full ranks."""
    folder = tmp_path_factory.mktemp("first") / "run"
    trained(config("experiment.kind=tensorized"), folder)
    return folder


def test_a_network_becomes_smaller_and_smaller(first: Path, tmp_path: Path) -> None:
    smaller, smallest = tmp_path / "smaller", tmp_path / "smallest"
    start = json.loads((first / "result.json").read_text())
    shown = CliRunner().invoke(app, [*words(), "--from", str(first), "--target-ratio", "150", "--out", str(smaller)])
    assert shown.exit_code == 0, shown.output
    assert "the network is that of" in " ".join(shown.output.split())
    begun, result = history(smaller)[0], json.loads((smaller / "result.json").read_text())
    assert begun["params"] == start["params"]  # nothing of what was learned is lost
    assert begun["validation"]["accuracy"] == start["validation"]["accuracy"] > 0.5
    assert result["ratio"] >= 150 > start["ratio"]
    assert result["max_ranks"] == start["max_ranks"]
    told = result["from_run"]
    assert told["run"] == str(first)
    commit = json.loads((first / "environment.json").read_text())["commit"]
    assert told["commits"] == ([commit] if commit else [])
    assert {key: told[key] for key in ("params", "accuracy", "epochs")} == {
        "params": start["params"], "accuracy": start["accuracy"], "epochs": 3,
    }  # fmt: skip
    again = trained(config(f"experiment.from_run={smaller}", "fit.target_ratio=250"), smallest)
    assert again["ratio"] >= 250
    assert again["from_run"]["epochs"] == 6
    assert again["from_run"]["seconds"] == pytest.approx(start["seconds"] + result["seconds"])
    page = " ".join(write_report(smallest, smallest / "report.html").read_text().split())
    assert f"The training went on from {smaller}, of {result['params']:,} parameters, trained for 6 epochs." in page
    assert f"Bonds started at the ranks of {smaller};" in page
    assert "of earlier training" in page
    assert "maximal rank;" not in page


def test_it_resumes_in_the_same_bits_without_the_run_it_began_with(first: Path, tmp_path: Path) -> None:
    start = shutil.copytree(first, tmp_path / "start")
    chosen = config(f"experiment.from_run={start}", "fit.target_ratio=150")
    trained(chosen, tmp_path / "whole")
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        trained(chosen, tmp_path / "parts", progress=StopAfter(1))
    shutil.rmtree(start)
    page = " ".join(write_report(tmp_path / "parts", tmp_path / "parts" / "report.html").read_text().split())
    assert "Up to epoch 1 of 3" in page
    assert f"went on from {start}" in page
    assert CliRunner().invoke(app, ["train", "--resume", "--out", str(tmp_path / "parts")]).exit_code == 0
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["from_run"] == results[1]["from_run"] is not None


def test_it_is_not_resumed_without_knowing_where_it_came_from(first: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        trained(config(f"experiment.from_run={first}"), folder, progress=StopAfter(1))
    for spoil, said in (
        (lambda note: note.write_text("{"), "from_run.json is damaged"),
        (lambda note: note.unlink(), "from_run.json, which says what the run went on from, is missing"),
    ):
        spoil(folder / "from_run.json")
        message = refused("train", "--resume", "--out", str(folder))
        assert said in message
        assert "Begin anew with --overwrite" in message
    assert history(folder)[-1]["epoch"] == 1


def test_a_posterior_starts_around_such_a_network(first: Path, tmp_path: Path) -> None:
    smaller, posterior = tmp_path / "smaller", tmp_path / "posterior"
    trained(config(f"experiment.from_run={first}", "fit.target_ratio=150"), smaller)
    changes = ("fit.target_ratio=150", "posterior.particles=2", "posterior.start=jitter", "posterior.jitter_epochs=1")
    shown = CliRunner().invoke(app, [*words(*changes), "--map", str(smaller), "--out", str(posterior)])
    assert shown.exit_code == 0, shown.output
    point = json.loads((posterior / "map" / "result.json").read_text())
    assert point["from_run"]["run"] == str(first)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["experiment.seed=4"], "experiment.seed: 0, now 4). Give those that it had; its seed (--seed 0) chose"),
        (["data.validation_fraction=0.2"], "data.validation_fraction: 0.1, now 0.2"),
        (["tensorize.max_rank=5"], "tensorize.max_rank: 6, now 5"),
        (["experiment.kind=dense"], "is tensorized: a run that is dense can go on from dense ones"),
        (["fit.target_ratio=2"], "fit.target_ratio 2 asks for nothing"),
        (["fit.target_ratio=2"], "begin with a larger network"),
        (["posterior.particles=2"], "from_run is for a single network"),
    ],
)
def test_what_does_not_fit_is_refused(first: Path, tmp_path: Path, changes: list[str], said: str) -> None:
    folder = tmp_path / "run"
    assert said in refused(*words(*changes), "--from", str(first), "--out", str(folder))
    assert not folder.exists()


def test_other_runs_are_refused(first: Path, tmp_path: Path) -> None:
    assert "There is no run nowhere to go on from" in refused(*words(), "--from", "nowhere")
    thin = shutil.copytree(first, tmp_path / "thin")
    (thin / "environment.json").write_text('{"earlier": 3}')
    with pytest.raises(ConfigError, match=r"environment\.json is damaged: earlier is no list of parts"):
        trained(config(f"experiment.from_run={thin}"), tmp_path / "run")
    (thin / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no complete, finished run to go on from: it has no model\.safetensors"):
        trained(config(f"experiment.from_run={thin}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    said = refused(*words(), "--from", str(first), "--out", str(first), "--overwrite")
    assert "which it is to go on from. Choose another --out" in said
    assert (first / "result.json").exists()


def test_an_overwritten_run_leaves_no_trace_of_where_it_came_from(first: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(config(f"experiment.from_run={first}"), folder)
    assert (folder / "from_run.json").exists()
    shown = CliRunner().invoke(app, [*words(), "--out", str(folder), "--overwrite"])
    assert shown.exit_code == 0, shown.output
    assert not (folder / "from_run.json").exists()
    assert json.loads((folder / "result.json").read_text())["from_run"] is None


def test_any_folder_can_be_gone_on_from(first: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(first, tmp_path / 'a "😀" \\ 1.5')
    shown = CliRunner().invoke(app, [*words("fit.epochs=1"), "--from", str(odd), "--out", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["from_run"]["run"] == str(odd)


def test_seeds_go_on_each_from_its_own_and_the_table_says_so(first: Path, tmp_path: Path) -> None:
    runs, results, start = tmp_path / "runs", tmp_path / "results", f"{tmp_path}/{{seed}}/run"
    trained(config("experiment.kind=tensorized", "experiment.seed=1"), tmp_path / "1" / "run")
    environment = shutil.copytree(first, tmp_path / "0" / "run") / "environment.json"
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "commit": "f" * 40}))
    command = [sys.executable, ROOT / "tools" / "run_seeds.py", "mnist-mini", "--label", "x150", "--seeds", "0", "1"]
    command += ["--runs", runs, "--results", results, *words()[2:], "--device", "cpu", "--target-ratio", "150"]
    subprocess.run([*command, "--from", start], check=True)
    group = results / "mnist-mini" / "x150"
    kept = [json.loads((group / f"seed-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    assert [result["from_run"]["run"] for result in kept] == [f"{tmp_path}/{seed}/run" for seed in (0, 1)]
    assert "f" * 40 in json.loads((group / "summary.json").read_text())["commits"]
    assert CliRunner().invoke(app, ["table", str(results)]).exit_code == 0
    table = (results / "TABLE.md").read_text()
    assert "| 3, after 3 |" in table
    assert "The commands that make the lines again; one with `--from` needs networks that must be there" in table
    both = [str(runs / f"mnist-mini-x150-seed{seed}") for seed in (0, 1)]
    assert CliRunner().invoke(app, ["report", *both, "--out", str(tmp_path / "both.html")]).exit_code == 0
    page = " ".join((tmp_path / "both.html").read_text().split())
    assert "2 seeds of one experiment" in page
    assert f"The training went on from {tmp_path}/1/run" in page
    other = subprocess.run([*command], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "had other settings (experiment.from_run: " in other.stderr


def test_runs_from_before_there_was_this_setting_are_as_those_with_none(first: Path, tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    old = shutil.copytree(first, runs / "mnist-mini-one-seed0")
    text = (old / "config.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("from_run")]
    assert len(lines) < len(text.splitlines())
    (old / "config.toml").write_text("\n".join(lines) + "\n")
    command = [sys.executable, ROOT / "tools" / "run_seeds.py", "mnist-mini", "--label", "one", "--runs", runs]
    command += ["--results", results, *words("experiment.kind=tensorized")[2:], "--device", "cpu"]
    passed_off = subprocess.run(
        [*command, "--seeds", "0", "--from", first], capture_output=True, text=True, check=False
    )
    assert passed_off.returncode == 1
    assert "had other settings (experiment.from_run: " in passed_off.stderr
    subprocess.run([*command, "--seeds", "0", "1"], check=True)
    shown = CliRunner().invoke(app, ["table", str(results)])
    assert shown.exit_code == 0, shown.output
    assert len(seed_groups([load_run(runs / f"mnist-mini-one-seed{seed}") for seed in (0, 1)])) == 1
