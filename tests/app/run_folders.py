"""Run folders written by hand, file by file, as `train` writes them: what the report is tested on."""

import json
from pathlib import Path
from typing import Any

import edits
import numpy as np
from safetensors.numpy import save_file
from scipy.special import entr, softmax

Json = dict[str, Any]
EPOCHS, FINETUNE, MAX_RANK = 16, 4, 20

CONFIG = """\
[run]
name = {name}
likelihood = "{task}"
model = "nets:build"
data = "nets:loaders"
seed = {seed}

[tensorize]
max_rank = 20

[prior]
weight = {weight}

[fit]
epochs = {epochs}
finetune_epochs = {finetune}
lr = 0.003
"""

LAYERS: dict[str, tuple[str, str, list[int], list[int], list[int]]] = {
    "features.conv": ("tt", "split", [32, 16, 3, 3], [18, 20, 9], [6, 9, 3]),
    "fc1": ("cp", "unsplit", [128, 784], [20], [7]),
    "fc2": ("knot", "paired", [64, 128], [20, 20, 20, 20], [4, 11, 8, 2]),  # an unknown format
}
"""Name: format, layout, shape, ranks at the start, ranks at the end."""


def write_run(
    folder: Path, kind: str = "classification", *, name: str = "digits", seed: int = 0, layers: Any = None,
    weight: float = 1.0, temper: float = 1.0,
) -> Path:  # fmt: skip
    """A finished run: "classification", "posterior", "regression", "regression-posterior", "other" or "dense"."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    about = {} if kind == "dense" else LAYERS if layers is None else layers
    posterior = kind.endswith("posterior")
    task = kind.partition("-")[0] if kind.startswith(("other", "regression")) else "classification"
    (folder / "config.toml").write_text(
        CONFIG.format(name=json.dumps(name), task=task, seed=seed, weight=weight, epochs=EPOCHS, finetune=FINETUNE)
    )
    dump(folder / "environment.json", {
        "bayestrain": "0.2.0", "gpu": None, "commit": "ec317859a1b6", "dirty": False, "threads": 1,
        "command": "bayestrain train run.toml", "earlier": [{"commit": "1" * 12, "dirty": True}],
    })  # fmt: skip
    tensors, metrics = _predictions(task, posterior, rng, temper)
    lines = [_epoch(epoch, about, metrics, posterior, weight) for epoch in range(EPOCHS + FINETUNE + 1)]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tensors:
        save_file(tensors, folder / "predictions.safetensors")
    calibrated = {"temperature": temper, **metrics, "ece": 0.008} if task == "classification" else None
    dump(folder / "result.json", {
        "task": task, "dense_parameters": 113_482, "parameters": lines[-1]["parameters"] if about else 113_482,
        "start_ranks": {layer: starts for layer, (_, _, _, starts, _) in about.items()},
        "ranks": {layer: ends for layer, (*_, ends) in about.items()},
        "layers": {
            **{layer: {"format": form, "layout": layout, "shape": shape, "dense": int(np.prod(shape)),
                       "now": 60 * sum(ends)}
               for layer, (form, layout, shape, starts, ends) in about.items()},
            "head": {"format": None, "layout": None, "shape": [10, 64], "dense": 650, "start": 650, "now": 650},
        },
        "metrics": metrics, "calibrated": calibrated, "validation": lines[-1]["validation"],
        "posterior": _posterior(metrics) if posterior else None,
        "classes": [f"digit {k}" for k in range(10)] if task == "classification" else None,
        "seconds": 260.06, "peak_memory_bytes": 602560512, "device": "cpu", "from_run": None,
    })  # fmt: skip
    return folder


def deep_layers(number: int = 90) -> Json:
    """Layers of a deep network, all convolutions in the same format."""
    return {
        f"stage{k // 30 + 1}.block{k % 30}.conv": (
            "tucker2", "channels", [16 + k, 16 + k, 3, 3], [16, 16], [3 + k % 11, 2 + k % 7],
        )
        for k in range(number)
    }  # fmt: skip


def unfinished(folder: Path, epochs: int = 6) -> Path:
    """Take back all that a run writes after its `epochs`th epoch; the next line is cut short, as by a crash."""
    for name in ("result.json", "predictions.safetensors"):
        (folder / name).unlink(missing_ok=True)
    lines = (folder / "history.jsonl").read_text().splitlines()
    (folder / "history.jsonl").write_text("\n".join([*lines[:epochs], lines[epochs][:40]]))
    return folder


def edit(folder: Path, **changes: Any) -> Path:
    """Change entries of a run's ``result.json``."""
    edits.edit(folder / "result.json", **changes)
    return folder


