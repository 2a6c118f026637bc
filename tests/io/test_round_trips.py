"""Every model that people bring survives every way out: saved folders, plain modules and their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_plain import is_plain
from test_transformers import MODELS
from torch import Tensor, nn

import bayestrain as bt

pytestmark = pytest.mark.filterwarnings("ignore::bayestrain.errors.HoldWarning")
ROWS, WORDS = torch.randn(3, 6, 32), torch.randint(0, 200, (3, 6))


class Tied(nn.Module):
    """An embedding, two recurrent layers and attention, in front of a head that is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 32, padding_idx=0), nn.Linear(32, 200)
        self.lstm, self.gru = nn.LSTM(32, 32, batch_first=True), nn.GRU(32, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(self.lstm(self.embed(x))[0])[0]
        return self.head(self.attention(h, h, h)[0])  # type: ignore[no-any-return]


class Bags(nn.Module):
    """A bag of words, drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.grow = nn.EmbeddingBag(200, 64, mode="mean"), nn.ConvTranspose2d(16, 18, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grow(self.bag(x).unflatten(1, (16, 2, 2)))  # type: ignore[no-any-return]


def picture() -> nn.Module:
    return nn.Sequential(nn.Conv1d(6, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 18, 3), nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    **{name: (build, batch) for name, (build, batch, _) in MODELS.items()},
    "tied": (Tied, {"x": WORDS}),
    "bags": (Bags, {"x": WORDS}),
    "convolutions": (picture, {"input": ROWS}),
}


@torch.no_grad()
def answer(model: Any, batch: Any) -> Tensor:
    y = model.eval()(**batch)
    return y if isinstance(y, Tensor) else y.logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_every_way_out_and_back(name: str, tmp_path: Path) -> None:
    build, batch = CASES[name]
    torch.manual_seed(0)
    model: Any = build()
    dense = bt.count_parameters(model)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    bt.compact_(model, 0.5)
    expected, size = answer(model, batch), bt.count_parameters(model)
    names = 200 * len(model.state_dict())  # in the header

    bt.save(model, tmp_path / "saved")
    assert torch.equal(answer(bt.load(tmp_path / "saved", into=build()), batch), expected)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size <= 4 * size + names

    plain = bt.to_plain(model)
    assert is_plain(plain)
    found = answer(plain, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert bt.count_parameters(plain) < dense
    tensors = {key: own.contiguous().clone() for key, own in plain.state_dict().items()}
    save_file(tensors, tmp_path / "plain.safetensors")
    blank = bt.to_plain(model)
    for own in blank.parameters():
        own.data.zero_()
    blank.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    assert torch.equal(answer(blank, batch), found)
    bt.save(plain, tmp_path / "plain")
    stored = (tmp_path / "plain" / "model.safetensors").stat().st_size
    assert stored <= 4 * bt.count_parameters(plain) + names
    assert torch.equal(answer(bt.load(tmp_path / "plain", into=blank), batch), found)
