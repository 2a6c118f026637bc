"""What a trained network or posterior is worth on images it has not seen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayestrain.posterior import ParticleModel
from bayestrain.predict import Classification, ClassPrediction, auroc, fit_temperature
from bayestrain.train.config import RunConfig
from bayestrain.train.material import Material
from bayestrain.train.metrics import measured, predict
from bayestrain.train.records import read_result


@dataclass(frozen=True)
class Evaluation:
    """Predictions for the test images and for outside ones, and the temperature that held-out images ask for."""

    material: Material
    network: nn.Module | ParticleModel
    prediction: ClassPrediction
    validation: ClassPrediction | None
    suited: float
    beyond: ClassPrediction | None


def evaluate_network(
    config: RunConfig, material: Material, network: nn.Module | ParticleModel, place: torch.device
) -> Evaluation:
    """Predict everything; a posterior is first brought to the temperature that the held-out images ask for."""
    normalize, held_out, suited = material.splits.normalize, None, 1.0
    if material.validation is not None:
        held_out = predict(network, material.validation.to(place), normalize, place)
        suited = fit_temperature(held_out.particle_probabilities, material.validation.labels)
    if isinstance(network, ParticleModel) and config.posterior.calibrate:
        assert isinstance(network.joint.likelihood, Classification)
        network.joint.likelihood.temperature = suited
        held_out = None if held_out is None else dataclasses.replace(held_out, temperature=suited)
    prediction = predict(network, material.splits.test.to(place), normalize, place)
    outside = material.outside
    beyond = None if outside is None else predict(network, outside.to(place), normalize, place)
    return Evaluation(material, network, prediction, held_out, suited, beyond)


def scores(evaluation: Evaluation) -> dict[str, Any]:
    """The figures of the test images, as the network answers and at the temperature that the held-out images ask for;
    and those of the held-out ones."""
    prediction, labels = evaluation.prediction, evaluation.material.splits.test.labels
    found = measured(prediction, labels)
    held_out, images = evaluation.validation, evaluation.material.validation
    suited = measured(dataclasses.replace(prediction, temperature=evaluation.suited), labels)
    return {
        **{key: found[key] for key in ("accuracy", "log_likelihood", "ece", "brier")},
        "calibrated": None if held_out is None else {"temperature": evaluation.suited, **suited},
        "validation": None if held_out is None or images is None else measured(held_out, images.labels),
    }


def posterior_scores(config: RunConfig, evaluation: Evaluation, map_folder: Path) -> dict[str, Any] | None:
    """What there is to say of a posterior beyond `scores`; of a MAP point, only if there are outside images."""
    prediction, labels = evaluation.prediction, evaluation.material.splits.test.labels
    found: dict[str, Any] = {
        "temperature": prediction.temperature,
        "uncalibrated": measured(dataclasses.replace(prediction, temperature=1.0), labels),
        "ood": None,
    }
    if evaluation.beyond is not None:
        found["ood"] = {
            "name": config.posterior.outside,
            "auroc": auroc(prediction.total, evaluation.beyond.total),
            "auroc_epistemic": auroc(prediction.epistemic, evaluation.beyond.epistemic),
        }
    if not isinstance(evaluation.network, ParticleModel):
        return {"method": "map", "particles": 1, **found} if evaluation.beyond is not None else None
    each = prediction.particle_probabilities
    return {
        "method": config.posterior.method,
        "particles": len(each),
        "start": config.posterior.start,
        "mean_log_likelihood": prediction.mean_log_likelihood(labels),
        "particle_accuracy": (each.argmax(2) == labels).double().mean(1).tolist(),
        "particle_log_likelihood": prediction.particle_log_likelihood(labels).tolist(),
        **found,
        "map": _map_figures(map_folder),
    }


def _map_figures(folder: Path) -> dict[str, Any] | None:
    if not (folder / "result.json").exists():
        return None
    result = read_result(folder)
    figures = {key: result[key] for key in ("accuracy", "log_likelihood", "ece", "brier", "params", "seconds")}
    ood = (result.get("posterior") or {}).get("ood")
    return {**figures, "ood_auroc": None if ood is None else ood["auroc"], "calibrated": result.get("calibrated")}
