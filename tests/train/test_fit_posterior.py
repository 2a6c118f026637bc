"""`fit` with several particles: the same loop, exact resuming, broken particles, what comes out."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fit_kit import HELD_OUT, TRAIN, Listener, assert_resumes, assert_same, network, tensors, train
from torch import nn

from bayestrain.errors import ConfigError, TrainingError
from bayestrain.nn import ranks
from bayestrain.posterior import RegressionPrediction, around, independent

build = partial(network, norm=True, max_rank=6, seed=None)


def posterior(**options: Any) -> Any:
    return train(build, **{"validation": HELD_OUT, "particles": 3, "lr": 3e-2, **options})


@pytest.mark.parametrize("method", ["svgd", "anchored", "ensemble", "sgld"])
def test_every_method_trains_and_its_ranks_shrink(method: str) -> None:
    heard = Listener()
    temperature = {"temperature": 1e-3} if method == "sgld" else {}
    result = posterior(method=method, clip_norm=1.0, callbacks=[heard], **temperature)
    losses = [record["train_loss"] for record in result.history[1:]]
    assert losses[-1] < losses[0]
    assert len(result.posterior) == heard.plan.particles == 3
    assert result.history[-1]["parameters"] < result.history[0]["parameters"]
    assert result.model is result.posterior.template
    assert [record["phase"] for record in result.history] == ["search"] * 5 + ["finetune"] * 2
    last = result.history[-1]
    assert last["particles"] == 3
    assert {"kernel_mass", "spread", "effective_particles"} <= last["diagnostics"].keys()
    assert last["validation"]["log_likelihood"] >= last["validation"]["mean_log_likelihood"]
    assert last["validation"]["accuracy"] > 0.7
    assert last["prior_weight"] == 1.0  # Normal, at fixed ranks


def test_more_options_of_a_posterior() -> None:
    plain, chunked = (posterior(chunk=chunk, epochs=1, finetune_epochs=0) for chunk in (3, 2))
    other = posterior(kernel="imq", optimizer="muon", precision="bf16")
    outputs = [each.posterior.outputs(HELD_OUT[0]) for each in (plain, chunked)]  # signs of rank indices are free
    torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)
    cores, rest = other.posterior.method.optimizer.param_groups
    assert (cores["orthogonal"], cores["stacked"], rest["orthogonal"]) == (True, True, False)
    named = {f"model.{name}" for name, _ in build().named_parameters() if ".cores." in name}
    assert set(cores["param_names"]) == named
    assert other.history[-1]["train_loss"] < other.history[1]["train_loss"]


@pytest.mark.parametrize("stop", [0, 2, 5])
@pytest.mark.parametrize("method", ["svgd", "sgld"])
def test_interrupted_and_resumed_is_bit_identical(method: str, stop: int, tmp_path: Path) -> None:
    assert_resumes(build, tmp_path, stop, particles=3, lr=3e-2, method=method, validation=HELD_OUT)


@pytest.mark.parametrize("every", [0, 1])
def test_a_posterior_trains_to_a_size(every: int) -> None:
    result = posterior(target_parameters=300, compact_every=every, compact_tol=1e-3, round_tol=1e-3, epochs=5)
    assert 240 < result.posterior.parameters_each <= 300
    exact = posterior(target_accuracy=0.5, epochs=8)
    assert exact.posterior.parameters_each < 500
    assert exact.validation["accuracy"] > 0.4


def test_fixed_ranks_stay_and_batch_norm_is_estimated_again() -> None:
    start = network()
    before = ranks(start)
    result = train(around(start, 3), search=False)
    assert result.posterior.ranks == before
    assert [record["phase"] for record in result.history] == ["train"] * 5
    result = posterior(lr=1.0, validation=None).posterior
    name = next(name for name in result.carried if name.endswith("running_mean"))
    found = result.carried[name].clone()
    result.refresh_statistics([TRAIN[0]])  # the same data in one batch have the same mean
    torch.testing.assert_close(found, result.carried[name], rtol=1e-4, atol=1e-4)


def test_other_networks_and_likelihoods_train(tmp_path: Path) -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    options = {"likelihood": "regression", "lr": 5e-2, "epochs": 30, "batch_size": 50, "folder": tmp_path}
    result = train(lambda: nn.Linear(4, 1), (x, y), (x, y), particles=4, **options)
    assert result.validation["rmse"] < 0.3
    assert isinstance(result.posterior.predict(x), RegressionPrediction)
    assert result.history[-1]["train_accuracy"] is None
    result = posterior(likelihood=lambda outputs, y: -F.cross_entropy(outputs, y, reduction="none"))
    assert result.validation["log_likelihood"] > -1
    assert result.history[-1]["train_loss"] < result.history[1]["train_loss"]


TOO_LARGE = 3e38  # finite, but its square is not


def test_a_particle_that_breaks_is_dropped_and_named(tmp_path: Path) -> None:
    heard = Listener()
    models = independent(build, 4)
    with torch.no_grad():
        models[1].get_parameter("4.bias").fill_(TOO_LARGE)
    result = train(models, folder=tmp_path, callbacks=[heard])
    assert len(result.posterior) == 3
    assert "particles [1] have values that are not finite and were dropped; 3 are left" in heard.messages
    assert result.history[-1]["particles"] == 3
    resumed = train(independent(build, 4), folder=tmp_path, resume=True)
    assert_same(tensors(resumed), tensors(result))
    with torch.no_grad():
        for model in models[1:]:
            model.get_parameter("4.bias").fill_(TOO_LARGE)
    with pytest.raises(TrainingError, match="not finite in 3 of 4 networks"):
        train(models)


def test_outputs_that_overflow_drop_a_particle_and_all_diverged_are_an_error() -> None:
    models = independent(build, 3)
    with torch.no_grad():
        for core in models[1].get_submodule("4").cores:
            core.mul_(1e18)
    result = train(models)
    assert len(result.posterior) == 2
    assert result.history[-1]["train_loss"] < result.history[1]["train_loss"]
    with pytest.raises(TrainingError):
        posterior(validation=None, lr=1e30, optimizer="sgd")


@pytest.mark.parametrize(("options", "message"), [
    ({"prior": False}, "prior=False is for one network, not for 3 particles"),
    ({"accumulate": 2}, r"fit\.accumulate is for one network.* Use chunk="),
    ({"precision": "fp16"}, r'"fp16" is for one network.* Use "bf16"'),
    ({"model": [network(), network()]}, "3 particles need as many networks, got 2"),
    ({"temperature": 0.5}, "svgd has no option 'temperature'"),
    ({"kernel": "imq", "method": "ensemble"}, "no option 'kernel'"),
    ({"method": "svdg"}, 'Did you mean "svgd"'),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(**{"model": build, "particles": 3, **options})