def load(path: Path) -> Json:
    return dict(json.loads(path.read_text()))


def dump(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content))


def _epoch(epoch: int, layers: Any, metrics: Json, posterior: bool, weight: float) -> Json:
    """A line of the history on the way to the final metrics; epoch 0 is the network before training."""
    progress = min(epoch / EPOCHS, 1.0)
    left = np.exp(-8 * progress)
    ranks = {
        name: [round(start + (end - start) * min(1.3 * progress, 1) ** 2) for start, end in zip(*bonds, strict=True)]
        for name, (_, _, _, *bonds) in layers.items()
    }  # fmt: skip
    signs = {"accuracy": -0.5, "log_likelihood": -2.0, "rmse": 1.0}
    validation = {key: value + signs.get(key, 0) * left for key, value in metrics.items()}
    line = {
        "epoch": epoch, "phase": "finetune" if epoch > EPOCHS else "search" if layers else "train", "seconds": 12.9,
        "lr": 0.003, "train_loss": None if not epoch else 0.01 - validation["log_likelihood"],
        "prior_loss": None if not epoch else -8 + 6 * left, "prior_weight": weight * progress,
        "train_accuracy": validation.get("accuracy") if epoch else None, "validation": validation,
        "parameters": 650 + 60 * sum(map(sum, ranks.values())), "ranks": ranks,
    }  # fmt: skip
    if posterior:
        line |= {"particles": 8, "diagnostics": {"effective_particles": 8 - 2 * progress, "spread": 0.2 + progress}}
    return line


def _posterior(metrics: Json) -> Json:
    return {
        "method": "svgd", "particles": 8, "mean_log_likelihood": metrics["log_likelihood"] - 0.05, "warnings": [],
        "diagnostics": {"effective_particles": 6.02, "spread": 1.2, "ksd": 0.00031, "disagreement": 0.021},
        "ood": {"name": "patches", "auroc": 0.9731},
    }  # fmt: skip


def _predictions(
    task: str, posterior: bool, rng: np.random.Generator, temper: float
) -> tuple[dict[str, Any], dict[str, float]]:
    n, particles = 1200, 8 if posterior else 1
    if task == "other":
        return {}, {"log_likelihood": -1.234}
    if task == "regression":
        targets = rng.normal(size=n)
        aleatoric, epistemic = 0.08 + 0.1 * rng.random(n), (0.1 if posterior else 0) * rng.random(n)
        std = np.sqrt(aleatoric + epistemic)
        mean = targets + std * rng.normal(size=n)
        found = {"mean": mean, "std": std, "aleatoric": aleatoric, "epistemic": epistemic, "targets": targets}
        score = -0.5 * np.log(2 * np.pi * std**2) - 0.5 * ((mean - targets) / std) ** 2
        metrics = {"rmse": float(np.sqrt(np.mean((mean - targets) ** 2))), "log_likelihood": float(score.mean())}
        return {key: value.astype(np.float32) for key, value in found.items()}, metrics
    each = softmax(8 * rng.normal(size=(n, 10)) + rng.normal(size=(particles, n, 10)), axis=-1)
    labels = np.array([rng.choice(10, p=p) for p in each.mean(0)])  # calibrated, unless tempered
    each = softmax(temper * np.log(each), axis=-1)
    probabilities = each.mean(0)
    total, aleatoric = entr(probabilities).sum(-1), entr(each).sum(-1).mean(0)
    found = {
        "probabilities": probabilities, "labels": labels, "total": total, "aleatoric": aleatoric,
        "epistemic": np.maximum(total - aleatoric, 0) if posterior else np.zeros(n),
    }  # fmt: skip
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    places = np.minimum((confidence * 15).astype(int), 14)
    ece = sum(abs(confidence[places == k].sum() - right[places == k].sum()) for k in range(15)) / n
    truth = probabilities[np.arange(n), labels]
    metrics = {"accuracy": right.mean(), "log_likelihood": np.log(truth).mean(), "ece": ece,
               "brier": ((probabilities - np.eye(10)[labels]) ** 2).sum(1).mean()}  # fmt: skip
    return found, {key: float(value) for key, value in metrics.items()}
