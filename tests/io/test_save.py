"""Saved models come back as they were; damaged and hostile files are refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import edit, put
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bayestrain import TensorizeConfig, TensorLinear, compact_, load, ranks, save, tensorize_
from bayestrain.errors import ConfigError, DataError
from bayestrain.formats import FORMATS, Format, TensorTrain
from bayestrain.nn import FactorizedWeight, factorized_weights
from bayestrain.prior import RankPrior


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 20, (3, 2), stride=2, padding=1, padding_mode="reflect"), nn.BatchNorm2d(20), nn.ReLU(),
        nn.Conv2d(20, 16, 3, padding="same", bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def trained(**config: Any) -> nn.Sequential:
    model = dense()
    tensorize_(model, TensorizeConfig(max_rank=6, **config))
    model(torch.randn(8, 3, 9, 9))  # running statistics of its own
    compact_(model, tol=0.5)
    return model.eval()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("layout", ["paired", "split"])
def test_a_compacted_model_of_any_format_comes_back(tmp_path: Path, format: Format, layout: str) -> None:
    model = trained(format=format, layout=layout)
    save(model, str(tmp_path / "new" / "folder"), {"note": "mine"})
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "model.json", "README.md"}
    x = torch.randn(4, 3, 9, 9)
    for path in (folder, folder / "model.json", str(folder / "model.safetensors")):
        again = load(path, dense())
        assert torch.equal(again(x), model(x))
        assert ranks(again) == ranks(model)
        assert not again.training
    about = json.loads((folder / "model.json").read_text())
    assert about["note"] == "mine"
    found = about["weights"]["6.factorized"]
    assert (found["format"], found["layout"]["shape"]) == (format.name, [5, 16])


def test_a_network_that_is_factorised_already_takes_ranks_and_layout_of_the_file(tmp_path: Path) -> None:
    model = trained(layout="split")
    save(model, tmp_path)
    x = torch.randn(2, 3, 9, 9)
    for layout in ("split", "paired"):
        other = dense()
        tensorize_(other, TensorizeConfig(max_rank=2, layout=layout))
        RankPrior(other, num_data=100)  # whose lambda goes
        assert torch.equal(load(tmp_path, other)(x), model(x))
        assert other[6].factorized.layout == model[6].factorized.layout
        assert other.state_dict().keys() == model.state_dict().keys()


class Mine(TensorTrain):
    """A format of a user's, which no list names."""

    name = "mine"


def test_a_format_that_no_list_names_comes_back_into_a_network_that_has_it(tmp_path: Path) -> None:
    model, other = dense(), dense()
    for own, rank in ((model, 4), (other, 2)):
        tensorize_(own, TensorizeConfig(max_rank=rank, format=Mine()))
    save(model.eval(), tmp_path)
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(load(tmp_path, other)(x), model(x))
    with pytest.raises(DataError, match="layer '0': format must be one of"):
        load(tmp_path, dense())


def test_bare_layers_and_weights_come_back(tmp_path: Path) -> None:
    layer = TensorLinear(8, 12, max_rank=3)
    save(layer, tmp_path)
    x = torch.randn(3, 8)
    assert torch.equal(load(tmp_path, TensorLinear(8, 12, max_rank=2, layout="split"))(x), layer(x))
    with pytest.raises(ConfigError, match=r"layer '' is a Linear with weight \(12, 8\)"):
        load(tmp_path, nn.Linear(8, 12))
    save(layer.factorized, tmp_path)
    again = load(tmp_path, TensorLinear(8, 12, max_rank=2).factorized)
    assert torch.equal(again.dense(), layer.factorized.dense())
    save(nn.ModuleDict({"table": layer.factorized}), tmp_path)
    again = load(tmp_path, nn.ModuleDict({"table": TensorLinear(8, 12, max_rank=2, layout="split").factorized}))
    assert isinstance(again["table"], FactorizedWeight)
    assert torch.equal(again["table"].dense(), layer.factorized.dense())


