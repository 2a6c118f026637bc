"""What a finished run leaves in its folder: the network or posterior, its predictions, and what they are worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bayestrain.files import write_atomically, write_json
from bayestrain.infer import diagnose
from bayestrain.posterior import ParticleModel, Posterior
from bayestrain.saved import WEIGHTS, save_model, save_posterior
from bayestrain.train.config import RunConfig
from bayestrain.train.evaluation import Evaluation
from bayestrain.train.loop import FitResult
from bayestrain.train.material import Material, augmentation

HARDEST = 24
"""How many of the most uncertain test images a run keeps."""

STEIN_BATCHES = 20
"""Batches over which the gradients for the Stein discrepancy are averaged."""

COLLAPSED = 0.5
"""Fewer really different particles than this part of them all, and the posterior is hardly one."""

DISAGREEMENT = 1e-3
"""Particles that differ on fewer test images than this say the same."""


FACTS = ("own_ranks", "within_one_rank", "bonds", "diagnostics", "warnings")
"""What `training_facts` finds."""


@dataclass(frozen=True)
class Result:
    """Where a run is and what its ``result.json`` says."""

    folder: Path
    summary: dict[str, Any]


def training_facts(
    config: RunConfig, posterior: Posterior, fitted: FitResult, material: Material, disagreement: float
) -> dict[str, Any]:
    """What only the end of training knows of a posterior: the spread of its ranks, and how its particles lie."""
    seed = config.experiment.seed
    noise, augment = torch.Generator(posterior.device).manual_seed(seed), augmentation(config.data, material.splits)
    batches = material.train.batches(
        config.fit.batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed), device=posterior.device,
        augment=lambda x: augment(x, noise),
    )  # fmt: skip
    diagnostics = {
        **asdict(diagnose(posterior.particles)),
        "disagreement": disagreement,
        "ksd": posterior.stein_discrepancy(islice(batches, STEIN_BATCHES)),
    }
    spreads = [max(bond) - min(bond) for bonds in fitted.own_ranks.values() for bond in bonds]
    return {
        "own_ranks": fitted.own_ranks,
        "within_one_rank": sum(spread <= 1 for spread in spreads) / len(spreads) if spreads else None,
        "bonds": len(spreads),
        "diagnostics": diagnostics,
        "warnings": warnings_of(len(posterior), config.posterior.particles, diagnostics),
    }


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


def write_evaluation(out: Path, config: RunConfig, evaluation: Evaluation, dense_params: int) -> None:
    """Write the network or posterior, and its predictions."""
    from safetensors import SafetensorError
    from safetensors.torch import save

    splits, prediction, network = evaluation.material.splits, evaluation.prediction, evaluation.network
    about = {
        "model": config.experiment.model,
        "experiment": config.experiment.name,
        "data": splits.name,
        "classes": list(splits.classes),
        "input_shape": list(splits.test.images.shape[1:]),
        "mean": list(splits.mean),
        "std": list(splits.std),
        "dense_params": dense_params,
    }
    hardest = prediction.total.argsort(descending=True)[:HARDEST]
    tensors = {
        "probabilities": prediction.mean.float(),
        "labels": splits.test.labels,
        "hardest": hardest,
        "hardest_images": splits.test.images[hardest],
    }
    if isinstance(network, ParticleModel):
        save_posterior(network, out, {**about, "method": config.posterior.method})
        tensors |= {
            "total": prediction.total.float(),
            "aleatoric": prediction.aleatoric.float(),
            "epistemic": prediction.epistemic.float(),
            "hardest_particle_probabilities": prediction.particle_probabilities[:, hardest].float(),
        }
    else:
        if evaluation.validation is not None:
            about["temperature"] = evaluation.suited  # a posterior has its own
        try:
            save_model(network.cpu(), out, about)
        except SafetensorError as error:  # a full disk, in the library's own words
            raise OSError(None, str(error), str(out / WEIGHTS)) from error
    beyond, outside = evaluation.beyond, evaluation.material.outside
    if beyond is not None and outside is not None:
        tensors |= {
            "ood_total": beyond.total.float(),
            "ood_aleatoric": beyond.aleatoric.float(),
            "ood_epistemic": beyond.epistemic.float(),
            "ood_images": outside.images[:HARDEST],
            "ood_images_total": beyond.total[:HARDEST].float(),
        }
    write_atomically(out / "evaluation.safetensors", save({name: t.contiguous() for name, t in tensors.items()}))


def write_result(out: Path, spectra: dict[str, Any], summary: dict[str, Any]) -> None:
    """``result.json``, which makes a run finished, comes last."""
    write_json(out / "spectra.json", spectra)
    write_json(out / "result.json", summary)
