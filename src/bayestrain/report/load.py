"""From a run folder to a `Run`: every file is checked, what may be missing is left out and named."""

import json
import math
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

from bayestrain.errors import ReportError
from bayestrain.report.load_evaluation import read_evaluation
from bayestrain.report.load_posterior import read_diagnostics, read_map, read_ood, read_posterior, read_warnings
from bayestrain.report.reading import Json, number, read_json, read_scores, whole
from bayestrain.report.run import Begun, Epoch, Layer, Run, Scores, Spectra


def load_run(folder: Path) -> Run:
    """Read a run folder. A run that was interrupted has no ``result.json``; its history is enough for a page."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(
            f"{folder} is not a run folder: there is no such folder. Give the --out folder of a training."
        )
    result = read_json(folder / "result.json")
    history = _history(folder / "history.jsonl")
    if result is None and not history:
        begun = (folder / "map" / "history.jsonl").is_file()
        raise ReportError(
            f"{folder} is not a run folder: it has neither result.json nor a history.jsonl with an epoch in it. "
            + (f"Only its MAP run has begun: give {folder / 'map'} to see that." if begun
               else "Give a folder that `bayestrain train --out FOLDER` has written.")
        )  # fmt: skip
    config_text, config = _config(folder / "config.toml")
    model = read_json(folder / "model.json")
    environment = read_json(folder / "environment.json")
    spectra = _spectra(folder / "spectra.json")
    evaluation = read_evaluation(folder / "evaluation.safetensors")
    posterior = read_posterior(result, config, folder / "result.json")
    parts = {
        "result.json": result, "history.jsonl": history, "config.toml": config_text, "model.json": model,
        "environment.json": environment, "spectra.json": spectra, "evaluation.safetensors": evaluation,
    }  # fmt: skip
    experiment, fit = config.get("experiment", {}), config.get("fit", {})
    about = {**experiment, **(result or {})}
    seed = about.get("seed")
    name = about.get("experiment") or about.get("name") or folder.resolve().name
    return Run(
        folder=folder,
        experiment=str(name),
        preset=str(about.get("preset", "")),
        kind=str(about.get("kind") or "low-rank"),
        rule=str(fit.get("rule", "rounding")),
        round_tol=_setting(fit, "round_tol", folder / "config.toml"),
        target_ratio=_setting(fit, "target_ratio", folder / "config.toml") or None,
        seed=int(seed) if isinstance(seed, int) else None,
        finished=result is not None and result.get("status", "finished") == "finished",
        total_epochs=_total_epochs(config),
        begun=_begun(result, folder),
        scores=_scores(result, history, folder / "result.json"),
        layers=_layers(result, history, model or {}, folder / "result.json"),
        history=history,
        spectra=spectra,
        evaluation=evaluation,
        posterior=posterior,
        map=read_map(folder, result, evaluation) if posterior else None,
        ood=read_ood(result, folder / "result.json"),
        warnings=read_warnings(result),
        classes=_classes(model or {}, folder / "model.json"),
        config_text=config_text,
        environment={key: _plain(value) for key, value in (environment or {}).items()},
        commits=_commits(environment or {}),
        command=str((result or {}).get("command", "")),
        device=str((result or {}).get("device", "")),
        evaluated_on=_evaluated_on(result or {}),
        missing=tuple(name for name, part in parts.items() if not part),
    )


def _history(path: Path) -> tuple[Epoch, ...]:
    """All epochs. A killed run may leave half a last line: it is dropped. An epoch written again counts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ()
    except (ValueError, OSError) as error:
        raise ReportError(f"{path} cannot be read: {error}.") from error
    records: dict[int, Epoch] = {}
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = _epoch(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if place == len(lines):
                break
            raise ReportError(f"{path}, line {place}: not an epoch of a training ({error!r}).") from error
        records[record.epoch] = record
    return tuple(records[epoch] for epoch in sorted(records))


def _epoch(line: Json) -> Epoch:
    validation = line.get("validation") or {}
    return Epoch(
        epoch=int(line["epoch"]),
        phase=str(line.get("phase", "search")),
        params=whole(line, "params"),
        train_loss=number(line, "train_loss"),
        train_accuracy=number(line, "train_accuracy"),
        validation_accuracy=number(validation, "accuracy"),
        validation_log_likelihood=number(validation, "log_likelihood"),
        validation_mean_log_likelihood=number(validation, "mean_log_likelihood"),
        ranks={name: _inner(ranks) for name, ranks in (line.get("ranks") or {}).items()},
        lambdas={
            name: [[float(value) for value in bond] for bond in bonds]
            for name, bonds in (line.get("lambdas") or {}).items()
        },
        diagnostics=read_diagnostics(line.get("diagnostics"), validation),
    )


def _scores(result: Json | None, history: tuple[Epoch, ...], path: Path) -> Scores:
    if result is None:
        return Scores(params=history[-1].params)
    try:
        scores = read_scores(result)
    except (TypeError, ValueError) as error:
        raise ReportError(f"{path}: {error}.") from error
    if scores.params is None:
        raise ReportError(f'{path} has no "params", the number of parameters left. Was it written by bayestrain?')
    return scores


def _layers(result: Json | None, history: tuple[Epoch, ...], model: Json, path: Path) -> tuple[Layer, ...]:
    """All layers in the network's order; without a result, what the history knows of them."""
    if result is None:
        first, last = history[0].ranks, history[-1].ranks
        return tuple(Layer(name, ranks, first.get(name, ranks)) for name, ranks in last.items())
    try:
        all_ranks, all_max = result.get("ranks") or {}, result.get("max_ranks") or {}
        counts = result.get("layer_params") or {}
        described = model.get("layers") or {}
        layers = []
        for name in [*counts, *(name for name in all_ranks if name not in counts)]:
            count, about = counts.get(name, {}), described.get(name, {})
            ranks = _inner(all_ranks[name]) if name in all_ranks else ()
            maximum = _inner(all_max[name]) if len(all_max.get(name, ())) == len(ranks) + 2 else ranks
            dense = whole(count, "dense")
            sizes, modes = _core_sizes(about) if len(ranks) else ((), "")
            fitting = sizes if len(sizes) == len(ranks) + 1 else ()
            layers.append(
                Layer(name, ranks, maximum, dense, whole(count, "start"), whole(count, "now"), fitting, modes)
            )
        return tuple(layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f'{path}: "ranks", "max_ranks" or "layer_params" is malformed, or "layers" of model.json ({error!r}).'
        ) from error


def _classes(model: Json, path: Path) -> tuple[str, ...]:
    classes = model.get("classes", [])
    if not isinstance(classes, list):
        raise ReportError(f'{path}: "classes" must be a list, not {classes!r}.')
    return tuple(map(str, classes))


def _core_sizes(about: Json) -> tuple[tuple[int, ...], str]:
    """Sizes of a layer's cores without their ranks, and its modes in words, from ``model.json``."""
    ins, outs = (tuple(int(mode) for mode in about.get(key, ())) for key in ("in_modes", "out_modes"))
    if not ins or not outs:
        return (), ""
    modes = f"{'·'.join(map(str, ins))} → {'·'.join(map(str, outs))}"
    if about.get("kind") == "linear":
        return (tuple(i * o for i, o in zip(ins, outs, strict=True)) if len(ins) == len(outs) else ()), modes
    return (math.prod(about["kernel_size"]), *ins, *outs), modes


def _spectra(path: Path) -> Spectra | None:
    content = read_json(path)
    if content is None:
        return None
    if not content:  # the ranks were given, nothing was cut
        return Spectra(0.0, {}, {}, {})
    try:
        layers = content["layers"]
        bonds = {name: [[float(v) for v in bond] for bond in about["bonds"]] for name, about in layers.items()}
        cut = {name: tuple(int(rank) for rank in about["cut"]) for name, about in layers.items()}
        for name, ranks in cut.items():
            if not all(bonds[name]):
                raise ValueError(f"layer {name!r} has a bond without singular values")
            if len(ranks) != len(bonds[name]):
                raise ValueError(f"layer {name!r} has {len(bonds[name])} bonds but {len(ranks)} ranks")
        earlier = {name: [[float(v) for v in bond] for bond in about["earlier"]] for name, about in layers.items()}
        change = content.get("change")
        return Spectra(float(content["tol"]), bonds, cut, earlier, None if change is None else float(change))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{path} is malformed ({error!r}). Delete it to leave the spectra out of the report."
        ) from error


