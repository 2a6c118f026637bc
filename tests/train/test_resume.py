"""Checkpoints: a run that was stopped and resumed ends in the very same bits. trust/test_faults.py kills runs."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_kit import HELD_OUT, TRAIN, Listener, StopAfter, assert_resumes, assert_same, network, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bayestrain.errors import ConfigError, DataError, Interrupted, TrainingError
from bayestrain.nn import TensorizeConfig, count_parameters, tensorize_
from bayestrain.train import PriorConfig, RunFolder
from bayestrain.train.folder import FORMAT

CHECKPOINT, PREVIOUS = "checkpoint.pt", "checkpoint-previous.pt"


class Noisy(Dataset[Any]):
    """Augments with the random numbers of Python and of NumPy."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> Any:
        return TRAIN[0][index] + 0.1 * random.random() + 0.1 * np.random.rand(), TRAIN[1][index]


def loader(data: Any, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(data, batch_size=100, shuffle=True, **{name: make() for name, make in options.items()})


CASES: dict[str, dict[str, Any]] = {
    "loader": {"data": loader(TensorDataset(*TRAIN))},
    "own generator": {"data": loader(TensorDataset(*TRAIN), generator=lambda: torch.Generator().manual_seed(7))},
    "augmented": {"data": loader(Noisy())},
    "half": {"precision": "fp16"}, "accumulated": {"accumulate": 2, "clip_norm": 0.5}, "fixed": {"search": False},
}  # fmt: skip


@pytest.mark.parametrize("stop", [0, 2, 4, 5])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_interrupted_and_resumed_is_bit_identical(stop: int, optimizer: str, tmp_path: Path) -> None:
    result = assert_resumes(partial(network, norm=True), tmp_path, stop, optimizer=optimizer, validation=HELD_OUT)
    assert len({record["parameters"] for record in result.history}) > 2  # cores really change their shapes


@pytest.mark.parametrize("case", CASES)
def test_data_and_every_state_of_the_loop_are_resumed(case: str, tmp_path: Path) -> None:
    assert_resumes(network, tmp_path, 2, **CASES[case])


def test_an_interrupted_or_finished_network_is_resumed_and_ctrl_c_needs_a_folder(tmp_path: Path) -> None:
    """As in a notebook, where it has been cut already."""
    whole, model = network(), network()
    train(whole)
    with pytest.raises(Interrupted):
        train(model, folder=tmp_path, callbacks=[StopAfter(5)])
    assert count_parameters(model) < count_parameters(network())
    for _ in range(2):
        result = train(model, folder=tmp_path, resume=True)
        assert_same(model, whole)
        assert len(result.history) == 7
    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[StopAfter(1)])


def test_checkpoints_now_and_then_lose_only_the_epochs_since(tmp_path: Path) -> None:
    whole, model, heard = network(), network(), Listener()
    train(whole, checkpoint_every=3)
    with pytest.raises(Interrupted, match="epoch 0"):
        train(network(), folder=tmp_path, callbacks=[StopAfter(2)], checkpoint_every=3)
    result = train(model, folder=tmp_path, resume=True, checkpoint_every=2, callbacks=[heard])  # may be another
    assert heard.calls[1] == "epoch 1"
    assert [record["epoch"] for record in result.history] == list(range(7))
    assert_same(model, whole)


