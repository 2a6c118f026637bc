"""A finished run as the MAP point of a posterior: `bayestrain train --particles N --map RUN`."""

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
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.experiment import run_experiment
from bayestrain.train.progress import Silent

ROOT = Path(__file__).parents[1]
SHORT = (
    "fit.epochs=1", "fit.finetune_epochs=1", "fit.batch_size=2000", "fit.compact_from=1", "fit.compact_tol=0.2",
    "fit.round_tol=0.3", "tensorize.max_rank=4", "posterior.particles=2",
)  # fmt: skip


def config(*changes: str) -> RunConfig:
    return toml.named("mnist-mini", "default", [*SHORT, *changes])


def trained(chosen: RunConfig, folder: Path, command: str, **options: Any) -> dict[str, Any]:
    options = {"resume": False, "progress": Silent(), **options}
    return run_experiment(chosen, folder, device="cpu", command=command, **options).summary


def command_line(*changes: str) -> list[str]:
    return ["train", "mnist-mini", *(word for change in (*SHORT, *changes) for word in ("--set", change))]


def of_map(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "map" / "result.json").read_text())
    return found


def refused(*words: str) -> str:
    """What a command says that ends with an error, on one line."""
    shown = CliRunner().invoke(app, list(words))
    assert shown.exit_code == 2 or shown.exit_code == 1
    assert "Traceback" not in shown.output
    return " ".join(shown.output.split())


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MAP point, trained by itself, that has met no outside images and saved more often."""
    folder = tmp_path_factory.mktemp("point") / "run"
    chosen = config("posterior.particles=0", 'posterior.outside="none"', "fit.checkpoint_every=1")
    trained(chosen, folder, "the point")
    return folder


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior that trained its own MAP point."""
    folder = tmp_path_factory.mktemp("posterior") / "run"
    trained(config(), folder, "a posterior")
    return folder


