"""The page of one run: headline figures, sections of plots, images, and the record."""

from typing import Any

from bayestrain.report import words
from bayestrain.report.headline import headline
from bayestrain.report.html import render
from bayestrain.report.pictures import doubts, hardest_pictures, strangers
from bayestrain.report.run import Run
from bayestrain.report.sections import sections_of

LEFT_OUT = {
    "history.jsonl": "the training curves",
    "config.toml": "the config",
    "model.json": "class names and the size at other tolerances",
    "environment.json": "the environment",
    "spectra.json": "the spectra",
    "evaluation.safetensors": "reliability and test images",
}
UNSOUGHT = {"model.json": "class names", "spectra.json": ""}
"""What a run that sought no ranks loses instead."""


def run_page(run: Run) -> str:
    """The HTML page of one run."""
    doubtful = doubts(run)
    beside = {doubt.picture.index for doubt in doubtful}
    context: dict[str, Any] = {
        "title": f"{run.experiment} · BayesTrain report",
        "run": run,
        "lead": _lead(run),
        "chips": _chips(run),
        "notices": _notices(run),
        "headline": headline(run),
        "sections": sections_of(run),
        "doubts": doubtful,
        "pictures": [picture for picture in hardest_pictures(run) if picture.index not in beside],
        "strangers": strangers(run),
        "count": words.count,
        "ratio": words.ratio,
        "percent": words.percent,
        "signed": words.signed,
    }
    return render("run.html.j2", context)


def _lead(run: Run) -> str:
    scores, posterior = run.scores, run.posterior
    earlier = f" {run.begun.sentence}" if run.begun else ""
    who = f"A posterior of {posterior.particles} particles by {words.method(posterior.method)}. " if posterior else ""
    if not run.finished or scores.accuracy is None:
        return who + _so_far(run) + earlier
    answer = "; together they classify" if posterior else " and classifies"
    return f"{who}{_network(run)}{answer} {words.percent(scores.accuracy)} of the test images right.{earlier}"


def _network(run: Run) -> str:
    """What was trained, and how large it is now."""
    scores, what = run.scores, "Each particle" if run.posterior else "The network"
    params, dense = words.count(scores.params), words.count(scores.dense_params)
    if run.kind == "dense":
        return f"{what} is an ordinary dense one of {params} parameters"
    if scores.ratio is None:
        return f"{what} has {params} parameters"
    if run.kind == "tensorized":
        kept = f"{what} keeps all ranks of its tensor trains, {params} instead of {dense} parameters"
        return f"{kept} ({words.ratio(scores.ratio)} smaller){'' if run.posterior else ','}"
    asked = f"; {words.ratio(run.target_ratio)} was asked for" if run.target_ratio else ""
    return f"{what} kept {params} of {dense} parameters ({words.ratio(scores.ratio)} smaller{asked})"


def _so_far(run: Run) -> str:
    last = run.history[-1].epoch if run.history else 0
    planned = f" of {run.total_epochs}" if run.total_epochs else ""
    what, params = "each particle" if run.posterior else "the network", words.count(run.scores.params)
    if run.sought:
        return f"Up to epoch {last}{planned} {what} has shrunk to {params} parameters."
    state = {"dense": "is dense and has", "tensorized": "keeps all its ranks and has"}.get(run.kind, "has")
    return f"The training has reached epoch {last}{planned}; {what} {state} {params} parameters."


def _chips(run: Run) -> list[tuple[str, str]]:
    environment = run.environment
    gpu = environment.get("gpu", "")
    machine = gpu if gpu not in ("", "null") else environment.get("cpu", "")
    posterior = run.posterior
    chips = [
        ("preset", run.preset),
        ("kind", run.kind),
        ("target", f"{words.ratio(run.target_ratio)} smaller" if run.target_ratio else ""),
        ("particles", str(posterior.particles) if posterior else ""),
        ("method", words.method(posterior.method) if posterior else ""),
        ("start", posterior.start if posterior else ""),
        ("seed", "" if run.seed is None else str(run.seed)),
        ("on", machine),
        ("started", environment.get("started", "")[:16].replace("T", " ")),
        ("resumed", environment.get("resumed", "")[:16].replace("T", " ")),
        ("commit", run.commits),
    ]
    return [(name, value) for name, value in chips if value not in ("", "null")]


def _notices(run: Run) -> list[str]:
    notices = list(run.warnings)
    if not run.finished:
        notices.append(
            f"This run has not finished, so there is no test result yet. "
            f"Go on with: bayestrain train --resume --out {run.folder}"
        )
    left_out = LEFT_OUT if run.sought else LEFT_OUT | UNSOUGHT
    lacking = [f"{what} (no {name})" for name, what in left_out.items() if what and name in run.missing]
    if run.posterior and run.evaluation and run.evaluation.uncertainty is None:
        lacking.append("the kinds of uncertainty (no total, aleatoric and epistemic in evaluation.safetensors)")
    if run.finished and lacking:
        notices.append("Left out: " + ", ".join(lacking) + ".")
    return notices
