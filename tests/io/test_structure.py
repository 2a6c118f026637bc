"""Networks of PyTorch's own modules are built from their description; nothing that a description names is run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import put
from torch import nn

import bayestrain as bt
from bayestrain.errors import BayesTrainError, ConfigError
from bayestrain.io.structure import LISTED, build, describe
from bayestrain.posterior import independent

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Bilinear": (3, 4, 5), "Linear": (3, 4), "Embedding": (5, 3, 2), "EmbeddingBag": (5, 3), "LSTM": (3, 4, 2),
    "GRU": (3, 4), "RNN": (3, 4), "MultiheadAttention": (8, 2), "GroupNorm": (2, 4),
    "LayerNorm": ((3, 4), 1e-3), "RMSNorm": (4,), "Unflatten": (1, (2, 2)), "Softmax": (1,), "LogSoftmax": (1,),
}  # fmt: skip
NUMBERS = (("Conv", (3, 4, 3, 2)), ("Norm", (4,)), ("Pool", (2,)), ("Pad", (2,)), ("huffle", (2,)))


@pytest.mark.parametrize("name", LISTED)
def test_every_listed_class_is_built_as_it_was(name: str) -> None:
    usual = next((numbers for part, numbers in NUMBERS if part in name), ())
    module = LISTED[name](*ARGUMENTS.get(name, usual if name != "LocalResponseNorm" else (2,)))
    found = build(json.loads(json.dumps(describe(module))), 100)
    assert repr(found) == repr(module)
    assert {n: t.shape for n, t in found.state_dict().items()} == {n: t.shape for n, t in module.state_dict().items()}
    assert all(own.is_meta for own in found.state_dict().values())


def networks() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    relu, rows = nn.ReLU(), torch.randn(2, 5, 32)
    convolutions = [nn.Conv2d(1, 16, (3, 2), 2, padding_mode="reflect", padding=1), nn.BatchNorm2d(16, 1e-3), relu]
    transposed = [nn.ConvTranspose2d(16, 18, 3, bias=False), relu, nn.Flatten(), nn.Linear(18 * 36, 5)]
    recurrent = nn.LSTM(32, 24, 2, batch_first=True, bidirectional=True), nn.GRU(32, 24, batch_first=True)
    return {
        "convolutions": (nn.Sequential(*convolutions, *transposed), (torch.randn(2, 1, 7, 7),)),
        "table": (nn.Sequential(nn.Embedding(97, 32, padding_idx=3), nn.Linear(32, 9)), (torch.tensor([[3, 1]]),)),
        "bag": (nn.Sequential(nn.EmbeddingBag(97, 32, mode="sum"), nn.PReLU()), (torch.tensor([[3, 1]]),)),
        "LSTM": (recurrent[0], (rows,)),
        "GRU": (recurrent[1], (rows,)),
        "attention": (nn.MultiheadAttention(32, 2, batch_first=True), (rows, rows, rows)),
    }


def outputs(model: nn.Module, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad():
        y = model.eval()(*x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", networks())
def test_a_network_is_loaded_without_being_given(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = networks()[name]
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    bt.compact_(model, 0.5)
    x = tuple(own.to(dtype) if own.is_floating_point() else own for own in x)
    bt.save(model.to(dtype), tmp_path)
    again = bt.load(tmp_path)
    assert type(again) is type(model) or name in ("LSTM", "GRU", "attention")
    assert bt.ranks(again) == bt.ranks(model)
    assert torch.equal(outputs(again, x), outputs(model, x))
    assert not any(own.is_meta for own in (*again.parameters(), *again.buffers()))
    assert 'bt.load("FOLDER")\n' in (tmp_path / "README.md").read_text()
    sum(own.sum() for own in again.parameters()).backward()  # it trains


def small() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(30, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    bt.tensorize_(net, bt.TensorizeConfig(max_rank=3), lambda _, name: name == "0")
    return net


def posterior(**options: Any) -> bt.Posterior:
    found = bt.Posterior(independent(small, 3), 100, **options)
    classes = torch.randint(0, 4, (20,)) if "likelihood" not in options else torch.randn(20, 4)
    found.step(torch.randn(20, 30), classes)
    found.fix_ranks_()
    return found


class Mine(nn.Sequential):
    """A class of the user's."""


def others() -> dict[str, nn.Module]:
    """Networks of which the description could not say everything."""
    hooked, extended, layer = small(), small(), nn.Linear(4, 4)
    hooked[0].register_forward_hook(lambda *_: None)
    extended[2].register_buffer("mine", torch.zeros(3))
    tied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    tied[1].weight = tied[0].weight
    found = {"mine": Mine(nn.Linear(3, 2)), "hooked": hooked, "extended": extended, "tied": tied}
    return {**found, "used twice": nn.Sequential(layer, nn.ReLU(), layer)}


