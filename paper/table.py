"""`results/TABLE.md` with its figures, and the results in the READMEs, from recorded results alone.

    python -m paper.table [--results paper/results] [--out FOLDER]

Every seed's `result.json` is read, every summary is computed again from them, and only then is anything written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bayestrain.files import write_atomically
from paper import fronts
from paper.published import PAPER
from paper.records import KINDS, Group, RecordError, Run, figures, gather

HERE = Path(__file__).parent
MARKERS = ("<!-- results: written by `make paper-table` -->", "<!-- end of results -->")

NONE = "–"
SPACE = "\u00a0"
"""Keeps a figure on one line."""

COLUMNS = (
    "model", "run", "inferred by", "preset", "prior weight", "target", "parameters", "ratio", "accuracy",
    "log likelihood", "calibrated", "particles' mean", "training", "epochs", "seeds", "commits",
)  # fmt: skip
LEFT = ("model", "run", "inferred by", "preset", "commits")

LOSS = 0.05
"""A cut of ranks that costs more accuracy than this is reported."""

INTRODUCTION = """\
`make paper-table` writes this file and its figures from the results in this folder.

# Results

Each line is a group of runs that differ only in their seed, or a line of the paper. Figures are for the test set, as
mean ± sample standard deviation over seeds; without a ±, there is one seed or all seeds agree. Settings were tuned on a
validation split of the training images. The test figures of some trial runs were seen with the validation figures, so
ours may be slightly optimistic.

- *model*, in the paper's terms: BNN is the dense network, BTNN the network of tensor trains at full rank, and LR-BTNN
  the network of tensor trains that finds its own ranks.
- *inferred by*: MAP means a single network; otherwise a posterior of so many networks (its particles), and the method.
- *preset*: which modes, ranks and prior were used, unless the line's command changed them. *prior weight*: 1 is Bayes,
  less keeps more ranks. *target*: how many times smaller than dense the network should become.
- *parameters*: with biases and batch norm's four vectors; for a posterior, those of one particle. *ratio*: how many
  times fewer than the dense network has.
- *log likelihood*: per test image; for a posterior, of the particles' mean probability at the temperature fitted to
  the held-out images. *calibrated*: of a single network at such a temperature. *particles' mean*: the mean of the
  particles' own log likelihoods, which is what the paper's figure appears to be.
- *training*: duration and device. Runs shared machines, so times are not a benchmark. *epochs* include fine-tuning;
  "after" counts the epochs of the run that a network started from, and "of" those of the preset, where a run had fewer.
  A posterior around MAP starts from a trained network, whose epochs and time are not counted.
- *commits*: the sources that a line was trained with, including the networks it started from; "+" marks uncommitted
  changes.
- A dash: unknown, or not applicable.