def test_a_folder_is_resumed_with_the_same_settings_and_never_overwritten(tmp_path: Path) -> None:
    train(folder=tmp_path, epochs=1, finetune_epochs=1)
    checkpoint, fresh = (tmp_path / CHECKPOINT).read_bytes(), network()
    same: dict[str, Any] = {"epochs": 1, "finetune_epochs": 1, "folder": tmp_path}
    with pytest.raises(ConfigError, match="already holds a run"):
        train(fresh, **same)
    for changes, message in (
        ({"lr": 1e-4}, r"fit\.lr was 0\.01, now 0\.0001"),
        ({"seed": 3}, "seed was 0, now 3"),
        ({"prior": PriorConfig(weight=0.5)}, r"prior\.weight was 1\.0, now 0\.5"),
        ({"prior": False}, r"prior\.a was 1\.0, now null"),
        ({"data": tuple(t[:500] for t in TRAIN)}, "num_data was 600, now 500"),
        ({"model": [network(), network()]}, r"posterior\.particles was 1, now 2"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be resumed with other settings: .*{message}"):
            train(**{"model": fresh, **same, "resume": True, **changes})
    with pytest.raises(TrainingError, match="nothing to resume"):
        train(fresh, folder=tmp_path / "mistyped", resume=True)
    assert not (tmp_path / "mistyped").exists()
    assert (tmp_path / CHECKPOINT).read_bytes() == checkpoint
    assert_same(fresh, network())


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path: Path) -> None:
    whole, model, heard = network(), network(), Listener()
    train(whole)
    with pytest.raises(Interrupted):
        train(network(), folder=tmp_path, callbacks=[StopAfter(3)])
    data = bytearray((tmp_path / CHECKPOINT).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / CHECKPOINT).write_bytes(data)
    result = train(model, folder=tmp_path, resume=True, callbacks=[heard])
    told = f"{tmp_path / CHECKPOINT} is damaged: its checksum does not match. Resuming from {tmp_path / PREVIOUS}."
    assert heard.messages[0] == told
    assert heard.calls[:3] == ["start", "cut", "epoch 3"]
    assert [record["epoch"] for record in result.history] == list(range(7))
    assert_same(model, whole)


@pytest.mark.parametrize("length", [0, 10, 64, 65, 1000, -1])
def test_a_checkpoint_cut_short_is_never_resumed(length: int, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(folder=tmp_path, callbacks=[StopAfter(2)])
    whole = (tmp_path / CHECKPOINT).read_bytes()
    assert len(whole) > 1000
    for name in (CHECKPOINT, PREVIOUS):
        (tmp_path / name).write_bytes(whole[:length])
    with pytest.raises(TrainingError, match=rf"{CHECKPOINT} .*{PREVIOUS}.*checksum does not match.*[Oo]verwrite"):
        train(folder=tmp_path, resume=True)


def test_checkpoints_of_another_version_or_kind_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("bayestrain.train.folder.FORMAT", FORMAT + 1)
        train(folder=tmp_path / "other", epochs=1)
    with pytest.raises(TrainingError, match="another version"):
        train(folder=tmp_path / "other", epochs=1, resume=True)
    train(folder=tmp_path, epochs=1, finetune_epochs=1)
    again: dict[str, Any] = {"epochs": 1, "finetune_epochs": 1, "folder": tmp_path, "resume": True}
    other = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    tensorize_(other, TensorizeConfig(max_rank=4))
    with pytest.raises(DataError, match=rf"(?s){tmp_path / CHECKPOINT} is damaged or .*Resume with the same"):
        train(other, **again)
    with RunFolder(tmp_path, resume=True) as folder:
        good, _ = folder.load_checkpoint()
        for forged in ({}, {"settings": 5}, {**good, "subject": None}, {**good, "random": {}}):
            folder.save_checkpoint(forged)
            with pytest.raises((DataError, TrainingError), match=f"{CHECKPOINT} (is damaged|was written by)"):
                train(**{**again, "folder": folder})


def test_a_step_that_breaks_the_weights_is_never_saved(tmp_path: Path) -> None:
    """The loss of an epoch's last step is finite, but the step itself leaves the numbers."""
    with pytest.raises(TrainingError, match=rf"epoch 1.*The checkpoint of epoch 0 is in {tmp_path}"):
        train(folder=tmp_path, batch_size=600, lr=1e30, optimizer="sgd")
    with RunFolder(tmp_path, resume=True) as folder:
        saved, _ = folder.load_checkpoint()
    assert saved["epoch"] == 0
    assert all(torch.isfinite(value).all() for value in saved["subject"]["template"].values())
    for line in (tmp_path / "history.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
