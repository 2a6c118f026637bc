"""What a run of several particles adds to its folder: the posterior's part of the result, and the MAP run beside it."""

from pathlib import Path

import numpy as np

from bayestrain.errors import ReportError
from bayestrain.report.agreement import within_one
from bayestrain.report.load_evaluation import read_evaluation
from bayestrain.report.reading import Json, as_number, number, read_json, read_scores, whole
from bayestrain.report.run import Diagnostics, Evaluation, MapRun, Ood, Posterior

OUTSIDE = {"patches": "shuffled patches"}
"""Names for people of images that are no data set of their own."""


def read_posterior(result: Json | None, config: Json, path: Path) -> Posterior | None:
    """The posterior in a result; while there is none, the one that the config asks for. None for a single network."""
    if result is None:
        wanted = config.get("posterior")
        particles = wanted.get("particles") if isinstance(wanted, dict) else None
        if not isinstance(wanted, dict) or not isinstance(particles, int):
            return None
        return _several(Posterior(str(wanted.get("method", "")), particles, str(wanted.get("start", ""))))
    about = result.get("posterior")
    if about is None:
        return None
    try:
        return _several(_posterior(about))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f'{path}: "posterior" is malformed ({error}). Set it to null to leave the particles out of the report.'
        ) from error


def _several(posterior: Posterior) -> Posterior | None:
    return posterior if posterior.particles > 1 and posterior.method != "map" else None


def _posterior(about: Json) -> Posterior:
    particles = whole(about, "particles")
    if particles is None:
        raise ValueError("it has no number of 'particles'")
    own = {
        name: tuple(tuple(int(rank) for rank in bond) for bond in bonds)
        for name, bonds in (about.get("own_ranks") or {}).items()
    }  # a particle that broke down after the rounding is still among them
    if not all(bond for bonds in own.values() for bond in bonds):
        raise ValueError("'own_ranks' has a bond without ranks")
    return Posterior(
        method=str(about.get("method", "")),
        particles=particles,
        start=str(about.get("start", "")),
        mean_log_likelihood=number(about, "mean_log_likelihood"),
        accuracies=_each(about, "particle_accuracy", particles),
        log_likelihoods=_each(about, "particle_log_likelihood", particles),
        own_ranks=own,
        within_one=_agreement(own, about),
        diagnostics=read_diagnostics(about.get("diagnostics")),
        temperature=number(about, "temperature"),
        plain_ece=number(about.get("uncalibrated") or {}, "ece"),
        plain_log_likelihood=number(about.get("uncalibrated") or {}, "log_likelihood"),
        map_calibrated_ece=number((about.get("map") or {}).get("calibrated") or {}, "ece"),
    )


def _each(about: Json, key: str, particles: int) -> tuple[float | None, ...]:
    """One number per particle, or none at all."""
    values = about.get(key) or []
    if values and len(values) != particles:
        raise ValueError(f"{key!r} has {len(values)} values for {particles} particles")
    return tuple(as_number(value, key) for value in values)


def _agreement(own: dict[str, tuple[tuple[int, ...], ...]], about: Json) -> tuple[int, int] | None:
    """Counted on the ranks themselves where they are there, else from the share that the run recorded."""
    bonds = [bond for layer in own.values() for bond in layer]
    if bonds:
        return within_one(bonds)
    share, number_of = number(about, "within_one_rank"), whole(about, "bonds")
    return (round(share * number_of), number_of) if share is not None and number_of else None


def read_ood(result: Json | None, path: Path) -> Ood | None:
    """How well another data set was told; a MAP run may have that too."""
    posterior = (result or {}).get("posterior")
    about = posterior.get("ood") if isinstance(posterior, dict) else None
    if about is None:
        return None
    try:
        return _ood(about)
    except (ValueError, AttributeError) as error:
        raise ReportError(
            f'{path}: "ood" of "posterior" is malformed ({error}). Set it to null to leave it out of the report.'
        ) from error


def _ood(about: Json) -> Ood:
    name = str(about.get("name", "another data set"))
    return Ood(OUTSIDE.get(name, name), number(about, "auroc"), number(about, "auroc_epistemic"))


def read_diagnostics(about: Json | None, validation: Json | None = None) -> Diagnostics | None:
    """The particles' diagnostics; None for a single network. Over the epochs they disagree on validation images."""
    if not about:
        return None
    names = ("bandwidth", "kernel_mass", "effective_particles", "disagreement", "ksd")
    values = {**(validation or {}), **about}
    return Diagnostics(**{name: number(values, name) for name in names})


def read_warnings(result: Json | None) -> tuple[str, ...]:
    """What the run itself warns of."""
    posterior = (result or {}).get("posterior")
    warnings = posterior.get("warnings") if isinstance(posterior, dict) else None
    return tuple(str(text) for text in warnings) if isinstance(warnings, list) else ()


def read_map(folder: Path, result: Json | None, ours: Evaluation | None) -> MapRun | None:
    """The MAP run that the posterior is compared with, from the result or from ``map/``; None if there is none."""
    about = ((result or {}).get("posterior") or {}).get("map") or read_json(folder / "map" / "result.json")
    if not about:
        return None
    try:
        scores, auroc = read_scores(about), number(about, "ood_auroc")
    except (TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f'{folder}: the figures of its MAP run are malformed ({error}). Set "map" of "posterior" in its '
            "result.json to null to leave the comparison out of the report."
        ) from error
    path = folder / "map" / "evaluation.safetensors"
    theirs = read_evaluation(path)
    if ours and theirs and not np.array_equal(ours.labels, theirs.labels):
        raise ReportError(
            f"{path} has other labels than the run itself, so the two cannot be compared. "
            f"Delete {path.parent} to leave the comparison with MAP out of the report."
        )
    return MapRun(scores, auroc, theirs)
