"""Several runs in one figure: accuracy against size, trajectories, ranks side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bayestrain.report.figures import PANEL_ROWS
from bayestrain.report.figures.layers import MOST_BONDS
from bayestrain.report.figures.marks import heat, heat_key, layer_ticks, log_counts
from bayestrain.report.palette import LIGHT, series
from bayestrain.report.paper import PAPER
from bayestrain.report.run import Epoch, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, percent, short_name

HEIGHT = 3.0
MARKERS = {"dense": "s", "tensorized": "^", "low-rank": "o"}
DASHES = ("-", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (5, 1, 1, 1)))


@dataclass(frozen=True)
class Entry:
    """A run in a comparison: its name, the number of its colour, its group of seeds, its round through the colours."""

    run: Run
    name: str
    colour: int
    group: int
    cycle: int

    @property
    def title(self) -> str:
        """Its name, with the kind of a network that did not find its ranks, unless the name says so."""
        kind = self.run.kind
        return self.name if kind == "low-rank" or kind in self.name else f"{self.name} ({kind})"


def scatter_plot(entries: Sequence[Entry]) -> list[Plot]:
    """Accuracy against parameters, one mark per run, a cross for the mean of seeds, the paper's points."""
    known = [e for e in entries if e.run.scores.accuracy is not None and e.run.scores.params]
    if not known:
        return []
    found = [e.run.experiment for e in known if e.run.kind == "low-rank"]  # the paper's points are of such networks
    papers = {name: PAPER[name] for name in found if name in PAPER}
    kinds = [kind for kind in MARKERS if any(e.run.kind == kind for e in known)]
    points = [(float(e.run.scores.params or 1), e.run.scores.accuracy or 0.0) for e in known]
    describe = "Accuracy against parameters. " + " ".join(
        f"{e.title}: {count(x)} parameters, {percent(y)}." for e, (x, y) in zip(known, points, strict=True)
    )
    with drawing(HEIGHT) as (figure, (axes,)):
        for entry, (x, y) in zip(known, points, strict=True):
            marker = MARKERS.get(entry.run.kind, "o")
            dot = axes.plot(x, y, marker, color=series(entry.colour), markersize=7, markeredgecolor=LIGHT["card"])[0]
            tip(dot, f"{entry.title}: {count(x)} parameters, {percent(y)}")
        for group in {e.group for e in known}:
            inside = np.array([p for e, p in zip(known, points, strict=True) if e.group == group])
            if len(inside) > 1:
                (x, y), (dx, dy) = inside.mean(0), inside.std(0, ddof=1)
                bar = axes.errorbar(x, y, dy, dx, color=LIGHT["ink"], linewidth=1.1, capsize=2.5, zorder=1)
                tip(bar.lines[2][0], f"mean ± sd: {count(x)} ± {count(dx)} parameters, {percent(y)} ± {percent(dy)}")
        for name, paper in papers.items():
            mark = axes.plot(paper.params, paper.accuracy, "D", color=LIGHT["paper"], markersize=7)[0]
            tip(mark, f"paper, {name}: {count(paper.params)} parameters, {percent(paper.accuracy, 1)}")
            axes.annotate("paper", (paper.params, paper.accuracy), (0, 8), textcoords="offset points", ha="center",
                          color=LIGHT["paper"], fontsize=9)  # fmt: skip
        xs = [x for x, _ in points] + [float(p.params) for p in papers.values()]
        ys = [y for _, y in points] + [p.accuracy for p in papers.values()]
        axes.set_xlim(max(xs) * 1.3, min(xs) / 1.3)
        room = 0.15 * (max(ys) - min(ys)) + 0.0015
        axes.set_ylim(min(ys) - room, min(1.0, max(ys) + 1.3 * room))
        log_counts(axes, "x")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))
        axes.set_xlabel("parameters (log scale, smaller to the right)")
        axes.set_ylabel("test accuracy / %")
        if len(kinds) > 1:
            handles = [
                axes.plot([], [], MARKERS[kind], color=LIGHT["muted"], markersize=6, label=kind)[0] for kind in kinds
            ]
            figure.legend(handles=handles, loc="outside upper left", ncols=3, handletextpad=0.1, columnspacing=1.0)
        svg = inline(figure, "scatter", describe)
    caption = "Right is smaller, up is better."
    if any(sum(other.group == e.group for other in known) > 1 for e in known):
        caption += " The cross is mean ± standard deviation over seeds."
    return [Plot("scatter", "Accuracy against size", caption, describe, svg)]


def path_plots(entries: Sequence[Entry]) -> list[Plot]:
    """Size and validation accuracy of all runs over the epochs; no size if it cannot have changed in any of them."""
    plots = []
    if any(entry.run.sought for entry in entries):
        plots = _paths(
            entries, "paths-size", "Size while training", "parameters (log scale)", lambda record: record.params
        )
    return plots + _paths(
        entries, "paths-accuracy", "Validation accuracy while training", "accuracy / %",
        lambda record: record.validation_accuracy if record.epoch else None,
    )  # fmt: skip


