"""`bt.fit` in a program: exact resumption, divergence, logs, and what a user may leave out."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_kit import StopAfter, jitter, settings
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data
from bayestrain.errors import ConfigError, Interrupted, TrainingError
from bayestrain.train import toml
from bayestrain.train.checkpoint import History, load_checkpoint, save_checkpoint
from bayestrain.train.config import differences
from bayestrain.train.experiment import run_experiment
from bayestrain.train.metrics import check_labels, evaluator
from bayestrain.train.progress import Silent
from bayestrain.train.schedule import learning_rate

DIGITS = data.load("mnist-mini")
TRAIN = DIGITS.train.subset(range(1000))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Dropout(0.1), nn.Linear(625, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8))
    return model


@pytest.mark.parametrize("stop", [0, 2, 4, 5])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_interrupted_and_resumed_is_bit_identical(stop: int, optimizer: str, tmp_path: Path) -> None:
    config = settings(optimizer=optimizer, lr=1e-3 if optimizer == "sgd" else 1e-2)
    prior = bt.PriorConfig(warmup_epochs=1, align_every=4)
    whole = network()
    expected = bt.fit(whole, TRAIN, None, config, prior=prior, augment=jitter)

    with pytest.raises(Interrupted, match=f"epoch {stop}") as stopped:
        bt.fit(network(), TRAIN, None, config, prior=prior, augment=jitter, folder=tmp_path, progress=StopAfter(stop))
    assert stopped.value.folder == str(tmp_path)
    torch.rand(7)  # another program's use of the global generator does not matter
    model = network()
    result = bt.fit(model, TRAIN, None, config, prior=prior, augment=jitter, folder=tmp_path, resume=True)

    assert bt.ranks(model) == bt.ranks(whole)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    strip = [{k: v for k, v in line.items() if k != "seconds"} for line in result.history]
    assert strip == [{k: v for k, v in line.items() if k != "seconds"} for line in expected.history]
    on_disk = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in on_disk] == list(range(7))
    lambdas = [value for line in on_disk for bonds in line["lambdas"].values() for bond in bonds for value in bond]
    assert lambdas
    assert all(float(f"{value:.5g}") == value for value in lambdas)


def test_a_run_that_prepares_blocks_of_batches_resumes_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.Images, "batches", partialmethod(data.Images.batches, block=3))  # as a GPU does
    whole, model = network(), network()
    bt.fit(whole, TRAIN, None, settings(), augment=jitter)
    with pytest.raises(Interrupted):
        bt.fit(network(), TRAIN, None, settings(), augment=jitter, folder=tmp_path, progress=StopAfter(2))
    bt.fit(model, TRAIN, None, settings(), augment=jitter, folder=tmp_path, resume=True)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_checkpoint_of_another_kind_of_device_goes_on_and_says_so(tmp_path: Path) -> None:
    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    heard: list[str] = []
    config = settings(epochs=2, finetune_epochs=1)
    with pytest.raises(Interrupted):
        bt.fit(network(), TRAIN, None, config, augment=jitter, folder=tmp_path, progress=StopAfter(1))
    state = load_checkpoint(tmp_path)
    state["noise"] = torch.zeros(16, dtype=torch.uint8)  # that is how long it is on a GPU
    for group in state["subject"]["optimizer"]["param_groups"]:
        group |= {"capturable": True, "fused": True, "lr": torch.tensor(group["lr"])}
    save_checkpoint(tmp_path, state)
    result = bt.fit(network(), TRAIN, None, config, augment=jitter, folder=tmp_path, resume=True, progress=Listener())
    assert [line["epoch"] for line in result.history] == [0, 1, 2, 3]
    assert any("another kind of device" in text for text in heard)


def test_training_gets_smaller_and_ends_without_lambda(tmp_path: Path) -> None:
    model = network()
    evaluate = evaluator(DIGITS.test, lambda x: x, "cpu")
    result = bt.fit(model, TRAIN, evaluate, settings(), folder=tmp_path)
    params = [line["params"] for line in result.history]
    assert params == sorted(params, reverse=True)
    assert params[-1] < params[0]
    assert result.history[-1]["validation"]["accuracy"] > 0.5
    assert not any("lambda" in key for key in model.state_dict())
    assert set(result.spectra["layers"]) == set(bt.ranks(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"clip_norm": 0.05},
        {"optimizer": "adamw", "weight_decay": 0.01},
        {"lr_warmup_epochs": 2.0},
    ],
    ids=str,
)
def test_every_option_of_the_loop_trains_and_makes_a_difference(changes: dict[str, Any]) -> None:
    plain, other = network(), network()
    short = {"epochs": 3, "finetune_epochs": 0, "compact_every": 0}
    bt.fit(plain, TRAIN, None, settings(**short))
    result = bt.fit(other, TRAIN, None, settings(**short, **changes))
    losses = [line["train_loss"] for line in result.history[1:]]
    assert losses[-1] < losses[0]
    assert not torch.equal(plain[1].cores[0], other[1].cores[0])


def test_a_loss_that_is_not_finite_stops_with_a_diagnosis(tmp_path: Path) -> None:
    calls = 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(outputs, labels)
        return value * math.nan if calls == 25 else value

    with pytest.raises(TrainingError, match=r"not finite at epoch 3.*data loss is nan.*last good checkpoint.*fit\.lr"):
        bt.fit(network(), TRAIN, None, settings(), loss=loss, folder=tmp_path)
    assert load_checkpoint(tmp_path)["epoch"] == 2


def test_a_step_that_breaks_the_weights_is_never_saved(tmp_path: Path) -> None:
    """The loss of an epoch's last step is finite, but the step itself leaves the numbers."""
    with pytest.raises(TrainingError, match=r"not finite at epoch 1"):
        bt.fit(network(), TRAIN, None, settings(batch_size=1000, lr=1e30, compact_every=0), folder=tmp_path)
    saved = load_checkpoint(tmp_path)
    assert saved["epoch"] == 0
    assert all(torch.isfinite(value).all() for value in saved["subject"]["model"].values())
    for line in (tmp_path / "history.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_tensorboard_logs_are_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bt.fit(network(), TRAIN, None, settings(epochs=2, finetune_epochs=0, tensorboard=True), folder=tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "params" in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2]


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="nothing to resume"):
        load_checkpoint(tmp_path)
    (tmp_path / "checkpoint-last.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match="damaged"):
        load_checkpoint(tmp_path)
    torch.save({"format": 99}, tmp_path / "checkpoint-last.pt")
    with pytest.raises(TrainingError, match="not a checkpoint of this version"):
        load_checkpoint(tmp_path)


def test_a_half_written_line_of_history_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n{"epoch": 2}\n{"epo')
    assert [line["epoch"] for line in History(tmp_path, until_epoch=1).lines] == [0, 1]
    assert (tmp_path / "history.jsonl").read_text() == '{"epoch": 0}\n{"epoch": 1}\n'


def test_rates_follow_their_schedules() -> None:
    cosine = settings(epochs=10, lr=1.0, lr_warmup_epochs=2, finetune_epochs=0)
    assert learning_rate(cosine, 0) == 0.0
    assert learning_rate(cosine, 1) == pytest.approx(0.5 * 0.5 * (1 + math.cos(math.pi * 0.1)))
    assert learning_rate(cosine, 10) == pytest.approx(0.0)
    step = settings(epochs=10, lr=1.0, schedule="step", milestones=(0.5, 0.75), gamma=0.1)
    assert [learning_rate(step, epoch) for epoch in (0, 4.9, 5, 7.5)] == pytest.approx([1.0, 1.0, 0.1, 0.01])
    tuned = settings(epochs=10, finetune_lr=0.2, finetune_epochs=4)
    assert [learning_rate(tuned, epoch) for epoch in (10, 12, 14)] == pytest.approx([0.2, 0.1, 0.0])
    through = settings(epochs=10, lr=0.5, finetune_lr=0.0, finetune_epochs=10)
    assert [learning_rate(through, epoch) for epoch in (0, 10, 20)] == pytest.approx([0.5, 0.25, 0.0])


@pytest.mark.parametrize(("name", "preset"), [(n, p) for n in toml.names() for p in toml.presets(n)])
def test_every_shipped_config_trains_two_steps(name: str, preset: str) -> None:
    """The network, modes, prior and optimiser of each config, on real images of the right shape."""
    from bayestrain import models
    from bayestrain.train.experiment import tensorize

    config = toml.named(name, preset)
    model = models.BUILDERS[config.experiment.model]()
    tensorize(model, config.tensorize)
    images = DIGITS.train.images[:4]
    if "cifar" in config.data.name:
        images = nn.functional.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()
    few = data.Images(images, DIGITS.train.labels[:4])
    fit = config.replace("fit", epochs=1, batch_size=2, finetune_epochs=0, lr_warmup_epochs=0.0).fit
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = bt.fit(model, few, None, fit, prior=config.prior)
    assert math.isfinite(result.history[-1]["train_loss"])
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_without_held_out_images_there_is_no_temperature(tmp_path: Path) -> None:
    changes = ["fit.epochs=1", "fit.finetune_epochs=0", "fit.batch_size=1000", "data.validation_fraction=0"]
    config = toml.named("mnist-mini", "default", changes)
    result = run_experiment(config, tmp_path / "run", device="cpu", resume=False, progress=Silent(), command="test")
    assert (result.summary["calibrated"], result.summary["validation"]) == (None, None)
    assert "temperature" not in json.loads((tmp_path / "run" / "model.json").read_text())


def test_a_run_folder_holds_everything(tmp_path: Path) -> None:
    config = toml.named("mnist-mini", "default", ["fit.epochs=1", "fit.finetune_epochs=0", "fit.batch_size=1000"])
    result = run_experiment(config, tmp_path / "run", device="cpu", resume=False, progress=Silent(), command="test")
    wanted = {
        "experiment", "preset", "kind", "seed", "dense_params", "params", "ratio", "ranks", "accuracy",
        "log_likelihood", "ece", "seconds", "peak_memory_bytes",
    }  # fmt: skip
    assert wanted <= set(result.summary)
    assert result.summary["dense_params"] == 496_885
    model = bt.load_model(tmp_path / "run")
    assert bt.count_parameters(model) == result.summary["params"]
    with torch.no_grad():
        right = (model(DIGITS.test.images.float() / 255).argmax(1) == DIGITS.test.labels).double().mean()
    assert float(right) == pytest.approx(result.summary["accuracy"])
    suited = result.summary["calibrated"]
    assert suited["accuracy"] == result.summary["accuracy"]
    assert suited["log_likelihood"] != result.summary["log_likelihood"]
    with pytest.raises(bt.BayesTrainError, match="already holds a run"):
        run_experiment(config, tmp_path / "run", device="cpu", resume=False, progress=Silent(), command="test")
    other = config.replace("fit", lr=0.5)
    with pytest.raises(bt.BayesTrainError, match=r"another config \(fit.lr"):
        run_experiment(other, tmp_path / "run", device="cpu", resume=True, progress=Silent(), command="test")
    moved = config.replace("fit", checkpoint_every=9, tensorboard=True).replace("data", folder=str(tmp_path))
    assert differences(config, moved) == []  # none of which changes what is trained
    assert differences(config, moved.replace("fit", lr=0.5)) == [f"fit.lr: {config.fit.lr}, now 0.5"]


def test_labels_that_are_no_class_are_refused_before_a_step_and_left_to_other_losses() -> None:
    labels = TRAIN.labels.clone()
    labels[900] = 10
    images = data.Images(TRAIN.images, labels)
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="between 0 and 9, got 0 to 10"):
        bt.fit(model, images, None, settings())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def parity(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y % 2)

    with pytest.raises(ConfigError, match="no training images"):
        bt.fit(model, TRAIN.subset([]), None, settings())
    assert len(bt.fit(model, images, None, settings(epochs=1, finetune_epochs=0), loss=parity).history) == 2
    with pytest.raises(ConfigError, match="between 0 and 9, got 0 to 10"):
        bt.fit_posterior([network(), network()], images, None, settings())


class Squeezed(nn.Module):
    """One output, whose last dimension is taken off: fine for every batch but one of a single image."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = bt.TTLinear(784, 10, max_rank=4)
        self.norm = nn.BatchNorm1d(10, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x.flatten(1)))[None].squeeze()


def test_looking_at_labels_refuses_no_network_that_can_train() -> None:
    labels = TRAIN.labels.clone()
    labels[::7] = -100  # which cross_entropy passes over
    short = settings(epochs=1, finetune_epochs=0)
    for model, config in ((Squeezed(), short), (network().bfloat16(), dataclasses.replace(short, precision="bf16"))):
        result = bt.fit(model, data.Images(TRAIN.images, labels), None, config)
        assert math.isfinite(result.history[-1]["train_loss"])
    nothing = data.Images(TRAIN.images, torch.full_like(labels, -100))
    check_labels(network(), nothing.images[:8] / 255, nothing.labels)
    posterior, _ = bt.fit_posterior(iter([network(), network()]), TRAIN, None, short)  # type: ignore[arg-type]
    assert len(posterior) == 2


def test_a_last_batch_of_one_image_is_left_out() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
        return model

    model = build()
    bt.fit(model, TRAIN.subset(range(101)), None, settings(batch_size=50))
    assert int(model.get_buffer("2.num_batches_tracked")) == 2 * 6
    posterior, result = bt.fit_posterior(bt.independent(build, 2), TRAIN.subset(range(101)), None, settings())
    assert len(posterior) == 2
    assert math.isfinite(result.history[-1]["train_loss"])


def test_metrics_may_be_numpys_or_tensors_and_the_folder_a_text(tmp_path: Path) -> None:
    def measured(_: nn.Module) -> dict[str, Any]:
        return {"one": np.float32(0.5), "two": torch.tensor(0.25)}

    bt.fit(network(), TRAIN, measured, settings(epochs=1), folder=str(tmp_path / "new" / "run"))
    last = json.loads((tmp_path / "new" / "run" / "history.jsonl").read_text().splitlines()[-1])
    assert last["validation"] == {"one": 0.5, "two": 0.25}


def test_tf32_is_told_to_be_for_a_gpu() -> None:
    heard: list[str] = []

    class Listen(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    bt.fit(network(), TRAIN, None, settings(epochs=1, finetune_epochs=0, precision="tf32"), progress=Listen())
    assert any("tf32 is for a GPU" in text for text in heard)


def test_any_metrics_may_be_measured(tmp_path: Path) -> None:
    def measured(model: nn.Module) -> dict[str, float]:
        return {"size": float(bt.count_parameters(model))}

    history = bt.fit(network(), TRAIN, measured, settings(), folder=tmp_path).history
    assert [line["validation"]["size"] for line in history] == [line["params"] for line in history]


def test_what_needs_a_folder_asks_for_one() -> None:
    for options in ({"resume": True}, {"config": settings(tensorboard=True)}):
        with pytest.raises(ConfigError, match="need the folder of a run"):
            bt.fit(network(), TRAIN, None, options.pop("config", settings()), **options)
