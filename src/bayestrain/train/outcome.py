"""What a finished run leaves in its folder: the network or posterior, its predictions, and what they are worth."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.data import Images, Splits
from bayestrain.files import write_atomically, write_json
from bayestrain.posterior import Posterior
from bayestrain.predict import ClassPrediction
from bayestrain.saved import save_model, save_posterior
from bayestrain.train.config import RunConfig
from bayestrain.train.loop import FitResult
from bayestrain.train.metrics import at_temperature, measured, temperature
from bayestrain.train.outside import told_apart

HARDEST = 24
"""How many of the most uncertain test images a run keeps."""

STEIN_BATCHES = 20
"""Batches over which the gradients for the Stein discrepancy are averaged."""

COLLAPSED = 0.5
"""Fewer really different particles than this part of them all, and the posterior is hardly one."""

DISAGREEMENT = 1e-3
"""Particles that differ on fewer test images than this say the same."""


@dataclass(frozen=True)
class Outcome:
    """What came out of training, on the test images and on outside ones.

    `temperature` is the one that the held-out images ask for; `prediction` has it if the config wants it.
    """

    splits: Splits
    network: nn.Module | Posterior
    fitted: FitResult
    logits: Tensor
    prediction: ClassPrediction
    temperature: float
    outside: Images | None
    beyond: ClassPrediction | None


def posterior_summary(
    config: RunConfig, outcome: Outcome, train: Images, map_folder: Path, augment: Any
) -> dict[str, Any] | None:
    """What ``result.json`` says beyond a MAP point's figures; for a MAP point only of outside images."""
    settings, prediction = config.posterior, outcome.prediction
    ood = None
    if outcome.beyond is not None:
        ood = told_apart(settings.outside, prediction, outcome.beyond)
    labels = outcome.splits.test.labels
    compared = {
        "temperature": temperature(outcome.network),
        "uncalibrated": measured(at_temperature(outcome.logits, 1.0), labels),
        "calibrated": {"temperature": outcome.temperature}
        | measured(at_temperature(outcome.logits, outcome.temperature), labels),
    }
    if not isinstance(outcome.network, Posterior):
        return None if ood is None else {"method": "map", "particles": 1, "ood": ood, **compared}
    posterior = outcome.network
    generator = torch.Generator(posterior.device).manual_seed(config.experiment.seed)
    batches = train.batches(
        config.fit.batch_size, shuffle=True, generator=torch.Generator().manual_seed(config.experiment.seed),
        device=posterior.device, augment=lambda x: augment(x, generator),
    )  # fmt: skip
    diagnostics = {
        **asdict(posterior.diagnostics()),
        "disagreement": float(prediction.disagreement.mean()),
        "ksd": posterior.stein_discrepancy(islice(batches, STEIN_BATCHES)),
    }
    each = prediction.particle_probabilities
    own = outcome.fitted.own_ranks
    spreads = [max(bond) - min(bond) for bonds in own.values() for bond in bonds]
    return {
        "method": settings.method,
        "particles": len(posterior),
        "start": settings.start,
        "mean_log_likelihood": prediction.mean_log_likelihood(labels),
        "particle_accuracy": (each.argmax(2) == labels).double().mean(1).tolist(),
        "particle_log_likelihood": each.gather(2, labels.expand(len(each), -1)[..., None]).clamp_min(1e-300).log()
        .mean((1, 2)).tolist(),
        "own_ranks": own,
        "within_one_rank": sum(spread <= 1 for spread in spreads) / len(spreads) if spreads else None,
        "bonds": len(spreads),
        "diagnostics": diagnostics,
        "warnings": warnings_of(len(posterior), settings.particles, diagnostics),
        **compared,
        "ood": ood,
        "map": _map_figures(map_folder),
    }  # fmt: skip


def warnings_of(left: int, started: int, diagnostics: dict[str, float]) -> list[str]:
    """Sentences on what is wrong with the particles, each with advice."""
    found = []
    if left < started:
        found.append(f"{started - left} of {started} particles broke and were dropped. Try a smaller learning rate.")
    if diagnostics["effective_particles"] < COLLAPSED * left:
        found.append(
            f"The particles have collapsed: of {left}, only about {diagnostics['effective_particles']:.1f} are "
            'different. Start them apart (posterior.start="independent"), or use a larger posterior.jitter.'
        )
    elif diagnostics["disagreement"] < DISAGREEMENT:
        found.append(
            f"The particles differ in their weights but hardly in what they say: they disagree on "
            f"{100 * diagnostics['disagreement']:.2g} % of the test images. Start them apart, or train them longer."
        )
    return found


def _map_figures(folder: Path) -> dict[str, Any] | None:
    if not (folder / "result.json").exists():
        return None
    result = json.loads((folder / "result.json").read_text())
    figures = {key: result[key] for key in ("accuracy", "log_likelihood", "ece", "brier", "params", "seconds")}
    more = result.get("posterior") or {}
    ood = more.get("ood")
    return {**figures, "ood_auroc": None if ood is None else ood["auroc"], "calibrated": more.get("calibrated")}


def write_outcome(out: Path, config: RunConfig, outcome: Outcome, summary: dict[str, Any]) -> None:
    """Fill the run folder; ``result.json``, which makes a run finished, comes last."""
    from safetensors.torch import save

    splits, prediction = outcome.splits, outcome.prediction
    about = {
        "model": config.experiment.model,
        "experiment": config.experiment.name,
        "data": splits.name,
        "classes": list(splits.classes),
        "input_shape": list(splits.test.images.shape[1:]),
        "mean": list(splits.mean),
        "std": list(splits.std),
        "dense_params": summary["dense_params"],
    }
    hardest = prediction.total.argsort(descending=True)[:HARDEST]
    tensors = {
        "probabilities": prediction.mean.float(),
        "labels": splits.test.labels,
        "hardest": hardest,
        "hardest_images": splits.test.images[hardest],
    }
    if isinstance(outcome.network, Posterior):
        save_posterior(outcome.network, out, {**about, "method": config.posterior.method})
        tensors |= {
            "total": prediction.total.float(),
            "aleatoric": prediction.aleatoric.float(),
            "epistemic": prediction.epistemic.float(),
            "hardest_particle_probabilities": prediction.particle_probabilities[:, hardest].float(),
        }
    else:
        save_model(outcome.network.cpu(), out, about)
    if outcome.beyond is not None and outcome.outside is not None:
        tensors |= {
            "ood_total": outcome.beyond.total.float(),
            "ood_aleatoric": outcome.beyond.aleatoric.float(),
            "ood_epistemic": outcome.beyond.epistemic.float(),
            "ood_images": outcome.outside.images[:HARDEST],
        }
    write_atomically(out / "evaluation.safetensors", save({name: t.contiguous() for name, t in tensors.items()}))
    write_json(out / "spectra.json", outcome.fitted.spectra)
    write_json(out / "result.json", summary)
