"""How the network got there: accuracy, size, ranks and lambda over the epochs."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bayestrain.report.figures import FEW_LAYERS
from bayestrain.report.figures.marks import (
    end_labels,
    epoch_axis,
    finetune,
    heat,
    heat_key,
    layer_ticks,
    log_counts,
    log_powers,
    stacked_height,
)
from bayestrain.report.palette import LIGHT, series
from bayestrain.report.paper import PaperRow
from bayestrain.report.run import Epoch, Layer, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, percent

HEIGHT = 2.75


def examples(layers: Sequence[Layer]) -> list[Layer]:
    """All layers if they are few, else two of them."""
    if len(layers) <= FEW_LAYERS:
        return list(layers)
    return [layers[len(layers) // 4], layers[3 * len(layers) // 4]]


def accuracy_plot(run: Run) -> list[Plot]:
    """Training and validation accuracy over the epochs."""
    lines = [
        ("training", "cut", [(r.epoch, r.train_accuracy) for r in run.history if r.train_accuracy is not None]),
        ("validation", "kept", [(r.epoch, r.validation_accuracy) for r in run.history
                                if r.validation_accuracy is not None and r.epoch]),
    ]  # fmt: skip
    lines = [line for line in lines if len(line[2]) > 1]
    if not lines:
        return []
    describe = "Accuracy over the epochs. " + " ".join(f"{n}: {percent(p[-1][1], 1)} at the end." for n, _, p in lines)
    with drawing(HEIGHT) as (figure, (axes,)):
        for _, colour, points in lines:
            axes.plot(*zip(*points, strict=True), color=LIGHT[colour])
        settled = [value for _, _, points in lines for _, value in points if value is not None]
        low, high = min(settled), max(settled)
        axes.set_ylim(max(0.0, low - 0.1 * (high - low) - 0.002), min(1.0, high + 0.1 * (high - low) + 0.002))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
        epoch_axis(axes, run)
        axes.set_ylabel("accuracy / %")
        finetune(axes, run.finetune_start)
        end_labels(axes, run.history[-1].epoch, [(float(p[-1][1] or 0), n, LIGHT[c]) for n, c, p in lines])
        svg = inline(figure, "accuracy", describe)
    return [Plot("accuracy", "Accuracy while training", "The validation images are part of neither the training nor "
                 "the test set.", describe, svg)]  # fmt: skip


def size_plot(run: Run) -> list[Plot]:
    """Parameters over the epochs."""
    points = [(r.epoch, r.params) for r in run.path if r.params]
    early = len({r.params for r in run.history if r.phase == "search"}) > 1
    if len(points) < 2:
        return []
    describe = f"Parameters over the epochs: from {count(points[0][1])} to {count(points[-1][1])}."
    with drawing(HEIGHT) as (figure, (axes,)):
        line = axes.plot(*zip(*points, strict=True), color=LIGHT["kept"], drawstyle="steps-post")[0]
        tip(line, describe)
        values = [value for _, value in points]
        axes.set_ylim(min(values) / 1.4, max(values) * 1.4)
        log_counts(axes, "y")
        epoch_axis(axes, run)
        axes.set_ylabel("parameters (log scale)")
        finetune(axes, run.finetune_start)
        svg = inline(figure, "size", describe)
    cause = "as soon as they no longer matter" if run.sized is None else "until the network has the size asked for"
    caption = f"Ranks are cut {cause}, so training gets cheaper as it goes."
    if not early:
        caption = "No rank was cut before the end of the search."
    return [Plot("size", "Size while training", caption, describe, svg)]


def trade_plot(run: Run, paper: PaperRow | None) -> list[Plot]:
    """Accuracy against size, epoch by epoch, with the final test result and the paper's."""
    validated = any(r.validation_accuracy is not None for r in run.history)
    points = [
        (r.params, accuracy, r.epoch)
        for r in run.history
        if r.params and (accuracy := r.validation_accuracy if validated else r.train_accuracy) is not None and r.epoch
    ]
    if len(points) < 2:
        return []
    source = "validation" if validated else "training"
    scores = run.scores
    describe = f"Accuracy against parameters over training, from epoch {points[0][2]} to {points[-1][2]}."
    with drawing(HEIGHT + 0.25) as (figure, (axes,)):
        axes.plot([p[0] for p in points], [p[1] for p in points], "-", color=LIGHT["cut"], linewidth=1.2, zorder=1)
        ages = np.linspace(0.2, 1.0, len(points))
        for (size, accuracy, epoch), age in zip(points, ages, strict=True):
            dot = axes.plot(size, accuracy, "o", markersize=4.5, color=LIGHT["kept"], alpha=float(age))[0]
            tip(dot, f"epoch {epoch}: {count(size)} parameters, {percent(accuracy)} ({source})")
        values = [p[1] for p in points]
        sizes = [p[0] for p in points]
        if scores.accuracy is not None and scores.params:
            star = axes.plot(scores.params, scores.accuracy, "*", color=LIGHT["kept"], markersize=14,
                             markeredgecolor=LIGHT["card"], label="test, at the end")[0]  # fmt: skip
            tip(star, f"test: {count(scores.params)} parameters, {percent(scores.accuracy)}")
            values.append(scores.accuracy)
            sizes.append(scores.params)
        if paper:
            mark = axes.plot(paper.params, paper.accuracy, "D", color=LIGHT["paper"], markersize=6.5, label="paper")[0]
            tip(mark, f"paper: {count(paper.params)} parameters, {percent(paper.accuracy, 1)}")
            values.append(paper.accuracy)
            sizes.append(paper.params)
        axes.plot([], [], "o", color=LIGHT["kept"], alpha=0.6, markersize=4.5, label=f"{source}, each epoch")
        spread = max(values) - min(values)
        axes.set_ylim(min(values) - 0.08 * spread - 0.001, min(1.0, max(values) + 0.12 * spread + 0.001))
        axes.set_xlim(max(sizes) * 1.25, min(sizes) / 1.35)
        log_counts(axes, "x")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
        axes.set_xlabel("parameters (log scale, smaller to the right)")
        axes.set_ylabel("accuracy / %")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3, handletextpad=0.2,
                      columnspacing=0.8, fontsize=8.5)  # fmt: skip
        svg = inline(figure, "trade", describe)
    return [Plot("trade", "Accuracy against size", "One dot per epoch, the later the darker: right is smaller, up is "
                 "better.", describe, svg)]  # fmt: skip


