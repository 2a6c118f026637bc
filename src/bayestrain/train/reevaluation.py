"""The figures of a finished run taken anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bayestrain.errors import TrainingError
from bayestrain.files import write_json
from bayestrain.saved import load_model, load_posterior
from bayestrain.train import toml
from bayestrain.train.environment import describe_environment
from bayestrain.train.evaluation import evaluate_network, posterior_scores, scores
from bayestrain.train.material import load_material
from bayestrain.train.outcome import FACTS, Result, write_evaluation
from bayestrain.train.places import MAP
from bayestrain.train.records import read_result


def evaluate_run(out: Path, *, device: str, command: str, with_outside: bool = False) -> Result:
    """Evaluate a finished run again, its MAP point first: predictions, temperature, figures. Nothing is trained.

    A run that met outside images meets them again, a MAP point also `with_outside`.
    """
    if not (out / "result.json").exists():
        raise TrainingError(
            f"{out} is no finished run: it has no result.json. Finish it with bayestrain train --resume."
        )
    before = read_result(out)
    if (out / MAP / "result.json").exists():
        evaluate_run(out / MAP, device=device, command=command)
    config, place = toml.load(out / "config.toml"), torch.device(device)
    material = load_material(config, with_outside=with_outside or before.get("posterior") is not None)
    network: Any = load_posterior(out).to(place) if config.posterior.particles else load_model(out).to(place)
    evaluation = evaluate_network(config, material, network, place)
    posterior = posterior_scores(config, evaluation, out / MAP)
    environment = describe_environment(place)
    summary = {
        **before,
        **scores(evaluation),
        "posterior": None if posterior is None else {**posterior, **_facts(before.get("posterior") or {})},
        "evaluated_again": {
            "command": command,
            "device": environment["gpu"] or "cpu",
            **{key: environment[key] for key in ("commit", "dirty", "torch")},
        },
    }
    write_evaluation(out, config, evaluation, before["dense_params"])
    write_json(out / "result.json", summary)
    return Result(out, summary)


def _facts(before: dict[str, Any]) -> dict[str, Any]:
    """What only training knew."""
    return {key: before[key] for key in FACTS if key in before}
