"""`write_table`: from a folder of results to ``TABLE.md`` and its figures."""

from collections.abc import Sequence
from pathlib import Path

from bayestrain.errors import ReportError
from bayestrain.files import write_atomically
from bayestrain.report.figures.front import front_plot, lines_through
from bayestrain.report.figures.layers import parameter_plots, rank_plots
from bayestrain.report.figures.uncertainty import uncertainty_plots
from bayestrain.report.groups import KINDS, Experiment, Group, gather
from bayestrain.report.overview import Figure, overview
from bayestrain.report.paper import PAPER
from bayestrain.report.run import Run
from bayestrain.report.sheet import sheet
from bayestrain.report.svg import Plot

Drawn = list[tuple[Figure, str]]
"""Figures of an experiment, each with its SVG."""


def write_table(results: Path, out: Path | None = None) -> Path:
    """Write ``TABLE.md`` and ``figures/*.svg`` and return the path of the table.

    Args:
        results: the folder with ``EXPERIMENT/LABEL/seed-N/``, as ``tools/run_seeds.py`` fills it.
        out: where to write; the folder of results by default. Nothing is written before all has been read and drawn.
    """
    results = Path(results)
    folder = results if out is None else Path(out)
    experiments = gather(results)
    drawn = {experiment.name: _figures(experiment) for experiment in experiments}
    pictures = {name: [picture for picture, _ in figures] for name, figures in drawn.items()}
    text = overview(experiments, pictures, folder)
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for picture, svg in (figure for figures in drawn.values() for figure in figures):
            write_atomically(folder / "figures" / f"{picture.name}.svg", svg)
        write_atomically(folder / "TABLE.md", text)
    except OSError as error:
        raise ReportError(
            f"{folder} cannot be written to: {error.strerror}. Choose another place with --out."
        ) from error
    return folder / "TABLE.md"


def _figures(experiment: Experiment) -> Drawn:
    name, groups = experiment.name, experiment.groups
    paper = PAPER.get(name)
    figures: Drawn = []

    def add(kind: str, title: str, caption: str, plots: Sequence[Plot]) -> None:
        if plots:
            figures.append((Figure(f"{kind}-{name}", f"{title}, {name}", caption), sheet(plots)))

    if groups:
        add(
            "front", "Test accuracy against parameters", _front_caption(name, groups), [front_plot(name, groups, paper)]
        )
    if shown := typical(experiment):
        run, who = shown.median, f"`{shown.label}`, seed {shown.median.seed}"
        published = "; diamonds are the paper’s" if paper and paper.ranks else ""
        caption = f"Ranks that {who}, kept of the maximal ones{published}."
        add("ranks", "Ranks per bond", caption, rank_plots(run, paper))
        caption = f"Parameters of each layer of {who}: dense, with all ranks of its tensor train, and now."
        add("layers", "Parameters per layer", caption, parameter_plots(run))
    if doubt := evaluated(groups):
        group, run = doubt
        outside = f" and on {run.ood.name}" if run.ood else ""
        caption = f"Uncertainty of `{group.label}`, seed {run.seed}, on the test images{outside}."
        add("uncertainty", "Uncertainty", caption, uncertainty_plots(run))
    return figures


def typical(experiment: Experiment) -> Group | None:
    """The group whose ranks are shown: MAP networks that found them, labelled "default", else the smallest of ours.

    Of ours, those that went on from others' ranks or had fewer epochs than their preset has come last.
    """
    found = [
        group for group in experiment.groups if group.settings.kind == "low-rank" and group.settings.particles == 1
    ]
    ours = [group for group in found if group.settings.preset != "paper"]
    own = [g for g in ours if not g.settings.earlier_epochs and not g.settings.shortened(experiment.name)]
    named = [group for group in own if group.label == "default"]
    return min(named or own or ours or found, key=lambda group: group.size, default=None)


def evaluated(groups: Sequence[Group]) -> tuple[Group, Run] | None:
    """A posterior whose answers were kept: of ranks that were found, else of full ranks, else of dense networks."""
    kept = [
        (group, run)
        for group in groups
        for run in group.runs
        if group.settings.particles > 1 and run.evaluation is not None
    ]
    order = list(KINDS)
    return max(kept, key=lambda pair: (order.index(pair[0].settings.kind), pair[0].settings.particles), default=None)


def _front_caption(name: str, groups: Sequence[Group]) -> str:
    text = "Mean and standard deviation over seeds; numbers are how many times smaller than dense a network is"
    if any(group.settings.by_weight for group in groups):
        text += ", with the weight of the prior where no target was set"
    if any(group.settings.preset == "paper" for group in groups):
        text += "; hollow marks are of the preset `paper`, but for the diamond, the paper’s dense network"
    said = {"-": "weights of the prior (solid)", ":": "targets (dotted)", "--": "runs with fewer epochs (dashed)"}
    joined = ", ".join(said[style] for style in lines_through(name, groups))
    lines = f" Lines join {joined}." if joined else ""
    begun = ", ".join(f"`{group.label}`" for group in groups if group.settings.earlier_epochs)
    more = f" More epochs than the others, for they went on from larger networks: {begun}." if begun else ""
    short = [(group, part) for group in groups if (part := group.settings.shortened(name))]
    fewer = ", ".join(f"`{group.label}` ({part})" for group, part in short)
    squares = ", single networks as squares" if any(group.settings.particles == 1 for group, _ in short) else ""
    less = f" Fewer epochs than their preset has{squares}: {fewer}." if short else ""
    return f"{text}.{lines}{more}{less}"