def _config(path: Path) -> tuple[str, Json]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        return "", {}
    except (ValueError, OSError) as error:
        raise ReportError(f"{path} cannot be read: {error}.") from error


def _setting(section: Json, key: str, path: Path) -> float | None:
    try:
        return number(section, key)
    except (TypeError, ValueError) as error:
        raise ReportError(f"{path}: {error}.") from error


def _evaluated_on(result: Json) -> str:
    again = result.get("evaluated_again")
    return str(again.get("device", "another machine")) if isinstance(again, dict) else ""


def _total_epochs(config: Json) -> int | None:
    fit, posterior = config.get("fit", {}), config.get("posterior", {})
    if posterior.get("particles") and posterior.get("start") == "jitter":  # only epochs around the MAP point
        jittered = posterior.get("jitter_epochs")
        return jittered if isinstance(jittered, int) else None
    epochs = fit.get("epochs")
    return int(epochs) + int(fit.get("finetune_epochs", 0)) if isinstance(epochs, int) else None


def _begun(result: Json | None, folder: Path) -> Begun | None:
    path = folder / ("from_run.json" if result is None else "result.json")
    about = read_json(path) if result is None else result.get("from_run")
    if about is None:
        return None
    try:
        return Begun(str(about["run"]), whole(about, "params"), whole(about, "epochs"), number(about, "seconds"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(
            f"{path}: what it says of the run that this one went on from is malformed ({error!r})."
        ) from error


def _inner(ranks: Any) -> tuple[int, ...]:
    """(1, R_1, .., R_d-1, 1) without the two ones at the ends."""
    return tuple(int(rank) for rank in ranks)[1:-1]


def _commits(environment: Json) -> str:
    earlier = environment.get("earlier")
    parts = [part for part in earlier if isinstance(part, dict)] if isinstance(earlier, list) else []
    said = [
        str(part["commit"])[:9] + (" + changes" if part.get("dirty") else "")
        for part in (*parts, environment)
        if part.get("commit")
    ]
    return ", then ".join(commit for commit, _ in groupby(said))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
