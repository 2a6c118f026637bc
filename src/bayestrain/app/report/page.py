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
from bayestrain.app.report.read import Run, read_run, reading
from bayestrain.app.report.words import count, duration, join, number, percent, plural, ratio
from bayestrain.files import write_atomically

FEW_ROWS = 14
"""Longer tables are folded."""


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
    notices = [] if run.result else ["This run is unfinished: the page shows what it has written so far."]
    with reading(Path(folder)), draw.style():
        training = Section("Training", (), draw.training_plots(run))
        sections = [_ranks(run), _spectra(run), training, _certainty(run)]
        html = render(
            "run.html.j2", title=run.name, lead=_lead(run), notices=notices, tiles=tiles(run), advice=advice(run),
            sections=sections, command=run.environment.get("command"), config=run.config_text,
            environment=run.environment,
        )  # fmt: skip
    write_atomically(path, html)
    return path


def render(template: str, **context: Any) -> str:
    """Fill a template; everything that comes from a run folder is escaped."""
    loader = jinja2.PackageLoader("bayestrain.app.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    css = resources.files("bayestrain.app.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    context = {"links": {}, "few": FEW_ROWS, "style": css, "version": version("bayestrain"), **context}
    return environment.get_template(template).render(context)


def tiles(run: Run) -> list[tuple[str, str, list[str]]]:
    """The figures to judge a run by: (label, value, notes). A value is this run's own, whatever its notes compare."""
    metrics, at = run.scores("metrics"), run.scores("calibrated").get("temperature")
    which = run.result.get("evaluated_on") or "test" if metrics else "validation"
    scores, posterior, values = metrics or run.scores("validation"), run.posterior, run.predictions
    held = run.scores("validation") if which == "test" else {}
    fewer = f"{ratio(run.ratio)} fewer than dense ({count(run.result.get('dense_parameters'))})" if run.ratio else ""
    each = f"in each of {plural(posterior['particles'], 'particle')}" if posterior else ""
    found = [("Parameters", count(run.parameters), [fewer, each])]
    if "accuracy" in scores:
        note = f"validation {percent(held['accuracy'])}" if "accuracy" in held else ""
        found.append((f"Accuracy ({which})", percent(scores["accuracy"]), [note]))
    if "rmse" in scores:
        note = f"validation {number(held['rmse'])}" if "rmse" in held else ""
        spread = number(float(values["targets"].std())) if "mean" in values else ""
        std = f"the targets have a standard deviation of {spread}" if spread else ""
        found.append((f"RMSE ({which})", number(scores["rmse"]), [std, note]))
    if "log_likelihood" in scores:
        alone = posterior.get("mean_log_likelihood")
        note = "per example" if alone is None else f"a particle alone has {number(alone)} on average"
        found.append((f"Log likelihood ({which})", number(scores["log_likelihood"]), [note]))
    if "ece" in scores:
        note = f"{percent(run.scores('calibrated').get('ece'))} at temperature {at:.2f}" if at else "0 is perfect"
        if at and posterior.get("uncalibrated"):  # its predictions have the temperature already
            note = f"at temperature {at:.2f}; {percent(posterior['uncalibrated'].get('ece'))} without"
        found.append(("Calibration error", percent(scores["ece"]), [note]))
    if "mean" in values:
        share = percent(certainty.covered(values, 0.9), 1)
        found.append(("In the 90% interval", share, ["of the true values"]))
    if run.result:
        peak, device = run.result.get("peak_memory_bytes"), run.result.get("device")
        notes = [f"on {device}" if device else "", f"{peak / 2**20:,.0f} MiB of memory" if peak else ""]
        return [*found, ("Training time", duration(run.result.get("seconds")), notes)]
    return [*found, ("Epochs so far", count(run.history[-1]["epoch"]), [f"of {run.epochs}" if run.epochs else ""])]


def _lead(run: Run) -> str:
    names = join(dict.fromkeys(layer.format for layer in run.tensor_layers if layer.format))
    layers = f"{plural(len(run.tensor_layers), 'tensorised layer')}{f' ({names})' if names else ''}"
    posterior = run.posterior
    who = f"posterior of {posterior['particles']} particles ({posterior['method']})" if posterior else "one network"
    task = "Own likelihood" if run.task == "other" else run.task.capitalize()
    begun = run.result.get("from_run")
    return f"{task}; {who}; {layers}." + (f" Started from {begun['run']}." if begun else "")


def _ranks(run: Run) -> Section:
    layers, texts = run.tensor_layers, []
    if layers:
        now, start = (sum(sum(getattr(x, key)) for x in layers) for key in ("ranks", "start_ranks"))
        texts = [f"{count(now)} of {count(start)} rank indices are left."]
    rows = [
        (x.name, x.format or ("" if x.ranks else "dense"), x.layout, join(x.shape, "×"), join(x.start_ranks),
         join(x.ranks), count(x.sizes.get("dense")), count(x.sizes.get("now")), ratio(x.ratio)) for x in run.layers
    ]  # fmt: skip
    header = ("layer", "format", "layout", "shape", "ranks at the start", "ranks now", "dense", "now", "ratio")
    tables = [Table(f"Layers ({len(rows)})", header, rows)] if rows else []
    return Section("Ranks and size" if layers else "Size", texts, draw.rank_plot(run), tables)


def _spectra(run: Run) -> Section:
    texts = ["What every bond held just before the final cut. A gap between dots and crosses means that the choice of "
             "the tolerance hardly matters."]  # fmt: skip
    cut = [layer for layer in run.layers if layer.spectrum]
    if len(cut) > draw.FEW_LAYERS:
        texts.append(f"Only the {draw.FEW_LAYERS} largest of {len(cut)} layers are shown.")
    later = [layer.name for layer in cut if layer.ranks != tuple(kept for _, kept in layer.spectrum)]
    if later:
        texts.append(f"Ranks changed again after this cut in {join(later[:5])}; the final ones are above.")
    return Section("Spectra at the final cut", texts, draw.spectrum_plots(run))


def _certainty(run: Run) -> Section:
    found, ood, most = run.predictions, run.posterior.get("ood"), certainty.SHOWN
    texts, pictures, tables, rows = [], [], [], list[Sequence[str]]()
    if ood:
        texts.append(f"Uncertainty separates out-of-distribution data ({ood['name']}) from test data with an AUROC of "
                     f"{number(ood['auroc'])}.")  # fmt: skip
    if "hardest_inputs" in found:
        pictures = [_picture(run, place) for place in range(min(len(found["hardest"]), most))]
    elif "labels" in found:
        for k in found["hardest"][:most].tolist():
            p, label = found["probabilities"][k], int(found["labels"][k])
            answer = run.class_name(int(p.argmax()))
            rows.append((str(k), run.class_name(label), answer, percent(float(p.max()), 1), number(found["total"][k])))
        header = ("input", "true class", "answer", "probability", "uncertainty (nats)")
        tables = [Table("The most uncertain test inputs", header, rows)]
    elif found:
        z, outputs = certainty.errors(found), found["mean"].shape[1]
        for k in np.argsort(-np.abs(z).ravel(), kind="stable")[:most].tolist():
            name = f"{k // outputs}" + (f", output {k % outputs + 1}" if outputs > 1 else "")
            columns = (found["targets"], found["mean"], found["std"], z)
            rows.append((name, *(number(float(values.ravel()[k])) for values in columns)))
        header = ("input", "true value", "predicted", "std", "error / std")
        tables = [Table("The most surprising test inputs", header, rows)]
    if facts := run.posterior.get("diagnostics"):
        rows = [(name.replace("_", " "), number(value)) for name, value in facts.items()]
        tables.append(Table("Diagnostics of the particles", ("diagnostic", "value"), rows))
    return Section("Certainty", texts, certainty.certainty_plots(run), tables, pictures)


def _picture(run: Run, place: int) -> dict[str, Any]:
    """One of the hardest inputs with its likeliest three classes, the true one among them."""
    found = run.predictions
    index = int(found["hardest"][place])
    p, truth = found["probabilities"][index], int(found["labels"][index])
    order = np.argsort(-p, kind="stable").tolist()
    top = order[:3] if truth in order[:3] else [*order[:2], truth]
    guesses = [(run.class_name(label), percent(float(p[label]), 0), label == truth) for label in top]
    source, name = certainty.picture(found["hardest_inputs"][place]), run.class_name(truth)
    return {"index": index, "truth": name, "right": order[0] == truth, "guesses": guesses, "source": source}
