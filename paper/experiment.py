"""One seed of an experiment: from a preset and a few options to a run config, and to a run folder.

    python -m paper.experiment mnist --seed 0 --out runs/mnist
    python -m paper.experiment cifar10-cnn --target-ratio 32 --out runs/x32 --device cuda

`paper.seeds` runs several seeds and records them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayestrain.errors import BayesTrainError, ConfigError
from bayestrain.files import write_atomically, write_json
from bayestrain.train import config as configs
from bayestrain.train.config import RunConfig
from paper.published import PAPER

PRESETS = Path(__file__).parent / "presets"
KINDS = ("low-rank", "tensorized", "dense")
"""The paper's three networks: ranks are sought; all ranks stay; no tensors at all."""

AROUND_RATE = 0.1
"""Learning rate of particles around a network, relative to the preset's, unless its fine-tuning has one of its own."""

BESIDE = "_beside"
"""Of `paper.data`: the same data with images of another kind, on which posteriors test their uncertainty."""


def run_config(
    experiment: str, *, preset: str = "default", kind: str = "low-rank", seed: int = 0, particles: int = 1,
    around: str = "", start: str = "", epochs: int = 0, jitter: float = 0.2, target_ratio: float = 0.0,
    overrides: Sequence[str] = (),
) -> RunConfig:  # fmt: skip
    """The config of one seed.

    Args:
        experiment: "mnist", "cifar10-cnn" or "cifar10-resnet110".
        preset: "default" for our settings, "paper" for the paper's.
        kind: "low-rank", "tensorized" or "dense".
        seed: of all random numbers.
        particles: 2 or more for a posterior.
        around: folder of a finished run whose network the particles start around; its ranks stay.
        start: folder of a finished run whose network is trained further.
        epochs: of the posterior around a network.
        jitter: relative distance of the particles from that network.
        target_ratio: how many times smaller than dense the network has to become.
        overrides: single settings, "fit.lr=3e-3".
    """
    if experiment not in PAPER:
        raise ConfigError(f"There is no experiment {experiment!r}. There are {', '.join(PAPER)}.")
    if kind not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    file = PRESETS / f"{experiment}{'' if preset == 'default' else f'.{preset}'}.toml"
    if not file.is_file():
        raise ConfigError(
            f"There is no preset {preset!r} of {experiment}: {file} does not exist. Use default or paper."
        )
    if around and (particles < 2 or not epochs or start):
        raise ConfigError("A posterior around a network needs --particles of at least 2 and --epochs, and no --from.")
    settings = configs.load(file).to_dict()  # changed as a whole, because sections are checked against each other
    run, fit = settings["run"], settings["fit"]
    run |= {"seed": seed, "from_run": around or start}
    fit["target_ratio"] = target_ratio
    if kind == "dense":
        settings["tensorize"] |= {"enabled": False, "modes": {}, "keep_dense": []}
    if particles > 1:
        settings["posterior"]["particles"] = particles
        run["data"] += BESIDE
    if around:
        fit |= {
            "search": False, "epochs": epochs, "finetune_epochs": 0,
            "lr": fit["finetune_lr"] or AROUND_RATE * fit["lr"], "schedule": "cosine", "milestones": [],
            "lr_warmup_epochs": 0.0,
        }  # fmt: skip
        settings["posterior"]["jitter"] = jitter
    config = RunConfig.from_dict(settings).override(overrides)
    if kind != "low-rank" and not around:  # one phase, as long as the two of a search
        fit = config.fit
        config = config.override(
            ["fit.search=false", f"fit.epochs={fit.epochs + fit.finetune_epochs}", "fit.finetune_epochs=0"]
        )
    if not config.fit.search and config.fit.target_ratio:
        raise ConfigError("These ranks stay as they are (--kind, --around): leave --target-ratio out.")
    return config


def train(config: RunConfig, out: Path, *, preset: str, kind: str, device: str, command: str, point: str = "") -> None:
    """Train one seed into `out`, or finish one that was stopped; `point` is a run to compare a posterior with."""
    from bayestrain.train import ProgressPrinter
    from bayestrain.train.run import train_run

    resume = any((out / name).exists() for name in ("checkpoint.pt", "checkpoint-previous.pt", "result.json"))
    point = point or (config.run.from_run if config.posterior.particles > 1 else "")
    compared = describe_point(Path(point)) if point else None  # what is missing is found before hours of training
    train_run(config, out, resume=resume, device=device, callbacks=[ProgressPrinter(every=10.0)], command=command)
    write_validation(out, device)
    write_json(out / "paper.json", {
        "experiment": config.run.name, "preset": preset, "kind": kind, "searched_accuracy": searched(out),
        "point": compared,
    })  # fmt: skip


def searched(out: Path) -> float | None:
    """Accuracy on the held-out images when the search for ranks ended, before the final cut; None without a search."""
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    found = [line["validation"]["accuracy"] for line in lines if line["phase"] == "search" and line["validation"]]
    return found[-1] if found else None


def describe_point(run: Path) -> dict[str, Any]:
    """The figures of the single network that a posterior is compared with."""
    try:
        result = json.loads((run / "result.json").read_text())
        return {
            "run": str(run), "params": result["parameters"], "seconds": result["seconds"], **result["metrics"],
            "calibrated": result["calibrated"],
        }  # fmt: skip
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{run} holds no finished run to compare with or to start around ({error!r}).") from error


def write_validation(out: Path, device: str) -> None:
    """Keep the predictions for the held-out images, without a temperature, so that the temperature can be checked."""
    import torch
    from safetensors.torch import save

    from bayestrain.train.run import load_data, load_run

    model, data = load_run(out, device=device), load_data(configs.load(out / "config.toml").run.data)
    parts, labels = [], []
    for x, y in data.validation.batches(500, shuffle=False, device=device):
        parts.append(model.predict(x).particle_probabilities.mean(0, dtype=torch.float64).float().cpu())
        labels.append(y.cpu())
    content = {"probabilities": torch.cat(parts).contiguous(), "labels": torch.cat(labels)}
    write_atomically(out / "validation.safetensors", save(content))


def options(parser: argparse.ArgumentParser) -> None:
    """The options that decide what is trained; `paper.seeds` has them, too."""
    parser.add_argument("experiment", choices=tuple(PAPER))
    parser.add_argument("--preset", default="default", help="default: our settings; paper: those of the paper's text")
    parser.add_argument("--kind", default="low-rank", choices=KINDS)
    parser.add_argument("--particles", type=int, default=1, help="2 or more for a posterior")
    parser.add_argument("--around", default="", help="finished run whose network the particles start around")
    parser.add_argument("--epochs", type=int, default=0, help="epochs of a posterior around a network")
    parser.add_argument("--jitter", type=float, default=0.2, help="relative distance from that network")
    parser.add_argument("--from", dest="start", default="", help="finished run whose network is trained further")
    parser.add_argument("--point", default="", help="finished run of one network to compare a posterior with")
    parser.add_argument("--target-ratio", type=float, default=0.0, help="times smaller than dense; 0: no target")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def chosen(given: argparse.Namespace, seed: int) -> RunConfig:
    """The config that the options stand for, with one seed."""
    return run_config(
        given.experiment, preset=given.preset, kind=given.kind, seed=seed, particles=given.particles,
        around=given.around, start=given.start, epochs=given.epochs, jitter=given.jitter,
        target_ratio=given.target_ratio, overrides=given.overrides,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    device = given.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    said = f"python -m paper.experiment {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    try:
        config = chosen(given, given.seed)
        train(config, given.out, preset=given.preset, kind=given.kind, device=device, command=said, point=given.point)
    except BayesTrainError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
