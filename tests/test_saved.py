"""Saved models come back as they were, and damaged ones are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import DataError


def own_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 20, (3, 2), stride=2, padding=1, padding_mode="reflect"), nn.BatchNorm2d(20), nn.ReLU(),
        nn.Conv2d(20, 16, 3, padding="same", bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def trained() -> nn.Sequential:
    torch.manual_seed(0)
    model = own_network()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6))
    model(torch.randn(8, 3, 9, 9))  # running statistics of its own
    bt.compact_(model, tol=0.5)
    return model.eval()


def test_a_users_own_compacted_model_comes_back(tmp_path: Path) -> None:
    model = trained()
    bt.save_model(model, tmp_path, {"note": "mine"})
    assert not [path.name for path in tmp_path.iterdir() if path.name not in ("model.safetensors", "model.json")]
    for path in (tmp_path, tmp_path / "model.json", tmp_path / "model.safetensors"):
        again = bt.load_model(path, own_network())
        x = torch.randn(4, 3, 9, 9)
        assert torch.equal(again(x), model(x))
        assert bt.ranks(again) == bt.ranks(model)
    assert json.loads((tmp_path / "model.json").read_text())["note"] == "mine"


class Shared(nn.Module):
    """One block in two places, and a weight that a second parameter looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.b = self.a
        self.head, self.twin = nn.Linear(16, 10), nn.Linear(16, 10, bias=False)
        self.twin.weight.data = self.head.weight.data
        self.register_buffer("part", self.head.weight.data[:3])

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)).mean((2, 3))
        return self.head(x) + self.twin(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_with_shared_blocks_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Shared()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4), lambda _, name: name.startswith("a"))
    model(torch.randn(8, 16, 5, 5))
    bt.save_model(model.eval().to(dtype), tmp_path)
    again = bt.load_model(tmp_path, Shared())
    x = torch.randn(2, 16, 5, 5, dtype=dtype)
    assert torch.equal(again(x), model(x))
    assert again.a is again.b
    if dtype == torch.float32:  # in another precision than that of the network given, views are no longer ones
        assert torch.equal(again.part, again.head.weight[:3])
        assert torch.equal(again.part, model.part)


def test_a_file_of_another_network_is_refused_by_the_names_it_lacks(tmp_path: Path) -> None:
    bt.save_model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), tmp_path)
    with pytest.raises(DataError, match=r"do not have these in common: 1\.bias, 1\.weight, 2\.weight, 2\.bias"):
        bt.load_model(tmp_path, nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))


def test_a_folder_may_be_a_text_and_is_made(tmp_path: Path) -> None:
    folder = str(tmp_path / "made" / "by itself")
    bt.save_model(trained(), folder)
    assert bt.ranks(bt.load_model(folder, own_network())) == bt.ranks(trained())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_a_model_of_another_precision_comes_back_in_it(tmp_path: Path, dtype: torch.dtype, given: torch.dtype) -> None:
    model = trained().to(dtype)
    bt.save_model(model, tmp_path, {})
    again = bt.load_model(tmp_path, own_network().to(given))
    expected = model.state_dict()
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


def test_layers_of_different_precision_come_back_each_in_its_own(tmp_path: Path) -> None:
    model = trained()
    model[6].double()
    model[1].double()
    bt.save_model(model, tmp_path, {})
    again = bt.load_model(tmp_path, own_network()).state_dict()
    assert {name: t.dtype for name, t in again.items()} == {name: t.dtype for name, t in model.state_dict().items()}


def test_sizes_may_be_numpys(tmp_path: Path) -> None:
    three, one, four, eight = np.array([3, 1, 4, 8])
    model = nn.Sequential(
        nn.Conv2d(three, eight, three, one, one, one, padding_mode="reflect"),
        bt.TTConv2d(eight, four, (three, one), (one, three), (one, one), one),
        nn.Flatten(),
        bt.TTLinear(eight * eight, four),
    )
    bt.tensorize_(model)
    bt.save_model(model.eval(), tmp_path, {})
    again = bt.load_model(tmp_path, copy.deepcopy(model))
    x = torch.randn(2, 3, 4, 9)
    assert torch.equal(again(x), model(x))


def test_a_layer_used_twice_is_saved_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    bt.tensorize_(model)
    bt.save_model(model, tmp_path, {})
    other = nn.Linear(16, 16)
    again = bt.load_model(tmp_path, nn.Sequential(other, nn.ReLU(), other))
    x = torch.randn(2, 16)
    assert torch.equal(again(x), model(x))


def test_lambda_is_no_part_of_a_saved_model(tmp_path: Path) -> None:
    model = trained()
    prior = bt.RankPrior(model, num_data=10)
    with pytest.raises(bt.BayesTrainError, match=r"still carries lambda. Call prior.remove_\(\)"):
        bt.save_model(model, tmp_path, {})
    prior.remove_()
    bt.save_model(model, tmp_path, {})


def test_a_lazy_network_needs_its_weights_first(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(12))

    x = torch.randn(3, 8)
    model, fresh = build(), build()
    model(x)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3))
    bt.save_model(model, tmp_path)
    with pytest.raises(bt.BayesTrainError, match=r"lazy layers without weights: 1\. Run one batch"):
        bt.load_model(tmp_path, fresh)
    fresh(x)
    torch.testing.assert_close(bt.load_model(tmp_path, fresh)(x), model(x))


def test_a_bare_layer_is_not_saved(tmp_path: Path) -> None:
    layer = bt.TTLinear(8, 12, max_rank=3)
    with pytest.raises(
        bt.BayesTrainError, match=r"The model itself is a tensor-train layer.*Wrap it in nn\.Sequential"
    ):
        bt.save_model(layer, tmp_path)
    bt.save_model(nn.Sequential(layer), tmp_path)
    x = torch.randn(3, 8)
    torch.testing.assert_close(bt.load_model(tmp_path, nn.Sequential(nn.Linear(8, 12)))(x), layer(x))


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no saved model.*model.json is missing"):
        bt.load_model(tmp_path)
    bt.save_model(trained(), tmp_path, {"model": "mine"})
    with pytest.raises(bt.BayesTrainError, match="The network given is not the one that was saved"):
        bt.load_model(tmp_path, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(bt.BayesTrainError, match=r"not one of.*Pass the dense network"):
        bt.load_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DataError, match="missing, damaged or not the one described"):
        bt.load_model(tmp_path, own_network())
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        bt.load_model(tmp_path, own_network())
    (tmp_path / "model.json").write_text('{"format": 7}')
    with pytest.raises(DataError, match="does not describe a saved model"):
        bt.load_model(tmp_path, own_network())
