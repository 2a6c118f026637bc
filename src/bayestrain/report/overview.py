"""``TABLE.md``: for each experiment one table of its groups beside the paper's lines, commands and figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayestrain.report import words
from bayestrain.report.groups import KINDS, Experiment, Group
from bayestrain.report.paper import PAPER, PaperRow
from bayestrain.report.run import Run
from bayestrain.report.table import likelihood

NONE = "–"
SPACE = "\u00a0"
"""Keeps a figure on one line."""

LOSS = 0.05
"""Accuracy that a cut of ranks costs and a reader should be told of."""

COLUMNS = (
    "model", "run", "inferred by", "preset", "prior weight", "target", "parameters", "ratio", "accuracy",
    "log likelihood", "calibrated", "particles' mean", "training", "epochs", "seeds",
)  # fmt: skip
LEFT = COLUMNS[:4]
INTRODUCTION = """\
`bayestrain table` writes this file and its figures from the results beside it; `make table` does so in a clone.

# Results

Each line is a group of runs that differ in their seed alone, or a line of the paper. Figures are those of the test set,
as mean ± sample standard deviation over seeds; without a ±, all seeds have the same or there is only one. Settings were
tuned on a validation split of the training images, not on the test images; but of some trial runs the test figures
were printed beside those of the split, and seen.

- *model*, in the paper's words: BNN is the dense network, BTNN the same in tensor trains of full ranks, LR-BTNN in
  tensor trains that find their own ranks.
- *inferred by*: MAP is a single network; else a posterior of so many networks, its particles, and by which method.
- *preset*: whose modes, ranks and prior, but for what a line's command sets otherwise; *prior weight*: 1 is Bayes,
  less keeps more ranks, where they are sought; *target*: how many times smaller than dense the network was asked to be,
  – if it was not.
- *parameters*: with biases and batch norm's four vectors (scale, shift, mean and variance); of a posterior, those of
  each particle. *ratio*: how many times fewer than the dense network has.
- *log likelihood*: per test image; of a posterior that of its particles' mean probability, as a rule at the temperature
  that held-out images ask for. *calibrated*: that of a single network at such a temperature. *particles' mean*: the
  mean of the particles' own log likelihoods, which is what the paper's figure appears to be.
- *training*: of a run, and where. Several may have shared the machine, or waited while others ran, so times are no
  benchmark. *epochs*: passes over the training images, fine-tuning included; "after" those of the run that a network
  went on from, which are not in its time; "of" those that the preset has, where a run had fewer. Of a posterior also
  its iterations, one per batch. One around MAP began with a trained network, whose epochs and time are not counted.
- A dash is what we do not know or what does not apply.

Commands are those that made the lines, at the commits in their `summary.json`; later code may come to other figures.
"""


@dataclass(frozen=True)
class Figure:
    """A figure in the file: its name, what it is, and a sentence below it."""

    name: str
    title: str
    caption: str


@dataclass(frozen=True)
class Line:
    """One line of a table before it is written; a cell that is not named is a dash."""

    kind: str
    cells: dict[str, str]


def overview(experiments: Sequence[Experiment], pictures: dict[str, list[Figure]], beside: Path) -> str:
    """The whole file, to be written into the folder `beside`; `pictures` are those of each experiment."""
    there = {experiment.name for experiment in experiments}
    absent = [f"There are no results of `{name}` yet." for name in PAPER if name not in there]
    parts = [INTRODUCTION, *(f"{sentence}\n" for sentence in absent)]
    for experiment in experiments:
        parts.append(_section(experiment, pictures.get(experiment.name, []), beside))
    return "\n".join(parts)


def _section(experiment: Experiment, pictures: Sequence[Figure], beside: Path) -> str:
    paper = PAPER.get(experiment.name)
    lines = _paper_lines(paper) if paper else []
    lines += [Line(group.settings.kind, _cells(experiment.name, group, beside)) for group in experiment.groups]
    lines.sort(key=lambda line: list(KINDS).index(line.kind))  # stable: the paper's line first
    texts = [f"## {experiment.name}", _table(lines)]
    if paper and paper.note:
        texts.append(paper.note)
    texts.append(_failures(experiment))
    if cut := _cut_too_far(experiment):
        texts.append(cut)
    if again := _evaluated_again(experiment):
        texts.append(again)
    if experiment.groups:
        commands = [f"- `{group.label}`: `{group.command}`" for group in experiment.groups]
        around = ["`--map`"] if "--map" in "".join(commands) else []
        begun = ["`--from`"] if any(group.settings.earlier_epochs for group in experiment.groups) else []
        needed = " or ".join([*around, *begun])
        after = f"; one with {needed} needs networks that must be there" if needed else ""
        texts.append("\n".join([f"The commands that make the lines again{after}:", "", *commands]))
    texts += [f"![{p.title}](figures/{p.name}.svg)\n\n*{p.caption}*" for p in pictures]
    return "\n\n".join(texts) + "\n"


def _table(lines: Sequence[Line]) -> str:
    """A Markdown table; a column that no line has is left out."""
    order = [name for name in COLUMNS if any(name in line.cells for line in lines)]
    aligned = ["---" if name in LEFT else "--:" for name in order]
    rows = [[line.cells.get(name, NONE) for name in order] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (order, aligned, *rows))


def _paper_lines(paper: PaperRow) -> list[Line]:
    """What is known of the paper's three networks."""

    def line(kind: str, params: int | None, accuracy: float | None) -> Line:
        cells = {"model": KINDS[kind], "run": "**the paper**", "parameters": words.count(params)}
        cells["ratio"] = words.ratio(paper.dense_params / params if params else None)
        cells["accuracy"] = words.percent(accuracy, 1).replace(" ", SPACE)
        return Line(kind, cells)

    found = line("low-rank", paper.params, paper.accuracy)
    found.cells["particles' mean"] = words.signed(paper.log_likelihood)
    return [
        line("dense", paper.dense_params, paper.dense_accuracy),
        line("tensorized", paper.tensorized_params, None),
        found,
    ]


