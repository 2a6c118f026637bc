"""`write_report`: from a run folder to an HTML page that needs no network and no script."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from bayestrain.app.report import figures
from bayestrain.app.report.facts import Table, advice, join, layer_table, number, plural, tiles
from bayestrain.app.report.read import Run, load, read_run
from bayestrain.files import reading, write_atomically

Section = dict[str, Any]  # arguments of the macro `section` in base.html.j2


def write_report(folder: Path | str) -> Path:
    """Write ``report.html`` into the folder of a run, finished or not, and return its path."""
    folder = Path(folder)
    run, environment, settings = read_run(folder), load(folder / "environment.json"), folder / "config.toml"
    with reading(folder):
        layers = [layer_table(run)] if run.finished else []
        name = str(run.config.get("run", {}).get("name") or folder.resolve().name)
        sections = [
            Section(title="Ranks and size", plots=figures.rank_plots(run), tables=layers),
            Section(title="Training", plots=figures.curves(run, "Log likelihood", "Prior", "Accuracy", "RMSE")),
            _certainty(run),
        ]
        page = render(
            "run.html.j2", title=name, lead=_lead(run), tiles=tiles(run), advice=advice(run),
            sections=sections, command=environment.get("command"), environment=environment,
            config=settings.read_text(encoding="utf-8") if run.config else "",
        )  # fmt: skip
    write_atomically(folder / "report.html", page)
    return folder / "report.html"


def render(template: str, **context: Any) -> str:
    """Fill a template; everything that comes from a run folder is escaped."""
    loader = jinja2.PackageLoader("bayestrain.app.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.get_template(template).render({"version": version("bayestrain"), **context})
    return page.encode(errors="replace").decode()  # half a surrogate pair is no text


def _lead(run: Run) -> str:
    posterior, begun, task = run.result["posterior"], run.result.get("from_run"), run.result["task"]
    names = join(dict.fromkeys(about["format"] for about in run.result["layers"].values() if about["format"]))
    layers = plural(len(run.result["ranks"]), "tensorised layer") + (f" ({names})" if names else "")
    who = f"posterior of {posterior['particles']} particles ({posterior['method']})" if posterior else "one network"
    lead = f"{'Own likelihood' if task == 'other' else task.capitalize()}; {who}; {layers}."
    lead += f" Started from {begun['run']}." if begun else ""
    return lead + ("" if run.finished else " This run is unfinished: the page shows what it has written so far.")


def _certainty(run: Run) -> Section:
    ood, diagnostics = (run.result["posterior"].get(key) for key in ("ood", "diagnostics"))
    texts, tables = [], []
    if ood:
        texts.append(f"Uncertainty separates out-of-distribution data ({ood['name']}) from test data with an AUROC of "
                     f"{number(ood['auroc'])}.")  # fmt: skip
    if diagnostics:
        rows = [(name.replace("_", " "), number(value)) for name, value in diagnostics.items()]
        tables.append(Table("Diagnostics of the particles", ("diagnostic", "value"), rows))
    return Section(title="Certainty", texts=texts, plots=figures.certainty_plots(run), tables=tables)
