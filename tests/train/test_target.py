"""Training to a budget: a size or an accuracy; cuts on the way, the end of the search, messages, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fit_kit import HELD_OUT, Listener, assert_resumes, classes, train, wide

from bayestrain.errors import ConfigError
from bayestrain.nn import count_parameters, dense_parameters, ranks
from bayestrain.train import FitConfig, PriorConfig
from bayestrain.train.loop import learning_rate
from bayestrain.train.search import wanted_parameters

WEAK, STRONG = PriorConfig(weight=0.01, warmup_epochs=1), PriorConfig(weight=3.0, warmup_epochs=1, align_every=4)
SLOW: dict[str, Any] = {"prior": WEAK, "compact_tol": 1e-3, "round_tol": 1e-3}
FLOOR: dict[str, Any] = {
    "validation": HELD_OUT, "prior": WEAK, "epochs": 16, "lr": 3e-2, "compact_tol": 1e-3, "round_tol": 1e-3,
    "compact_from": 3, "compact_every": 1, "finetune_epochs": 3,
}  # fmt: skip
DENSE = dense_parameters(wide())


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("target", [{"target_ratio": 8.0}, {"target_parameters": DENSE // 8}], ids=str)
def test_training_ends_at_the_size_it_was_given(target: dict[str, Any], every: int) -> None:
    model, heard = wide(), Listener()
    result = train(model, **SLOW, **target, epochs=6, compact_every=every, callbacks=[heard])
    size = count_parameters(model)
    assert len({record["parameters"] for record in result.history}) > 3 * every  # little by little
    assert 0.8 * DENSE / 8 < size <= DENSE / 8
    assert not any("no rank moved" in text for text in heard.messages)


def test_sizes_and_rates_follow_their_schedules() -> None:
    config = FitConfig(epochs=22, compact_from=2.0)
    assert [wanted_parameters(config, epoch, 6400, 100) for epoch in (0, 2)] == [6400, 6400]
    falling = [wanted_parameters(config, epoch, 64_000, 1000) for epoch in (5, 6, 7)]
    assert falling[1] / falling[0] == pytest.approx(falling[2] / falling[1], rel=1e-3)
    assert falling[1] < falling[0]
    assert [wanted_parameters(config, epoch, 6400, 100) for epoch in (17.6, 22)] == [100, 100]
    cosine = FitConfig(epochs=10, lr=1.0, lr_warmup_epochs=2, finetune_epochs=0)
    assert [learning_rate(cosine, epoch) for epoch in (0, 5, 10)] == pytest.approx([0.0, 0.5, 0.0])
    assert learning_rate(cosine, 1) == pytest.approx(0.5 * learning_rate(FitConfig(epochs=10, lr=1.0), 1))
    step = FitConfig(epochs=10, lr=1.0, schedule="step", milestones=(0.5, 0.75), gamma=0.1)
    assert [learning_rate(step, epoch) for epoch in (0, 4.9, 5, 7.5)] == pytest.approx([1.0, 1.0, 0.1, 0.01])
    assert learning_rate(FitConfig(epochs=10, lr=0.3, schedule="constant"), 7) == 0.3
    tuned = FitConfig(epochs=10, finetune_lr=0.2, finetune_epochs=4)
    assert [learning_rate(tuned, epoch) for epoch in (10, 12, 14)] == pytest.approx([0.2, 0.1, 0.0])
    assert learning_rate(tuned, 9, search_ended=4) == pytest.approx(0.1)
    through = FitConfig(epochs=10, lr=0.5, finetune_lr=0.0, finetune_epochs=10)
    assert [learning_rate(through, epoch) for epoch in (0, 10, 20)] == pytest.approx([0.5, 0.25, 0.0])


@pytest.mark.parametrize("finetune_lr", [0.0, 4e-3])
def test_a_search_that_has_reached_its_target_is_over(finetune_lr: float) -> None:
    """A strong prior would go far beyond it; the epochs that are left go into fine-tuning at just that size."""
    free, model, heard = wide(), wide(), Listener()
    options: dict[str, Any] = {"prior": STRONG, "epochs": 12, "compact_from": 2, "lr": 2e-2, "finetune_lr": finetune_lr}
    train(free, **options)
    assert count_parameters(free) < 0.8 * DENSE / 5
    result = train(model, **options, target_ratio=5.0, callbacks=[heard])
    size = count_parameters(model)
    assert 0.85 * DENSE / 5 < size <= DENSE / 5
    phases = [record["phase"] for record in result.history]
    started = phases.index("finetune")
    assert started < 12
    assert phases == ["search"] * started + ["finetune"] * (15 - started)
    assert {record["parameters"] for record in result.history[started:]} == {size}
    assert f"the search ended after {started - 1} epochs; the other {15 - started} are fine-tuning" in heard.messages
    rates = [record["lr"] for record in result.history[started:]]
    assert rates == sorted(rates, reverse=True)
    assert not finetune_lr or rates[0] < 4e-3 < result.history[started - 1]["lr"]


def test_empty_ranks_stay_where_the_target_has_room_for_them() -> None:
    model, smallest = wide(), wide()
    for one in (model, smallest):
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                if ".cores." in name:
                    parameter.mul_(0.05 ** torch.arange(parameter.shape[-1]))
    options: dict[str, Any] = {"prior": WEAK, "epochs": 3, "lr": 1e-9, "compact_tol": 0.02, "round_tol": 0.02}
    train(smallest, **options)
    assert count_parameters(smallest) < 0.6 * DENSE / 5
    result = train(model, **options, target_ratio=5.0)
    assert [record["phase"] for record in result.history] == ["search"] * 2 + ["finetune"] * 4
    assert 0.7 * DENSE / 5 < count_parameters(model) <= DENSE / 5


@pytest.mark.parametrize("stop", [3, 7])
@pytest.mark.parametrize("options", [{**SLOW, "target_ratio": 8.0}, {"prior": STRONG, "target_ratio": 4.0}], ids=str)
def test_a_run_with_a_target_resumes_in_the_same_bits(stop: int, options: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(wide, tmp_path, stop, **options, epochs=6, finetune_lr=0.0)


def test_the_smallest_network_that_holds_an_accuracy_is_found() -> None:
    sizes = {}
    for floor in (0.0, 0.8, 0.97):
        model, heard = wide(), Listener()
        result = train(model, **FLOOR, target_accuracy=floor, callbacks=[heard])
        sizes[floor] = count_parameters(model)
        if floor:
            (text,) = [text for text in heard.messages if text.startswith("the smallest network with")]
            held = [r["parameters"] for r in result.history[3:] if r["validation"]["accuracy"] >= floor]
            assert min(held) >= sizes[floor]
            assert result.validation["accuracy"] > floor - 0.03
    assert sizes[0.8] < 0.5 * sizes[0.0]
    assert sizes[0.8] < sizes[0.97]


def test_training_returns_to_the_last_good_size_when_accuracy_does_not_recover() -> None:
    """Here nothing can be learned after the first cut, so every later one is one too many."""
    model, heard = wide(), Listener()
    options = {**FLOOR, "epochs": 20, "lr": 3e-2, "schedule": "step", "milestones": (0.2,), "gamma": 1e-9}
    result = train(model, **options, target_accuracy=0.9, callbacks=[heard])
    assert result.validation["accuracy"] >= 0.9
    kept = count_parameters(model)
    sizes = [record["parameters"] for record in result.history]
    assert min(sizes) < kept  # it went too far, and came back
    (text,) = [text for text in heard.messages if text.startswith("the smallest network with")]
    assert text == f"the smallest network with validation accuracy 90 % has {kept:,} parameters"
    assert any("the search ended after" in text for text in heard.messages)


def test_accuracies_that_no_size_or_any_size_has() -> None:
    noise = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0))
    model, heard = wide(), Listener()
    before = count_parameters(model)
    options = {**FLOOR, "validation": (HELD_OUT[0], noise), "epochs": 8, "compact_tol": 0.0, "round_tol": 0.0}
    train(model, **options, target_accuracy=0.9, callbacks=[heard])
    assert any("no network had validation accuracy 90 %" in text for text in heard.messages)
    assert count_parameters(model) == before
    x, _ = classes(300)
    y = torch.zeros(300, dtype=torch.int64)
    model = wide()
    train(model, (x, y), **{**FLOOR, "validation": (x, y)}, target_accuracy=0.9)
    assert {rank for bonds in ranks(model).values() for rank in bonds} == {1}
    with pytest.raises(ConfigError, match="needs an accuracy among the metrics"):
        train(wide(), (x, x[:, :3]), (x, x[:, :3]), likelihood="regression", target_accuracy=0.9)


@pytest.mark.parametrize("stop", [8, 17])
def test_a_run_with_an_accuracy_resumes_in_the_same_bits(stop: int, tmp_path: Path) -> None:
    assert_resumes(wide, tmp_path, stop, **FLOOR, target_accuracy=0.93)