def rank_trajectories(run: Run) -> list[Plot]:
    """Ranks over the epochs: lines for a small network, one map for a deep one."""
    layers = [layer for layer in run.tensor_layers if sum(layer.name in r.ranks for r in run.history) > 1]
    if not layers:
        return []
    if len(layers) > FEW_LAYERS:
        return [_trajectory_map(run, layers)]
    return [_trajectory(run, layer, k) for k, layer in enumerate(layers)]


def _trajectory(run: Run, layer: Layer, index: int) -> Plot:
    name = f"rank-path-{index + 1}"
    records = [r for r in run.path if len(r.ranks.get(layer.name, ())) == len(layer.ranks)]
    describe = f"Ranks of layer {layer.name} over the epochs, at the end " + ", ".join(map(str, layer.ranks)) + "."
    with drawing(HEIGHT) as (figure, (axes,)):
        ends = []
        for bond in range(len(layer.ranks)):
            ys = [r.ranks[layer.name][bond] for r in records]
            line = axes.plot([r.epoch for r in records], ys, color=series(bond), drawstyle="steps-post")[0]
            tip(line, f"bond {bond + 1}: from {ys[0]} to {ys[-1]}")
            ends.append((float(ys[-1]), f"bond {bond + 1}: {ys[-1]}", series(bond)))
        axes.set_ylim(0, max(layer.max_ranks) * 1.05)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        epoch_axis(axes, run)
        axes.set_ylabel("rank")
        finetune(axes, run.finetune_start)
        end_labels(axes, run.history[-1].epoch, ends)
        svg = inline(figure, name, describe)
    return Plot(name, f"Ranks of layer {layer.name}", "", describe, svg)


