"""Training towards a size: cuts on the way, the end of the search, messages, resuming."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from fit_kit import StopAfter, jitter, settings
from torch import nn

import bayestrain as bt
from bayestrain import data
from bayestrain.errors import ConfigError, Interrupted
from bayestrain.target import dense_parameters
from bayestrain.train.progress import Silent
from bayestrain.train.schedule import learning_rate, wanted_ratio

WEAK = bt.PriorConfig(weight=0.01, warmup_epochs=1, align_every=4)
TRAIN = data.load("mnist-mini").train.subset(range(1000))


def rounded(model: nn.Module, tol: float) -> int:
    small = copy.deepcopy(model)
    bt.compact_(small, tol)
    return bt.count_parameters(small)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("particles", [0, 2])
def test_training_ends_at_the_ratio_it_was_given(particles: int, every: int) -> None:
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10))
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=12))
        return model

    config = settings(round_tol=1e-3, compact_tol=1e-3, compact_every=every, target_ratio=40.0)
    dense = 784 * 48 + 48 + 480 + 10
    if particles:
        found, result = bt.fit_posterior(bt.independent(build, particles), TRAIN, None, config, progress=Listener())
        size = found.parameters_each
        assert bool(result.own_ranks) == (not every)  # cut to one size on the way, none has ranks of its own
    else:
        torch.manual_seed(0)
        model = build()
        result = bt.fit(model, TRAIN, None, config, progress=Listener())
        size = bt.count_parameters(model)
    assert 0.7 * dense / 40 < size <= dense / 40  # an index of the first layer has 392 parameters
    assert result.spectra["change"] > 1e-3
    assert not any("no rank moved" in text for text in heard)
    assert any(
        f"cut to be {dense / size:.4g}x smaller: no cut for that changed a weight by more" in text for text in heard
    )


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=12))
    return model


def test_the_ratio_on_the_way_rises_by_the_same_factor() -> None:
    config = settings(epochs=22, compact_from=2.0, target_ratio=64.0)
    assert [wanted_ratio(config, epoch, 4.0) for epoch in (0, 2)] == [4.0, 4.0]
    rising = [wanted_ratio(config, epoch, 4.0) for epoch in (5, 6, 7)]
    assert rising[1] / rising[0] == pytest.approx(rising[2] / rising[1])
    assert rising[1] / rising[0] > 1
    assert [wanted_ratio(config, epoch, 4.0) for epoch in (17.6, 22)] == pytest.approx([64.0, 64.0])
    starts = [1 + k / 7 for k in range(200)]
    assert {wanted_ratio(config, 20, start) for start in starts} == {64.0}  # not a rounding error less


def test_ranks_fall_little_by_little_towards_a_target() -> None:
    config = settings(epochs=10, compact_from=1, compact_tol=1e-3, round_tol=1e-3, finetune_epochs=0)
    sizes = {}
    for target in (0.0, 25.0):
        model = perceptron()
        result = bt.fit(model, TRAIN, None, dataclasses.replace(config, target_ratio=target), prior=WEAK)
        sizes[target] = [line["params"] for line in result.history]
    assert len(set(sizes[25.0])) > 3  # cut several times before the end
    assert sizes[25.0][-1] < 0.7 * sizes[0.0][-1]


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_run_with_a_target_resumes_in_the_same_bits(stop: int, tmp_path: Path) -> None:
    config = settings(epochs=4, round_tol=1e-3, compact_tol=1e-3, target_ratio=30.0, finetune_lr=0.0)
    whole, model = perceptron(), perceptron()
    expected = bt.fit(whole, TRAIN, None, config, prior=WEAK, augment=jitter)
    with pytest.raises(Interrupted):
        bt.fit(perceptron(), TRAIN, None, config, prior=WEAK, augment=jitter, folder=tmp_path, progress=StopAfter(stop))
    result = bt.fit(model, TRAIN, None, config, prior=WEAK, augment=jitter, folder=tmp_path, resume=True)
    assert result.spectra == expected.spectra
    assert bt.ranks(model) == bt.ranks(whole)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


STRONG = bt.PriorConfig(weight=3.0, warmup_epochs=1, align_every=4)
EARLY = {"epochs": 12, "compact_from": 2, "compact_every": 1, "finetune_epochs": 3, "finetune_lr": 0.0, "lr": 1e-2}


@pytest.mark.parametrize("particles", [0, 2])
def test_a_search_that_has_reached_its_target_is_over(particles: int) -> None:
    """A strong prior would go on far beyond it; the epochs that are left go into fine-tuning at just that size."""
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    config, dense = settings(**EARLY, target_ratio=20.0), 784 * 48 + 48 + 480 + 10
    free, model = perceptron(), perceptron()
    bt.fit(free, TRAIN, None, dataclasses.replace(config, target_ratio=0.0), prior=STRONG)
    assert bt.count_parameters(free) < 0.7 * dense / 20
    if particles:
        found, result = bt.fit_posterior(
            bt.independent(perceptron, particles), TRAIN, None, config, prior=STRONG, progress=Listener()
        )
        size = found.parameters_each
    else:
        result = bt.fit(model, TRAIN, None, config, prior=STRONG, progress=Listener())
        size = bt.count_parameters(model)
    assert 0.85 * dense / 20 < size <= dense / 20
    phases = [line["phase"] for line in result.history]
    started = phases.index("finetune")
    assert started < 12
    assert set(phases[:started]) == {"search"}
    assert set(phases[started:]) == {"finetune"}
    assert {line["params"] for line in result.history[started:]} == {size}
    assert any(f"the target was reached after {started - 1} epochs" in text for text in heard)
    assert set(result.spectra["layers"]) == {"1", "3"}


def test_ranks_that_are_nearly_empty_stay_where_the_target_has_room() -> None:
    """Any cut would take more than was asked for: here everything but the first few ranks is almost nothing."""
    model = perceptron()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 2:
                parameter.mul_(0.2 ** torch.arange(parameter.shape[-1]))
    dense = dense_parameters(model)
    assert rounded(model, 1e-2) < 0.6 * dense / 10
    config = settings(**{**EARLY, "epochs": 3, "lr": 1e-9}, compact_tol=1e-2, target_ratio=10.0)
    result = bt.fit(model, TRAIN, None, config, prior=WEAK)
    assert [line["phase"] for line in result.history[2:]] == ["search", *["finetune"] * 4]
    assert 0.85 * dense / 10 < bt.count_parameters(model) <= dense / 10


def test_fine_tuning_has_its_own_rate_from_the_end_of_the_search_on() -> None:
    config = settings(**{**EARLY, "finetune_lr": 4e-3}, target_ratio=20.0)
    result = bt.fit(perceptron(), TRAIN, None, config, prior=STRONG)
    tuned = [line["lr"] for line in result.history if line["phase"] == "finetune"]
    assert len(tuned) > 4
    assert tuned == sorted(tuned, reverse=True)
    assert 3e-3 < tuned[0] < 4e-3
    assert tuned[-1] < 1e-3
    assert learning_rate(config, 7.5, 5) == pytest.approx(2e-3 * (1 + math.cos(math.pi * 0.25)))


def test_a_target_that_all_ranks_meet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fit\.target_ratio 3 asks for nothing: .* is \d+\.\d+x smaller than dense"):
        bt.fit(perceptron(), TRAIN, None, settings(target_ratio=3.0))


@pytest.mark.parametrize("stop", [3, 6, 13])
def test_a_search_that_ended_early_resumes_in_the_same_bits(stop: int, tmp_path: Path) -> None:
    config = settings(**EARLY, target_ratio=20.0)
    whole, model = perceptron(), perceptron()
    result = bt.fit(whole, TRAIN, None, config, prior=STRONG, augment=jitter)
    assert result.history[12]["phase"] == "finetune"
    with pytest.raises(Interrupted):
        bt.fit(
            perceptron(), TRAIN, None, config, prior=STRONG, augment=jitter, folder=tmp_path, progress=StopAfter(stop)
        )
    bt.fit(model, TRAIN, None, config, prior=STRONG, augment=jitter, folder=tmp_path, resume=True)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_target_that_no_rank_can_reach_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"fit\.target_ratio 1000 is out of reach\. 38 parameters are too few"):
        bt.fit(perceptron(), TRAIN, None, settings(target_ratio=1000.0))


def test_a_target_without_a_rounding_is_refused() -> None:
    for options in ({"config": settings(target_ratio=10.0, rule="lambda")}, {"search": False}):
        chosen = {"config": settings(target_ratio=10.0), **options}
        with pytest.raises(ConfigError, match=r"needs a search for ranks and fit\.rule"):
            bt.fit(perceptron(), TRAIN, None, **chosen)


def test_a_target_is_met_where_nothing_is_small() -> None:
    """One epoch and no cut on the way: most goes at once, which is told."""
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    model = bt.models.mnist_mlp()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=20))
    config = settings(epochs=1, compact_every=0, finetune_epochs=0, target_ratio=500.0, lr=1e-4)
    result = bt.fit(model, TRAIN, None, config, prior=WEAK, progress=Listener())
    assert 500 <= dense_parameters(model) / bt.count_parameters(model) < 550
    assert result.spectra["change"] > 0.5
    assert any("no cut for that changed a weight by more than" in text for text in heard)
