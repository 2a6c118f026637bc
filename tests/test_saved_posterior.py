"""Posteriors on disk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayestrain as bt
from bayestrain.errors import ConfigError, DataError
from bayestrain.posterior import Posterior, independent


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 24), nn.ReLU(),
        nn.Linear(24, 3),
    )  # fmt: skip


def tensorized() -> nn.Module:
    model = dense()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6), lambda _, name: name == "4")
    return model


def trained(likelihood: bt.Likelihood | None = None) -> tuple[Posterior, torch.Tensor]:
    posterior = Posterior(independent(tensorized, 3), 50, likelihood=likelihood)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 1, 8, 8, generator=generator)
    y = torch.randint(0, 3, (20,), generator=generator) if likelihood is None else torch.randn(20, 3)
    for _ in range(4):
        posterior.step(x, y)
    posterior.compact_(0.3)
    posterior.fix_ranks_()
    return posterior, x


def test_a_posterior_comes_back_with_the_same_predictions(tmp_path: Path) -> None:
    posterior, x = trained()
    posterior.calibrate_(x, torch.arange(20) % 3)
    bt.save_posterior(posterior, str(tmp_path / "new"), {"note": "mine"})
    loaded = bt.load_posterior(str(tmp_path / "new"), dense())
    assert len(loaded) == 3
    assert loaded.ranks == posterior.ranks
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    one, other = loaded.particle(1), posterior.particle(1)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))
    description = json.loads((tmp_path / "new" / "model.json").read_text())
    assert description["particles"] == 3
    assert description["note"] == "mine"
    again = bt.load_posterior(tmp_path / "new" / "posterior.safetensors", dense())
    assert torch.equal(again.outputs(x), loaded.outputs(x))


def test_regression_and_shared_parameters_come_back(tmp_path: Path) -> None:
    posterior, x = trained(bt.Regression())
    bt.save_posterior(posterior, tmp_path, {})
    loaded = bt.load_posterior(tmp_path, dense())
    torch.testing.assert_close(loaded.predict(x).total, posterior.predict(x).total, rtol=0, atol=0)

    def frozen() -> nn.Module:
        torch.manual_seed(0)
        model = dense()
        model.get_submodule("0").requires_grad_(False)
        torch.seed()
        nn.init.normal_(model.get_parameter("6.weight"))
        return model

    shared = Posterior(independent(frozen, 2), 50)
    bt.save_posterior(shared, tmp_path, {})
    tensors = load_file(tmp_path / "posterior.safetensors")
    assert tensors["shared.model.0.weight"].shape == (4, 1, 3, 3)
    assert torch.equal(bt.load_posterior(tmp_path, dense()).outputs(x), shared.outputs(x))


def test_double_precision_comes_back(tmp_path: Path) -> None:
    def doubled() -> nn.Module:
        model = tensorized().double()
        torch.nn.init.constant_(model.get_parameter("6.bias"), 0.1).requires_grad_(False)
        return model

    posterior = Posterior(independent(doubled, 2), 50)
    posterior.fix_ranks_()
    bt.save_posterior(posterior, tmp_path, {})
    loaded = bt.load_posterior(tmp_path, dense())
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(loaded.outputs(x), posterior.outputs(x))
    with torch.no_grad():
        assert torch.equal(loaded.particle(1)(x), posterior.particle(1)(x))


def test_lambda_that_another_prior_left_goes_too(tmp_path: Path) -> None:
    model = tensorized()
    bt.RankPrior(model, 50)  # not removed
    posterior = Posterior(bt.around(model, 2), 50, prior=lambda network: bt.NormalPrior(network, 50))
    with pytest.raises(ConfigError, match=r"still carries lambda.*fix_ranks_"):
        bt.save_posterior(posterior, tmp_path)
    posterior.fix_ranks_()
    bt.save_posterior(posterior, tmp_path)
    assert len(bt.load_posterior(tmp_path, dense())) == 2


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    posterior, _ = trained()
    searching = Posterior(independent(tensorized, 2), 50)
    with pytest.raises(ConfigError, match=r"still carries lambda.*fix_ranks_"):
        bt.save_posterior(searching, tmp_path, {})
    assert not (tmp_path / "model.json").exists()
    bt.save_posterior(posterior, tmp_path, {})
    with pytest.raises(ConfigError, match=r"holds a posterior of 3 particles.*load_posterior"):
        bt.load_model(tmp_path, dense())
    with pytest.raises(ConfigError, match=r"names the network None.*Pass the dense network"):
        bt.load_posterior(tmp_path)
    tensors = load_file(tmp_path / "posterior.safetensors")
    tensors["model.6.bias"] = tensors["model.6.bias"][:2]
    save_file(tensors, tmp_path / "posterior.safetensors")
    with pytest.raises(DataError, match=r"model\.6\.bias needs shape \(3, 3\), there is shape \(2, 3\)"):
        bt.load_posterior(tmp_path, dense())
    (tmp_path / "posterior.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="missing or damaged"):
        bt.load_posterior(tmp_path, dense())
    single = tmp_path / "single"
    single.mkdir()
    bt.save_model(dense(), single, {})
    with pytest.raises(ConfigError, match=r"a single model, not a posterior.*load_model"):
        bt.load_posterior(single, dense())


def test_a_likelihood_of_ones_own_is_asked_for(tmp_path: Path) -> None:
    posterior = Posterior(independent(dense, 2), 50, likelihood=lambda outputs, y: -(outputs - y).square().sum(1))
    bt.save_posterior(posterior, tmp_path, {})
    with pytest.raises(ConfigError, match=r"names no likelihood.*likelihood="):
        bt.load_posterior(tmp_path, dense())
    assert len(bt.load_posterior(tmp_path, dense(), bt.Regression(noise=1.0))) == 2
