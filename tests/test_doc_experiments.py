"""What docs/experiments.md says of the runs, their settings and their figures is what was recorded."""

from __future__ import annotations

import json

from doc_kit import EXPERIMENTS, METHOD, README, ROOT, summary_of, text_of

from bayestrain import models
from bayestrain.report.paper import PAPER
from bayestrain.sizes import count_parameters, tt_layers
from bayestrain.train import toml
from bayestrain.train.config import differences
from bayestrain.train.experiment import tensorize


def test_the_layers_of_resnet110_that_become_tensor_trains_are_counted() -> None:
    found = {}
    for preset in ("default", "paper"):
        config = toml.named("cifar10-resnet110", preset).replace("tensorize", max_rank=1)
        network = models.BUILDERS[config.experiment.model]()
        dense = count_parameters(network)
        tensorize(network, config.tensorize)
        found[preset] = len(tt_layers(network)), dense / count_parameters(network)
    text = text_of(EXPERIMENTS)
    assert f"so {found['default'][0]} layers become tensor trains and not {found['paper'][0]}." in text
    assert f"no ranks make ResNet-110 more than {found['paper'][1]:.1f} times smaller" in text


def test_lines_with_a_target_and_other_settings_beside_it_are_told() -> None:
    other = {}
    for experiment, label in (
        ("mnist", "x300"), ("cifar10-cnn", "x16"), ("cifar10-cnn", "x32"),
        ("cifar10-resnet110", "x7"), ("cifar10-resnet110", "x11"),
    ):  # fmt: skip
        seed = summary_of(experiment, label)["seeds"][0]
        had = toml.load(ROOT / "results" / experiment / label / f"seed-{seed}" / "config.toml")
        preset = toml.named(experiment, "default").replace("experiment", seed=seed)
        changed = {said.split(":")[0] for said in differences(preset, had)} - {"fit.target_ratio"}
        other[label] = changed
        if label == "x300":
            epochs = [config.fit.epochs + config.fit.finetune_epochs for config in (had, preset)]
            assert had.tensorize.modes["3"] == ((25, 5, 5), (1, 2, 5))
            assert f"(25, 5, 5) x (1, 2, 5), and {epochs[0]} epochs instead of {epochs[1]};" in text_of(EXPERIMENTS)
            assert f"MNIST at 300 times has {epochs[0]} epochs, not {epochs[1]}," in text_of(README)
        if label == "x16":
            assert (had.fit.lr, preset.fit.lr) == (3e-3, 5e-3)
            assert (had.prior.weight, preset.prior.weight) == (0.5, 0.4)
    assert {label for label, changed in other.items() if changed} == {"x300", "x16"}


def test_the_runs_whose_earlier_parts_are_not_recorded_are_told() -> None:
    lacking = []
    for file in (ROOT / "results").glob("*/*/seed-*/environment.json"):
        kept = json.loads(file.read_text())
        if "resumed" in kept and "earlier" not in kept:
            lacking.append("/".join(file.parts[-4:-1]))
    cnn, deep = (f"cifar10-{name}" for name in ("cnn", "resnet110"))
    assert sorted(lacking) == sorted(
        [f"{cnn}/x32/seed-{k}" for k in range(3)]
        + [f"{deep}/{label}/seed-{k}" for label in ("x7", "x11") for k in range(2)]
        + [f"mnist/svgd-20/seed-{k}" for k in range(3)]
    )
    assert "Ten older runs that went on say only what their last part ran on" in text_of(EXPERIMENTS)


