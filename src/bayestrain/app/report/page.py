"""`write_report`: from a run folder to one HTML page that needs no network and no script."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from bayestrain.app.report import figures
from bayestrain.app.report.advice import advice
from bayestrain.app.report.facts import Table, join, layer_table, number, percent, plural, tiles
from bayestrain.app.report.read import Run, load, read_run, reading
from bayestrain.files import write_atomically

FEW_ROWS, HARDEST = 14, 14
"""Longer tables are folded, and no more of the hardest inputs are shown."""


@dataclass(frozen=True)
class Section:
    """What a part of a page shows; one without plots, tables and pictures is left out."""

    title: str
    texts: Sequence[str] = ()
    plots: Sequence[figures.Plot] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[dict[str, Any]] = ()


def write_report(folder: Path | str) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    An unfinished run gets a page of what is there. `DataError` names a file that is damaged.
    """
    folder = Path(folder)
    run, environment, settings = read_run(folder), load(folder / "environment.json"), folder / "config.toml"
    with reading(folder):
        sections = [
            Section("Ranks and size", (), figures.rank_plots(run), [layer_table(run)] if run.finished else []),
            Section("Training", (), figures.curves(run, "Log likelihood", "Prior", "Accuracy", "RMSE")),
            _certainty(run),
        ]
        page = render(
            "run.html.j2", title=run.name, lead=_lead(run), tiles=tiles(run), advice=advice(run),
            sections=sections, command=environment.get("command"), environment=environment,
            config=settings.read_text(encoding="utf-8") if run.config else "",
        )  # fmt: skip
    write_atomically(folder / "report.html", page)
    return folder / "report.html"


def render(template: str, **context: Any) -> str:
    """Fill a template; everything that comes from a run folder is escaped."""
    loader = jinja2.PackageLoader("bayestrain.app.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    css = resources.files("bayestrain.app.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    context = {"links": {}, "few": FEW_ROWS, "style": css, "version": version("bayestrain"), **context}
    return environment.get_template(template).render(context)


def _lead(run: Run) -> str:
    posterior, begun, task = run.result["posterior"], run.result.get("from_run"), run.result["task"]
    names = join(dict.fromkeys(about["format"] for about in run.result["layers"].values() if about["format"]))
    layers = plural(len(run.result["ranks"]), "tensorised layer") + (f" ({names})" if names else "")
    who = f"posterior of {posterior['particles']} particles ({posterior['method']})" if posterior else "one network"
    lead = f"{'Own likelihood' if task == 'other' else task.capitalize()}; {who}; {layers}."
    lead += f" Started from {begun['run']}." if begun else ""
    return lead + ("" if run.finished else " This run is unfinished: the page shows what it has written so far.")


def _certainty(run: Run) -> Section:
    found, (ood, diagnostics) = run.predictions, (run.result["posterior"].get(key) for key in ("ood", "diagnostics"))
    texts, tables, pictures = [], [], []
    if ood:
        texts.append(f"Uncertainty separates out-of-distribution data ({ood['name']}) from test data with an AUROC of "
                     f"{number(ood['auroc'])}.")  # fmt: skip
    if "hardest_inputs" in found:
        pictures = [_picture(run, place) for place in range(min(len(found["hardest"]), HARDEST))]
    if diagnostics:
        rows = [(name.replace("_", " "), number(value)) for name, value in diagnostics.items()]
        tables.append(Table("Diagnostics of the particles", ("diagnostic", "value"), rows))
    return Section("Certainty", texts, figures.certainty_plots(run), tables, pictures)


def _picture(run: Run, place: int) -> dict[str, Any]:
    """One of the hardest inputs with its likeliest three classes, the true one among them."""
    found = run.predictions
    index = int(found["hardest"][place])
    p, truth = found["probabilities"][index], int(found["labels"][index])
    names = run.result["classes"] or range(len(p))
    order = np.argsort(-p, kind="stable").tolist()
    top = order[:3] if truth in order[:3] else [*order[:2], truth]
    guesses = [(names[label], percent(p[label], 0), label == truth) for label in top]
    source = figures.picture(found["hardest_inputs"][place])
    return {"index": index, "truth": names[truth], "right": order[0] == truth, "guesses": guesses, "source": source}
