"""What docs/experiments.md says of the CNN with other weights of the prior is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from bayestrain.train import toml

ROOT = Path(__file__).parents[1]


def test_the_sizes_and_accuracies_are_those_of_the_results() -> None:
    text = " ".join((ROOT / "docs" / "experiments.md").read_text().split())
    for label, said in (
        ("w0.1-12", "a weight of 0.1 made it {ratio:.1f} times smaller ({accuracy:.2f} % on the test images)"),
        ("w0.4-12", "one of 0.4 made it {ratio:.1f} times smaller ({accuracy:.2f} %)"),
        ("x32", "All epochs at 32 times give {accuracy:.2f} %."),
    ):
        found = json.loads((ROOT / "results" / "cifar10-cnn" / label / "summary.json").read_text())
        assert found["failed"] == []
        assert said.format(ratio=found["ratio"]["mean"], accuracy=100 * found["accuracy"]["mean"]) in text
        if label != "x32":
            assert found["seeds"] == [0]  # "with one seed each"
            config = toml.load(ROOT / "results" / "cifar10-cnn" / label / "seed-0" / "config.toml")
            assert f"w{config.prior.weight:g}-{config.fit.epochs + config.fit.finetune_epochs}" == label