@pytest.mark.parametrize("name", others())
def test_any_other_network_has_to_be_given(name: str, tmp_path: Path) -> None:
    model = others()[name]
    bt.save(model, tmp_path)
    assert json.loads((tmp_path / "model.json").read_text())["network"] is None
    with pytest.raises(ConfigError, match=r"does not say how to build.*load\(path, into=network\)"):
        bt.load(tmp_path)
    assert bt.load(tmp_path, into=others()[name]) is not model


HUGE = {"class": "LSTM", "settings": {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}, "children": {}}
LIES: dict[str, Any] = {
    "sizes": ("children 0 settings in_features", 10**13),
    "overflow": ("children 0 settings in_features", 10**30),
    "negative": ("children 0 settings in_features", -3),
    "text": ("children 0 settings in_features", "os.system"),
    "another class": ("children 0 class", "Bilinear"),
    "no class of the list": ("children 0 class", "DataParallel"),
    "a path": ("children 0 class", "os.system"),
    "a list": ("children 0 class", ["Linear"]),
    "a device": ("children 0 settings device", "cuda"),
    "a private argument": ("children 0 settings _weight", [[1.0]]),
    "an unknown argument": ("children 0 settings magic", 1),
    "a billion layers": ("children 0", HUGE),
    "no settings": ("children 0", {"class": "ReLU", "children": {}}),
    "a method's name": ("children forward", HUGE),
    "a layer more": ("children 4", {"class": "ReLU", "settings": {}, "children": {}}),
    "number": ("children", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lying_description_is_refused(name: str, tmp_path: Path) -> None:
    bt.save(small(), tmp_path)
    where, value = LIES[name]
    put(tmp_path / "model.json", f"network {where}", value)
    with pytest.raises(BayesTrainError):
        bt.load(tmp_path)


SCHEMA = json.loads(Path(bt.io.__file__).with_name("model.schema.json").read_text())
KINDS = {"object": dict, "array": list, "string": str, "null": type(None), "integer": int, "number": (int, float)}
USED = {"$schema", "$id", "$defs", "$ref", "title", "description", "type", "required", "properties", "const", "enum",
        "additionalProperties", "items", "maxItems", "anyOf", "minimum", "exclusiveMinimum", "pattern"}  # fmt: skip


def fits(value: Any, schema: Any) -> bool:
    """Whether a value fits a schema of the words in `USED`."""
    if isinstance(schema, bool):
        return schema
    assert schema.keys() <= USED
    if "$ref" in schema and not fits(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]):
        return False
    if "anyOf" in schema and not any(fits(value, own) for own in schema["anyOf"]):
        return False
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    is_bool = isinstance(value, bool)
    if kinds and not any(is_bool if kind == "boolean" else not is_bool and isinstance(value, KINDS[kind])
                         for kind in kinds):  # fmt: skip
        return False
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, int | float) and not is_bool:
        return bool(value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", value - 1))
    if isinstance(value, list):
        items = schema.get("items", True)
        return len(value) <= schema.get("maxItems", len(value)) and all(fits(own, items) for own in value)
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        whole = all(key in value for key in schema.get("required", []))
        return whole and all(fits(own, known.get(key, other)) for key, own in value.items())
    return True


@pytest.mark.parametrize("kind", ["model", "posterior", "regression", "likelihood", "mine"])
def test_what_save_writes_fits_the_published_schema(kind: str, tmp_path: Path) -> None:
    mine = {"likelihood": lambda y, t: -(y - t).square().sum(1), "regression": "regression"}
    made = {"model": small, "mine": lambda: Mine(small())}.get(kind)
    bt.save(made() if made else posterior(**({"likelihood": mine[kind]} if kind in mine else {})), tmp_path, {"a": 1})
    about = json.loads((tmp_path / "model.json").read_text())
    assert fits(about, SCHEMA)
    assert about.keys() - {"a"} <= SCHEMA["properties"].keys()
    name = next(iter(about["weights"]))
    for wrong in (
        {"version": 1}, {"kind": "network"}, {"sha256": "x"}, {"parameters": -1}, {"weights": []},
        {"weights": {name: {}}}, {"network": {"class": "os.system", "settings": {}, "children": {}}},
        {"weights": {name: about["weights"][name] | {"layout": {}}}},
    ):  # fmt: skip
        assert not fits(about | wrong, SCHEMA), wrong


def test_a_file_of_today_that_lacks_what_is_optional_still_loads(tmp_path: Path) -> None:
    model, x = small().eval(), torch.randn(3, 30)
    bt.save(model, tmp_path)
    about = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({key: about[key] for key in SCHEMA["required"]}))
    assert torch.equal(bt.load(tmp_path, into=small())(x), model(x))
    with pytest.raises(BayesTrainError, match="into=network"):
        bt.load(tmp_path)
