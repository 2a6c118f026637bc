"""Tables and plots from the files of the benchmarks.

    python benchmarks/tables.py

Reads what is there under ``results/benchmarks/`` and writes ``README.md`` and SVG plots beside it. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from bayestrain.report.palette import LIGHT, series

TITLES = {
    "layers": "Layers against dense ones",
    "peers": "Layers against other libraries",
    "inference": "Compacted networks against dense ones",
    "steps": "Training steps and whole trainings",
    "planner": "Does a layer choose well how it multiplies?",
    "scaling": "How time and memory grow",
}
DEVICES = {"cpu": "on a CPU", "cuda": "on a GPU"}
AXES = {
    "rank": "rank",
    "layer size": "features in and out",
    "batch": "batch",
    "layers": "layers",
    "particles": "particles",
}
INTRODUCTION = """# Speed

Written by `python benchmarks/tables.py` from the JSON files here; `make bench`, `make bench-peers` and `make bench-gpu`
make those anew. Dense, ours and others alternate in one process; a ratio is the median over rounds of the quotient of
two times of the same round, in brackets its quartiles. Training is forward and backward, inference is forward in
evaluation mode. "First layer" means that the input needs no gradient. Errors are relative, against the full weight in
double precision: the largest of all outputs and gradients, over all plans.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def machine(report: dict[str, Any]) -> str:
    """What it ran on, and how."""
    found = report["environment"]
    where = found["gpu"] or f"{found['cpu']}, {found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    versions = {"torch": found["torch"], **{k: v for k, v in report["versions"].items() if v and k != "torch"}}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = (found["commit"] or "unknown")[:10] + (" with changes" if found["dirty"] else "")
    quick = " **A quick run, to see that it works: no result.**" if report["quick"] else ""
    parts = [where, named, f"Python {found['python']}", f"commit {commit}", found["started"], f"`{report['command']}`"]
    return "; ".join(parts) + f".{quick}\n"


def number(value: float) -> str:
    """Three digits, as a person writes them."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    return number(seconds * 1e3)


def claims(report: dict[str, Any]) -> str:
    """Target and measurement."""
    words = {None: "", True: "yes", False: "**no**"}
    signs = {"<=": "at most", ">=": "at least"}
    rows = [
        [line["what"], f"{number(line['measured'])} {line['unit']}",
         "" if line["target"] is None else f"{signs[line['sense']]} {line['target']:g}", words[line["met"]]]
        for line in report["claims"]
    ]  # fmt: skip
    return table(["what", "measured", "target", "met"], rows) if rows else ""


def spread(timing: dict[str, Any]) -> str:
    """A ratio with its quartiles."""
    low, high = timing["ratio_quartiles"]
    return f"{timing['ratio']:.2f} ({low:.2f}-{high:.2f})"


def processes(row: dict[str, Any]) -> str:
    """The median ratio of several processes, with the smallest and the largest; empty for a row of one process."""
    ratios = row.get("ratios", [])
    return f"{row['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f} in {len(ratios)} processes)" if ratios else ""


def layers(report: dict[str, Any]) -> str:
    """Times, plans and errors of every row."""
    rows = [
        [row["title"], milliseconds(row["times"]["dense"]["seconds"]), milliseconds(row["times"]["ours"]["seconds"]),
         processes(row) or spread(row["times"]["ours"]), row["plan"],
         f"{max(row['largest_error_of_plans'].values()):.0e}"]
        for row in report["rows"]
    ]  # fmt: skip
    text = table(["layer", "dense, ms", "ours, ms", "ratio", "plan", "error"], rows)
    for row in report["memory"]:
        slower = row["low_memory_time"]["ratio"]
        text += f"\nLow-memory plan for {row['title']}: low_memory, time {slower:.2f} of dense.\n"
    return text


def peers(report: dict[str, Any]) -> str:
    """One column for each implementation."""
    names = list(report["rows"][0]["times"]) if report["rows"] else []
    rows = [
        [row["title"], *(milliseconds(row["times"][name]["seconds"]) for name in names),
         f"{max(row['errors'].values()):.0e}"]
        for row in report["rows"]
    ]  # fmt: skip
    missing = "".join(f"\n{name} was left out: {why}.\n" for name, why in report["left_out"].items())
    return table(["layer, milliseconds", *names, "error"], rows) + missing


def planner(report: dict[str, Any]) -> str:
    """The shapes where another plan was clearly better."""
    missed = [row for row in report["rows"] if not row["within"]]
    rows = [
        [row["title"], row["chosen"], row["measured"][-1]["best"], f"{row['chosen_over_best']:.2f}"] for row in missed
    ]
    return table(["not within", "chosen", "best", "time of chosen over best"], rows) if rows else ""


def steps(report: dict[str, Any]) -> str:
    """The three steps of every network, and what MNIST came to."""
    rows = [
        [row["title"], *(milliseconds(row["times"][name]["seconds"]) for name in row["times"]),
         milliseconds(row["align_seconds"] / max(row["align_every"], 1)), f"{row['prior_share']:.1%}",
         f"{max(row['errors'].values()):.0e}"]
        for row in report["steps"]
    ]  # fmt: skip
    header = ["step, ms", "dense", "ours", "with prior", "alignment per step", "prior's share without it", "error"]
    text = table(header, rows) if rows else ""
    point = report["trainings"].get("map")
    if point:
        size, accuracy = point["parameters"], point["accuracy"]
        text += f"\nThe MAP network has {size:,} parameters and a test accuracy of {accuracy:.2%}.\n"
    return text


def inference(report: dict[str, Any]) -> str:
    """Throughput and latency of both sides."""
    rows = [
        [row["experiment"], row["ranks"], f"{row['times_smaller']:.1f}",
         *(number(row["images"] / row["seconds_of_all_images"][side]["seconds"]) + f" (batch {row['batch'][side]})"
           for side in ("dense", "ours")),
         *(milliseconds(row["single_image"][side]["seconds"]) for side in ("dense", "ours")),
         f"{row['largest_error']:.0e}"]
        for row in report["rows"]
    ]  # fmt: skip
    header = ["network", "ranks", "times smaller", "dense, images/s", "ours, images/s", "dense, ms per single image",
              "ours, ms", "error"]  # fmt: skip
    return table(header, rows)


def scaling(report: dict[str, Any]) -> str:
    """The ratio at every point of the curves."""
    text = ""
    for name, points in report["curves"].items():
        if all("dense" in point["times"] for point in points):
            values = [spread(point["times"]["ours"]) for point in points]
            what = "time over dense"
        else:
            values = [milliseconds(point["times"]["ours"]["seconds"]) for point in points]
            what = "milliseconds a step"
        text += "\n" + table([AXES[name], *(f"{point['at']:,}" for point in points)], [[what, *values]])
    return text


DETAILS = {
    "layers": layers, "peers": peers, "planner": planner, "steps": steps, "inference": inference, "scaling": scaling,
}  # fmt: skip


def style() -> None:
    plt.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": LIGHT["muted"],
        "axes.grid": True, "grid.color": LIGHT["line"], "legend.frameon": False, "svg.hashsalt": "bayestrain",
        "text.color": LIGHT["ink"], "axes.labelcolor": LIGHT["ink"],
    })  # fmt: skip


COLOURS = {"dense": LIGHT["cut"], "ours": LIGHT["kept"]}
LABELS = {"dense": "dense", "ours": "BayesTrain"}


def line(axes: Axes, points: list[dict[str, Any]], value: Any, name: str, unit: str) -> None:
    """Dense and ours over the points of a curve, both axes logarithmic."""
    for side in ("dense", "ours"):
        there = [(point["at"], value(point, side)) for point in points if value(point, side) is not None]
        if there:
            axes.plot(*zip(*there, strict=True), marker="o", markersize=4, color=COLOURS[side], label=LABELS[side])
    axes.set(xscale="log", yscale="log", xlabel=AXES[name], ylabel=unit)
    at = [point["at"] for point in points]
    axes.set_xticks(at, [f"{x:,}" for x in at], rotation=45 if max(at) >= 1000 else 0)
    axes.minorticks_off()
    plain_ticks(axes.yaxis)
    axes.legend()


def plain_ticks(axis: Axis) -> None:
    """1, 2, 5, 10 on a logarithmic axis, written as they are."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def plot_scaling(report: dict[str, Any], path: Path) -> None:
    """Time over rank, size, batch, layers and particles; memory over size."""
    figure, grid = plt.subplots(2, 3, figsize=(11, 6.5), layout="constrained")
    panels = list(grid.flat)
    for axes, (name, points) in zip(panels, report["curves"].items(), strict=False):

        def seconds(point: dict[str, Any], side: str) -> float | None:
            return point["times"][side]["seconds"] * 1e3 if side in point["times"] else None

        line(axes, points, seconds, name, "milliseconds a step")
        axes.set_title(f"time over {AXES[name]}")

    def megabytes(point: dict[str, Any], side: str) -> float | None:
        found = point.get("memory_bytes", {})
        return found[side] / 1e6 if side in found else None

    line(panels[5], report["curves"]["layer size"], megabytes, "layer size", "megabytes")
    panels[5].set_title("memory of training over layer size")
    save(figure, path)


