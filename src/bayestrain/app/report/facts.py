"""The figures to judge a run by, as people read them: its scores, its layers, and how well its certainty holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import NormalDist

import numpy as np

from bayestrain.app.report.read import Array, Run

FEW_LAYERS = 6
Arrays = Mapping[str, Array]


def count(value: float) -> str:
    """3625 -> "3,625"."""
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    """137.07 -> "137×"."""
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.3g}×"


def percent(value: float, digits: int = 2) -> str:
    """0.9856 -> "98.56%"."""
    return f"{100 * value:.{digits}f}%"


def number(value: float) -> str:
    """Any number in three digits or its whole part: -0.04583 -> "-0.0458"."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:#.3g}".removesuffix(".")


def duration(seconds: float) -> str:
    """112 -> "0:01:52"."""
    return str(timedelta(seconds=round(seconds)))


def plural(number: int, noun: str) -> str:
    """2, "layer" -> "2 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def join(values: Iterable[object], separator: str = ", ") -> str:
    """(7, 5, 3) -> "7, 5, 3"."""
    return separator.join(map(str, values))


@dataclass(frozen=True)
class Table:
    """Rows of texts under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def confidence(found: Arrays) -> Array:
    """The probability of the likeliest class."""
    return np.asarray(found["probabilities"].max(1))


def right(found: Arrays) -> Array:
    """Whether the likeliest class is the true one."""
    return np.asarray(found["probabilities"].argmax(1) == found["labels"])


def errors(found: Arrays) -> Array:
    """Errors of values in units of the predicted standard deviation."""
    return np.asarray((found["targets"] - found["mean"]) / np.maximum(found["std"], 1e-30))


def covered(found: Arrays, share: float) -> float:
    """Part of the targets inside the central interval that should hold this share of them."""
    return float((np.abs(errors(found)) <= NormalDist().inv_cdf((1 + share) / 2)).mean())


def tiles(run: Run) -> list[tuple[str, str, list[str]]]:
    """(label, value, notes). A value is this run's own, whatever its notes compare it with."""
    result, posterior = run.result, run.posterior
    dense = result.get("dense_parameters", 0)
    fewer = f"{ratio(dense / run.parameters)} fewer than dense ({count(dense)})" if dense else ""
    each = f"in each of {plural(posterior['particles'], 'particle')}" if posterior else ""
    found = [("Parameters", count(run.parameters), [fewer, each])]
    if run.ranks:
        now, start = (sum(map(sum, ranks.values())) for ranks in (run.ranks, run.start_ranks))
        few = [f"{name}: {join(ranks)}" for name, ranks in run.ranks.items()] if len(run.ranks) <= FEW_LAYERS else []
        found.append(("Rank indices", count(now), [f"of {count(start)} at the start", *few]))
    found += _scores(run)
    if not result:
        return [*found, ("Epochs so far", run.progress, [])]
    peak, device = result.get("peak_memory_bytes"), result.get("device")
    notes = [f"on {device}" if device else "", f"{peak / 2**20:,.0f} MiB of memory" if peak else ""]
    return [*found, ("Training time", duration(result.get("seconds", 0)), notes)]


def _scores(run: Run) -> list[tuple[str, str, list[str]]]:
    metrics, held, calibrated = (run.scores(name) for name in ("metrics", "validation", "calibrated"))
    which = run.result.get("evaluated_on") or "test" if metrics else "validation"
    scores, posterior, values, found = metrics or held, run.posterior, run.predictions, []
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
        note = "0 is perfect"
        if calibrated:
            at, other = f"at temperature {calibrated['temperature']:.2f}", posterior.get("uncalibrated")
            # The predictions of a calibrated posterior have the temperature already.
            note = f"{at}; {percent(other['ece'])} without" if other else f"{percent(calibrated['ece'])} {at}"
        found.append(("Calibration error", percent(scores["ece"]), [note]))
    if "targets" in values:
        found.append(("In the 90% interval", percent(covered(values, 0.9), 1), ["of the true values"]))
    return found


def layer_table(run: Run) -> Table:
    """A row for each layer of a finished run, and one for the whole network."""
    whole, particles = run.result["dense_parameters"], run.posterior.get("particles", 1)
    rows = [
        (name, x["format"] or "dense", x["layout"] or "", join(x["shape"], "×"), join(run.start_ranks.get(name, ())),
         join(run.ranks.get(name, ())), count(x["dense"]), count(x["now"]), ratio(x["dense"] / x["now"]))
        for name, x in run.layers.items()
    ]  # fmt: skip
    name = "whole network" if particles == 1 else f"each of {particles} particles"
    rows.append((name, "", "", "", "", "", count(whole), count(run.parameters), ratio(whole / run.parameters)))
    header = ("layer", "format", "layout", "shape", "ranks at the start", "ranks now", "dense", "now", "ratio")
    return Table(f"Layers ({len(run.layers)})", header, rows)
