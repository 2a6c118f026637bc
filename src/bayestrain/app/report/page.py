"""`write_report`: from a run folder to one HTML page that needs no network and no script."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from bayestrain.app.report import certainty
from bayestrain.app.report import plots as draw
from bayestrain.app.report.advice import advice
from bayestrain.app.report.read import Classes, Run, Values, read_run
from bayestrain.app.report.words import count, duration, join, number, percent, plural, ratio
from bayestrain.files import write_atomically

FEW_ROWS = 14
"""Longer tables with a title are folded."""


@dataclass(frozen=True)
class Table:
    """Rows of texts under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """What a part of a page shows; one without plots, tables and pictures is left out."""

    title: str
    texts: Sequence[str] = ()
    plots: Sequence[draw.Plot] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[dict[str, Any]] = ()


def write_report(folder: Path | str) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    An unfinished run gets a page of what is there. `DataError` names a file that is damaged.
    """
    run, path = read_run(Path(folder)), Path(folder) / "report.html"
    notices = [] if run.finished else ["This run is unfinished: the page shows what it has written so far."]
    notices += [f"Left out, because the run folder lacks {join(run.missing)}."] if run.missing else []
    with draw.style():
        training = Section("Training", (), draw.training_plots(run))
        sections = [_ranks(run), _spectra(run), training, _certainty(run), _particles(run)]
    html = render(
        "run.html.j2", title=run.name, lead=_lead(run), notices=notices, tiles=tiles(run), advice=advice(run),
        sections=sections, command=run.result.get("command") or run.environment.get("command"), config=run.config_text,
        environment=run.environment,
    )  # fmt: skip
    write_atomically(path, html)
    return path


def render(template: str, **context: Any) -> str:
    """Fill a template; everything that comes from a run folder is escaped."""
    loader = jinja2.PackageLoader("bayestrain.app.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    css = resources.files("bayestrain.app.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(
        {"links": {}, "few": FEW_ROWS, **context}, style=css, version=version("bayestrain")
    )


def tiles(run: Run) -> list[tuple[str, str, list[str]]]:
    """The figures to judge a run by: (label, value, notes). A value is this run's own, whatever its notes compare."""
    which = run.result.get("evaluated_on") or "test" if run.metrics else "validation"
    scores = run.metrics or run.validation
    posterior, at = run.posterior, run.calibrated.get("temperature")
    alone = posterior.mean_log_likelihood if posterior else None
    fewer = f"{ratio(run.ratio)} fewer than dense ({count(run.dense_parameters)})" if run.ratio else ""
    each = f"in each of {plural(posterior.particles, 'particle')}" if posterior else ""
    held = run.validation if which == "test" else {}
    values = run.predictions if isinstance(run.predictions, Values) else None
    found = [("Parameters", count(run.parameters), [fewer, each])]
    if "accuracy" in scores:
        note = f"validation {percent(held['accuracy'])}" if "accuracy" in held else ""
        found.append((f"Accuracy ({which})", percent(scores["accuracy"]), [note]))
    if "rmse" in scores:
        note = f"validation {number(held['rmse'])}" if "rmse" in held else ""
        std = f"targets have a standard deviation of {number(float(values.targets.std()))}" if values else ""
        found.append((f"RMSE ({which})", number(scores["rmse"]), [std, note]))
    if "log_likelihood" in scores:
        note = f"one particle alone: {number(alone)} on average" if alone is not None else "per example"
        found.append((f"Log likelihood ({which})", number(scores["log_likelihood"]), [note]))
    if "ece" in scores:
        note = f"{percent(run.calibrated.get('ece'))} at temperature {at:.2f}" if at else "0 is perfect"
        if at and posterior and posterior.uncalibrated:  # its predictions have the temperature already
            note = f"at temperature {at:.2f}; {percent(posterior.uncalibrated.get('ece'))} without"
        found.append(("Calibration error", percent(scores["ece"]), [note]))
    if values:
        share = percent(certainty.covered(values, 0.9), 1)
        found.append(("Calibration", share, ["of true values lie in their 90 % interval"]))
    if run.result:
        peak, device = run.numbers.get("peak_memory_bytes"), run.result.get("device")
        notes = [f"on {device}" if device else "", f"{peak / 2**20:,.0f} MiB of memory" if peak else ""]
        return [*found, ("Training time", duration(run.numbers.get("seconds")), notes)]
    return [*found, ("Epochs so far", count(run.history[-1].number), [f"of {run.epochs}" if run.epochs else ""])]


def _lead(run: Run) -> str:
    names = join(dict.fromkeys(layer.format for layer in run.tensor_layers if layer.format))
    layers = f"{plural(len(run.tensor_layers), 'tensorised layer')}{f' ({names})' if names else ''}"
    posterior = run.posterior
    who = f"posterior of {posterior.particles} particles ({posterior.method})" if posterior else "one network"
    task = "Own likelihood" if run.task == "other" else run.task.capitalize()
    begun = run.result.get("from_run")
    started = f" Started from {begun.get('run') if isinstance(begun, dict) else begun}." if begun else ""
    return f"{task}; {who}; {layers}.{started}"


