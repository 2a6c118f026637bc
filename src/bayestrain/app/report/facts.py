"""The figures to judge a run by, as people read them: its scores, its layers, and how well its certainty holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import NormalDist

import numpy as np

from bayestrain.app.report.read import Arrays, Run

FEW_LAYERS = 6


def percent(value: float, digits: int = 2) -> str:
    """0.9856 -> "98.56%"."""
    return f"{value:.{digits}%}"


def number(value: float) -> str:
    """Any number in three digits or its whole part: -0.04583 -> "-0.0458"."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:#.3g}".removesuffix(".")


def plural(number: int, noun: str) -> str:
    """2, "layer" -> "2 layers"."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def join(values: Iterable[object], separator: str = ", ") -> str:
    """(7, 5, 3) -> "7, 5, 3"."""
    return separator.join(map(str, values))


@dataclass(frozen=True)
class Table:
    """Rows of texts under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def covered(found: Arrays, share: float) -> float:
    """Part of the targets inside the central interval that should hold this share of them."""
    return float((np.abs(found["errors"]) <= NormalDist().inv_cdf((1 + share) / 2)).mean())


def tiles(run: Run) -> list[tuple[str, str, list[str]]]:
    """(label, value, notes). A value is this run's own, whatever its notes compare it with."""
    result, metrics, held, values = run.result, run.result["metrics"], run.result["validation"], run.predictions
    posterior, calibrated, dense, ranks = (result[k] for k in ("posterior", "calibrated", "dense_parameters", "ranks"))
    fewer = f"{dense / result['parameters']:,.1f}× fewer than dense ({dense:,})" if dense else ""
    each = f"in each of {plural(posterior['particles'], 'particle')}" if posterior else ""
    found = [("Parameters", f"{result['parameters']:,}", [fewer, each])]
    if ranks:
        now, start = (sum(map(sum, each.values())) for each in (ranks, result["start_ranks"]))
        few = [f"{name}: {join(each)}" for name, each in ranks.items()] if len(ranks) <= FEW_LAYERS else []
        found.append(("Rank indices", f"{now:,}", [f"of {start:,} at the start", *few]))

    which, scores = (result.get("evaluated_on", "test"), metrics) if metrics else ("validation", held)
    for key, label, show in (("accuracy", "Accuracy", percent), ("rmse", "RMSE", number)):
        if key in scores:
            notes = [f"validation {show(held[key])}"] if which == "test" and key in held else []
            if key == "rmse" and "targets" in values:
                notes.insert(0, f"the targets have a standard deviation of {number(float(values['targets'].std()))}")
            found.append((f"{label} ({which})", show(scores[key]), notes))
    if "log_likelihood" in scores:
        alone = posterior.get("mean_log_likelihood")
        note = "per example" if alone is None else f"a particle alone has {number(alone)} on average"
        found.append((f"Log likelihood ({which})", number(scores["log_likelihood"]), [note]))
    if "ece" in scores:
        note, other = "0 is perfect", posterior.get("uncalibrated")
        if calibrated:  # the predictions of a posterior have the temperature already
            at = f"at temperature {calibrated['temperature']:.2f}"
            note = f"{at}; {percent(other['ece'])} without" if other else f"{percent(calibrated['ece'])} {at}"
        found.append(("Calibration error", percent(scores["ece"]), [note]))
    if "targets" in values:
        found.append(("In the 90% interval", percent(covered(values, 0.9), 1), ["of the true values"]))

    if not run.finished:
        return [*found, ("Epochs so far", run.progress, [])]
    peak, device = result.get("peak_memory_bytes"), result.get("device")
    notes = [f"on {device}" if device else "", f"{peak / 2**20:,.0f} MiB of memory" if peak else ""]
    return [*found, ("Training time", str(timedelta(seconds=round(result.get("seconds", 0)))), notes)]


def layer_table(run: Run) -> Table:
    """A row for each layer of a finished run, and one for the whole network."""
    result, particles = run.result, run.result["posterior"].get("particles", 1)
    starts, ranks, dense, now = (result[k] for k in ("start_ranks", "ranks", "dense_parameters", "parameters"))
    layers = [
        (name, x["format"] or "dense", x["layout"] or "", join(x["shape"], "×"), join(starts.get(name, ())),
         join(ranks.get(name, ())), x["dense"], x["now"])
        for name, x in result["layers"].items()
    ]  # fmt: skip
    name = "whole network" if particles == 1 else f"each of {particles} particles"
    rows = [
        (*texts, f"{before:,}", f"{after:,}", f"{before / after:,.1f}×")
        for *texts, before, after in [*layers, (name, "", "", "", "", "", dense, now)]
    ]
    header = ("layer", "format", "layout", "shape", "ranks at the start", "ranks now", "dense", "now", "ratio")
    return Table(f"Layers ({len(layers)})", header, rows)
