"""`fit` on a GPU: captured, in every precision, resumed, on another device. Left out where there is none."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import Interrupted
from bayestrain.nn.fast import fast

pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(__file__).parent / "train"))
from fit_kit import HELD_OUT, StopAfter, assert_same, network, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.cuda.empty_cache()


def stopped(folder: Path, device: str = "cuda", **changes: Any) -> None:
    """A run that ends during its third epoch."""
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        train(device=device, folder=folder, callbacks=[StopAfter(2)], **changes)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_optimiser_learns_in_every_precision(optimizer: str, precision: str) -> None:
    result = train(device="cuda", validation=HELD_OUT, optimizer=optimizer, precision=precision)
    assert result.history[-1]["validation"]["accuracy"] > 0.5  # 0.33 by chance
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_other_precisions(precision: str) -> None:
    assert train(device="cuda", validation=HELD_OUT, precision=precision).validation["accuracy"] > 0.7


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_resumed_run_ends_as_the_uninterrupted_one(optimizer: str, tmp_path: Path) -> None:
    whole = train(device="cuda", optimizer=optimizer).model
    stopped(tmp_path, optimizer=optimizer)
    torch.rand(7, device="cuda")
    again = train(device="cuda", optimizer=optimizer, folder=tmp_path, resume=True).model
    assert bt.ranks(again) == bt.ranks(whole)
    assert_same(again, whole)


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_continues_on_another_device(devices: tuple[str, str], tmp_path: Path) -> None:
    stopped(tmp_path, device=devices[0])
    result = train(device=devices[1], folder=tmp_path, resume=True)
    assert len(result.history) == 7
    assert result.history[-1]["train_loss"] < result.history[1]["train_loss"]


def test_a_posterior_trains_and_resumes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": lambda: network(norm=True), "particles": 3, "validation": HELD_OUT}
    whole = train(device="cuda", **options)
    assert whole.validation["accuracy"] > 0.7
    stopped(tmp_path, **options)
    again = train(device="cuda", folder=tmp_path, resume=True, **options)
    for name, tensor in whole.posterior.particles.items():
        torch.testing.assert_close(again.posterior.particles[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    x = HELD_OUT[0][:20]
    there = whole.posterior.predict(x).mean
    torch.testing.assert_close(whole.posterior.to("cpu").predict(x).mean, there.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_convolutions_get_channels_last_images(precision: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 9, 3),
    )  # fmt: skip
    bt.tensorize_(net, bt.TensorizeConfig(max_rank=8), lambda _, name: name != "0")
    layouts = set()

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layouts.add(inputs[0].is_contiguous(memory_format=torch.channels_last))

    net[0].register_forward_pre_hook(note)
    x = torch.randn(600, 3, 9, 9)
    y = x.mean((2, 3)).argmax(1)
    result = train(net, (x, y), (x, y), device="cuda", precision=precision)
    assert layouts == {True}
    assert result.history[-1]["validation"]["accuracy"] > 0.5  # 0.33 by chance; 0.59 to 0.65 after these six epochs


def test_without_perf_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAYESTRAIN_PERF", "0")
    fast.cache_clear()
    try:
        assert train(device="cuda", validation=HELD_OUT).validation["accuracy"] > 0.7
    finally:
        fast.cache_clear()