def test_what_weights_did_to_resnet110_is_what_was_measured() -> None:
    text, readme, results = text_of(EXPERIMENTS), text_of(README), ROOT / "results" / "cifar10-resnet110"
    row = "| the same two, `--from` them, no target, prior weight {}, 8 more epochs | "
    row += "{:,.0f} | {:.1f} | {:.2f} % | {:.3f} |"
    for weight, said in (
        ("0.5", "A weight of 0.5 made them {:.1f} times smaller ({:.2f} % on the test images)"),
        ("2", "one of 2 made them {:.1f} times smaller ({:.2f} %)."),
    ):
        found = summary_of("cifar10-resnet110", f"w{weight}-from-x7")
        params, ratio, accuracy, likelihood = (
            found[key]["mean"] for key in ("params", "ratio", "accuracy", "log_likelihood")
        )
        assert said.format(ratio, 100 * accuracy) in text
        assert row.format(weight, params, ratio, 100 * accuracy, likelihood) in readme
        assert found["seeds"] == [2, 3]
        for seed in found["seeds"]:
            ours, cut = (
                toml.load(results / label / f"seed-{seed}" / "config.toml") for label in (f"w{weight}-from-x7", "x15")
            )
            assert (ours.fit.epochs, ours.fit.finetune_epochs, ours.prior.weight) == (4, 4, float(weight))
            apart = {each.split(":")[0] for each in differences(ours, cut)}  # "the same start, rate and epochs"
            assert apart - {"prior.weight"} == {"fit.target_ratio", "prior.warmup_epochs"}
            started = toml.load(results / "x7" / f"seed-{seed}" / "config.toml")
            assert ours.experiment.from_run.endswith(f"x7/seed-{seed}")
            assert started.fit.target_ratio == 7.4
    better = [f"{100 * summary_of('cifar10-resnet110', label)['accuracy']['mean']:.2f} %" for label in ("x11", "x15")]
    assert f"are better: {better[0]} at 11 times and {better[1]} at 15, the latter with" in text


def test_the_sizes_and_accuracies_are_those_of_the_results() -> None:
    text = text_of(EXPERIMENTS)
    for label, said in (
        ("w0.1-12", "a weight of 0.1 made it {ratio:.1f} times smaller ({accuracy:.2f} % on the test images)"),
        ("w0.4-12", "one of 0.4 made it {ratio:.1f} times smaller ({accuracy:.2f} %)"),
        ("x32", "All epochs at 32 times give {accuracy:.2f} %."),
    ):
        found = summary_of("cifar10-cnn", label)
        assert said.format(ratio=found["ratio"]["mean"], accuracy=100 * found["accuracy"]["mean"]) in text
        if label != "x32":
            assert found["seeds"] == [0, 1]  # "with two seeds each"
            config = toml.load(ROOT / "results" / "cifar10-cnn" / label / "seed-0" / "config.toml")
            assert f"w{config.prior.weight:g}-{config.fit.epochs + config.fit.finetune_epochs}" == label


def test_what_the_papers_threshold_cuts_is_said_as_it_was_measured() -> None:
    first, cut, deep = (
        summary_of(*of) for of in (("mnist", "paper"), ("cifar10-cnn", "paper"), ("cifar10-resnet110", "paper-12"))
    )
    (before, after), (learned, left), (deep_before, deep_after) = (
        [f"{100 * found[key]['mean']:.1f} %" for key in ("searched_accuracy", "validation_accuracy")]
        for found in (first, cut, deep)
    )
    text = text_of(EXPERIMENTS)
    assert f"takes MNIST's network to {before} and the CNN to {learned} on held-out images." in text
    assert f"MNIST's network falls to {after}, the CNN to chance." in text
    each = " and ".join(f"{100 * value:.1f}" for value in deep["validation_accuracy"]["each"])
    assert f"{deep_before} on held-out images, and {deep_after} after the cut ({each} %;" in text
    short = toml.load(ROOT / "results" / "cifar10-resnet110" / "paper-12" / "seed-0" / "config.toml").fit.epochs
    assert f"ResNet-110 had {short} of its {toml.named('cifar10-resnet110', 'paper').fit.epochs} epochs" in text
    method = text_of(METHOD)
    assert f"right on {learned} of the held-out images" in method
    assert f"a network that guesses ({left}; means of three seeds)" in method
    for seed in range(3):
        kept = json.loads((ROOT / "results" / "cifar10-cnn" / "paper" / f"seed-{seed}" / "result.json").read_text())
        assert all(chain[3] == 1 for name, chain in kept["ranks"].items() if name.startswith("conv"))


def test_the_presets_have_the_epochs_that_the_table_tells_short_runs_by() -> None:
    assert {name: row.epochs for name, row in PAPER.items()} == {
        name: {
            preset: (fit := toml.named(name, preset).fit).epochs + fit.finetune_epochs
            for preset in ("default", "paper")
        }
        for name in PAPER
    }
