"""What a posterior's figures show, in sentences with their numbers."""

import numpy as np
from numpy.typing import NDArray

from bayestrain.report.agreement import agreement_sentence
from bayestrain.report.run import Run
from bayestrain.report.words import area, percent, plural, signed


def certainty_findings(run: Run) -> list[str]:
    """How well uncertainty finds the run's own errors, images of another data set, and what calibration did."""
    return [sentence for sentence in (_errors(run), _strangers(run), _calibration(run)) if sentence]


def particle_findings(run: Run) -> list[str]:
    """Whether the particles agree on the ranks, what they gain together, how many they really are."""
    posterior = run.posterior
    if posterior is None:
        return []
    sentences = []
    if posterior.within_one and run.rule == "rounding":  # own ranks are those of a rounding
        uncut = sum(
            min(ranks) >= most
            for layer in run.tensor_layers
            for ranks, most in zip(posterior.own_ranks.get(layer.name, ()), layer.max_ranks, strict=False)
        )
        sentences.append(agreement_sentence(*posterior.within_one, "The particles", "their own ranks", uncut))
    ours, alone = run.scores.log_likelihood, posterior.mean_log_likelihood
    if ours is not None and alone is not None:
        plain = ours if posterior.plain_log_likelihood is None else posterior.plain_log_likelihood
        rest = f", the temperature {ours - plain:.3f}" if plain != ours else ""
        sentences.append(
            f"Together they reach a log likelihood of {signed(ours)} per test image, a particle alone "
            f"{signed(alone)} on average: answering together gains {plain - alone:.3f}{rest}."
        )
    about = posterior.diagnostics
    if about and about.effective_particles is not None:
        sentences.append(
            f"By their distances they count as {about.effective_particles:.3g} different networks out of "
            f"{posterior.particles}."
        )
    if about and about.disagreement is not None:
        sentences.append(
            f"A particle’s answer differs from the common one on {percent(about.disagreement)} of the test images, "
            "on average."
        )
    if about and about.ksd is not None:
        sentences.append(
            f"Kernelised Stein discrepancy, squared and per weight: {about.ksd:.3g}; 0 for draws from the posterior, "
            "of either sign by the noise of the batches it is estimated from."
        )
    return [sentence.replace(" %", "\u00a0%") for sentence in sentences]


def _calibration(run: Run) -> str:
    posterior, scores = run.posterior, run.scores
    if posterior is None or posterior.temperature in (None, 1.0) or posterior.plain_ece is None or scores.ece is None:
        return ""
    other = posterior.map_calibrated_ece
    single = "" if other is None else f" The MAP point’s figures, too, are at its own temperature ({percent(other)})."
    return (
        f"Probabilities are reported at temperature {posterior.temperature:.2f}, found on held-out images: the plain "
        f"mean of the particles has a calibration error of {percent(posterior.plain_ece)} and a log likelihood of "
        f"{signed(posterior.plain_log_likelihood)}, at this temperature {percent(scores.ece)} and "
        f"{signed(scores.log_likelihood)}.{single}"
    )


def _errors(run: Run) -> str:
    evaluation = run.evaluation
    if evaluation is None or evaluation.uncertainty is None or evaluation.right.all() or not evaluation.right.any():
        return ""
    right, doubt = evaluation.right, evaluation.uncertainty
    other = run.map.evaluation if run.map else None
    found = None
    if other is not None and other.right.any() and not other.right.all():
        found = _auroc(other.entropy[other.right], other.entropy[~other.right])
    return _comparison(
        f"AUROC (0.5 is chance, 1 perfect) for telling its {plural(int((~right).sum()), 'error')} from the rest",
        _auroc(doubt.total[right], doubt.total[~right]),
        _auroc(doubt.epistemic[right], doubt.epistemic[~right]),
        found,
    )


def _strangers(run: Run) -> str:
    ood = run.ood
    if ood is None or ood.auroc is None:
        return ""
    single = run.map.ood_auroc if run.map else None
    what = f"AUROC for telling {ood.name} from the test images"
    if run.posterior is None:  # the epistemic part of a single network is nothing
        return f"{what}: {area(ood.auroc)} by the entropy of its answer (0.5 is chance, 1 perfect)."
    return _comparison(what, ood.auroc, ood.auroc_epistemic, single)


def _comparison(what: str, total: float, epistemic: float | None, single: float | None) -> str:
    parts = [f"{area(total)} by total uncertainty"]
    parts += [] if epistemic is None else [f"{area(epistemic)} by the epistemic part alone"]
    parts += [] if single is None else [f"{area(single)} for MAP"]
    return f"{what}: {', '.join(parts)}."


def _auroc(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """Chance that an outside score is above an inside one."""
    import torch

    from bayestrain.predict import auroc

    return auroc(torch.from_numpy(inside), torch.from_numpy(outside))
