"""The page of one run: headline figures, sections of plots, images, and the record."""

from dataclasses import dataclass, replace
from typing import Any

from bayestrain.report import words
from bayestrain.report.figures import FEW_LAYERS
from bayestrain.report.figures.certainty import rejection_plot, reliability_plot
from bayestrain.report.figures.layers import parameter_plots, rank_plots
from bayestrain.report.figures.own_ranks import own_rank_plot
from bayestrain.report.figures.particles import diagnostic_plots, gain_plot, score_plot
from bayestrain.report.figures.spectra import spectrum_plots, tolerance_plots
from bayestrain.report.figures.training import (
    accuracy_plot,
    lambda_plots,
    rank_trajectories,
    size_plot,
    trade_plot,
)
from bayestrain.report.figures.uncertainty import uncertainty_plots
from bayestrain.report.findings import certainty_findings, particle_findings
from bayestrain.report.headline import headline
from bayestrain.report.html import render
from bayestrain.report.paper import PAPER
from bayestrain.report.pictures import doubts, hardest_pictures, strangers
from bayestrain.report.run import Run
from bayestrain.report.svg import Plot

LEFT_OUT = {
    "history.jsonl": "the training curves",
    "config.toml": "the config",
    "model.json": "class names and the size at other tolerances",
    "environment.json": "the environment",
    "spectra.json": "the spectra",
    "evaluation.safetensors": "reliability and test images",
}


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, what was found, and plots in grids of plots that are about equally tall."""

    name: str
    title: str
    text: str
    grids: list[list[Plot]]
    findings: tuple[str, ...] = ()


def run_page(run: Run) -> str:
    """The HTML page of one run."""
    doubtful = doubts(run)
    beside = {doubt.picture.index for doubt in doubtful}
    context: dict[str, Any] = {
        "title": f"{run.experiment} · BayesTrain report",
        "run": run,
        "lead": _lead(run),
        "chips": _chips(run),
        "notices": _notices(run),
        "headline": headline(run),
        "sections": _sections(run),
        "doubts": doubtful,
        "pictures": [picture for picture in hardest_pictures(run) if picture.index not in beside],
        "strangers": strangers(run),
        "count": words.count,
        "ratio": words.ratio,
        "percent": words.percent,
        "signed": words.signed,
    }
    return render("run.html.j2", context)


def _sections(run: Run) -> list[Section]:
    paper = PAPER.get(run.experiment)
    curves = accuracy_plot(run) + size_plot(run) + trade_plot(run, paper)
    paths, lambdas = rank_trajectories(run), lambda_plots(run)
    spectra, tolerances = spectrum_plots(run), tolerance_plots(run)
    if len(run.tensor_layers) > FEW_LAYERS:  # maps of all layers beside the examples
        way, cut = [curves, paths + lambdas], [spectra[:1] + tolerances[:1], tolerances[1:] + spectra[1:]]
    else:
        way, cut = [curves, paths, lambdas], [spectra, tolerances]
    mean = " Of several particles the mean is shown." if run.posterior else ""
    particles = [score_plot(run) + own_rank_plot(run), gain_plot(run) + diagnostic_plots(run)]
    if len(particles[0]) == 1:  # it would stand alone on its row
        particles = [particles[0] + particles[1]]
    sections = [
        Section(
            "left",
            "What is left",
            "Every bond started at its maximal rank; the prior let go of what the data did not ask for.",
            [rank_plots(run, paper) + parameter_plots(run)]
            if len(run.tensor_layers) <= FEW_LAYERS
            else [rank_plots(run, paper), parameter_plots(run)],
        ),
        Section(
            "way",
            "How it got there",
            "A rank disappears when its λ falls: the slices of both cores it joins shrink to nothing together." + mean,
            way,
        ),
        Section(
            "cut",
            "Where the cut fell",
            "The final rounding sees only the weights. A gap in the spectrum means that the training decided, not "
            "the tolerance." + mean,
            cut,
        ),
        _certainty(run),
        Section(
            "particles",
            "The particles",
            "Each particle is a network of its own; all have the same ranks. A posterior is worth its cost when they "
            "differ, and when they are better together than alone.",
            particles,
            tuple(particle_findings(run)),
        ),
    ]
    filled = [replace(section, grids=[grid for grid in section.grids if grid]) for section in sections]
    return [section for section in filled if section.grids or section.findings]


def _certainty(run: Run) -> Section:
    plots = reliability_plot(run) + rejection_plot(run)
    if run.posterior is None:
        text = "Probabilities on the test set, which training and validation never saw."
        return Section(
            "certainty", "How sure it is", text, [uncertainty_plots(run) + plots], tuple(certainty_findings(run))
        )
    text = (
        "On the test set, which training and validation never saw. Doubt has two sources: the image itself, which "
        "every particle finds unclear (aleatoric), and the particles’ disagreement (epistemic)."
    )
    grids = [uncertainty_plots(run), plots]
    return Section("certainty", "How sure it is, and why", text, grids, tuple(certainty_findings(run)))


def _lead(run: Run) -> str:
    scores, posterior = run.scores, run.posterior
    who = f"A posterior of {posterior.particles} particles by {words.method(posterior.method)}. " if posterior else ""
    if not run.finished or scores.accuracy is None:
        last = run.history[-1].epoch if run.history else 0
        planned = f" of {run.total_epochs}" if run.total_epochs else ""
        what = "each particle" if posterior else "the network"
        return f"{who}Up to epoch {last}{planned} {what} has shrunk to {words.count(scores.params)} parameters."
    what = "Each particle" if posterior else "The network"
    if scores.ratio is None:
        kept = f"{what} has {words.count(scores.params)} parameters"
    else:
        kept = f"{what} kept {words.count(scores.params)} of {words.count(scores.dense_params)} parameters"
        kept += f" ({words.ratio(scores.ratio)} smaller)"
    answer = "; together they classify" if posterior else " and classifies"
    return f"{who}{kept}{answer} {words.percent(scores.accuracy)} of the test images right."


def _chips(run: Run) -> list[tuple[str, str]]:
    environment = run.environment
    gpu = environment.get("gpu", "")
    machine = gpu if gpu not in ("", "null") else environment.get("cpu", "")
    posterior = run.posterior
    chips = [
        ("preset", run.preset),
        ("kind", run.kind),
        ("particles", str(posterior.particles) if posterior else ""),
        ("method", words.method(posterior.method) if posterior else ""),
        ("start", posterior.start if posterior else ""),
        ("seed", "" if run.seed is None else str(run.seed)),
        ("on", machine),
        ("started", environment.get("started", "")[:16].replace("T", " ")),
        ("commit", environment.get("commit", "")[:9] + (" + changes" if environment.get("dirty") == "true" else "")),
    ]
    return [(name, value) for name, value in chips if value not in ("", "null")]


def _notices(run: Run) -> list[str]:
    notices = list(run.warnings)
    if not run.finished:
        notices.append(
            f"This run has not finished, so there is no test result yet. "
            f"Go on with: bayestrain train --resume --out {run.folder}"
        )
    lacking = [f"{what} (no {name})" for name, what in LEFT_OUT.items() if name in run.missing]
    if run.posterior and run.evaluation and run.evaluation.uncertainty is None:
        lacking.append("the kinds of uncertainty (no total, aleatoric and epistemic in evaluation.safetensors)")
    if run.finished and lacking:
        notices.append("Left out: " + ", ".join(lacking) + ".")
    return notices
