"""Making a network smaller at once: with one tolerance for all layers, and to a size where weights change least.

    python benchmarks/cuts.py

Networks under ``results/`` are cut to a few sizes in both ways and not trained any further. Batch norm's statistics are
taken anew from training images; then images answer that were held out from the training. Writes
``results/benchmarks/cuts.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from record import RESULTS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

import bayestrain as bt
from bayestrain import data
from bayestrain.saved import load_model
from bayestrain.target import dense_parameters
from bayestrain.train import toml
from bayestrain.train.environment import describe_environment

CUTS = {"results/cifar10-resnet110/x7/seed-2": (9, 11, 15), "results/cifar10-resnet110/x15/seed-2": (16.5, 18, 20, 25)}
STATISTICS = 2000
"""So many training images for the statistics of batch norm."""
BATCH = 250
HALVINGS = 20


def with_one_tolerance(model: nn.Module, parameters: int) -> nn.Module:
    """A copy, rounded with the smallest tolerance that leaves so few parameters."""
    low, high, best = 0.0, 1.0 - 1e-9, model
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        small = copy.deepcopy(model)
        if bt.compact_(small, middle).parameters <= parameters:
            high, best = middle, small
        else:
            low = middle
    return best


def to_a_size(model: nn.Module, parameters: int) -> nn.Module:
    """A copy, cut to so many parameters."""
    small = copy.deepcopy(model)
    bt.compact_(small, parameters=parameters)
    return small


def batches(images: data.Images, normalize: Any) -> list[tuple[Tensor, Tensor]]:
    return [(normalize(x), y) for x, y in images.batches(BATCH, shuffle=False)]


@torch.no_grad()
def judged(model: nn.Module, dense: int, train: list[Tensor], held: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Size, and log likelihood and accuracy on the held-out images."""
    update_bn(train, model)
    model.eval()
    outputs, labels = torch.cat([model(x) for x, _ in held]), torch.cat([y for _, y in held])
    return {
        "ratio": dense / bt.count_parameters(model),
        "log_likelihood": -float(F.cross_entropy(outputs, labels)),
        "accuracy": float((outputs.argmax(1) == labels).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the file")
    folder = parser.parse_args().results
    found: list[dict[str, Any]] = []
    for run, ratios in CUTS.items():
        config = toml.load(Path(run) / "config.toml")
        splits = data.load(config.data.name)
        train, held = splits.train.split(config.data.validation_fraction, config.experiment.seed)
        statistics = [x for x, _ in batches(train.subset(range(STATISTICS)), splits.normalize)]
        asked = batches(held, splits.normalize)
        model = load_model(run)
        dense = dense_parameters(model)
        for ratio in (None, *ratios):
            ways = {"whole": copy.deepcopy(model)} if ratio is None else {
                "one tolerance": with_one_tolerance(model, int(dense / ratio)),
                "to a size": to_a_size(model, int(dense / ratio)),
            }  # fmt: skip
            for way, small in ways.items():
                line = {"network": run, "asked": ratio, "way": way, **judged(small, dense, statistics, asked)}
                found.append(line)
                print(json.dumps(line), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    report = {"cuts": found, "held_out_images": len(held), "environment": describe_environment(torch.device("cpu"))}
    (folder / "cuts.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