def plot_peers(report: dict[str, Any], path: Path) -> None:
    """Bars: the time of every implementation relative to the dense layer, one group for each row."""
    rows = report["rows"]
    names = [name for name in rows[0]["times"] if name != "dense"]
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.75 * len(rows)), layout="constrained")
    height = 0.8 / len(names)
    for k, name in enumerate(names):
        colour = COLOURS["ours"] if name == "ours" else series(k)
        lengths = [row["times"][name]["seconds"] / row["times"]["dense"]["seconds"] for row in rows]
        at = [i + (k - (len(names) - 1) / 2) * height for i in range(len(rows))]
        axes.barh(at, lengths, height=height, color=colour, label=LABELS.get(name, name))
        for y, length in zip(at, lengths, strict=True):
            axes.annotate(f" {length:.2g}", (length, y), va="center", fontsize=7)
    axes.axvline(1, color=LIGHT["ink"], linewidth=1)
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows])
    axes.set(xscale="log", xlabel="time, dense layer = 1 (logarithmic; shorter is better)")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    plain_ticks(axes.xaxis)
    figure.legend(loc="outside upper center", ncols=len(names))
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


PLOTS = {"scaling": plot_scaling, "peers": plot_peers}


def render(folder: Path) -> str:
    """The text of README.md; plots are written into the folder."""
    style()
    parts = [INTRODUCTION]
    for device, where in DEVICES.items():
        for name, title in TITLES.items():
            file = folder / f"{name}-{device}.json"
            if not file.exists():
                continue
            report = json.loads(file.read_text())
            parts += [f"## {title}, {where}\n", machine(report), claims(report), DETAILS[name](report)]
            if name in PLOTS and (report.get("rows") or report.get("curves")):
                PLOTS[name](report, folder / f"{name}-{device}.svg")
                parts.append(f"![{title}, {where}]({name}-{device}.svg)\n")
    return "\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    path = options.results / "README.md"
    path.write_text(render(options.results))
    print(path)


if __name__ == "__main__":
    main()