def test_it_is_as_if_it_had_been_trained_here(point: Path, posterior: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(config(), folder, "a test", point=point)
    assert (folder / "posterior.safetensors").read_bytes() == (posterior / "posterior.safetensors").read_bytes()
    here, there = of_map(folder), of_map(posterior)
    assert (here["command"], here["evaluated_again"]["command"]) == ("the point", "a test")
    assert here["evaluated_again"]["device"] == "cpu"
    assert (folder / "map" / "config.toml").read_text() == (posterior / "map" / "config.toml").read_text()
    assert {path.name for path in folder.iterdir()} == {path.name for path in posterior.iterdir()}
    for key in ("accuracy", "log_likelihood", "ece", "calibrated", "posterior"):
        assert here[key] == there[key], key
    assert json.loads((folder / "result.json").read_text())["posterior"]["map"]["ood_auroc"] is not None


def test_particles_start_around_it_on_the_command_line(point: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = ('posterior.start="jitter"', "posterior.jitter_epochs=1")
    shown = CliRunner().invoke(app, [*command_line(*changes), "--map", str(point), "--out", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert of_map(folder)["command"] == "the point"
    result = json.loads((folder / "result.json").read_text())
    assert result["ranks"] == of_map(folder)["ranks"]
    assert result["posterior"]["start"] == "jitter"
    assert "MAP point is that of" in " ".join(shown.output.split())


def test_a_small_network_is_kept_with_its_figures_and_can_be_gone_on_with(point: Path, tmp_path: Path) -> None:
    """What `tools/run_seeds.py` keeps of a run is enough to evaluate it again, and to start a posterior around it."""
    runs, results, posterior = tmp_path / "runs", tmp_path / "results", tmp_path / "posterior"
    shutil.copytree(point, runs / "mnist-mini-one-seed0")
    large = shutil.copytree(point, runs / "mnist-mini-one-seed1")
    with (large / "model.safetensors").open("ab") as weights:
        weights.write(bytes(1 << 20))
    old = results / "mnist-mini" / "one" / "seed-1"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(b"of an earlier gathering")
    command = [sys.executable, ROOT / "tools" / "run_seeds.py", "mnist-mini", "--label", "one", "--seeds", "0", "1"]
    command += [
        "--runs",
        runs,
        "--results",
        results,
        *command_line("posterior.particles=0", "posterior.outside=none")[2:],
    ]
    done = subprocess.run([*command, "--set", "fit.lr=0.5"], capture_output=True, text=True, check=False)
    assert done.returncode == 1  # what was trained with other settings is not passed off as this
    assert "mnist-mini-one-seed0 is finished and had other settings (fit.lr: 0.01, now 0.5)" in done.stderr
    assert not (results / "mnist-mini" / "one" / "summary.json").exists()
    subprocess.run(command, check=True)
    assert {path.name for path in old.iterdir()} == {"config.toml", "environment.json", "result.json"}
    kept = results / "mnist-mini" / "one" / "seed-0"
    assert {"model.json", "model.safetensors"} < {path.name for path in kept.iterdir()}
    summary = json.loads((kept.parent / "summary.json").read_text())
    lines = [json.loads(line) for line in (point / "history.jsonl").read_text().splitlines()]
    search = [line["validation"]["accuracy"] for line in lines if line["phase"] == "search"]
    assert summary["searched_accuracy"]["each"] == [search[-1]] * 2
    assert (
        summary["validation_accuracy"]["mean"]
        == json.loads((point / "result.json").read_text())["validation"]["accuracy"]
    )
    before = json.loads((kept / "result.json").read_text())
    assert CliRunner().invoke(app, ["evaluate", str(kept)]).exit_code == 0
    again = json.loads((kept / "result.json").read_text())
    assert (again["accuracy"], again["log_likelihood"]) == (before["accuracy"], before["log_likelihood"])
    trained(config('posterior.start="jitter"', "posterior.jitter_epochs=1"), posterior, "a test", point=kept)
    assert not (posterior / "map" / "history.jsonl").exists()
    assert of_map(posterior)["command"] == "the point"
    assert CliRunner().invoke(app, ["report", str(posterior)]).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["posterior.particles=0"], "is for a posterior"),
        (["fit.lr=0.5"], "not the MAP point of these settings .*fit.lr"),
        (["experiment.seed=4"], "experiment.seed: 0, now 4"),
        (["posterior.compare_map=false"], "leaves the MAP point out"),
    ],
)
def test_other_settings_are_refused(point: Path, tmp_path: Path, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trained(config(*changes), tmp_path / "run", "", point=point)
    assert not (tmp_path / "run").exists()


def test_what_is_no_finished_point_is_refused(point: Path, posterior: Path, tmp_path: Path) -> None:
    for place, said in ((posterior, "holds a posterior"), (tmp_path / "none", "There is no run")):
        with pytest.raises(ConfigError, match=said):
            trained(config(), tmp_path / "run", "", point=place)
    said = refused(*command_line(), "--map", str(point), "--out", str(point), "--overwrite")
    assert "which it is to take the MAP point from. Choose another --out" in said
    assert (point / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "missing"),
    [("environment.json", True), ("model.safetensors", True), ("model.safetensors", False), ("spectra.json", False)],
)
def test_an_incomplete_point_does_not_cost_the_run_that_is_there(
    point: Path, posterior: Path, tmp_path: Path, name: str, missing: bool
) -> None:
    thin, there = shutil.copytree(point, tmp_path / "thin"), shutil.copytree(posterior, tmp_path / "there")
    (thin / name).unlink() if missing else (thin / name).write_text("{")
    before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    said = refused(*command_line(), "--map", str(thin), "--out", str(there), "--overwrite")
    assert name in said
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before


def test_a_result_without_figures_is_refused(point: Path, tmp_path: Path) -> None:
    for text, said in (("{}", "no accuracy"), ("[]", "no entries"), ("{", "damaged")):
        thin = shutil.copytree(point, tmp_path / "thin", dirs_exist_ok=True)
        (thin / "result.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            trained(config(), tmp_path / "run", "", point=thin)


def test_a_point_that_is_not_there_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "There is no run" in refused(*command_line(), "--map", "runs/mnist-mini-seed0")


def test_a_run_stopped_behind_it_goes_on_and_keeps_it(point: Path, posterior: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        trained(config(), folder, "the first", point=point, progress=StopAfter(0))
    (folder / "checkpoint-last.pt").unlink(missing_ok=True)  # as if it had been killed, not stopped
    shutil.copytree(point, other)
    _shift(other / "model.safetensors")
    with pytest.raises(ConfigError, match="it is not that of"):
        trained(config(), folder, "the second", point=other, resume=True)
    result = trained(config(), folder, "the third", resume=True)
    assert result["command"] == "the first"
    assert (folder / "posterior.safetensors").read_bytes() == (posterior / "posterior.safetensors").read_bytes()
    words = ["train", "--resume", "--out", str(folder), "--map"]
    assert CliRunner().invoke(app, [*words, str(point)]).exit_code == 0
    assert "it is not that of" in refused(*words, str(other))


def test_overwriting_leaves_nothing_of_an_interrupted_take_over(point: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(point, tmp_path / "run")
    (folder / ".map.partial").mkdir()
    (folder / ".map.partial" / "result.json").write_text("{")
    words = [*command_line("posterior.particles=0"), "--out", str(folder), "--overwrite"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert not (folder / ".map.partial").exists()


def test_run_seeds_puts_the_seed_into_arguments(point: Path, tmp_path: Path) -> None:
    shutil.copytree(point, tmp_path / "point-0")
    words = [*command_line()[2:], "--map", str(tmp_path / "point-{seed}"), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_seeds.py"), "mnist-mini", "--seeds", "0", *words,
         "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert of_map(tmp_path / "runs" / "mnist-mini-default-seed0")["command"] == "the point"
    summary = json.loads((tmp_path / "results" / "mnist-mini" / "default" / "summary.json").read_text())
    assert (summary["failed"], "map_auroc" in summary) == ([], True)


def _shift(weights: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