def _ranks(run: Run) -> Section:
    layers, texts = run.tensor_layers, []
    if layers:
        now, start = (sum(sum(getattr(x, key)) for x in layers) for key in ("ranks", "start_ranks"))
        bonds = plural(sum(len(layer.ranks) for layer in layers), "bond")
        texts = [f"Of {count(start)} rank indices at the start, {count(now)} are left, at {bonds}."]
    rows = [
        (x.name, x.format or ("" if x.ranks else "dense"), x.layout, join(x.shape, "×"), join(x.start_ranks),
         join(x.ranks), count(x.sizes.get("dense")), count(x.sizes.get("now")), ratio(x.ratio)) for x in run.layers
    ]  # fmt: skip
    header = ("layer", "format", "layout", "shape", "ranks at the start", "ranks now", "dense", "now", "ratio")
    tables = [Table(f"Layers ({len(rows)})", header, rows)] if rows else []
    figures = [*draw.rank_plot(run), *draw.size_plot(run), *draw.rank_paths(run)]
    return Section("Ranks and size" if layers else "Size", texts, figures, tables)


def _spectra(run: Run) -> Section:
    now = {layer.name: layer.ranks for layer in run.layers}
    texts = ["What every bond held just before the final cut. A gap between dots and crosses means that the choice of "
             "the tolerance hardly matters."]  # fmt: skip
    if len(run.spectra) > draw.FEW_LAYERS:
        texts.append(f"Shown are the {draw.FEW_LAYERS} largest of {len(run.spectra)} layers.")
    later = [name for name, bonds in run.spectra.items() if now.get(name) != tuple(kept for _, kept in bonds)]
    if later:
        texts.append(f"Ranks changed again after this cut in {join(later[:5])}; the final ones are above.")
    return Section("Spectra at the final cut", texts, draw.spectrum_plots(run))


def _certainty(run: Run) -> Section:
    found, posterior, most = run.predictions, run.posterior, certainty.SHOWN
    texts, pictures, tables = [], [], []
    if posterior and posterior.ood:
        name, auroc = posterior.ood.get("name", ""), number(posterior.ood.get("auroc"))
        texts.append(f"Uncertainty tells out-of-distribution data ({name}) from test data with an AUROC of {auroc}.")
    rows: list[Sequence[str]] = []
    if isinstance(found, Classes) and found.inputs is not None:
        pictures = [_picture(run, found, place) for place in range(min(len(found.hardest), most))]
    elif isinstance(found, Classes):
        header = ("input", "true class", "answer", "probability", "uncertainty / nats")
        for k in found.hardest[:most].tolist():
            truth, answer = (run.class_name(int(label)) for label in (found.labels[k], found.probabilities[k].argmax()))
            rows.append((str(k), truth, answer, percent(float(found.confidence[k]), 1), number(float(found.total[k]))))
    elif found is not None:
        header, outputs = ("input", "true value", "predicted", "std", "error / std"), found.mean.shape[1]
        for k in np.argsort(-np.abs(found.z).ravel(), kind="stable")[:most].tolist():
            name = f"{k // outputs}" + (f", output {k % outputs + 1}" if outputs > 1 else "")
            columns = (found.targets, found.mean, found.std, found.z)
            rows.append((name, *(number(float(values.ravel()[k])) for values in columns)))
    if rows:
        title = "The most uncertain test inputs" if isinstance(found, Classes) else "The most surprising test inputs"
        tables = [Table(title, header, rows)]
    return Section("Certainty", texts, certainty.certainty_plots(run), tables, pictures)


def _picture(run: Run, found: Classes, place: int) -> dict[str, Any]:
    """One of the hardest inputs with its likeliest three classes, the true one among them."""
    index = int(found.hardest[place])
    probabilities, truth = found.probabilities[index], int(found.labels[index])
    order = np.argsort(-probabilities, kind="stable").tolist()
    top = order[:3] if truth in order[:3] else [*order[:2], truth]
    guesses = [(run.class_name(label), percent(float(probabilities[label]), 0), label == truth) for label in top]
    source = certainty.picture(found.inputs[place]) if found.inputs is not None else ""
    truth_name = run.class_name(truth)
    return {"index": index, "truth": truth_name, "right": order[0] == truth, "guesses": guesses, "source": source}


def _particles(run: Run) -> Section:
    if run.posterior is None:
        return Section("Particles")
    together, alone = run.metrics.get("log_likelihood"), run.posterior.mean_log_likelihood
    texts = [f"Together, the {run.posterior.particles} particles have a log likelihood of {number(together)}; a single "
             f"one has {number(alone)} on average."] if together is not None and alone is not None else []  # fmt: skip
    facts = [(name.replace("_", " "), number(value)) for name, value in run.posterior.diagnostics.items()]
    tables = [Table("Diagnostics at the end", ("diagnostic", "value"), facts)] if facts else []
    spread = {n: join(join(sorted({min(b), max(b)}), "–") for b in own) for n, own in run.posterior.own_ranks.items()}
    if spread:
        header = ("layer", "least and greatest rank at each bond")
        tables.append(Table("Ranks that each particle would keep on its own", header, list(spread.items())))
    return Section("Particles", texts, [*certainty.particle_plot(run), *draw.diagnostic_plots(run)], tables)
