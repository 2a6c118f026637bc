"""A posterior's run folder as the report reads it: whole, partial, damaged."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report_page import EXPECTED, parsed
from test_report_posterior import OF_PARTICLES, change, change_tensors, copy, densities, plain, posterior_run

from bayestrain.errors import ReportError
from bayestrain.report import write_report
from bayestrain.report.figures.particles import score_plot
from bayestrain.report.figures.uncertainty import uncertainty_plots
from bayestrain.report.load import load_run
from bayestrain.report.pictures import doubts


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return posterior_run(tmp_path_factory.getbasetemp())


def test_all_of_a_posterior_is_read(posterior: Path) -> None:
    run = load_run(posterior)
    result = json.loads((posterior / "result.json").read_text())["posterior"]
    assert run.posterior is not None
    assert (run.posterior.method, run.posterior.particles, run.posterior.start) == ("svgd", 3, "independent")
    assert run.posterior.mean_log_likelihood == result["mean_log_likelihood"]
    assert list(run.posterior.accuracies) == result["particle_accuracy"]
    assert run.posterior.within_one is not None
    within, bonds = run.posterior.within_one
    assert (within / bonds, bonds) == (result["within_one_rank"], result["bonds"])
    assert run.ood is not None
    assert (run.ood.name, run.ood.auroc) == ("shuffled patches", result["ood"]["auroc"])
    assert run.map is not None
    assert run.map.evaluation is not None
    assert run.map.scores.accuracy == run.map.evaluation.right.mean() == result["map"]["accuracy"]
    evaluation = run.evaluation
    assert evaluation is not None
    assert evaluation.particles is not None
    assert evaluation.uncertainty is not None
    mixture = evaluation.particles.mean(0)
    sharpened = mixture ** (1 / result["temperature"])
    sharpened /= sharpened.sum(1, keepdims=True)
    assert sharpened == pytest.approx(evaluation.probabilities[evaluation.hardest], abs=1e-5)
    entropy = -(mixture * np.log(mixture)).sum(1)
    assert entropy == pytest.approx(evaluation.uncertainty.total[evaluation.hardest], abs=1e-4)
    assert run.posterior.temperature == result["temperature"]
    assert run.posterior.plain_ece == result["uncalibrated"]["ece"]
    assert [r.diagnostics is not None and r.diagnostics.disagreement is not None for r in run.history] == [True] * 4
    assert run.missing == ()


def test_without_map_and_other_data_these_parts_are_left_out(posterior: Path, tmp_path: Path) -> None:
    folder = copy(posterior, tmp_path / "run", "map")
    change(folder, lambda result: result["posterior"].update(map=None, ood=None))

    def no_ood(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("ood_")]:
            del tensors[name]

    change_tensors(folder / "evaluation.safetensors", no_ood)
    path = write_report(folder)
    plots = parsed(path).plots
    assert set(plots) - densities(plots) == EXPECTED | OF_PARTICLES
    html = plain(path).partition("For the record")[0]
    assert "MAP" not in html
    assert "Brier score" in html
    assert "Images it was not made for" not in html


def test_a_run_that_lacks_the_particles_predictions_says_so(posterior: Path, tmp_path: Path) -> None:
    folder = copy(posterior, tmp_path / "run")

    def bare(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name not in ("probabilities", "labels", "hardest", "hardest_images")]:
            del tensors[name]

    change_tensors(folder / "evaluation.safetensors", bare)
    path = write_report(folder)
    plots = parsed(path).plots
    assert not densities(plots)
    assert "uncertainty-total" not in plots
    assert "The 24 most uncertain test images" in plain(path)
    assert "the kinds of uncertainty (no total, aleatoric and epistemic in evaluation.safetensors)" in plain(path)


def test_an_interrupted_posterior_has_a_page(posterior: Path, tmp_path: Path) -> None:
    late = ("result.json", "spectra.json", "evaluation.safetensors", "model.json")
    path = write_report(copy(posterior, tmp_path / "run", *late))
    assert {"particle-number", "particle-distance", "mixture-gain", "lambda-1"} <= set(parsed(path).plots)
    assert "A posterior of 3 particles by SVGD. Up to epoch 3 of 3 each particle has shrunk to" in plain(path)


def test_a_posterior_whose_map_run_has_only_begun_is_told(posterior: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    copy(posterior / "map", tmp_path / "run" / "map", "result.json")
    with pytest.raises(ReportError, match=rf"Only its MAP run has begun: give {tmp_path / 'run' / 'map'} to see that"):
        load_run(tmp_path / "run")


def broken(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda result: result["posterior"].update(changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda result: result.update(posterior=[1]), r'"posterior" is malformed'),
        (broken(particles=None), r"it has no number of 'particles'"),
        (broken(particles=4), r"'particle_accuracy' has 3 values for 4 particles.*Set it to null"),
        (broken(mean_log_likelihood="low"), r"'mean_log_likelihood' must be a number, not 'low'"),
        (broken(own_ranks={"1": [3]}), r'"posterior" is malformed'),
        (broken(own_ranks={"1": [[]]}), r"a bond without ranks"),
        (broken(ood={"auroc": "high"}), r'"ood" of "posterior" is malformed .* Set it to null'),
        (broken(map={"accuracy": "high"}), r"the figures of its MAP run are malformed"),
    ],
)
def test_a_damaged_posterior_is_named(posterior: Path, tmp_path: Path, edit: Any, message: str) -> None:
    folder = change(copy(posterior, tmp_path / "run"), edit)
    with pytest.raises(ReportError, match=message):
        load_run(folder)


@pytest.mark.parametrize(
    ("file", "name", "value", "message"),
    [
        ("evaluation", "total", np.zeros((5, 1)), r"total, aleatoric, epistemic have shapes"),
        ("evaluation", "hardest_particle_probabilities", np.zeros((3, 2, 10)), r"must be \(particles, 24, 10\)"),
        ("evaluation", "hardest_particle_probabilities", np.full((3, 24, 10), 0.3), r"rows that sum to 3 instead of 1"),
        ("evaluation", "ood_images", np.zeros((2, 3), np.uint8), r"ood_images of shape \(2, 3\)"),
        ("map/evaluation", "labels", np.zeros(2000, np.int64), r"other labels than the run itself.*Delete"),
    ],
)
def test_damaged_predictions_are_named(
    posterior: Path, tmp_path: Path, file: str, name: str, value: Any, message: str
) -> None:
    folder = copy(posterior, tmp_path / "run")
    change_tensors(folder / f"{file}.safetensors", lambda tensors: tensors.update({name: value}))
    with pytest.raises(ReportError, match=message):
        load_run(folder)


def test_a_particle_that_is_not_finite_is_left_out(posterior: Path, tmp_path: Path) -> None:
    folder = copy(posterior, tmp_path / "run")

    def spoil(tensors: dict[str, Any]) -> None:
        tensors["hardest_particle_probabilities"][1] = np.nan
        tensors["epistemic"][0] = np.nan

    change_tensors(folder / "evaluation.safetensors", spoil)
    change(folder, lambda result: result["posterior"]["particle_log_likelihood"].__setitem__(1, float("nan")))
    run = load_run(folder)
    found = doubts(run)
    assert len(found) == 9
    assert all("over 2 particles" in doubt.plot.describe for doubt in found)
    assert [plot.name for plot in score_plot(run)] == ["particle-scores"]
    assert [plot.name for plot in uncertainty_plots(run)] == ["uncertainty-total"], "by the entropy of the answers"


def test_a_posterior_around_a_map_point_has_given_ranks(posterior: Path, tmp_path: Path) -> None:
    folder = copy(posterior, tmp_path / "run")
    (folder / "spectra.json").write_text("{}")
    change(
        folder, lambda result: result["posterior"].update(start="jitter", own_ranks={}, within_one_rank=None, bonds=0)
    )
    config = (folder / "config.toml").read_text()
    changed = config.replace('start = "independent"', 'start = "jitter"')
    (folder / "config.toml").write_text(re.sub("jitter_epochs = [0-9]+", "jitter_epochs = 7", changed))
    run = load_run(folder)
    assert (run.total_epochs, run.missing) == (7, ())
    path = write_report(folder)
    plots = parsed(path).plots
    assert "own-ranks" not in plots
    assert not any(name.startswith(("spectrum", "tolerance")) for name in plots)
    assert "on the ranks" not in plain(path)