class Shared(nn.Module):
    """One block in two places, and a weight that a second parameter and a buffer look into."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.b = self.a
        self.head, self.twin = nn.Linear(16, 10), nn.Linear(16, 10, bias=False)
        self.twin.weight.data = self.head.weight.data
        self.register_buffer("part", self.head.weight.data[:3])
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)).mean((2, 3))
        return self.head(x) + self.twin(x)


def test_a_model_with_shared_blocks_and_buffers_comes_back(tmp_path: Path) -> None:
    model = Shared()
    tensorize_(model, TensorizeConfig(max_rank=4), lambda _, name: name.startswith("a"))
    model(torch.randn(8, 16, 5, 5))
    save(model.eval().double(), tmp_path)
    again = load(tmp_path, Shared())
    x = torch.randn(2, 16, 5, 5, dtype=torch.float64)
    assert torch.equal(again(x), model(x))
    assert again.a is again.b
    assert torch.equal(again.mask, model.mask)
    assert torch.equal(again.part, again.head.weight[:3])
    assert sum("conv" in name or ".cores." in name for name in load_file(tmp_path / "model.safetensors")) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_types_of_the_file_win(tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained()
    model[1:4].to(dtype)
    save(model, tmp_path)
    for given in (torch.float32, torch.float64):
        again = load(tmp_path, dense().to(given)).state_dict()
        torch.testing.assert_close(again, model.state_dict(), rtol=0, atol=0)


def test_frozen_layers_and_hooks_stay_as_they_are_in_the_network_given(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    fresh, seen = dense(), []
    fresh[6].weight.requires_grad_(False)
    fresh[6].register_forward_hook(lambda *_: seen.append(1))
    again = load(tmp_path, fresh)
    assert [core.requires_grad for core in again[6].cores] == [False] * len(again[6].cores)
    assert again[3].cores[0].requires_grad
    again(torch.randn(2, 3, 9, 9))
    assert seen == [1]


def test_what_should_not_be_saved_is_refused(tmp_path: Path) -> None:
    model = trained()
    prior = RankPrior(model, num_data=10)
    with pytest.raises(ConfigError, match=r"still carries lambda. Call RankPrior.remove_\(\)"):
        save(model, tmp_path)
    prior.remove_()
    with pytest.raises(ConfigError, match="about must not contain 'weights'"):
        save(model, tmp_path, {"weights": 1})
    for odd in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(ConfigError, match="about must hold what JSON can"):
            save(model, tmp_path, odd)
    with pytest.raises(ConfigError, match=r"'1.weight' has no values yet. Run one batch"):
        save(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), tmp_path)
    with torch.no_grad():
        model[1].running_var[0] = torch.nan
    with pytest.raises(ConfigError, match=r"'1.running_var' has NaN or infinite values. Go back"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_lazy_network_needs_its_weights_first(tmp_path: Path) -> None:
    model, fresh = (nn.Sequential(nn.Flatten(), nn.LazyLinear(12)) for _ in range(2))
    model(x := torch.randn(3, 8))
    tensorize_(model, TensorizeConfig(max_rank=3))
    save(model, tmp_path)
    with pytest.raises(ConfigError, match=r"lazy layers: 1\. Run one batch"):
        load(tmp_path, fresh)
    fresh(x)
    torch.testing.assert_close(load(tmp_path, fresh)(x), model(x))


def test_another_network_is_refused_by_what_differs(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    with pytest.raises(ConfigError, match=r"The network given is not the one saved in .*layer '0'"):
        load(tmp_path, nn.Sequential(nn.Linear(2, 2)))
    other = dense()
    other[6] = nn.Linear(16, 6)
    with pytest.raises(ConfigError, match=r"layer '6' is a Linear with weight \(6, 16\), not \(5, 16\)"):
        load(tmp_path, other)
    other[6] = nn.Identity()
    with pytest.raises(ConfigError, match=r"layer '6' is a Identity with weight None"):
        load(tmp_path, other)
    assert not factorized_weights(other)  # nothing was changed
    save(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), tmp_path)
    with pytest.raises(DataError, match=r"these are not in both: 1\.bias, 1\.weight, 2\.bias, 2\.weight"):
        load(tmp_path, nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))


@pytest.mark.parametrize(
    "text", ["{", "\xff", "[]", "{}", '{"version": 2, "weights": ' + "[" * 100_000, '{"version": ' + "9" * 10_000 + "}"]
)
def test_a_description_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text, encoding="latin1")
    with pytest.raises(DataError, match="describes no saved model of version 2: "):
        load(tmp_path, dense())


WRONG: dict[str, tuple[Any, ...]] = {
    "version": (1,), "kind": ("network", "posterior"), "weights": (3,), "weights 6.factorized": (3,),
    "weights 6.factorized layout": ([],),
    "weights 6.factorized layout splits": ([[5], [10**40]], [[-5, -1], [16]], [[1] * 100, [16]]),
    "weights 6.factorized layout modes": ([[0, 0], [1, 1]], [[True], [1]]),
    "weights 6.factorized layout shape": ([5.0, 16],),
    "weights 6.factorized layout axes": ([16, 5], [5, 10**13, [[]]]),
    "weights 6.factorized equation": ("ax, xb -> ba",), "weights 6.factorized format": ("magic", ["tt"]),
}  # fmt: skip


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG.items() for value in values])
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, path: str, value: object) -> None:
    save(trained(), tmp_path)
    put(tmp_path / "model.json", path, value)
    network = dense()
    with pytest.raises(DataError):
        load(tmp_path, network)
    assert not factorized_weights(network)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no saved model.*model.json is missing"):
        load(tmp_path, dense())
    model = trained()
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 1
    for damaged in (content[:-10], content.replace(b'"F32"', b'"F64"', 1), b"nonsense", flipped):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{file} is damaged"):
            load(tmp_path, dense())
    with pytest.raises(DataError, match=r"its checksum is not that in model\.json; perhaps saving was interrupted"):
        load(tmp_path, dense())
    edit(tmp_path / "model.json", drop="sha256")  # written by hand
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    for wrong, message in (
        ({"6.bias": torch.full((5,), torch.nan)}, r"has NaN or infinite values in '6\.bias'"),
        ({"6.bias": torch.full((5,), -torch.inf)}, r"has NaN or infinite values in '6\.bias'"),
        ({"7.bias": torch.ones(5)}, r"these are not in both: 7\.bias"),
        ({"6.bias": torch.zeros(4)}, r"6\.bias needs shape \(5,\) of torch.float32, there is shape \(4,\)"),
        ({"6.bias": torch.zeros(5, dtype=torch.int64)}, r"there is shape \(5,\) of torch.int64"),
        ({"6.factorized.cores.0": torch.zeros(3, 3)}, "do not fit each other at layer '6'"),
        ({"6.factorized.cores.0": tensors["6.factorized.cores.0"].int()}, "do not fit each other at layer '6'"),
    ):
        save_file({**tensors, **wrong}, file)
        network = dense()
        layers, before = list(network), copy.deepcopy(network.state_dict())
        with pytest.raises(DataError, match=message):
            load(tmp_path, network)
        assert list(network) == layers
        torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("stop", [".model.safetensors.new", "model.json", "model.safetensors"])
def test_an_interrupted_save_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    models = [trained(), trained()]
    save(models[0], tmp_path)
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.name == stop:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(models[1], tmp_path)
    found = load(tmp_path, dense()).state_dict()
    expected = models[stop == "model.safetensors"].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    save(models[0], tmp_path)
    assert not list(tmp_path.glob(".model*"))


class Partly(nn.Module):
    """A buffer that no file holds beside layers that may be on the meta device, two of which share a weight."""

    def __init__(self, device: str = "cpu", buffer: str = "cpu") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, device=device), nn.Linear(6, 6, device=device)
        self.b.weight = self.a.weight
        self.lstm = nn.LSTM(6, 4, device=device)
        self.register_buffer("scale", torch.arange(6.0, device=buffer), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.b(self.a(x)) * self.scale)[0]


def test_only_what_the_file_fills_leaves_the_meta_device(tmp_path: Path) -> None:
    model, x = Partly().eval(), torch.randn(3, 6)
    save(model, tmp_path)
    again = load(tmp_path, Partly("meta"))
    assert torch.equal(again.scale, model.scale)
    assert again.a.weight is again.b.weight
    assert torch.equal(again(x), model(x))
    with pytest.raises(ConfigError, match="'scale' is on the meta device"):
        load(tmp_path, Partly("meta", "meta"))


def test_what_is_no_model_and_no_folder_is_said(tmp_path: Path) -> None:
    save(dense(), tmp_path)
    wrong: list[tuple[Any, str]] = [
        (lambda: save(dense().state_dict(), tmp_path), "got a OrderedDict"),
        (lambda: load(tmp_path, Partly), "into must be a network"),
        (lambda: load(tmp_path, dense), "call it first"),
    ]
    for call, said in wrong:
        with pytest.raises(ConfigError, match=said):
            call()
