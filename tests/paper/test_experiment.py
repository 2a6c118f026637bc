"""Presets, kinds and commands; one small experiment from training to the table; what paper/README.md names."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from argparse import ArgumentParser
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from table_kit import RESULTS, ROOT, best_temperature

import bayestrain as bt
from bayestrain.app.data import Images
from bayestrain.errors import ConfigError
from bayestrain.train import run as running
from bayestrain.train.run import tensorized
from paper import data, experiment, networks, seeds, table
from paper.experiment import run_config
from paper.published import PAPER
from paper.records import RecordError, gather, read_group

BUILDERS = {"mnist": networks.mnist_mlp, "cifar10-cnn": networks.cifar10_cnn, "cifar10-resnet110": networks.resnet110}


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("name", PAPER)
def test_presets_have_the_epochs_that_the_table_recognises_short_runs_by(name: str, preset: str) -> None:
    fit = run_config(name, preset=preset).fit
    assert fit.epochs + fit.finetune_epochs == PAPER[name].epochs[preset]


@pytest.mark.parametrize(("recorded", "preset", "changed"), [
    ("mnist/default", "default", {}),
    ("mnist/paper", "paper", {}),
    ("cifar10-cnn/x32", "default", {"fit.target_ratio": 32.0}),
    ("cifar10-cnn/paper", "paper", {}),
    ("cifar10-resnet110/x11", "default", {"fit.target_ratio": 11.0}),
    ("cifar10-resnet110/paper-12", "paper", {"fit.epochs": 12, "fit.precision": "bf16"}),
])  # fmt: skip
def test_presets_are_those_of_the_recorded_lines(recorded: str, preset: str, changed: dict[str, Any]) -> None:
    """Every setting that the package had before its rewrite and has now, but for names and what does not matter."""
    name, seed = recorded.split("/")[0], min((RESULTS / recorded).glob("seed-*"))
    old, new = tomllib.loads((seed / "config.toml").read_text()), run_config(name, preset=preset).to_dict()
    compared = 0
    for section in ("tensorize", "prior", "fit"):
        for key in old[section].keys() & new[section].keys() - {"checkpoint_every"}:
            was, now = old[section][key], new[section][key]
            if key == "rule":
                now = {"auto": "rounding"}.get(now, now)
            if key == "compact_from" and not new["fit"]["compact_every"]:
                continue
            if key == "finetune_lr" and not new["fit"]["finetune_epochs"]:
                continue
            assert now == was or changed.get(f"{section}.{key}") == was, (section, key)
            compared += 1
    assert compared > 25


def test_fixed_ranks_train_as_long_and_particles_at_a_rate_of_their_own() -> None:
    found = run_config("cifar10-cnn")
    for kind in ("dense", "tensorized"):
        fixed = run_config("cifar10-cnn", kind=kind)
        assert (fixed.fit.epochs, fixed.fit.finetune_epochs, fixed.fit.search) == (180, 0, False)
        assert (fixed.fit.lr, fixed.fit.schedule, fixed.prior) == (found.fit.lr, found.fit.schedule, found.prior)
        assert fixed.tensorize.enabled == (kind == "tensorized")
    around = run_config("cifar10-cnn", particles=20, around="runs/x32", epochs=6)
    assert (around.fit.epochs, around.fit.finetune_epochs, around.fit.search) == (6, 0, False)
    assert around.fit.lr == pytest.approx(0.1 * run_config("cifar10-cnn").fit.lr)
    assert (around.run.from_run, around.posterior.jitter) == ("runs/x32", 0.2)
    assert around.run.data == "paper.data:cifar10_cutout_beside"
    assert run_config("mnist", particles=3, around="x", epochs=1).fit.lr == 3e-3  # of the fine-tuning


@pytest.mark.parametrize(("options", "words"), [
    ({"experiment": "cifar"}, "There is no experiment 'cifar'"),
    ({"kind": "sparse"}, "kind must be one of low-rank, tensorized, dense"),
    ({"preset": "theirs"}, "There is no preset 'theirs' of mnist"),
    ({"around": "x", "particles": 20}, "needs --particles of at least 2 and --epochs"),
    ({"kind": "dense", "target_ratio": 30.0}, "leave --target-ratio out"),
    ({"overrides": ["fit.lrr=1"]}, "fit.lr"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        run_config(**{"experiment": "mnist", **options})


@pytest.mark.parametrize(("name", "preset", "layers", "parameters"), [
    ("mnist", "default", 2, 27_235),  # the paper's BTNN
    ("mnist", "paper", 2, 27_235),
    ("cifar10-cnn", "default", 5, 286_717),
    ("cifar10-resnet110", "default", 109, 460_934),
    ("cifar10-resnet110", "paper", 74, None),
])  # fmt: skip
def test_networks_at_full_rank_have_the_recorded_sizes(
    name: str, preset: str, layers: int, parameters: int | None
) -> None:
    model = tensorized(BUILDERS[name](), run_config(name, preset=preset).tensorize)
    assert len(bt.ranks(model)) == layers
    assert parameters in (None, bt.count_parameters(model))


def test_the_papers_choice_of_layers_bounds_how_small_resnet110_can_be() -> None:
    settings = run_config("cifar10-resnet110", preset="paper", overrides=["tensorize.max_rank=1"]).tensorize
    smallest = bt.count_parameters(tensorized(networks.resnet110(), settings))
    assert f"{1_742_762 / smallest:.1f}" == "16.3"  # paper/README.md says so


def test_every_command_of_the_makefile_trains_what_was_recorded(tmp_path: Path) -> None:
    """Dry, in a directory of its own: make expands the commands, the options become a config for every seed."""
    makefile, targets = str(ROOT / "paper" / "Makefile"), ("paper-mnist", "paper-cnn", "paper-resnet110", "paper-table")
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # `make test` runs this
    done = subprocess.run(
        ["make", "-n", "-f", makefile, "BIN=bin", *targets],
        cwd=tmp_path, env=outside, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *lines, last = done.stdout.replace("\\\n", " ").strip().splitlines()
    assert last.startswith("bin/python -m paper.table")
    recorded = {"/".join(path.parts[-3:-1]) for path in RESULTS.glob("*/*/summary.json")}
    found = set()
    for line in lines:
        program, *words = shlex.split(line)
        assert (program, words[:2]) == ("bin/python", ["-m", "paper.seeds"])
        parser = ArgumentParser()
        experiment.options(parser)
        seeds.add_options(parser)
        given = parser.parse_args(words[2:])
        found.add(f"{given.experiment}/{given.label}")
        summary = json.loads((RESULTS / given.experiment / given.label / "summary.json").read_text())
        assert given.seeds == sorted(summary["seeds"])
        config = experiment.chosen(seeds.for_seed(given, given.seeds[0]), given.seeds[0])
        result = json.loads(next((RESULTS / given.experiment / given.label).glob("seed-*/result.json")).read_text())
        if "kind" in result:
            assert given.kind == result["kind"]
        assert config.posterior.particles == ((result["posterior"] or {}).get("particles") or 1)
    assert found <= recorded
    assert len(found) == len(lines) == 33


@pytest.fixture
def _mini(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 digits that ship with the package in place of all data sets."""
    digits = bt.data.load("mnist-mini")
    train, test = digits.train.subset(range(0, 10_000, 10)), digits.test.subset(range(500))
    small = data.fetch.Splits("digits", train, test, digits.classes, (0.1321,), (0.3096,))
    monkeypatch.setattr(data.fetch, "load", lambda _: small)


