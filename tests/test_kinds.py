"""The three kinds of network: ranks that are sought, ranks that all stay, no tensor trains at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_kit import StopAfter, jitter, settings
from torch import nn

import bayestrain as bt
from bayestrain import data
from bayestrain.errors import ConfigError, Interrupted
from bayestrain.train import toml
from bayestrain.train.experiment import fit_settings, run_experiment
from bayestrain.train.progress import Silent

DIGITS = data.load("mnist-mini")
TRAIN = DIGITS.train.subset(range(1000))
SHORT = ("fit.epochs=2", "fit.finetune_epochs=1", "fit.batch_size=500", "fit.compact_from=1")


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def run(out: Path, *overrides: str) -> dict[str, Any]:
    config = toml.named("mnist-mini", "default", [*SHORT, *overrides])
    return run_experiment(config, out, device="cpu", resume=False, progress=Silent(), command="test").summary


@pytest.mark.parametrize("kind", ["dense", "tensorized"])
def test_a_kind_without_a_search_cuts_nothing_and_trains_as_long(kind: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"experiment.kind={kind}")
    assert result["kind"] == kind
    assert result["ranks"] == result["max_ranks"]
    assert result["params"] == (496_885 if kind == "dense" else 27_235)
    assert bool(result["ranks"]) == (kind == "tensorized")
    assert result["accuracy"] > 0.8
    model = bt.load_model(tmp_path)
    assert bt.count_parameters(model) == result["params"]
    history = (tmp_path / "history.jsonl").read_text().splitlines()
    assert len(history) == 4  # the start and three epochs


def test_a_layer_kept_dense_needs_no_modes(tmp_path: Path) -> None:
    result = run(tmp_path, 'tensorize.keep_dense=["3"]', "fit.epochs=1", "tensorize.max_rank=3")
    assert list(result["ranks"]) == ["1"]
    assert result["layer_params"]["3"]["now"] == 6260
    with pytest.raises(ConfigError, match=r"not converted: \['7'\]"):
        run(tmp_path / "wrong", 'tensorize.keep_dense=["3"]', "tensorize.modes.7=[[5],[2]]")


@pytest.mark.parametrize("kind", ["dense", "tensorized"])
def test_a_posterior_of_each_kind(kind: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"experiment.kind={kind}", "posterior.particles=2", "fit.epochs=1", "posterior.outside=none")
    assert result["posterior"]["particles"] == 2
    assert result["posterior"]["map"]["params"] == result["params"]
    assert result["posterior"]["own_ranks"] == {}
    assert result["ranks"] == result["max_ranks"]


def test_all_kinds_have_the_same_number_of_epochs() -> None:
    low = fit_settings(toml.named("cifar10-cnn", "default", []))
    for kind in ("dense", "tensorized"):
        other = fit_settings(toml.named("cifar10-cnn", "default", [f"experiment.kind={kind}"]))
        assert (other.epochs, other.finetune_epochs) == (low.epochs + low.finetune_epochs, 0)
        assert (other.lr, other.batch_size, other.schedule) == (low.lr, low.batch_size, low.schedule)


def test_a_dense_network_resumes_in_the_same_bits(tmp_path: Path) -> None:
    config, options = settings(finetune_epochs=0), {"search": False, "augment": jitter}
    whole, model = dense(), dense()
    bt.fit(whole, TRAIN, None, config, **options)
    with pytest.raises(Interrupted):
        bt.fit(dense(), TRAIN, None, config, folder=tmp_path, progress=StopAfter(2), **options)
    bt.fit(model, TRAIN, None, config, folder=tmp_path, resume=True, **options)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_without_a_search_the_prior_is_one_normal_for_all_weights() -> None:
    loose, tight = dense(), dense()
    bt.fit(loose, TRAIN, None, settings(epochs=3), search=False)
    bt.fit(tight, TRAIN, None, settings(epochs=3), search=False, prior=bt.PriorConfig(other_variance=1e-4, weight=5.0))
    size = [sum(float(p.detach().square().sum()) for p in model.parameters()) for model in (loose, tight)]
    assert size[1] < 0.5 * size[0]


def test_the_papers_rule_decides_by_lambda(tmp_path: Path) -> None:
    """A threshold above every lambda leaves rank 1 everywhere, one of zero leaves every rank."""
    none = run(tmp_path / "none", "fit.rule=lambda", "fit.round_tol=0.999999", "prior.b=50", "fit.compact_every=0")
    every = run(tmp_path / "every", "fit.rule=lambda", "fit.round_tol=0", "fit.compact_every=0")
    assert all(set(chain) == {1} for chain in none["ranks"].values())
    assert every["ranks"] == every["max_ranks"]


def test_a_target_of_another_kind_or_rule_is_refused() -> None:
    for other in ("experiment.kind=dense", "fit.rule=lambda"):
        with pytest.raises(ConfigError, match=r"fit\.target_ratio needs"):
            toml.named("mnist", "default", ["fit.target_ratio=30", other])


def test_scales_are_held_only_if_asked() -> None:
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 26 * 26, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    from bayestrain.train.subject import make_prior

    held = [make_prior(bt.PriorConfig(hold_scale=hold), model, 10, 1) for hold in (True, False)]
    assert [bool(prior.held) for prior in held if isinstance(prior, bt.RankPrior)] == [True, False]


def test_particles_around_a_point_have_a_rate_where_the_fine_tuning_has_none() -> None:
    overrides = ["posterior.particles=2", "posterior.start=jitter", "fit.target_ratio=20", "fit.finetune_lr=0"]
    config = toml.named("mnist-mini", "default", overrides)
    around = fit_settings(config)
    assert around.lr == pytest.approx(0.1 * config.fit.lr)
    assert (around.epochs, around.finetune_epochs, around.target_ratio) == (config.posterior.jitter_epochs, 0, 0.0)


@pytest.mark.parametrize("changes", [("experiment.kind=dense",), ("fit.rule=lambda", "prior.update=gradient")])
def test_seeds_of_every_kind_of_posterior_are_gathered(changes: tuple[str, ...], tmp_path: Path) -> None:
    sets = [word for change in (*SHORT, *changes) for word in ("--set", change)]
    tool = Path(__file__).parents[1] / "tools" / "run_seeds.py"
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    command = [
        sys.executable,
        str(tool),
        "mnist-mini",
        "--label",
        "x",
        "--seeds",
        "0",
        "--particles",
        "2",
        *folders,
        *sets,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "mnist-mini" / "x" / "summary.json").read_text())
    assert summary["failed"] == []
    assert "within_one_rank" not in summary
    assert summary["mean_log_likelihood"]["each"][0] < 0
