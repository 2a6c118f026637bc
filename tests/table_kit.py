"""What tests of `bayestrain table` share: folders of results, made of a committed seed, and the lines of a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, SEED = ROOT / "results", ROOT / "results" / "mnist" / "default" / "seed-0"
SVG = "{http://www.w3.org/2000/svg}"
POSTERIOR = {"method": "svgd", "particles": 20, "start": "independent", "ood": None}


def group(
    results: Path, label: str, each: list[dict[str, Any]], *, experiment: str = "mnist", failed: tuple[int, ...] = (),
    command: str = "python tools/run_seeds.py", settings: dict[str, str] | None = None,
    summarised: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A group of seeds: results of the committed seed with other figures, and lines of its config exchanged."""
    config = (SEED / "config.toml").read_text()
    for old, new in (settings or {}).items():
        assert old in config
        config = config.replace(old, new)
    seeds = [seed for seed in range(len(each) + len(failed)) if seed not in failed]
    for seed, changes in zip(seeds, each, strict=True):
        folder = results / experiment / label / f"seed-{seed}"
        folder.mkdir(parents=True)
        result = json.loads((SEED / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps({**result, "experiment": experiment, "seed": seed, **changes}))
        (folder / "config.toml").write_text(config)
    summary = {"command": command, "seeds": [*seeds, *failed], "failed": list(failed), **(summarised or {})}
    (results / experiment / label).mkdir(parents=True, exist_ok=True)
    (results / experiment / label / "summary.json").write_text(json.dumps(summary))
    return results / experiment / label


def rows(text: str, experiment: str = "mnist") -> list[dict[str, str]]:
    """The lines of an experiment's table."""
    section = text.split(f"\n## {experiment}\n")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [dict(zip(table[0], row, strict=True)) for row in table[2:]]


def plain(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace("\u00a0", " ")


def all_kinds(results: Path) -> Path:
    """Groups of every kind, in an order that is not the table's."""
    sizes = {"params": 10_000, "ratio": 49.7}
    group(results, "zeta", [{"params": 5000}, {"params": 5200}, {"params": 5400}])
    group(results, "alpha", [{"params": 3000}, {"params": 3100}], settings={"weight = 1.0": "weight = 2.0"})
    group(results, "aimed", [{**sizes}], settings={"target_ratio = 0.0": "target_ratio = 50.0"})
    suited = {"temperature": 2.0, "log_likelihood": -0.03, "ece": 0.001}
    group(results, "tt", [{"kind": "tensorized", "params": 27_235, "calibrated": suited}])
    group(results, "plain", [{"kind": "dense", "params": 496_885}, {"kind": "dense", "params": 496_885}])
    several = [{"posterior": {**POSTERIOR, "mean_log_likelihood": value}} for value in (-0.05, -0.07)]
    group(results, "cloud", several, failed=(2,))
    group(results, "their-way", [{"preset": "paper", "params": 4000}])
    group(results, "lost", [], failed=(0, 1))
    (results / "benchmarks" / "old").mkdir(parents=True)
    (results / "benchmarks" / "old" / "layers.json").write_text("{}")
    return results
