"""The page of one run: headline figures, sections of plots, images, and the record."""

from dataclasses import dataclass, replace
from typing import Any

from bayestrain.report import words
from bayestrain.report.figures import FEW_LAYERS
from bayestrain.report.figures.certainty import rejection_plot, reliability_plot
from bayestrain.report.figures.layers import parameter_plots, rank_plots
from bayestrain.report.figures.spectra import spectrum_plots, tolerance_plots
from bayestrain.report.figures.training import (
    accuracy_plot,
    lambda_plots,
    rank_trajectories,
    size_plot,
    trade_plot,
)
from bayestrain.report.html import render
from bayestrain.report.paper import PAPER
from bayestrain.report.pictures import hardest_pictures
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
class Card:
    """One headline figure; `verdict` says how it stands to the paper's."""

    label: str
    value: str
    paper: str = ""
    verdict: str = ""
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, a sentence and plots, in grids of plots that are about equally tall."""

    name: str
    title: str
    text: str
    grids: list[list[Plot]]


def run_page(run: Run) -> str:
    """The HTML page of one run."""
    context: dict[str, Any] = {
        "title": f"{run.experiment} · BayesTrain report",
        "run": run,
        "lead": _lead(run),
        "chips": _chips(run),
        "notices": _notices(run),
        "headline": headline(run),
        "sections": _sections(run),
        "pictures": hardest_pictures(run),
        "count": words.count,
        "ratio": words.ratio,
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
            "A rank disappears when its λ falls: the slices of both cores it joins shrink to nothing together.",
            way,
        ),
        Section(
            "cut",
            "Where the cut fell",
            "The final rounding sees only the weights. A gap in the spectrum means that the training decided, not "
            "the tolerance.",
            cut,
        ),
        Section(
            "certainty",
            "How sure it is",
            "Probabilities on the test set, which training and validation never saw.",
            [reliability_plot(run) + rejection_plot(run)],
        ),
    ]
    filled = [replace(section, grids=[grid for grid in section.grids if grid]) for section in sections]
    return [section for section in filled if section.grids]


def headline(run: Run) -> list[Card]:
    """The six figures at the top, against the paper's where there are any."""
    scores, paper = run.scores, PAPER.get(run.experiment)

    def verdict(ours: float | None, theirs: float, smaller_is_better: bool = False) -> str:
        if ours is None or ours == theirs:
            return ""
        return "better" if (ours < theirs) == smaller_is_better else "worse"

    cards = [
        Card("Parameters", words.count(scores.params), note=f"of {words.count(scores.dense_params)}"),
        Card("Compression", words.ratio(scores.ratio), note="smaller than the dense network"),
        Card("Test accuracy", words.percent(scores.accuracy)),
        Card("Log likelihood", words.signed(scores.log_likelihood), note="mean per test image"),
        Card("Calibration error", words.percent(scores.ece), note="expected (ECE), 0 is perfect"),
        Card("Time", words.duration(scores.seconds), note=f"peak memory {words.size(scores.peak_memory_bytes)}"),
    ]
    if scores.ratio is None:
        cards[1] = Card("Compression", "–")
    if paper:
        cards[:4] = [
            Card("Parameters", cards[0].value, words.count(paper.params), verdict(scores.params, paper.params, True)),
            Card("Compression", cards[1].value, words.ratio(paper.ratio), verdict(scores.ratio, paper.ratio)),
            Card("Test accuracy", cards[2].value, words.percent(paper.accuracy, 1),
                 verdict(scores.accuracy, paper.accuracy)),
            Card("Log likelihood", cards[3].value, words.signed(paper.log_likelihood),
                 verdict(scores.log_likelihood, paper.log_likelihood)),
        ]  # fmt: skip
    return cards


def _lead(run: Run) -> str:
    scores = run.scores
    if not run.finished or scores.accuracy is None:
        last = run.history[-1].epoch if run.history else 0
        planned = f" of {run.total_epochs}" if run.total_epochs else ""
        return f"Up to epoch {last}{planned} the network has shrunk to {words.count(scores.params)} parameters."
    if scores.ratio is None:
        kept = f"The network has {words.count(scores.params)} parameters"
    else:
        kept = f"The network kept {words.count(scores.params)} of {words.count(scores.dense_params)} parameters"
        kept += f" ({words.ratio(scores.ratio)} smaller)"
    return f"{kept} and classifies {words.percent(scores.accuracy)} of the test images right."


def _chips(run: Run) -> list[tuple[str, str]]:
    environment = run.environment
    gpu = environment.get("gpu", "")
    machine = gpu if gpu not in ("", "null") else environment.get("cpu", "")
    chips = [
        ("preset", run.preset),
        ("kind", run.kind),
        ("seed", "" if run.seed is None else str(run.seed)),
        ("on", machine),
        ("started", environment.get("started", "")[:16].replace("T", " ")),
        ("commit", environment.get("commit", "")[:9] + (" + changes" if environment.get("dirty") == "true" else "")),
    ]
    return [(name, value) for name, value in chips if value not in ("", "null")]


def _notices(run: Run) -> list[str]:
    notices = []
    if not run.finished:
        notices.append(
            f"This run has not finished, so there is no test result yet. "
            f"Go on with: bayestrain train --resume --out {run.folder}"
        )
    lacking = [f"{what} (no {name})" for name, what in LEFT_OUT.items() if name in run.missing]
    if run.finished and lacking:
        notices.append("Left out: " + ", ".join(lacking) + ".")
    return notices