def _trajectory_map(run: Run, layers: Sequence[Layer]) -> Plot:
    records = [r for r in run.path if all(layer.name in r.ranks for layer in layers)]
    shares = np.array([[sum(r.ranks[layer.name]) / sum(layer.max_ranks) for r in records] for layer in layers])
    epochs = [float(r.epoch) for r in records]
    last = epochs[-1]
    if epochs[-2:] == [last, last]:  # what the final cut left has half of the last epoch
        epochs[-1] += 0.5
    describe = f"Map of the ranks of {len(layers)} layers over the epochs, as a share of the maximum."
    with drawing(0.8 + 0.062 * len(layers)) as (figure, (axes,)):
        heat(axes, shares.clip(0, 1), [*epochs, last + 1], LIGHT["kept"])
        heat_key(axes, LIGHT["kept"], "0", "100 %")
        layer_ticks(axes, layers)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        svg = inline(figure, "rank-path-map", describe)
    return Plot("rank-path-map", "Ranks over the epochs", "Sum of a layer’s ranks as a share of the maximum: deep blue "
                "is full rank, pale is cut.", describe, svg)  # fmt: skip


def lambda_plots(run: Run) -> list[Plot]:
    """Lambda of every bond over the epochs, relative to the bond's largest, which is what no gauge can change."""

    def recorded(layer: Layer) -> list[Epoch]:
        """Epochs with lambda for every bond of the layer."""
        bonds = len(layer.ranks)
        return [r for r in run.history if sum(map(bool, r.lambdas.get(layer.name, ()))) == bonds]

    layers = [layer for layer in run.tensor_layers if len(recorded(layer)) > 1]
    return [_lambda_panel(run, recorded(layer), layer, k) for k, layer in enumerate(examples(layers))]


def _lambda_panel(run: Run, records: Sequence[Epoch], layer: Layer, index: int) -> Plot:
    name = f"lambda-{index + 1}"
    bonds = len(layer.ranks)
    describe = f"Lambda of each rank index of layer {layer.name} over the epochs, {bonds} bonds."
    with drawing(stacked_height(bonds), bonds, sharex=True) as (figure, all_axes):
        for bond, axes in enumerate(all_axes):
            paths: dict[int, list[tuple[int, float]]] = {}
            for record in records:
                values = sorted(record.lambdas[layer.name][bond], reverse=True)
                for place, value in enumerate(values):
                    paths.setdefault(place, []).append((record.epoch, max(value / max(values[0], 1e-30), 1e-6)))
            for place, path in sorted(paths.items(), reverse=True):
                kept = place < layer.ranks[bond]
                axes.plot(*zip(*path, strict=True), color=LIGHT["kept" if kept else "cut"],
                          linewidth=1.5 if kept else 0.9, alpha=1.0 if kept else 0.75)  # fmt: skip
                if path[-1][0] < records[-1].epoch:
                    axes.plot(*path[-1], "x", color=LIGHT["cut"], markersize=4)
            log_powers(axes, "y", ticks=4)
            lowest = min(value for path in paths.values() for _, value in path)
            axes.set_ylim(min(lowest / 1.6, 0.07), 1.6)
            axes.set_title(f"bond {bond + 1}: {layer.ranks[bond]} of {len(paths)} kept", fontsize=9, pad=3)
        epoch_axis(all_axes[-1], run, last=records[-1].epoch)
        figure.supylabel("λ / largest λ of the bond", fontsize=9.5, color=LIGHT["muted"])
        svg = inline(figure, name, describe)
    caption = "Blue: ranks kept at the end. Grey: ranks that λ starved; × where they were cut."
    if run.rule == "lambda":
        caption = (
            "Blue: ranks kept at the end. Grey: ranks whose λ fell below the threshold; × where training cut them."
        )
    elif run.sized is not None:  # then not only the prior has cut
        caption = "Blue: as many ranks as were kept at the end. Grey: the others; × where training cut them."
    return Plot(name, f"λ of layer {layer.name}", caption, describe, svg)