def _paths(
    entries: Sequence[Entry], name: str, title: str, label: str, value: Callable[[Epoch], float | None]
) -> list[Plot]:
    paths = [
        (entry, [(r.epoch, y) for r in entry.run.path if (y := value(r)) is not None]) for entry in entries
    ]  # fmt: skip
    paths = [(entry, path) for entry, path in paths if len(path) > 1]
    if not paths:
        return []
    describe = f"{title}, {len(paths)} runs over the epochs."
    with drawing(HEIGHT) as (figure, (axes,)):
        for entry, path in paths:
            line = axes.plot(*zip(*path, strict=True), color=series(entry.colour), linewidth=1.5,
                             linestyle=DASHES[entry.cycle % len(DASHES)])[0]  # fmt: skip
            tip(line, entry.title)
        ys = [y for _, path in paths for _, y in path]
        if "size" in name:
            axes.set_ylim(min(ys) / 1.3, max(ys) * 1.3)
            log_counts(axes, "y")
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.4g}"))
        axes.set_xlim(min(path[0][0] for _, path in paths), max(path[-1][0] for _, path in paths))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        svg = inline(figure, name, describe)
    return [Plot(name, title, "", describe, svg)]


def rank_comparison(entries: Sequence[Entry]) -> list[list[Plot]]:
    """Ranks of the runs that have the same layers, side by side; one list of plots per such set of runs.

    Tensorized runs, which keep the maximum that the others are shown against, are left out.
    """
    alike: dict[tuple[tuple[str, int], ...], list[Entry]] = {}
    for entry in entries:
        shape = tuple((layer.name, len(layer.ranks)) for layer in entry.run.tensor_layers)
        if shape and entry.run.kind != "tensorized":
            alike.setdefault(shape, []).append(entry)
    plots = []
    for number, (shape, members) in enumerate(alike.items(), start=1):
        title = "Ranks side by side" if len(members) > 1 else f"Ranks of {members[0].name}"
        title += f": {members[0].run.experiment}" if len(alike) > 1 else ""
        if sum(bonds for _, bonds in shape) <= MOST_BONDS:
            plots.append([_rank_dots(members, f"rank-dots-{number}", title)])
        else:
            plots.append(_rank_maps(members, f"rank-map-{number}", title))
    return plots


def _rank_dots(entries: Sequence[Entry], name: str, title: str) -> Plot:
    layers = entries[0].run.tensor_layers
    rows = [(layer, bond) for layer in layers for bond in range(len(layer.ranks))]
    describe = "Ranks per bond. " + " ".join(
        f"{e.name}: " + "; ".join(", ".join(map(str, layer.ranks)) for layer in e.run.tensor_layers) + "."
        for e in entries
    )
    paper = PAPER.get(entries[0].run.experiment)
    lane = 0.8 / max(len(entries), 1)
    height = 0.6 + len(rows) * max(0.34, 0.075 * len(entries))
    with drawing(height) as (figure, (axes,)):
        for row, (layer, bond) in enumerate(rows):
            axes.barh(row, layer.max_ranks[bond], 0.86, color=LIGHT["cut"], alpha=0.2, linewidth=0)
            for place, entry in enumerate(entries):
                mine = next(x for x in entry.run.tensor_layers if x.name == layer.name)
                y = row - 0.4 + lane * (place + 0.5)
                stem = axes.plot([0, mine.ranks[bond]], [y, y], color=series(entry.colour), linewidth=1.6)[0]
                dot = axes.plot(mine.ranks[bond], y, "o", color=series(entry.colour), markersize=4.5)[0]
                for artist in (stem, dot):
                    tip(artist, f"{entry.name}, layer {layer.name}, bond {bond + 1}: rank {mine.ranks[bond]}")
            theirs = paper.ranks.get(layer.name, ()) if paper else ()
            if len(theirs) == len(layer.ranks):
                mark = axes.plot(theirs[bond], row, "D", color=LIGHT["paper"], markersize=6, zorder=5)[0]
                tip(mark, f"paper: rank {theirs[bond]}")
        axes.set_yticks(
            range(len(rows)), [f"{short_name(layer.name, 14)} · bond {bond + 1}" for layer, bond in rows], fontsize=8.5
        )
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("rank")
        svg = inline(figure, name, describe)
    caption = "One line per run, grey: the maximum." + (" Diamonds: the paper." if paper and paper.ranks else "")
    return Plot(name, title, caption, describe, svg)


def _rank_maps(entries: Sequence[Entry], name: str, title: str) -> list[Plot]:
    layers = entries[0].run.tensor_layers
    shares = np.array([
        [sum(e.run.tensor_layers[k].ranks) / sum(e.run.tensor_layers[k].max_ranks) for e in entries]
        for k in range(len(layers))
    ])  # fmt: skip
    plots = []
    panels = range(0, len(layers), PANEL_ROWS)
    for number, start in enumerate(panels, start=1):
        part = layers[start : start + PANEL_ROWS]
        own = f"{name}-{number}"
        describe = f"Map of the ranks of {len(part)} layers in {len(entries)} runs, as a share of the maximum."
        with drawing(0.9 + 0.165 * len(part)) as (figure, (axes,)):
            heat(
                axes, shares[start : start + PANEL_ROWS].clip(0, 1), list(np.arange(len(entries) + 1.0)), LIGHT["kept"]
            )
            heat_key(axes, LIGHT["kept"], "0", "100 %")
            layer_ticks(axes, part, PANEL_ROWS)
            axes.set_xticks(
                [k + 0.5 for k in range(len(entries))], [short_name(e.name) for e in entries], rotation=30, ha="right"
            )
            svg = inline(figure, own, describe)
        label = f"{title} ({number} of {len(panels)})" if len(panels) > 1 else title
        plots.append(Plot(own, label, "Sum of a layer’s ranks as a share of the maximum.", describe, svg))
    return plots
