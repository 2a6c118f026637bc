"""`train_run`: from names to a folder; what it starts from, loading and evaluating it again; names and settings."""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from edits import edit
from fit_kit import StopAfter

from bayestrain.errors import ConfigError, DataError, Interrupted, TrainingError
from bayestrain.train import config as configs
from bayestrain.train.config import RunConfig
from bayestrain.train.run import evaluate_run, load_data, load_run, resolve, train_run

NETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

def data():
    parts = torch.randn(240, 4, generator=torch.Generator().manual_seed(0)).split([160, 40, 40])
    return tuple((x, x[:, :1] - 2 * x[:, 1:2]) for x in parts)

broken = (1, 2, 3, 4)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    file = tmp_path / "regression_nets.py"
    file.write_text(NETS)
    sys.modules.pop("regression_nets", None)
    run = {"model": f"{file}:build", "data": f"{file}:data", "likelihood": "regression"}
    fit = {"epochs": 3, "finetune_epochs": 1, "batch_size": 40, "lr": 2e-2}
    return RunConfig.from_dict({"run": run, "fit": fit, "tensorize": {"max_rank": 4}})


def test_a_run_is_trained_loaded_evaluated_and_finished_only_once(config: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train_run(config, out, command="typed")
    assert json.loads((out / "result.json").read_text()) == json.loads(json.dumps(result))
    assert (result["task"], result["evaluated_on"], result["input_shape"]) == ("regression", "test", [4])
    assert result["layers"]["0"].keys() == {"format", "layout", "shape", "dense", "start", "now"}
    assert (configs.load(out / "config.toml"), result["command"]) == (config, "typed")
    x, y = load_data(config.run.data).test
    prediction = load_run(out).predict(x)  # with the noise that was learned
    assert float((prediction.mean - y).square().mean().sqrt()) == pytest.approx(result["metrics"]["rmse"], rel=1e-4)
    again = evaluate_run(out)
    assert again["metrics"] == pytest.approx(result["metrics"], rel=1e-4)
    assert again["evaluated_again"]["device"] == "cpu"
    assert train_run(config, out, resume=True) == again
    with pytest.raises(ConfigError, match=r"other settings \(fit\.lr was 0\.02, now 0\.1\)"):
        train_run(config.override(["fit.lr=0.1"]), out, resume=True)


@pytest.mark.parametrize("particles", [1, 2])
def test_a_killed_run_remembers_what_it_starts_from(config: RunConfig, tmp_path: Path, particles: int) -> None:
    train_run(config, tmp_path / "first")
    config = config.override([  # tensorize does not matter: the layers of the first run stay as they are
        f"run.from_run={tmp_path}/first", f"posterior.particles={particles}", "tensorize.max_rank=2",
    ])  # fmt: skip
    whole, out = train_run(config, tmp_path / "whole"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(config, out, callbacks=[SimpleNamespace(on_start=Mock(side_effect=KeyboardInterrupt))])
    with pytest.raises(TrainingError, match="nothing to resume"):
        train_run(configs.load(out / "config.toml"), out, resume=True)
    with pytest.raises(Interrupted):
        train_run(configs.load(out / "config.toml"), out, callbacks=[StopAfter(1)])
    result = train_run(configs.load(out / "config.toml"), out, resume=True)
    assert (result["from_run"]["run"], result["from_run"]["epochs"]) == (str(tmp_path / "first"), 4)
    assert result["metrics"] == whole["metrics"]
    assert len(json.loads((out / "environment.json").read_text())["earlier"]) == 1
    changed = config.override([f"run.model={config.run.model.replace('build', 'other')}"])
    with pytest.raises(ConfigError, match="Name the same model"):
        train_run(changed, tmp_path / "other")


DIGITS = {20: "fit.epochs fit.batch_size", 400: "fit.epochs fit.lr", 4000: "fit.lr", 5000: "fit.lr run.seed"}


def test_numbers_too_long_and_lists_too_deep_are_refused(config: RunConfig) -> None:
    for digits, names in DIGITS.items():
        for name in names.split():
            with pytest.raises(ConfigError, match=rf'{name} must be .*, got "?999'):
                config.override([f"{name}={'9' * digits}"])
    for depth, name in product((100, 500, 5000), ("fit.epochs", "fit.milestones")):
        with pytest.raises(ConfigError, match=f"{name} must be "):
            config.override([f"{name}={'[' * depth}{']' * depth}"])


@pytest.mark.parametrize("state", [None, 1, [], {"log_variance": "x"}, {"log_variance": [[1], [1, 2]]}, {"other": 1.0}])
def test_a_likelihood_that_was_damaged_names_its_file(state: object, config: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_run(config, out)
    (out / "checksums.json").unlink()  # which would have told
    edit(out / "model.json", likelihood_state=state)
    with pytest.raises(DataError, match=r"model\.json is damaged"):
        load_run(out)


@pytest.mark.parametrize(("name", "message"), [
    ("nothing", 'must be "package.module:name" or "file.py:name"'),
    ("no.such.module:build", "no module 'no.such.module'"),
    ("missing.py:build", "no module 'missing.py'"),
    ("bayestrain.app.example:digit", 'Did you mean "digits"'),
])  # fmt: skip
def test_names_that_lead_nowhere_say_what_to_write(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_data_and_networks_of_another_kind_are_refused(config: RunConfig, tmp_path: Path) -> None:
    for change, message in (
        (f"run.data={tmp_path}/regression_nets.py:broken", r"must return \(train, validation\)"),
        (f"run.model={tmp_path}/regression_nets.py:data", "must build a torch.nn.Module, got a tuple"),
        ('tensorize.keep_dense=["9*"]', "matches none of"),
        ("fit.target_ratio=1e6", "out of reach"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_run(config.override([change]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_file_has_every_setting_with_its_meaning(config: RunConfig, tmp_path: Path) -> None:
    config = config.override(["tensorize.modes={0 = [[2, 2], [4, 4]]}", 'tensorize.keep_dense=["2"]'])
    file = tmp_path / "run.toml"
    file.write_text(configs.dumps(config))
    assert configs.load(file) == config
    assert "# passes over the training data before the final cut\nepochs = 3\n" in file.read_text()
    changed = config.override(["fit.optimizer=sgd", "fit.milestones=[0.5]", "run.name=two words"])
    assert (changed.fit.optimizer, changed.fit.milestones, changed.run.name) == ("sgd", (0.5,), "two words")
    numbers = configs.FitConfig(lr=torch.tensor(0.5).numpy()[()], epochs=torch.tensor(3).numpy()[()])
    assert (type(numbers.lr), type(numbers.epochs)) == (float, int)


NAMED = "[run]\nmodel='m:b'\ndata='m:d'\n"


@pytest.mark.parametrize(("text", "message"), [
    ("fit = 3", r"fit must be a section of settings, \[fit\], got 3"),
    ("[fit]\nepochs = 3", r"run\.toml: run\.model has no default"),
    ("[fit]\nepoch = 3", 'no setting "fit.epoch". Did you mean "fit.epochs"'),
    ("[run]\nepochs = 3", 'no setting "run.epochs". Did you mean "fit.epochs"'),
    ("[fitt]", 'no setting "fitt". Did you mean "fit"'),
    (f"{NAMED}[fit]\nlr = inf", r"fit\.lr must be a number above 0, got Infinity"),
    (f"{NAMED}[fit]\nlr = true", r"fit\.lr must be a number above 0, got true"),
    (f"{NAMED}[fit]\nepochs = 1.5", r"fit\.epochs must be an integer at least 1, got 1\.5"),
    (f"{NAMED}[fit]\nmilestones = [0.5, 1.0]", r"must be a list, each a number above 0 and below 1, got \[0.5, 1"),
    (f"{NAMED}[fit]\noptimizer = 'adm'", 'Did you mean "adam"'),
    (f"{NAMED}[tensorize]\nkeep_dense = 'x'", "must be a list, each text in quotes"),
    (f"{NAMED}[tensorize]\nmodes = 3", "modes must be a table, got 3"),
    ("epochs = " + "9" * 5000, "is not valid TOML"),
    ("x = " + "[" * 100_000, "is not valid TOML"),
    ("x = \xff", "is not valid TOML"),
], ids=range(15))  # fmt: skip
def test_a_config_that_does_not_fit_names_file_rule_and_value(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match=message):
        configs.load(file)