`summary.json` has the command of each line. Commands with `tools/run_seeds.py` belong to the commits of their line;
[paper/README.md](../README.md#commands) lists the commands that train with the same settings today.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, help="where to write; the folder of results by default")
    options = parser.parse_args(arguments)
    try:
        print(write_table(options.results, options.out))
        if options.results.resolve() == HERE / "results" and options.out is None:
            for path, tables in DOCUMENTS.items():
                refresh(path, tables(gather(options.results)))
    except RecordError as error:
        sys.exit(str(error))


def write_table(results: Path, out: Path | None = None) -> Path:
    """Write `TABLE.md` and `figures/*.svg`; nothing is written before everything has been read and drawn."""
    folder, experiments = out or results, gather(results)
    drawings = {name: fronts.figures(name, groups) for name, groups in experiments.items()}
    sections = [section(name, groups, drawings[name], results, folder) for name, groups in experiments.items()]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for drawing in (drawing for drawings_ in drawings.values() for drawing in drawings_):
        write_atomically(folder / "figures" / f"{drawing.name}.svg", drawing.svg())
    absent = [f"There are no results of `{name}` yet.\n" for name in PAPER if name not in experiments]
    write_atomically(folder / "TABLE.md", "\n".join([INTRODUCTION, *absent, *sections]))
    return folder / "TABLE.md"


def section(name: str, groups: Sequence[Group], drawings: Sequence[fronts.Drawing], results: Path, folder: Path) -> str:
    """One experiment: its table, what to know when comparing, its posteriors, its figures."""
    paper = PAPER.get(name)
    links = folder.resolve() == results.resolve()
    lines = [(group.first.kind, _cells(group, links)) for group in groups]
    lines = _published(name) + lines
    lines.sort(key=lambda line: list(KINDS).index(line[0]))  # stable: the paper's line comes first
    notes = [*(paper.notes if paper else ()), *_common_seeds(name, groups), _cut_too_far(groups), _again(groups),
             _before_the_rewrite(groups), _failed(groups)]  # fmt: skip
    parts = [f"## {name}", markdown([cells for _, cells in lines], COLUMNS), "\n".join(f"- {n}" for n in notes if n)]
    if posteriors := [group for group in groups if group.first.posterior and group.first.posterior.point]:
        parts.append(_beside_single_networks(posteriors))
    parts += [f"![{d.title}](figures/{d.name}.svg)\n\n*{d.caption}*" for d in drawings]
    return "\n\n".join(parts) + "\n"


def markdown(lines: Sequence[dict[str, str]], columns: Sequence[str]) -> str:
    """A Markdown table; a column that no line has is left out, a cell that a line lacks is a dash."""
    order = [name for name in columns if any(name in line for line in lines)]
    aligned = ["---" if name in (*LEFT, order[0]) else "--:" for name in order]
    rows = [[line.get(name, NONE) for name in order] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (order, aligned, *rows))


def _published(name: str) -> list[tuple[str, dict[str, str]]]:
    """The paper's three networks, as far as it reports them."""
    if (paper := PAPER.get(name)) is None:
        return []
    sizes = {"dense": paper.dense_parameters, "tensorized": paper.tensorized_parameters, "low-rank": paper.parameters}
    lines = {
        kind: {"model": KINDS[kind], "run": "**the paper**", "parameters": f"{size:,}",
               "ratio": times(paper.dense_parameters / size)}
        for kind, size in sizes.items()
    }  # fmt: skip
    lines["dense"]["accuracy"] = percent(paper.dense_accuracy, 1)
    lines["low-rank"] |= {"accuracy": percent(paper.accuracy, 1), "particles' mean": signed(paper.log_likelihood, 3)}
    return list(lines.items())


def _cells(group: Group, links: bool) -> dict[str, str]:
    run, posterior = group.first, group.first.posterior
    devices = " and ".join(dict.fromkeys(run.device for run in group.runs))
    earlier = f", after {run.earlier_epochs}" if run.earlier_epochs else ""
    iterations = f" ({run.iterations:,} iterations)" if posterior and run.iterations else ""
    cells = {
        "model": KINDS[run.kind],
        "run": f"[{group.label}]({run.experiment}/{group.label})" if links else group.label,
        "inferred by": posterior.how if posterior else "MAP",
        "preset": run.preset,
        "parameters": spread(group, lambda run: run.parameters, lambda value: f"{value:,.0f}"),
        "ratio": spread(group, lambda run: run.ratio, lambda value: f"{value:.1f}", "×"),
        "accuracy": spread(group, lambda run: run.metrics["accuracy"], lambda x: f"{100 * x:.2f}", f"{SPACE}%"),
        "log likelihood": spread(group, lambda run: run.metrics["log_likelihood"], signed),
        "training": spread(group, lambda run: run.seconds, lambda value: f"{value:,.0f}", f"{SPACE}s, {devices}"),
        "seeds": str(len(group.runs)),
        "commits": ", ".join(commit[:7] + commit[40:] for commit in group.summary["commits"]),
    }
    if run.prior_weight is not None:
        cells["prior weight"] = f"{run.prior_weight:g}"
    if run.target_ratio:
        cells["target"] = f"{run.target_ratio:g}×"
    if run.epochs:
        cells["epochs"] = f"{group.shortened or run.epochs}{earlier}{iterations}"
    if posterior:
        cells["particles' mean"] = spread(group, _particles_mean, signed)
    else:
        cells["calibrated"] = spread(group, lambda run: run.calibrated.get("log_likelihood"), signed)
    return cells


def _particles_mean(run: Run) -> float | None:
    return run.posterior.mean_log_likelihood if run.posterior else None


def spread(group: Group, value: Callable[[Run], float | None], text: Callable[[float], str], unit: str = "") -> str:
    """Mean ± standard deviation over the seeds; the mean alone if they do not differ."""
    if (found := group.mean(value)) is None:
        return NONE
    mean, deviation = found
    return f"{text(mean)}{SPACE}±{SPACE}{text(deviation)}{unit}" if deviation else f"{text(mean)}{unit}"


# --- sentences --------------------------------------------------------------------------------------------------------


def _common_seeds(name: str, groups: Sequence[Group]) -> list[str]:
    """Lines with different seeds, on the seeds that both have."""
    found, labels = [], {group.label: group for group in groups}
    for one, other in PAPER[name].common_seeds if name in PAPER else ():
        if one not in labels or other not in labels:
            continue
        shared = sorted({*labels[one].seeds} & {*labels[other].seeds})
        if not shared or labels[one].seeds == labels[other].seeds:
            continue
        means = [
            percent(statistics.fmean(run.metrics["accuracy"] for run in labels[label].runs if run.seed in shared))
            for label in (one, other)
        ]
        said = ", ".join(map(str, shared))
        found.append(f"On the seeds that both have ({said}): `{one}` {means[0]}, `{other}` {means[1]}.")
    return found


def _cut_too_far(groups: Sequence[Group]) -> str:
    """The groups that were good until their ranks were cut."""
    lines = []
    for group in groups:
        before, after = group.mean(lambda run: run.searched_accuracy), group.mean(lambda r: r.validation["accuracy"])
        if before and after and before[0] - after[0] > LOSS:
            part = f" (after {group.shortened} epochs)" if group.shortened else ""
            lines.append(f"`{group.label}`{part} from {percent(before[0], 1)} to {percent(after[0], 1)}")
    return f"Accuracy on held-out images, before and after the final cut of ranks: {', '.join(lines)}." if lines else ""


def _again(groups: Sequence[Group]) -> str:
    lines = []
    for group in groups:
        if again := [run for run in group.runs if run.evaluated_on]:
            seeds = ", ".join(str(run.seed) for run in again)
            some = f" ({'seed' if len(again) == 1 else 'seeds'} {seeds})" if len(again) < len(group.runs) else ""
            lines.append(f"`{group.label}`{some} on {' and '.join(sorted({run.evaluated_on for run in again}))}")
    return f"Evaluated again after training, from the saved weights: {', '.join(lines)}." if lines else ""


def _before_the_rewrite(groups: Sequence[Group]) -> str:
    new = [f"`{group.label}`" for group in groups if not group.first.before_rewrite]
    if not new:
        return "All lines were trained by the package before its rewrite (commit a19cf68 and earlier)."
    if len(new) == len(groups):
        return "All lines were trained by the package since its rewrite."
    return f"Trained by the package since its rewrite: {', '.join(new)}; all other lines before (a19cf68 and earlier)."


def _failed(groups: Sequence[Group]) -> str:
    lost = [f"{', '.join(map(str, failed))} of `{g.label}`" for g in groups if (failed := g.summary["failed"])]
    return f"Failed seeds, which no line counts: {'; '.join(lost)}." if lost else "No seed failed."


def _beside_single_networks(groups: Sequence[Group]) -> str:
    """Every posterior beside the single network of the same settings, or around which it started."""
    columns = ("network", "accuracy", "log likelihood", "calibrated", "ECE", "ECE calibrated", "OOD AUROC")
    keys = {
        "single": ("map_accuracy", "map_log_likelihood", "map_calibrated_log_likelihood", "map_ece",
                   "map_calibrated_ece", "map_auroc"),
        "particles": ("accuracy", "uncalibrated_log_likelihood", "log_likelihood", "uncalibrated_ece", "ece", "auroc"),
    }  # fmt: skip
    digits = {"accuracy": 2, "log likelihood": 4, "calibrated": 4, "ECE": 4, "ECE calibrated": 4, "OOD AUROC": 3}
    lines, worse = [], []
    for group in groups:
        assert group.first.posterior is not None
        posterior, each = group.first.posterior, [figures(run) for run in group.runs]
        names = ("a single network", f"`{group.label}`, {posterior.particles} particles")
        for who, row in zip(names, keys.values(), strict=True):
            line = {"network": who if who.startswith("`") else f"`{group.label}`, {who}"}
            for column, key in zip(columns[1:], row, strict=True):
                values = [figures[key] for figures in each if key in figures]
                if len(values) < len(each):
                    continue
                scale, unit = (100, f"{SPACE}%") if column == "accuracy" else (1, "")
                mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
                text = [signed(scale * value, digits[column]) for value in (mean, deviation)]
                line[column] = f"{f'{SPACE}±{SPACE}'.join(text) if deviation else text[0]}{unit}"
            lines.append(line)
        counts = [
            sum(values["ece"] > values[key] for values in each) for key in ("map_ece", "map_calibrated_ece")
            if all(key in values for values in each)
        ]  # fmt: skip
        worse.append(f"`{group.label}` {' and '.join(map(str, counts))} of {len(each)}")
    return (
        "### Posteriors and single networks\n\nThe single network has the settings of the posterior, or is the network "
        "that the posterior started around. Temperatures are fitted to held-out images. AUROC: how well total "
        "uncertainty separates test images from images of another kind.\n\n"
        + markdown(lines, columns)
        + "\n\nSeeds for which the posterior's calibrated ECE is worse than the single network's, without and with a "
        f"temperature: {'; '.join(worse)}."
    )


# --- the tables of the documents --------------------------------------------------------------------------------------

HEADLINE = {
    "mnist": ("default", "x300", "svgd-50"),
    "cifar10-cnn": ("x16", "x32", "svgd-20"),
    "cifar10-resnet110": ("x7", "x11", "svgd-20"),
}
"""Per experiment: the line beside the paper's, a smaller one, and a posterior."""


def headline(experiments: dict[str, list[Group]]) -> str:
    """Two tables: accuracies at a size beside the paper and both dense networks, and log likelihoods of posteriors."""
    accuracies, likelihoods = [], []
    for name, (beside, smaller, posterior) in HEADLINE.items():
        paper, means = PAPER[name], _means(experiments[name])
        accuracies.append({
            "test accuracy": paper.title,
            "the paper, dense": percent(paper.dense_accuracy, 1),
            "the paper": f"{times(paper.ratio)}, {percent(paper.accuracy, 1)}",
            "ours, dense": percent(means["dense"]["accuracy"]),
            "BayesTrain": f"{times(means[beside]['ratio'])}, **{percent(means[beside]['accuracy'])}**",
            "smaller still": f"{times(means[smaller]['ratio'])}, {percent(means[smaller]['accuracy'])}",
        })  # fmt: skip
        (several,) = (group.first.posterior for group in experiments[name] if group.label == posterior)
        found, size = means[posterior], times(means[posterior]["ratio"])
        likelihoods.append({
            "log likelihood of a posterior": f"{paper.title}, {several.particles if several else 1} particles",
            "the paper": f"{times(paper.ratio)}, {signed(paper.log_likelihood, 3)}",
            "BayesTrain, mean of the particles": f"{size}, **{signed(found['mean_log_likelihood'], 3)}**",
            "all particles together, calibrated": signed(found["log_likelihood"], 3),
        })  # fmt: skip
    return "\n\n".join(markdown(lines, tuple(lines[0])) for lines in (accuracies, likelihoods))


SHORT = {"mnist": "default", "cifar10-cnn": "x32", "cifar10-resnet110": "x11"}
"""The lines of the README's one table."""


def short(experiments: dict[str, list[Group]]) -> str:
    """One line per experiment: our network, the dense one of the same recipe, and both of the paper."""
    lines = []
    for name, label in SHORT.items():
        paper, means = PAPER[name], _means(experiments[name])
        lines.append({
            "test set, mean over seeds": paper.title,
            "parameters": f"{means[label]['params']:,.0f}",
            "times smaller": f"{means[label]['ratio']:.3g}",
            "accuracy": percent(means[label]["accuracy"]),
            "dense, same recipe": percent(means["dense"]["accuracy"]),
            "the paper": f"{times(paper.ratio)} at {percent(paper.accuracy, 1)}",
            "the paper, dense": percent(paper.dense_accuracy, 1),
        })  # fmt: skip
    return markdown(lines, tuple(lines[0]))


def _means(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Per label, the means over seeds."""
    return {
        group.label: {key: value["mean"] for key, value in group.summary.items() if isinstance(value, dict)}
        for group in groups
    }


DOCUMENTS = {HERE / "README.md": headline, HERE.parent / "docs" / "results.md": headline,
             HERE.parent / "README.md": short}  # fmt: skip
"""The documents with tables of results, which stand between two markers."""


def refresh(path: Path, tables: str) -> None:
    """Write the tables between the markers of a document."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(MARKERS[0])
    again = f"{before}{MARKERS[0]}\n\n{tables}\n\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}"
    if again != text:
        write_atomically(path, again)


# --- numbers as people read them --------------------------------------------------------------------------------------


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f}{SPACE}%"


def signed(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def times(value: float) -> str:
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×"


if __name__ == "__main__":
    main()
