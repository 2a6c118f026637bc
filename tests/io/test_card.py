"""The model card: what is known, in the Hub's format, and never in place of a README that `save` did not write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bayestrain as bt
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
    assert f"A network with {size:,} parameters, {nn_size() / size:.3g} times fewer" in text
    assert "| 0.factorized | tt | 32x24 | 4 |" in text
    assert 'bt.load("FOLDER")\n' in text
    bt.save(Mine(*model), tmp_path)
    assert 'bt.load("FOLDER", into=build())  # the network' in (tmp_path / "README.md").read_text()
    assert "None" not in text


def nn_size() -> int:
    return 24 * 32 + 32 + 32 * 3 + 3


def test_what_a_run_knows_is_in_it(tmp_path: Path) -> None:
    posterior = bt.Posterior(independent(lambda: Mine(*network()), 3), num_data=10)
    posterior.fix_ranks_()
    posterior.likelihood.temperature = 1.25  # type: ignore[attr-defined]
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
