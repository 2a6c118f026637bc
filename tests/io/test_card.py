"""What is told of a model: the card that `save` writes, in the Hub's format, and the table of `summary`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bayestrain as bt
from bayestrain.formats import FORMATS, Format
from bayestrain.nn.fast import fast
from bayestrain.posterior import independent


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    return model


class Mine(nn.Sequential):
    """A class that `load` cannot build."""


def test_a_plain_model_has_its_sizes_and_ranks(tmp_path: Path) -> None:
    model = network()
    bt.save(model, tmp_path)
    text = (tmp_path / "README.md").read_text()
    head, size = text.split("---\n")[1], bt.count_parameters(model)
    assert [line.split(": ")[0].rstrip(":") for line in head.splitlines() if line[0] != "-"] == ["library_name", "tags"]
    assert f"A network with {size:,} parameters, {(24 * 32 + 32 + 32 * 3 + 3) / size:.3g} times fewer" in text
    assert "| 0.factorized | tt | 32x24 | 4 |" in text
    assert 'bt.load("FOLDER")\n' in text
    bt.save(Mine(*model), tmp_path)
    assert 'bt.load("FOLDER", into=build())  # the network' in (tmp_path / "README.md").read_text()
    assert "None" not in text


def test_what_a_run_knows_is_in_it(tmp_path: Path) -> None:
    posterior = bt.Posterior(independent(lambda: Mine(*network()), 3), num_data=10)
    posterior.fix_ranks_()
    posterior.likelihood.temperature = 1.25
    about = {"name": "a|b <script>\n# c", "classes": ["cat", "dog"], "data": "d:load", "model": "n:build"}
    bt.save(posterior, tmp_path, {**about, "metrics": {"accuracy": 0.98765, "log_likelihood": -0.05}})
    text = (tmp_path / "README.md").read_text()
    assert "A posterior of 3 networks, each with" in text
    assert "# a\\|b &lt;script> # c\n" in text
    assert "temperature 1.25" in text
    assert "| accuracy | 0.9877 |" in text
    assert "Classes: cat, dog\n" in text
    assert "Data: d:load\n" in text
    assert "into=build())  # n:build" in text


@pytest.mark.parametrize("own", [True, False])
def test_only_our_own_card_is_replaced(own: bool, tmp_path: Path) -> None:
    bt.save(network(), tmp_path, {"name": "first"})
    if not own:
        (tmp_path / "README.md").write_text("# Mine\n")
    bt.save(network(), tmp_path, {"name": "second"})
    text = (tmp_path / "README.md").read_text()
    assert ("# second\n" in text) if own else (text == "# Mine\n")
    assert load_file(tmp_path / "model.safetensors")
    assert bt.load(tmp_path, into=network())(torch.zeros(1, 24)).shape == (1, 3)


def convolutions(format: str | Format = "tt") -> nn.Sequential:
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 48), nn.Linear(48, 3)
    model = nn.Sequential(*layers)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4, format=format), lambda _, name: name != "5")
    return model


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_factorised_layer_has_a_row_whatever_its_format(format: Format) -> None:
    model = convolutions(format)
    bt.compact_(model, 0.6)
    found = bt.summary(model)
    assert [(row.name, row.shape, row.format) for row in found.rows] == [
        ("0", (16, 3, 3, 3), format.name), ("4", (48, 64), format.name),
    ]  # fmt: skip
    layer = model[4]
    assert found.rows[1].ranks == layer.ranks
    assert found.rows[1].parameters == sum(p.numel() for p in layer.parameters())
    assert found.rows[1].dense_parameters == 48 * 64 + 48
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.dense_parameters == found.parameters + sum(r.dense_parameters - r.parameters for r in found.rows)
    assert not any(row.plan for row in found.rows)
    assert str(found).splitlines()[-1] == found.verdict()


def test_summaries_say_how_each_layer_runs_bare_ones_too() -> None:
    model = convolutions().train()
    before = [module.training for module in model.modules()]
    found = bt.summary(model, torch.randn(5, 3, 9, 9))
    assert all(row.plan and row.operations and row.operations > 0 for row in found.rows)
    assert "multiplications / dense" in str(found)
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    if fast() is not None:
        assert all(row.seconds and row.dense_seconds for row in found.rows)
    layer = bt.TensorLinear(8, 12, max_rank=3)
    assert bt.summary(layer).rows[0].name == ""
    assert bt.summary(layer.factorized).rows[0].dense_parameters == 96
    assert "tensorize_" in str(bt.summary(nn.Linear(3, 2)))