def _cells(experiment: str, group: Group, beside: Path) -> dict[str, str]:
    settings = group.settings
    folder, home = group.folder.resolve(), beside.resolve()
    where = folder.relative_to(home).as_posix() if folder.is_relative_to(home) else ""
    devices = " and ".join(dict.fromkeys(run.device for run in group.runs if run.device))
    seconds = _spread(group, lambda run: run.scores.seconds, lambda value: f"{value:,.0f}", f"{SPACE}s")
    earlier = f", after {settings.earlier_epochs}" if settings.earlier_epochs else ""
    iterations = f" ({settings.iterations:,} iterations)" if settings.iterations else ""
    epochs = settings.shortened(experiment) or settings.epochs
    cells = {
        "model": KINDS[settings.kind],
        "run": f"[{group.label}]({where})" if where else group.label,
        "inferred by": settings.how,
        "preset": settings.preset or NONE,
        "prior weight": _number(settings.prior_weight),
        "parameters": _spread(group, lambda run: run.scores.params, words.count),
        "ratio": _spread(group, lambda run: run.scores.ratio, lambda value: f"{value:.1f}", "×"),
        "accuracy": _spread(group, lambda run: run.scores.accuracy, lambda value: f"{100 * value:.2f}", f"{SPACE}%"),
        "log likelihood": _spread(group, lambda run: run.scores.log_likelihood, likelihood),
        "training": f"{seconds}, {devices}" if devices else seconds,
        "epochs": f"{epochs}{earlier}{iterations}" if epochs else NONE,
        "seeds": str(len(group.runs)),
    }
    if settings.target_ratio:
        cells["target"] = f"{_number(settings.target_ratio)}×"
    if settings.particles == 1:
        cells["calibrated"] = _spread(group, lambda run: run.scores.calibrated_log_likelihood, likelihood)
    else:
        cells["particles' mean"] = _spread(
            group, lambda run: run.posterior.mean_log_likelihood if run.posterior else None, likelihood
        )
    return cells


def _spread(group: Group, value: Callable[[Run], float | None], text: Callable[[float], str], unit: str = "") -> str:
    """Mean ± standard deviation over the seeds; the mean alone if they do not differ."""
    found = group.mean(value)
    if found is None:
        return NONE
    mean, deviation = found
    return f"{text(mean)}{SPACE}±{SPACE}{text(deviation)}{unit}" if deviation else f"{text(mean)}{unit}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:g}"


def _cut_too_far(experiment: Experiment) -> str:
    """The groups that were good until their ranks were cut."""
    lines = [
        f"`{group.label}`{_part(experiment, group)} from {words.percent(group.cut[0], 1)} to "
        f"{words.percent(group.cut[1], 1)}"
        for group in experiment.groups
        if group.cut and group.cut[0] - group.cut[1] > LOSS
    ]
    said = "Lost when the ranks were cut, in accuracy on held-out images"
    return f"{said}: {', '.join(lines)}.".replace(" %", f"{SPACE}%") if lines else ""


def _part(experiment: Experiment, group: Group) -> str:
    part = group.settings.shortened(experiment.name)
    return f" (after {part} epochs)" if part else ""


def _evaluated_again(experiment: Experiment) -> str:
    lines = []
    for group in experiment.groups:
        if again := [run for run in group.runs if run.evaluated_on]:
            seeds = ", ".join(str(run.seed) for run in again)
            some = f" ({'seed' if len(again) == 1 else 'seeds'} {seeds})" if len(again) < len(group.runs) else ""
            lines.append(f"`{group.label}`{some} on {' and '.join(sorted({run.evaluated_on for run in again}))}")
    return f"Figures taken anew after training, by `bayestrain evaluate`: {', '.join(lines)}." if lines else ""


def _failures(experiment: Experiment) -> str:
    if not experiment.failed:
        return "No seed failed."
    lost = [f"{', '.join(map(str, seeds))} of `{label}`" for label, seeds in experiment.failed.items()]
    return f"Failed seeds, which no line counts: {'; '.join(lost)}."
