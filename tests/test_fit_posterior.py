"""`fit_posterior` and whole posterior runs: exact resuming, every method and start, what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_kit import StopAfter, jitter, settings
from torch import Tensor, nn
from typer.testing import CliRunner

import bayestrain as bt
from bayestrain import data, infer
from bayestrain.cli.app import app
from bayestrain.errors import ConfigError, Interrupted, TrainingError
from bayestrain.report.figures.certainty import (
    at_share,
    rejection_curve,
    rejection_plot,
    reliability_bins,
    reliability_plot,
)
from bayestrain.report.figures.particles import score_plot
from bayestrain.report.load import load_run
from bayestrain.report.words import percent, signed
from bayestrain.train import loop, toml
from bayestrain.train.config import RunConfig
from bayestrain.train.evaluation import evaluate_network
from bayestrain.train.experiment import run_experiment
from bayestrain.train.material import load_material, outside_images
from bayestrain.train.metrics import evaluator
from bayestrain.train.outcome import warnings_of
from bayestrain.train.progress import Silent
from bayestrain.train.reevaluation import evaluate_run

DIGITS = data.load("mnist-mini")
TRAIN = DIGITS.train.subset(range(1000))


def network() -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6))
    return model


def trained(folder: Path | None = None, config: bt.FitConfig | None = None, **options: Any) -> Any:
    evaluate = evaluator(DIGITS.test.subset(range(200)), lambda x: x, "cpu")
    if folder is not None:
        folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    return bt.fit_posterior(
        bt.independent(network, 3), TRAIN, evaluate, config or settings(),
        prior=bt.PriorConfig(warmup_epochs=1, align_every=4), augment=jitter, folder=folder, **options,
    )  # fmt: skip


@pytest.mark.parametrize("stop", [0, 2, 4, 5])
def test_interrupted_and_resumed_is_bit_identical(stop: int, tmp_path: Path) -> None:
    whole, result = trained(tmp_path / "whole")
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        trained(tmp_path / "parts", progress=StopAfter(stop))
    parts, again = trained(tmp_path / "parts", resume=True)
    assert whole.ranks == parts.ranks
    for group in ("particles", "carried"):
        for name, tensor in getattr(whole, group).items():
            assert torch.equal(getattr(parts, group)[name], tensor), name
    assert result.own_ranks == again.own_ranks
    assert result.spectra == again.spectra
    for one, other in zip(result.history, again.history, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize(
    "how",
    [{"method": "ensemble"}, {"method": "sgld", "temperature": 1e-3}, {"kernel": infer.imq}, {"chunk": 2}],
    ids=["ensemble", "sgld", "imq", "chunk"],
)
def test_every_option_of_a_posterior_trains(how: dict[str, Any]) -> None:
    found, result = trained(config=settings(clip_norm=1.0), **how)
    losses = [line["train_loss"] for line in result.history[1:]]
    assert losses[3] < losses[0]
    assert len(found) == 3
    assert result.history[-1]["params"] < result.history[0]["params"]
    assert result.history[-1]["validation"]["log_likelihood"] >= result.history[-1]["validation"]["mean_log_likelihood"]
    if "chunk" in how:
        plain, _ = trained(config=settings(clip_norm=1.0))
        for name, tensor in plain.particles.items():
            torch.testing.assert_close(found.particles[name], tensor, rtol=1e-3, atol=1e-3)


def test_muon_knows_the_cores_of_particles(tmp_path: Path) -> None:
    config = settings(optimizer="muon", clip_norm=1.0)
    whole, result = trained(config=config)
    losses = [line["train_loss"] for line in result.history[1:]]
    assert losses[3] < losses[0]
    assert result.history[-1]["params"] < result.history[0]["params"]
    cores, rest = whole.method.optimizer.param_groups
    assert cores["orthogonal"]
    assert cores["stacked"]
    names = {f"model.{layer}.cores.{k}" for layer, ranks in whole.ranks.items() for k in range(len(ranks) - 1)}
    assert set(cores["param_names"]) == names
    assert {*cores["param_names"], *rest["param_names"]} == set(whole.particles)
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        trained(tmp_path, config, progress=StopAfter(2))
    parts, _ = trained(tmp_path, config, resume=True)
    for name, tensor in whole.particles.items():
        assert torch.equal(parts.particles[name], tensor), name


def test_options_of_other_methods_are_refused() -> None:
    with pytest.raises(ConfigError, match="Only svgd has a kernel, not ensemble"):
        trained(method="ensemble", kernel=infer.imq)
    with pytest.raises(ConfigError, match="svgd has no option 'temperature'"):
        trained(temperature=0.5)
    for key, value, other in (("kernel", "imq", "sgld"), ("temperature", 0.5, "ensemble")):
        with pytest.raises(ConfigError, match=f"posterior.{key} is for method .* only, not for {other}"):
            toml.named("mnist").replace("posterior", **{key: value, "method": other})


def test_given_ranks_stay_as_they_are() -> None:
    start = network()
    bt.compact_(start, 0.5)
    before = bt.ranks(start)
    found, result = bt.fit_posterior(bt.around(start, 3), TRAIN, None, settings(), search=False)
    assert found.ranks == before
    assert [line["phase"] for line in result.history] == ["train"] * 5 + ["finetune"] * 2
    assert result.own_ranks == {}


def test_a_particle_that_breaks_is_dropped_and_told(tmp_path: Path) -> None:
    messages: list[str] = []

    class Listen(Silent):
        def message(self, text: str) -> None:
            messages.append(text)

    models = bt.independent(network, 4)
    with torch.no_grad():
        models[1].get_parameter("5.bias").fill_(float("nan"))
    found, result = bt.fit_posterior(models, TRAIN, None, settings(), progress=Listen(), folder=tmp_path)
    assert len(found) == 3
    assert "particles [1] have weights or outputs that are not finite and were dropped; 3 are left" in messages
    assert messages[0].startswith("4 particles need about ")
    assert result.history[-1]["particles"] == 3
    resumed, _ = bt.fit_posterior(bt.independent(network, 4), TRAIN, None, settings(), folder=tmp_path, resume=True)
    assert len(resumed) == 3
    with torch.no_grad():
        for model in models[1:]:
            model.get_parameter("5.bias").fill_(float("nan"))
    with pytest.raises(TrainingError, match="3 of 4 particles is not finite"):
        bt.fit_posterior(models, TRAIN, None, settings())


def test_a_particle_whose_outputs_overflow_is_dropped_though_its_weights_are_finite() -> None:
    models = bt.independent(network, 3)
    with torch.no_grad():
        for core in models[1].get_submodule("5").cores:  # type: ignore[union-attr]
            core.mul_(1e30)
    evaluate = evaluator(DIGITS.test.subset(range(50)), lambda x: x, "cpu")
    found, result = bt.fit_posterior(models, TRAIN, evaluate, settings())
    assert len(found) == 2
    assert result.history[-1]["train_loss"] < result.history[1]["train_loss"]


@pytest.mark.parametrize(
    ("inputs", "batch", "size", "wanted"),
    [(250, 100, 50, [100, 100]), (10_000, 600, 50, [600]), (10_000, 999, 50, [999]), (10_000, 2048, 50, [1000])],
    ids=["part", "rest left out", "one left out", "all"],
)
def test_batch_norm_of_particles_is_settled_with_large_batches(
    inputs: int, batch: int, size: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(TRAIN) == 1000
    seen: list[int] = []
    refresh = bt.Posterior.refresh_statistics

    def counted(posterior: bt.Posterior, batches: Iterable[Tensor]) -> None:
        parts = list(batches)
        seen.extend(len(part) for part in parts)
        refresh(posterior, parts)

    monkeypatch.setattr(bt.Posterior, "refresh_statistics", counted)
    monkeypatch.setattr(loop, "LAST_INPUTS", inputs)
    monkeypatch.setattr(loop, "LAST_BATCH", batch)
    trained(config=settings(epochs=1, finetune_epochs=1, batch_size=size))
    assert seen == wanted


def test_an_augmentation_may_change_the_shape_and_a_network_be_one_layer() -> None:
    found, _ = bt.fit_posterior(
        bt.independent(lambda: bt.TTLinear(196, 10, max_rank=4), 2), TRAIN, None, settings(epochs=1, finetune_epochs=1),
        augment=lambda x, _: x[:, 0, ::2, ::2].flatten(1),
    )  # fmt: skip
    assert len(found) == 2


@pytest.mark.parametrize("name", toml.names())
def test_every_named_experiment_has_other_images_to_be_unsure_of(name: str) -> None:
    chosen = toml.named(name, "default", ["posterior.particles=4"])
    assert chosen.posterior.outside != chosen.data.name


SHORT = (
    "fit.epochs=2", "fit.finetune_epochs=1", "fit.batch_size=1000", "fit.compact_from=1", "fit.compact_tol=0.2",
    "fit.round_tol=0.3", "tensorize.max_rank=6", "posterior.particles=3",
)  # fmt: skip


def config(*changes: str) -> RunConfig:
    return toml.named("mnist-mini", "default", [*SHORT, *changes])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("posterior") / "run"
    run_experiment(config(), folder, device="cpu", resume=False, progress=Silent(), command="a test")
    return folder


def test_a_run_leaves_the_posterior_its_figures_and_the_map_point(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    posterior = result["posterior"]
    assert (posterior["method"], posterior["particles"], posterior["start"]) == ("svgd", 3, "independent")
    assert len(posterior["particle_accuracy"]) == 3
    assert posterior["mean_log_likelihood"] <= posterior["uncalibrated"]["log_likelihood"]
    assert posterior["temperature"] == result["calibrated"]["temperature"] != 1.0
    assert result["ece"] == result["calibrated"]["ece"]
    assert posterior["ood"]["name"] == "patches"
    assert (
        posterior["map"]["ood_auroc"]
        == json.loads((run / "map" / "result.json").read_text())["posterior"]["ood"]["auroc"]
    )
    assert set(posterior["own_ranks"]) == {"1", "3"}
    assert posterior["bonds"] == 4
    assert set(posterior["diagnostics"]) == {
        "bandwidth", "kernel_mass", "spread", "effective_particles", "disagreement", "ksd"
    }  # fmt: skip
    loaded = bt.load_posterior(run)
    found = evaluate_network(
        config("posterior.calibrate=false"), load_material(config(), False), loaded, torch.device("cpu")
    )
    assert float((found.prediction.classes == DIGITS.test.labels).double().mean()) == pytest.approx(result["accuracy"])
    assert not (run / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="already holds a run"):
        run_experiment(config(), run, device="cpu", resume=False, progress=Silent(), command="")


def test_the_report_compares_with_the_map_point_at_its_own_temperature(run: Path) -> None:
    page = load_run(run)
    assert page.rival is not None
    assert page.rival.evaluation is not None
    assert page.map is not None
    calibrated = json.loads((run / "map" / "result.json").read_text())["calibrated"]
    assert page.rival.scores.ece == calibrated["ece"] != page.map.scores.ece
    assert reliability_bins(page.rival.evaluation)[1] == pytest.approx(calibrated["ece"], rel=1e-2)
    (plot,) = reliability_plot(page)
    assert f"MAP {percent(calibrated['ece'])}" in plot.describe
    (strips,) = score_plot(page)  # particles have no temperature, so here nobody has
    plain = json.loads((run / "result.json").read_text())["posterior"]["uncalibrated"]["log_likelihood"]
    assert f"posterior {signed(plain)}" in strips.describe
    assert f"MAP: {signed(page.map.scores.log_likelihood)}" in strips.svg
    assert "without a temperature" in strips.caption
    (rejection,) = rejection_plot(page)
    assert percent(at_share(rejection_curve(page.rival.evaluation), 0.9)) in rejection.describe


def test_evaluating_again_finds_the_same_figures(run: Path, tmp_path: Path) -> None:
    before = json.loads((run / "result.json").read_text())
    after = evaluate_run(run, device="cpu", command="again").summary
    for key in ("accuracy", "log_likelihood", "ece", "brier"):
        assert after[key] == pytest.approx(before[key], rel=1e-6)
    assert after["posterior"]["own_ranks"] == before["posterior"]["own_ranks"]
    assert after["evaluated_again"]["command"] == "again"
    with pytest.raises(TrainingError, match="no finished run"):
        evaluate_run(tmp_path, device="cpu", command="")


def test_a_run_stopped_in_its_map_point_goes_on(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        run_experiment(config(), folder, device="cpu", resume=False, progress=StopAfter(1), command="a test")
    assert not (folder / "checkpoint-last.pt").exists()
    found = run_experiment(config(), folder, device="cpu", resume=True, progress=Silent(), command="again").summary
    assert found["command"] == "a test"  # that of the beginning
    ran_on = [json.loads((place / "environment.json").read_text()) for place in (folder, folder / "map", run)]
    assert [[part["epochs"] for part in record.get("earlier", [])] for record in ran_on] == [[], [1], []]
    assert ["resumed" in record for record in ran_on] == [True, True, False]
    for name in ("posterior.safetensors", "evaluation.safetensors", "map/model.safetensors"):
        assert (folder / name).read_bytes() == (run / name).read_bytes(), name


def test_around_a_map_point_particles_hardly_differ_and_the_run_says_so(tmp_path: Path) -> None:
    chosen = config(
        'posterior.start="jitter"', "posterior.jitter=1e-4", "posterior.jitter_epochs=1", "fit.finetune_lr=1e-5"
    )
    result = run_experiment(chosen, tmp_path / "run", device="cpu", resume=False, progress=Silent(), command="").summary
    assert result["ranks"] == json.loads((tmp_path / "run" / "map" / "result.json").read_text())["ranks"]
    assert result["posterior"]["diagnostics"]["effective_particles"] < 1.5
    assert "collapsed" in result["posterior"]["warnings"][0]


def test_warnings_say_what_to_do() -> None:
    fine = {"effective_particles": 9.9, "disagreement": 0.02}
    assert warnings_of(10, 10, fine) == []
    assert "2 of 10 particles broke" in warnings_of(8, 10, fine)[0]
    assert "independent" in warnings_of(10, 10, {"effective_particles": 1.2, "disagreement": 0.0})[0]
    assert "hardly in what they say" in warnings_of(10, 10, {"effective_particles": 9.9, "disagreement": 1e-5})[0]


def test_patches_are_the_same_pixels_in_another_order() -> None:
    mixed = outside_images("patches", DIGITS, seed=0)
    assert mixed is not None
    assert torch.equal(mixed.images.flatten(1).sort(1).values, DIGITS.test.images.flatten(1).sort(1).values)
    assert float((mixed.images == DIGITS.test.images).float().mean()) < 0.95
    assert outside_images("none", DIGITS, seed=0) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (['posterior.outside="mnist"'], "is no other data than data.name"),
        (["posterior.particles=1"], "at least 2 particles.*0 for a single point"),
        (["data.validation_fraction=0.0"], "calibrate needs images held out"),
        (['posterior.outside="cifar10"'], "has 3x32x32 images, but the network takes 1x28x28"),
        (["posterior.particles=-1"], "posterior.particles"),
        (['posterior.method="hmc"'], "posterior.method"),
    ],
)
def test_bad_settings_are_refused(changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(*changes)


def test_the_command_line_trains_evaluates_and_predicts_with_a_posterior(run: Path, tmp_path: Path) -> None:
    from PIL import Image

    assert "posterior:" in CliRunner().invoke(app, ["evaluate", str(run)]).stdout
    assert "3 particles" in CliRunner().invoke(app, ["inspect", str(run)]).stdout
    Image.fromarray(DIGITS.test.images[0, 0].numpy()).save(tmp_path / "digit.png")
    answer = CliRunner().invoke(app, ["predict", str(run), str(tmp_path / "digit.png"), "--json"])
    found = json.loads(answer.stdout)[0]
    assert found["low"] <= found["high"]
    assert found["total"] == pytest.approx(found["aleatoric"] + found["epistemic"])
    table = CliRunner().invoke(app, ["predict", str(run), str(tmp_path / "digit.png")]).stdout
    assert "90 % of networks say" in table
    refused = CliRunner().invoke(app, ["train", "mnist-mini", "--particles", "1", "--out", str(tmp_path / "no")])
    assert refused.exit_code == 2
    assert not (tmp_path / "no").exists()


def test_a_posterior_goes_on_as_what_it_was(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        bt.fit_posterior(
            bt.independent(network, 3), TRAIN, None, settings(), folder=tmp_path, progress=StopAfter(1)
        )  # fmt: skip
    for number, options, message in (
        (4, {}, "particles was 3, now 4"),
        (3, {"method": "ensemble"}, "method was 'svgd', now 'ensemble'"),
        (3, {"kernel": infer.imq}, "kernel was None, now 'imq'"),
    ):
        with pytest.raises(ConfigError, match=f"cannot go on with other settings: {message}"):
            bt.fit_posterior(
                bt.independent(network, number), TRAIN, None, settings(), **options, folder=tmp_path, resume=True
            )
    with pytest.raises(ConfigError, match="trains was 'a posterior', now 'a network'"):
        bt.fit(network(), TRAIN, None, settings(), folder=tmp_path, resume=True)