@pytest.mark.usefixtures("_mini")
def test_only_training_images_are_augmented_and_images_beside_have_their_patches() -> None:
    first, second = data.mnist(), data.mnist()
    assert torch.equal(first.validation.images, second.validation.images)
    assert len(first.train) + len(first.validation) == 1000
    for part, augmented in ((first.train, True), (first.validation, False), (first.test, False)):
        x, _ = next(part.batches(100, shuffle=False))
        same = torch.equal(x, part.images[:100].float() / 255)
        assert same != augmented
    x, _ = next(data.cifar10_cutout().train.batches(100, shuffle=False))
    assert (x == 0).any()  # blanked to the mean, which no pixel of these digits has
    assert data.cifar10().mean is not None
    assert data.mnist().mean is None
    found = data.cifar10_beside()
    assert (found.outside.name, data.mnist_plain_beside().outside.name) == ("patches", "fashion-mnist")
    assert isinstance(found.outside, Images)
    before, after = found.test.images, found.outside.images
    assert not torch.equal(before, after)
    assert torch.equal(before.flatten(1).sort().values, after.flatten(1).sort().values)


AROUND = ["--set", "fit.batch_size=100", "--device", "cpu"]
SMALL = [*AROUND, "--set", "fit.epochs=2", "--set", "fit.finetune_epochs=1", "--set", "tensorize.max_rank=4"]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _mini: None) -> Any:
    """`paper.seeds` with its processes in this one, which has the small data."""

    def inside(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        try:
            experiment.main(words[3:])
        except SystemExit as end:
            return subprocess.CompletedProcess(words, 1, str(end))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(seeds, "subprocess", SimpleNamespace(run=inside))

    def call(*words: str) -> None:
        seeds.main(["mnist", *words, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")])

    return call


def test_seeds_are_trained_recorded_and_tabled(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []
    original = running.fit_temperature
    monkeypatch.setattr(running, "fit_temperature", lambda p, y: fitted.append(y) or original(p, y))
    train("--label", "two", "--seeds", "0", "1", *SMALL)
    train("--label", "cloud", "--seeds", "0", "--particles", "2", "--around", "two", "--epochs", "1", *AROUND)
    held_out = data.mnist().validation.labels
    assert len(fitted) == 3
    assert all(torch.equal(labels, held_out) for labels in fitted)  # no test image ever reaches the fit

    results = tmp_path / "results"
    kept = {path.name for path in (results / "mnist" / "two" / "seed-0").iterdir()}
    assert kept == {*seeds.KEPT, *seeds.NETWORK, "validation.safetensors"}
    assert not (results / "mnist" / "two" / "seed-1" / "validation.safetensors").exists()
    assert (results / "mnist" / "cloud" / "seed-0" / "predictions.safetensors").exists()
    (groups,) = gather(results).values()
    two, cloud = groups
    assert (two.label, two.seeds, two.first.epochs, two.shortened) == ("two", (0, 1), 3, "3 of 95")
    assert two.first.searched_accuracy is not None
    assert cloud.first.posterior.how == "SVGD, 2 particles around MAP"
    assert cloud.first.posterior.point["accuracy"] == two.first.metrics["accuracy"]
    assert (cloud.first.epochs, cloud.first.iterations, cloud.first.earlier_epochs) == (1, 570, None)
    text = table.write_table(results).read_text().replace("\u00a0", " ")
    assert "All lines were trained by the package since its rewrite." in text
    assert "SVGD, 2 particles around MAP" in text
    assert "`cloud`, a single network" in text

    # A finished seed is only recorded; with other settings, or in place of another commit's, it is not.
    again, file = ("--label", "two", "--seeds", "0", "1", *SMALL), results / "mnist" / "two" / "summary.json"
    before = json.loads(file.read_text())
    train(*again)
    assert len(fitted) == 3
    assert json.loads(file.read_text()) == before
    with pytest.raises(SystemExit, match=r"had other settings \(fit.lr was 0.01, now 0.02\)"):
        train(*again, "--set", "fit.lr=2e-2")
    file.write_text(json.dumps({**before, "commits": ["f" * 40]}))
    with pytest.raises(SystemExit, match=r"was recorded at commits f{40}\. Give another --label"):
        train(*again)
    train(*again, "--replace")
    assert {**json.loads(file.read_text()), "command": before["command"]} == before

    # A temperature that suits the test images and not those held out is refused.
    run = tmp_path / "runs" / "mnist-two-seed0"
    stored = load_file(run / "predictions.safetensors")
    best = best_temperature(stored["probabilities"].numpy(), stored["labels"].numpy())
    file = results / "mnist" / "two" / "seed-0" / "result.json"
    result = json.loads(file.read_text())
    assert abs(best / result["calibrated"]["temperature"] - 1) > 0.01
    result["calibrated"]["temperature"] = best
    file.write_text(json.dumps(result))
    with pytest.raises(RecordError, match="is not the best one for the held-out images"):
        read_group(results / "mnist" / "two", "mnist")


def test_seeds_that_fail_are_counted_and_end_in_an_error(train: Any, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        train("--label", "far", "--seeds", "0", "--particles", "2", "--around", "nowhere", "--epochs", "1", *AROUND)
    assert "seed 0 failed with exit code 1" in capsys.readouterr().out
    summary = json.loads((tmp_path / "results" / "mnist" / "far" / "summary.json").read_text())
    assert summary["failed"] == [0]
    with pytest.raises(SystemExit, match="no setting"):
        train("--label", "bad", "--seeds", "0", "--set", "fit.lrr=1")
    assert not (tmp_path / "results" / "mnist" / "bad").exists()


README = (ROOT / "paper" / "README.md").read_text()
ELEMENTS = README.split("\n## The paper, element by element\n")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in ELEMENTS.splitlines() if line[:1] == "|"][2:]
NAMED = re.compile(r"`([^`]+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_an_element_has_its_function_its_test_and_its_result(row: list[str]) -> None:
    _, functions, tests, results = row
    for name in NAMED.findall(functions):
        if name.endswith(".toml"):
            assert (ROOT / "paper" / name).is_file(), name
        elif name.startswith(("bayestrain.", "paper.")):
            resolve_name(name)
        else:
            assert "=" in name, f"{name} is neither a function, nor a preset, nor an argument"
    assert NAMED.findall(tests)
    for name in NAMED.findall(tests):
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not test or re.search(rf"^ *def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name
    for name in NAMED.findall(results):
        assert (RESULTS / name / "summary.json").is_file() or (RESULTS / name).is_file(), name


def test_the_commands_for_single_lines_train_something() -> None:
    assert len(ROWS) >= 20
    (block,) = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    commands = block.replace("\\\n", " ").strip().splitlines()
    assert len(commands) == 4
    for line in commands:
        program, module, name, *words = shlex.split(line)
        assert (program, module, name) == ("python", "-m", "paper.seeds")
        parser = ArgumentParser()
        experiment.options(parser)
        seeds.add_options(parser)
        given = parser.parse_args(words)
        assert experiment.chosen(seeds.for_seed(given, 0), 0).fit.epochs > 0
        assert not (RESULTS / given.experiment / given.label).exists()
