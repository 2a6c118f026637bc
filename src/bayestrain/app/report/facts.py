"""The figures to judge a run by, as people read them, and what they suggest to do next."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from bayestrain.app.report.read import Arrays, Run


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


class Table(NamedTuple):
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
        few = [f"{name}: {join(each)}" for name, each in ranks.items()] if len(ranks) <= 6 else []
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

    if posterior and "epistemic" in values:
        share = values["epistemic"].sum() / (values["epistemic"] + values["aleatoric"]).sum()
        found.append(("Epistemic share", percent(share, 1), ["of the uncertainty, which more data would reduce"]))
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


def advice(run: Run) -> list[str]:
    """Sentences, the most pressing first; never empty."""
    return [*_training(run), *run.result["posterior"].get("warnings", ()), *_ranks(run), *_certainty(run)] or [
        "Nothing here calls for another run: use the saved model, for example with “bayestrain predict”."
    ]


def _training(run: Run) -> Iterator[str]:
    if not run.finished:
        yield f"The run was stopped or is still at epoch {run.progress}. To resume it, add --resume to its command."
    held = [(line["validation"], line["epoch"]) for line in run.history]
    scores = [(found["log_likelihood"], epoch) for found, epoch in held if "log_likelihood" in found]
    if len(scores) < 5:
        return
    (best, at), (last, end) = max(scores), scores[-1]
    gained = best - scores[0][0]
    if at < 0.7 * end and best - last > 0.1 * gained > 0:
        scored = f"validation log likelihood was best at epoch {at} ({number(best)}) and ended at {number(last)}"
        yield f"It overfits: {scored}. Train for fewer epochs, or raise weight in [prior]."
    elif run.finished and at == end and last - max(s for s, n in scores if n <= 0.8 * end) > 0.05 * gained > 0:
        yield "Validation log likelihood was still rising at the end: train longer (epochs in [fit])."


def _ranks(run: Run) -> Iterator[str]:
    search, starts = [line for line in run.history if line["phase"] == "search"], run.result["start_ranks"]
    layers = [(name, ranks, starts[name]) for name, ranks in run.result["ranks"].items()]
    bonds = [bond for _, *ends in layers for bond in zip(*ends, strict=True) if bond[1] > 1]
    larger = [name for name, about in run.result["layers"].items() if about["dense"] < about["now"]]
    if larger:
        yield f"Smaller as dense layers: {_few(larger)}. List them under keep_dense in [tensorize], or lower max_rank."
    if not bonds or not search or not run.finished:
        return
    if all(now == start for now, start in bonds):
        weight = number(max(line.get("prior_weight", 0.0) for line in search))
        yield f"No rank was pruned: train longer (epochs in [fit]), or raise weight in [prior], which reached {weight}."
        return
    collapsed = [name for name, ranks, start in layers if max(ranks) == 1 < max(start)]
    if collapsed:
        remedy = "If they are bottlenecks, use keep_dense in [tensorize], or lower weight in [prior]."
        yield f"{plural(len(collapsed), 'layer')} collapsed to rank 1: {_few(collapsed)}. {remedy}"
    cap = run.config.get("tensorize", {}).get("max_rank") or max(start for _, start in bonds)
    full = sum(now == start == cap for now, start in bonds)
    if full >= 0.25 * len(bonds):
        remedy = f"If accuracy matters more than size, raise max_rank in [tensorize], for example to {2 * cap}."
        yield f"{full} of {plural(len(bonds), 'bond')} kept the maximum rank of {cap}. {remedy}"
    before, after = (scores.get("accuracy", 0.0) for scores in (search[-1]["validation"], run.result["validation"]))
    if before - after > 0.01:
        remedy = "cut less (a lower round_tol or target in [fit]), or fine-tune longer (finetune_epochs)"
        yield f"The final cut cost {100 * (before - after):.1f} points of validation accuracy: {remedy}."


def _certainty(run: Run) -> Iterator[str]:
    found, metrics, posterior = run.predictions, run.result["metrics"], run.result["posterior"]
    ece, calibrated = metrics.get("ece", 0.0), run.result["calibrated"]
    remedy = "calibrate on validation data" + ("" if posterior else ", or train a posterior (particles in [posterior])")
    if calibrated.get("ece", ece) < ece:
        remedy = f"predict at temperature {calibrated['temperature']:.2f}, which lowers the calibration error from "
        remedy += f"{percent(ece, 1)} to {percent(calibrated['ece'], 1)}"
    elif calibrated:
        remedy = "a temperature fitted on validation data does not help; check that they resemble the test data"
    if "labels" in found:
        promised, kept = (float(found[name].mean()) for name in ("confidence", "right"))
        if abs(promised - kept) > 0.02:
            claim = "overconfident" if promised > kept else "underconfident"
            yield f"It is {claim} ({percent(promised, 1)} sure on average, {percent(kept, 1)} right): {remedy}."
    if "mean" in found and not 0.83 <= (held := covered(found, 0.9)) <= 0.97:
        claim = "narrow" if held < 0.9 else "wide"
        yield f"Its intervals are too {claim} (those of 90% hold {percent(held, 1)} of the true values): {remedy}."
    if metrics.get("log_likelihood", 0.0) <= posterior.get("mean_log_likelihood", -float("inf")):
        yield "The particles together are no better than one alone: a single network would do."


def _few(names: list[str]) -> str:
    return join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
