"""Posteriors on disk."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from edits import edit
from safetensors.torch import load_file, save_file
from torch import nn

from bayestrain import Posterior, RankPrior, TensorizeConfig, load, save, tensorize_
from bayestrain.errors import ConfigError, DataError
from bayestrain.formats import FORMATS, Format
from bayestrain.posterior import Regression, around, independent
from bayestrain.prior import NormalPrior


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 24), nn.ReLU(),
        nn.Linear(24, 3),
    )  # fmt: skip


def tensorized(format: str | Format = "tt") -> nn.Sequential:
    model = dense()
    tensorize_(model, TensorizeConfig(max_rank=6, format=format), lambda _, name: name == "4")
    return model


def trained(
    build: Callable[[], nn.Module] = tensorized, likelihood: str = "classification"
) -> tuple[Posterior, torch.Tensor]:
    posterior = Posterior(independent(build, 3), 50, likelihood=likelihood)
    x = torch.randn(20, 1, 8, 8)
    y = torch.randint(0, 3, (20,)) if likelihood == "classification" else torch.randn(20, 3)
    for _ in range(4):
        posterior.step(x, y)
    posterior.compact_(0.3)
    posterior.fix_ranks_()
    return posterior, x


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_posterior_comes_back_with_the_same_predictions(tmp_path: Path, format: Format) -> None:
    posterior, x = trained(lambda: tensorized(format))
    posterior.calibrate_(x, torch.arange(20) % 3)
    save(posterior, tmp_path / "new", {"note": "mine"})
    loaded = load(tmp_path / "new", dense())
    assert len(loaded) == 3
    assert loaded.ranks == posterior.ranks
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    with torch.no_grad():
        assert torch.equal(loaded.particle(1)(x), posterior.particle(1)(x))
    about = json.loads((tmp_path / "new" / "model.json").read_text())
    assert (about["kind"], about["particles"], about["note"]) == ("posterior", 3, "mine")
    again = load(tmp_path / "new" / "posterior.safetensors", tensorized(format))
    assert torch.equal(again.outputs(x), loaded.outputs(x))
    save(loaded, tmp_path / "again")  # what was loaded can be saved
    assert torch.equal(load(tmp_path / "again", dense()).outputs(x), loaded.outputs(x))


def test_noise_and_buffers_come_back(tmp_path: Path) -> None:
    posterior, x = trained(likelihood="regression")
    save(posterior, tmp_path)
    assert torch.equal(load(tmp_path, dense()).predict(x).total, posterior.predict(x).total)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    model.register_buffer("ones", torch.ones(3), persistent=False)
    posterior = Posterior(around(model, 2), 50)
    save(posterior, tmp_path)
    assert torch.equal(load(tmp_path, model).outputs(x), posterior.outputs(x))


@pytest.mark.parametrize("where", ["0", "4"])
def test_frozen_parameters_are_saved_once(tmp_path: Path, where: str) -> None:
    first = tensorized().double()
    first.get_submodule(where).requires_grad_(False)

    def build() -> nn.Module:
        model = copy.deepcopy(first)
        nn.init.normal_(model.get_parameter("6.weight"))
        return model

    posterior = Posterior([build(), build()], 50)
    posterior.fix_ranks_()
    save(posterior, tmp_path)
    tensors = load_file(tmp_path / "posterior.safetensors")
    for name, parameter in first.get_submodule(where).named_parameters():
        assert tensors[f"model.{where}.{name}"].shape == parameter.shape
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)  # and the types of the file win
    loaded = load(tmp_path, dense())
    assert torch.equal(loaded.outputs(x), posterior.outputs(x))
    with torch.no_grad():
        assert torch.equal(loaded.particle(1)(x), posterior.particle(1)(x))


def test_lambda_is_not_saved(tmp_path: Path) -> None:
    model = tensorized()
    RankPrior(model, 50)  # not removed
    posterior = Posterior(around(model, 2), 50, prior=lambda network: NormalPrior(network, 50))
    with pytest.raises(ConfigError, match=r"still carries lambda.*fix_ranks_"):
        save(posterior, tmp_path)
    posterior.fix_ranks_()
    save(posterior, tmp_path)
    assert len(load(tmp_path, dense())) == 2


@pytest.mark.parametrize("wrong", [0, 2, "3", [3]])
def test_another_number_of_particles_is_refused(tmp_path: Path, wrong: object) -> None:
    save(trained()[0], tmp_path)
    edit(tmp_path / "model.json", particles=wrong)
    with pytest.raises(DataError, match=r"does not hold|describes no saved model"):
        load(tmp_path, dense())


def test_a_likelihood_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    posterior = Posterior(independent(dense, 2), 50, likelihood=lambda outputs, y: -(outputs - y).square().sum(1))
    save(posterior, tmp_path)
    with pytest.raises(ConfigError, match=r"names no likelihood.*likelihood="):
        load(tmp_path, dense())
    assert len(load(tmp_path, dense(), Regression(noise=1.0))) == 2
    for wrong in ({"kind": "classification", "temperature": -1}, {"kind": "regression", "noise": "much"}):
        edit(tmp_path / "model.json", likelihood=wrong)
        with pytest.raises(DataError, match="describes no saved model"):
            load(tmp_path, dense())


def test_a_model_over_a_posterior_replaces_it_and_the_other_way_round(tmp_path: Path) -> None:
    posterior, x = trained()
    for _ in range(2):
        save(posterior, tmp_path)
        assert {own.name for own in tmp_path.iterdir()} == {"posterior.safetensors", "model.json", "README.md"}
        again = load(tmp_path)  # without its network
        assert (len(again), again.ranks) == (3, posterior.ranks)
        for name in ("mean", "total", "epistemic"):
            assert torch.equal(getattr(again.predict(x), name), getattr(posterior.predict(x), name))
        save(posterior.particle(0), tmp_path)
        assert {own.name for own in tmp_path.iterdir()} == {"model.safetensors", "model.json", "README.md"}
        assert torch.equal(load(tmp_path)(x), posterior.particle(0).eval()(x))
    save_file({"weight": torch.zeros(3)}, tmp_path / "posterior.safetensors")  # another program's
    save(posterior.particle(1), tmp_path)
    assert (tmp_path / "posterior.safetensors").exists()
