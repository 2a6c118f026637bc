"""What to do next with a run, drawn from the facts in its files."""

from collections.abc import Iterator
from math import isfinite

from bayestrain.app.report.facts import covered, join, number, percent, plural
from bayestrain.app.report.read import Run


def advice(run: Run) -> list[str]:
    """Sentences, the most pressing first; never empty."""
    return [*_training(run), *run.result["posterior"].get("warnings", ()), *_ranks(run), *_certainty(run)] or [
        "Nothing here calls for another run: use the saved model, for example with “bayestrain predict”."
    ]


def _training(run: Run) -> Iterator[str]:
    if not run.finished:
        yield f"The run was stopped or is still at epoch {run.progress}. To resume it, add --resume to its command."
    broken = [line["epoch"] for line in run.history if not isfinite(line.get("train_loss", 0.0))]
    if broken:
        yield f"The training loss is not finite from epoch {broken[0]} on: lower lr in [fit], or clip gradients."
    held = [(line["validation"], line["epoch"]) for line in run.history]
    scores = [(found["log_likelihood"], epoch) for found, epoch in held if "log_likelihood" in found]
    if len(scores) < 5:
        return
    (best, at), (last, end) = max(scores), scores[-1]
    gained = best - scores[0][0]
    if at < 0.7 * end and best - last > 0.1 * gained > 0:
        yield (
            f"It overfits: validation log likelihood was best at epoch {at} ({number(best)}) and ended at "
            f"{number(last)}. Train for fewer epochs, or raise weight in [prior]."
        )
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
        yield (
            f"{plural(len(collapsed), 'layer')} collapsed to rank 1 ({_few(collapsed)}), which may be a bottleneck: "
            "use keep_dense in [tensorize], or lower weight in [prior]."
        )
    cap = run.config.get("tensorize", {}).get("max_rank") or max(start for _, start in bonds)
    full = sum(now == start == cap for now, start in bonds)
    if full >= 0.25 * len(bonds):
        yield (
            f"{full} of {plural(len(bonds), 'bond')} kept the maximum rank of {cap}, so the data may support more: "
            f"raise max_rank in [tensorize], for example to {2 * cap}, if accuracy matters more than size."
        )
    sizes = [line["parameters"] for line in search]
    if len(sizes) >= 10 and sizes[-1] < 0.98 * sizes[-1 - len(sizes) // 10]:
        yield "The search ended while ranks were still being pruned: more epochs in [fit] give a smaller network."
    before, after = (scores.get("accuracy", 0.0) for scores in (search[-1]["validation"], run.result["validation"]))
    if before - after > 0.01:
        yield (
            f"The final cut cost {100 * (before - after):.1f} points of validation accuracy: cut less (a lower "
            "round_tol or target in [fit]), or fine-tune longer (finetune_epochs)."
        )


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
