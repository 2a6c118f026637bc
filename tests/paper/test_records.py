"""Recorded results are read whole and checked: forged, damaged or contradictory ones are refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edits import edit
from safetensors.numpy import load_file, save_file
from table_kit import POSTERIOR, RESULTS, best_temperature, figures, group, seed

from bayestrain.posterior import ClassPrediction
from paper.records import RecordError, check_predictions, gather, read_group

SUMMARIES = sorted(path for path in RESULTS.glob("*/*/summary.json") if not any(path.parent.glob("*/paper.json")))
PREDICTIONS = sorted(RESULTS.glob("*/*/*/evaluation.safetensors"))


def copied(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / folder.parent.name / folder.name)


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: f"{path.parts[-3]}/{path.parts[-2]}")
def test_every_recorded_summary_follows_from_its_seeds(path: Path) -> None:
    """Computed here from each `result.json`, by other code than that of `paper.records`.

    For results recorded since the rewrite, `test_experiment` compares a group from training to the table.
    """
    summary = json.loads(path.read_text())
    good = [number for number in summary["seeds"] if number not in summary["failed"]]
    each = [figures(json.loads((path.parent / f"seed-{n}" / "result.json").read_text())) for n in good]
    told = {key: value for key, value in summary.items() if isinstance(value, dict)}
    assert len(told) >= 6
    for key, value in told.items():
        if key != "searched_accuracy":  # from histories, which were not recorded
            assert value["each"] == pytest.approx([own[key] for own in each], rel=1e-12), key
        assert value["mean"] == pytest.approx(np.mean(value["each"]), rel=1e-12), key
        assert value["spread"] == pytest.approx(np.std(value["each"], ddof=1) if len(good) > 1 else 0.0, rel=1e-9), key


def forge(value: float) -> float:
    """A value that no table would show as another one."""
    return 1.000001 * value + 1e-9


@pytest.mark.parametrize("label", ["mnist/default", "mnist/svgd-20", "cifar10-cnn/paper"])
def test_any_forged_value_of_a_summary_is_refused(label: str, tmp_path: Path) -> None:
    folder = copied(RESULTS / label, tmp_path)
    path, experiment = folder / "summary.json", folder.parent.name
    original = path.read_text()
    assert read_group(folder, experiment) is not None
    for key, value in json.loads(original).items():
        if not isinstance(value, dict):
            continue
        for part, forged in (
            ("mean", forge(value["mean"])), ("spread", forge(value["spread"])),
            ("each", [forge(value["each"][0]), *value["each"][1:]]),
        ):  # fmt: skip
            edit(path, key, **{part: forged})
            with pytest.raises(RecordError, match=f'for the (mean|spread|each) of "{key}"'):
                read_group(folder, experiment)
            path.write_text(original)


@pytest.mark.parametrize("path", PREDICTIONS, ids=lambda path: "/".join(path.parts[-4:-1]))
def test_a_temperature_fitted_to_the_test_images_is_refused(path: Path, tmp_path: Path) -> None:
    folder = copied(path.parents[1], tmp_path)
    here, number = folder / path.parent.name, path.parent.name
    assert read_group(folder, folder.parent.name) is not None  # the recorded one is not

    stored = load_file(here / path.name)
    temperature = best_temperature(stored["probabilities"], stored["labels"])
    forged = stored["probabilities"].astype(np.float64) ** (1 / temperature)
    forged /= forged.sum(1, keepdims=True)
    save_file({**stored, "probabilities": forged.astype(np.float32)}, here / path.name)
    labels = torch.from_numpy(stored["labels"]).long()
    for key, figure in ClassPrediction(torch.from_numpy(forged)[None]).metrics(labels).items():
        if key in ("log_likelihood", "ece", "brier"):
            edit(here / "result.json", **{key: figure})
    group_of = {int(p.name[5:]): json.loads((p / "result.json").read_text()) for p in folder.glob("seed-*")}
    for key in ("log_likelihood", "ece"):
        values = [group_of[n][key] for n in sorted(group_of)]
        told = {"mean": float(np.mean(values)), "spread": float(np.std(values, ddof=1)), "each": values}
        edit(folder / "summary.json", **{key: told})
    with pytest.raises(RecordError, match=f"{number}, .*so it was fitted to them"):
        read_group(folder, folder.parent.name)


@pytest.mark.parametrize("key", ["accuracy", "log_likelihood", "ece", "brier"])
def test_metrics_that_the_predictions_do_not_give_are_refused(key: str, tmp_path: Path) -> None:
    folder = copied(RESULTS / "mnist" / "svgd-20", tmp_path)
    (run,) = [run for run in read_group(folder, "mnist").runs if run.predictions]
    check_predictions(run)
    run.metrics[key] += 1e-3 if key == "ece" else 1e-4
    with pytest.raises(RecordError, match=f"records {key}"):
        check_predictions(run)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def content(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def result(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "seed-1/result.json", **changes)


FAULTS = [
    (without("seed-1/result.json"), "result.json is missing"),
    (without("seed-1/environment.json"), "environment.json is missing"),
    (without("seed-1/config.toml"), "config.toml cannot be read"),
    (content("seed-1/result.json", "{"), "result.json is damaged"),
    (content("seed-1/result.json", "[]"), "must hold a JSON object, not a list"),
    (content("seed-1/config.toml", "["), "config.toml cannot be read"),
    (content("seed-1/config.toml", "[fit]"), "is malformed (KeyError"),
    (content("summary.json", "{"), "summary.json is damaged"),
    (content("summary.json", '{"seeds": [0], "failed": []}'), "holds seeds [0, 1], but its summary.json lists [0]"),
    (result(status="running"), "has not finished"),
    (result(seed=7), "is of mnist, seed 7"),
    (result(experiment="cifar10-cnn"), "is of cifar10-cnn, seed 1"),
    (result(kind="sparse"), "has the kind 'sparse'; there are dense, tensorized, low-rank"),
    (result(kind="dense"), "differ in kind"),
    (result(accuracy=0.9999), '"accuracy", but the results of its seeds give'),
    (result(accuracy=float("nan")), 'has nan for "accuracy"'),
    (result(posterior={**POSTERIOR, "method": None, "particles": "x"}), "is malformed"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_a_fault_is_one_clear_error(fault: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    folder = group(tmp_path, "a", [{}, {}])
    assert read_group(folder, "mnist") is not None
    fault(folder)
    with pytest.raises(RecordError, match=re.escape(words)) as caught:
        gather(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_results_must_be_there_and_seeds_agree_in_what_matters(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="There is no folder"):
        gather(tmp_path / "nowhere")
    seed(tmp_path, "a", 0, {})
    with pytest.raises(RecordError, match="holds no results"):  # a seed without a summary is not recorded
        gather(tmp_path)
    group(tmp_path, "good", [{}])
    group(tmp_path, "lost", [], failed=(0, 1))
    assert [found.label for found in gather(tmp_path)["mnist"]] == ["good"]
    folder = copied(RESULTS / "mnist" / "default", tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    for other in ({**summary, "auroc": summary["ece"]}, {k: v for k, v in summary.items() if k != "ece"}):
        (folder / "summary.json").write_text(json.dumps(other))
        with pytest.raises(RecordError, match=r"do not have the same figures: (auroc|ece)\."):
            read_group(folder, "mnist")
    folder = group(tmp_path, "pair", [{}, {}])
    config = folder / "seed-1" / "config.toml"
    before = config.read_text()
    config.write_text(re.sub(r"checkpoint_every = \d+", "checkpoint_every = 7", before))
    assert read_group(folder, "mnist") is not None
    config.write_text(re.sub(r"compact_every = \d+", "compact_every = 7", before))
    with pytest.raises(RecordError, match=r"differ in fit\.compact_every"):
        read_group(folder, "mnist")
