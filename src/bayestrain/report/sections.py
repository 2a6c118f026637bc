"""The sections of a run's page: which there are, and what they say, depends on what was trained and how it was cut."""

from dataclasses import dataclass, replace

from bayestrain.report import words
from bayestrain.report.figures import FEW_LAYERS
from bayestrain.report.figures.certainty import rejection_plot, reliability_plot
from bayestrain.report.figures.layers import parameter_plots, rank_plots
from bayestrain.report.figures.own_ranks import own_rank_plot
from bayestrain.report.figures.particles import diagnostic_plots, gain_plot, score_plot
from bayestrain.report.figures.spectra import spectrum_plots, tolerance_plots
from bayestrain.report.figures.threshold import threshold_plots
from bayestrain.report.figures.training import (
    accuracy_plot,
    lambda_plots,
    rank_trajectories,
    size_plot,
    trade_plot,
)
from bayestrain.report.figures.uncertainty import uncertainty_plots
from bayestrain.report.findings import certainty_findings, particle_findings
from bayestrain.report.paper import PAPER
from bayestrain.report.run import Run
from bayestrain.report.svg import Plot

TRAINED = {
    "dense": "An ordinary network without tensor trains, to compare with: no ranks were sought, nothing was cut.",
    "tensorized": "Tensor trains that keep all their ranks, to compare with those that find theirs: no ranks were "
    "sought, nothing was cut.",
}
"""What to know of the kinds of networks that seek no ranks."""

AROUND = "The ranks are those of the MAP point around which the particles start: here nothing was cut."


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, what was found, and plots in grids of plots that are about equally tall."""

    name: str
    title: str
    text: str
    grids: list[list[Plot]]
    findings: tuple[str, ...] = ()


def sections_of(run: Run) -> list[Section]:
    """All sections that have something to show."""
    sections = [*(_search(run) if run.sought else [_training(run)]), _certainty(run), _particles(run)]
    filled = [replace(section, grids=[grid for grid in section.grids if grid]) for section in sections]
    return [section for section in filled if section.grids or section.findings]


def _training(run: Run) -> Section:
    """A training that sought no ranks: what the network is made of, and how accurate it became."""
    ranks, sizes, curve = rank_plots(run, PAPER.get(run.experiment)), parameter_plots(run), accuracy_plot(run)
    grids = [ranks + sizes + curve]
    if len(run.layers) > 2 * FEW_LAYERS:  # several figures of each
        grids = [ranks, sizes, curve] if ranks else [curve + sizes]
    return Section("trained", "What was trained", TRAINED.get(run.kind, AROUND), grids)


def _search(run: Run) -> list[Section]:
    """What a search for ranks left, how it got there, and where the cut fell."""
    paper = PAPER.get(run.experiment)
    curves = accuracy_plot(run) + size_plot(run) + trade_plot(run, paper)
    paths, lambdas = rank_trajectories(run), lambda_plots(run)
    thresholds, spectra, tolerances = threshold_plots(run), spectrum_plots(run), tolerance_plots(run)
    if len(run.tensor_layers) > FEW_LAYERS:  # maps of all layers beside the examples
        left = [rank_plots(run, paper), parameter_plots(run)]
        way, cut = [curves, paths + lambdas], [spectra[:1] + tolerances[:1], tolerances[1:] + spectra[1:]]
    else:
        left = [rank_plots(run, paper) + parameter_plots(run)]
        way, cut = [curves, paths, lambdas], [spectra, tolerances]
        if run.rule == "lambda":  # a single curve, which would stand alone on its row
            cut = [spectra + tolerances]
    mean = " Of several particles the mean is shown." if run.posterior else ""
    falls = "A rank disappears when its λ falls: the slices of both cores it joins shrink to nothing together."
    if run.sized is not None:
        falls += " Others are cut for the size, and what they held is learned anew."
    return [
        Section("left", "What is left", _left_text(run), left),
        Section("way", "How it got there", falls + mean, way),
        Section("cut", "Where the cut fell", _cut_text(run) + mean, [thresholds, *cut]),
    ]


def _left_text(run: Run) -> str:
    first = f"Bonds started at the ranks of {run.begun.run}" if run.begun else "Every bond started at its maximal rank"
    text = f"{first}; the prior let go of what the data did not ask for"
    if run.rule == "lambda":
        return f"{text}, and the paper’s threshold on λ decided what is left."
    if run.sized is not None:
        return f"{text}, and cuts went on until the network was {words.ratio(run.scores.ratio)} smaller."
    if run.reached:
        return f"{text}, until the network was {words.ratio(run.scores.ratio)} smaller."
    return f"{text}."


def _cut_text(run: Run) -> str:
    """Who decided the final ranks."""
    if run.rule == "lambda":
        known = f" of {run.spectra.tol:g}" if run.spectra else ""
        whose = "its λ, the particles’ mean," if run.posterior else "its λ"
        return (
            f"The paper’s threshold on λ decided: a rank index stayed if {whose} was above the threshold{known}. "
            "Nothing was rounded. The threshold sees neither the weights nor the error it makes; the singular values "
            "show what each bond held."
        )
    if run.sized is not None:
        end = f"ended after {run.finetune_start} epochs" if run.finetune_start else "went on to the end"
        on_the_way = any(bond for bonds in run.spectra.earlier.values() for bond in bonds) if run.spectra else False
        return (
            f"The network was to be at least {words.ratio(run.target_ratio)} smaller. That decided, not a gap in the "
            f"spectrum: {'little by little' if on_the_way else 'at the end'}, ranks went where the weights change "
            f"least by it, in whatever layer. The search {end}; no cut for the size changed a weight by more than "
            f"{words.tolerance(run.sized)}{' (root mean square over particles)' if run.posterior else ''}."
        )
    if run.reached:
        when = f" by epoch {run.finetune_start}" if run.finetune_start else ""
        text = f"The network was to be at least {words.ratio(run.target_ratio)} smaller, and what the prior had emptied"
        text += f"{when} was enough for that."
        if run.spectra and run.round_tol and run.spectra.tol < run.round_tol:
            text += " The last cut was for just that size: what was all but empty stayed, where there was room for it."
        return text
    return (
        "The final rounding sees only the weights. A gap in the spectrum means that the training decided, not the "
        "tolerance."
    )


def _certainty(run: Run) -> Section:
    plots = reliability_plot(run) + rejection_plot(run)
    if run.posterior is None:
        text = "Probabilities on the test set, which training and validation never saw."
        if run.scores.temperature is not None:
            text += (
                f" They are the network’s own; bayestrain predict answers at temperature {run.scores.temperature:.2f}."
            )
        return Section(
            "certainty", "How sure it is", text, [uncertainty_plots(run) + plots], tuple(certainty_findings(run))
        )
    text = (
        "On the test set, which training and validation never saw. Doubt has two sources: the image itself, which "
        "every particle finds unclear (aleatoric), and the particles’ disagreement (epistemic)."
    )
    grids = [uncertainty_plots(run), plots]
    return Section("certainty", "How sure it is, and why", text, grids, tuple(certainty_findings(run)))


def _particles(run: Run) -> Section:
    ranks = "; all have the same ranks" if run.tensor_layers else ""
    text = (
        f"Each particle is a network of its own{ranks}. A posterior is worth its cost when they differ, and when they "
        "are better together than alone."
    )
    grids = [score_plot(run) + own_rank_plot(run), gain_plot(run) + diagnostic_plots(run)]
    if len(grids[0]) == 1:  # it would stand alone on its row
        grids = [grids[0] + grids[1]]
    return Section("particles", "The particles", text, grids, tuple(particle_findings(run)))
