"""`summary`: ranks, sizes and plans in one table."""

import pytest
import torch
from torch import nn

from bayestrain import TensorizeConfig, TensorLinear, compact_, summary, tensorize_
from bayestrain.formats import FORMATS, Format
from bayestrain.nn.fast import fast


def network(format: str | Format = "tt") -> nn.Sequential:
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 48), nn.Linear(48, 3)
    model = nn.Sequential(*layers)
    tensorize_(model, TensorizeConfig(max_rank=4, format=format), lambda _, name: name != "5")
    return model


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_factorised_layer_has_a_row_whatever_its_format(format: Format) -> None:
    model = network(format)
    compact_(model, 0.6)
    found = summary(model)
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


def test_with_an_input_it_says_how_each_layer_runs_and_changes_nothing() -> None:
    model = network().train()
    before = [module.training for module in model.modules()]
    found = summary(model, torch.randn(5, 3, 9, 9))
    assert all(row.plan and row.operations and row.operations > 0 for row in found.rows)
    assert "multiplications / dense" in str(found)
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    if fast() is not None:
        assert all(row.seconds and row.dense_seconds for row in found.rows)


def test_bare_layers_bare_weights_and_dense_models() -> None:
    layer = TensorLinear(8, 12, max_rank=3)
    assert summary(layer).rows[0].name == ""
    assert summary(layer.factorized).rows[0].dense_parameters == 96
    assert "tensorize_" in str(summary(nn.Linear(3, 2)))
