"""What tests of records and tables share: folders of results made from one recorded seed, and the lines of a table."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "paper" / "results"
SEED = RESULTS / "mnist" / "default" / "seed-0"

POSTERIOR: dict[str, Any] = {
    "method": "svgd", "particles": 20, "start": "independent", "ood": None, "temperature": 0.8, "map": None,
    "mean_log_likelihood": -0.05, "uncalibrated": {"log_likelihood": -0.04, "ece": 0.01},
}  # fmt: skip


def seed(results: Path, label: str, number: int, changes: dict[str, Any], *, settings: dict[str, str] | None = None,
         experiment: str = "mnist") -> Path:  # fmt: skip
    """A copy of the recorded seed with other figures, and lines of its config exchanged."""
    folder = shutil.copytree(SEED, results / experiment / label / f"seed-{number}")
    result = {**json.loads((folder / "result.json").read_text()), "experiment": experiment, "seed": number, **changes}
    result["ratio"] = result["dense_params"] / result["params"]
    (folder / "result.json").write_text(json.dumps(result))
    config = (folder / "config.toml").read_text()
    for old, new in (settings or {}).items():
        assert old in config
        config = config.replace(old, new)
    (folder / "config.toml").write_text(config)
    return folder


def group(results: Path, label: str, each: list[dict[str, Any]], *, failed: tuple[int, ...] = (),
          experiment: str = "mnist", settings: dict[str, str] | None = None, searched: tuple[float, ...] = (),
          ) -> Path:  # fmt: skip
    """A group of seeds with its summary, computed here and not by the code under test."""
    numbers = [number for number in range(len(each) + len(failed)) if number not in failed]
    folders = [
        seed(results, label, number, changes, settings=settings, experiment=experiment)
        for number, changes in zip(numbers, each, strict=True)
    ]
    all_figures = [figures(json.loads((folder / "result.json").read_text())) for folder in folders]
    if searched:
        for own, before in zip(all_figures, searched, strict=True):
            own["searched_accuracy"] = before
    else:
        for own in all_figures:
            own.pop("validation_accuracy", None)
    commits = sorted({json.loads((folder / "environment.json").read_text())["commit"] for folder in folders})
    summary: dict[str, Any] = {"command": "", "seeds": sorted([*numbers, *failed]), "failed": list(failed),
                               "commits": commits}  # fmt: skip
    for key in all_figures[0] if all_figures else ():
        values = [own[key] for own in all_figures]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        summary[key] = {"mean": statistics.fmean(values), "spread": spread, "each": values}
    folder = results / experiment / label
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def figures(result: dict[str, Any]) -> dict[str, float]:
    """The figures of one `result.json` recorded before the rewrite, read off independently of `paper.records`."""
    found = {key: result[key] for key in ("params", "ratio", "accuracy", "log_likelihood", "ece", "seconds")}
    found["validation_accuracy"] = result["validation"]["accuracy"]
    posterior = result["posterior"] or {}
    if "mean_log_likelihood" in posterior:
        del found["validation_accuracy"]
        found |= {key: posterior.get(key) for key in ("mean_log_likelihood", "temperature", "within_one_rank")}
        found |= {f"uncalibrated_{key}": posterior["uncalibrated"][key] for key in ("log_likelihood", "ece")}
        if ood := posterior["ood"]:
            found |= {key: ood[key] for key in ("auroc", "auroc_epistemic")}
        if point := posterior["map"]:
            found |= {f"map_{k}": point[k] for k in ("params", "accuracy", "log_likelihood", "ece", "seconds")}
            found |= {f"map_calibrated_{k}": point["calibrated"][k] for k in ("log_likelihood", "ece")}
            found["map_auroc"] = point["ood_auroc"]
    elif calibrated := result.get("calibrated"):
        found |= {f"calibrated_{key}": calibrated[key] for key in ("log_likelihood", "ece")}
    return {key: value for key, value in found.items() if value is not None}


def best_temperature(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The temperature that suits these images best, in units of the one they have."""
    logs = np.log(np.maximum(probabilities.astype(np.float64), 1e-45))

    def loss(beta: float) -> float:
        right = beta * logs[np.arange(len(labels)), labels] - np.log(np.exp(beta * logs).sum(1))
        return -float(right.mean())

    return 1 / minimize_scalar(loss, bounds=(0.2, 5), method="bounded", options={"xatol": 1e-4}).x
