"""Every figure in the documents is that of a file under `results/`."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from doc_kit import EXPERIMENTS, POSTERIOR, README, ROOT, summary_of, text_of

from bayestrain.report.paper import PAPER

HEADLINE = (
    ("MNIST, two-layer MLP", "mnist", ("default", "x300"), ".0f", "svgd-50"),
    ("CIFAR-10, CNN", "cifar10-cnn", ("x16", "x32"), ".1f", "svgd-20"),
    ("CIFAR-10, ResNet-110", "cifar10-resnet110", ("x7", "x11"), ".1f", "svgd-20"),
)
"""Per line of the table on top of the README: its runs."""


def test_the_headline_is_that_of_the_results_and_of_the_paper() -> None:
    text = README.read_text()
    for name, experiment, labels, style, posterior in HEADLINE:
        dense = summary_of(experiment, "dense")["accuracy"]["mean"]
        paper = PAPER[experiment]
        first, second = (
            (f"{found['ratio']['mean']:{style}}x", f"{100 * found['accuracy']['mean']:.2f} %")
            for found in (summary_of(experiment, label) for label in labels)
        )
        several = summary_of(experiment, posterior)
        cells = [
            name, f"{100 * dense:.2f} %",
            f"{paper.ratio:{style}}x, {100 * paper.accuracy:.1f} %", f"{first[0]}, **{first[1]}**",
            ", ".join(second),
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in text, cells
        single, pooled = (several[key]["mean"] for key in ("mean_log_likelihood", "log_likelihood"))
        cells = [
            f"{name}, {posterior.removeprefix('svgd-')} particles",
            f"{paper.ratio:{style}}x, {paper.log_likelihood:.3f}",
            f"{several['ratio']['mean']:{style}}x, **{single:.3f}**", f"{pooled:.3f}",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in text, cells


def test_the_readmes_figures_are_those_of_the_results() -> None:
    summary = summary_of("mnist", "default")
    columns = ("params", "ratio", "accuracy", "log_likelihood")
    mean = [summary[key]["mean"] for key in columns]
    worst = [max(summary["params"]["each"]), *(min(summary[key]["each"]) for key in columns[1:])]
    for label, row in (("BayesTrain, mean of 5 seeds", mean), ("worst seed of the five, column by column", worst)):
        params, ratio, accuracy, likelihood = row
        line = f"| {label} | {params:,.0f} | {ratio:.0f} | {100 * accuracy:.2f} % | {likelihood:.3f} |"
        assert line in README.read_text(), line
    for label, name in (("x300", "BayesTrain, `--target-ratio 300`"), ("dense", "dense")):
        found = summary_of("mnist", label)
        params, ratio, accuracy, likelihood = (found[key]["mean"] for key in columns)
        row = f"{params:,.0f} | {ratio:.0f} | {100 * accuracy:.2f} % | {likelihood:.3f} |"
        assert f"| {name}, mean of 3 seeds | {row}" in README.read_text()
    targets = (("cnn", "x16", "15.8"), ("cnn", "x32", "32"), ("resnet110", "x7", "7.4"), ("resnet110", "x11", "11"))
    calibrated = {}
    for name, label, ratio in targets:
        found = summary_of(f"cifar10-{name}", label)
        params, times, accuracy, likelihood = (found[key]["mean"] for key in columns)
        assert min(found["ratio"]["each"]) >= float(ratio)
        row = f"{params:,.0f} | {times:.1f} | {100 * accuracy:.2f} % | {likelihood:.3f} |"
        number = len(found["params"]["each"])
        seeds = "one seed" if number == 1 else f"mean of {number} seeds"
        assert f"| BayesTrain, `--target-ratio {ratio}`, {seeds} | {row}" in README.read_text()
        if "calibrated_log_likelihood" in found:
            calibrated[f"{name} {ratio}"] = f"{found['calibrated_log_likelihood']['mean']:.3f}"
    deep = f"are {calibrated['resnet110 7.4']} and {calibrated['resnet110 11']} for ResNet-110 at 7.4 and 11 times"
    assert deep in text_of(EXPERIMENTS)
    assert f"{calibrated['cnn 32']} for the CNN at 32 times" in text_of(EXPERIMENTS)
    bench = json.loads((ROOT / "results" / "benchmarks" / "compaction-mnist.json").read_text())
    assert f"{bench['speedup']:.2f} times faster" in text_of(EXPERIMENTS)
    assert len(summary["params"]["each"]) == 5


def test_the_readmes_other_lines_are_those_of_the_results() -> None:
    columns = ("params", "ratio", "accuracy", "log_likelihood")
    readme, text = text_of(README), text_of(EXPERIMENTS)
    lines = (
        ("cnn", "dense", "dense, mean of 3 seeds", ".0f"),
        ("cnn", "tensorized", "rank 60 throughout, `--kind tensorized`, mean of 3 seeds", ".1f"),
        ("cnn", "paper", "the paper's settings, `--preset paper`, mean of 3 seeds", ".1f"),
        ("resnet110", "dense", "dense, mean of 2 seeds", ".0f"),
        ("resnet110", "tensorized", "rank 20 throughout, `--kind tensorized`, mean of 2 seeds", ".1f"),
        (
            "resnet110",
            "paper-12",
            "the paper's settings, `--preset paper`, but 12 epochs of 200, mean of 2 seeds",
            ".1f",
        ),
        ("resnet110", "x15", "two of those at 7.4 times, `--from` them `--target-ratio 15`, 8 more epochs", ".1f"),
        ("resnet110", "x25", "those at 15 times, `--from` them `--target-ratio 25`, 7 more epochs", ".1f"),
        ("cnn", "svgd-20", "posteriors of 20 around those, parameters each", ".1f"),
        ("resnet110", "svgd-20", "posteriors of 20 around two of those, parameters each", ".1f"),
        ("mnist", "svgd-50", "posteriors of 50, parameters each", ".0f"),
        ("mnist", "paper", "the paper's settings, `--preset paper`, mean of 3 seeds", ".0f"),
    )
    for name, label, said, style in lines:
        experiment = name if name == "mnist" else f"cifar10-{name}"
        found = summary_of(experiment, label)
        if "mean_log_likelihood" in found:
            said = f"{said} (particles' mean {found['mean_log_likelihood']['mean']:.3f})"
        params, times, accuracy, likelihood = (found[key]["mean"] for key in columns)
        row = f"{params:,.0f} | {times:{style}} | {100 * accuracy:.2f} % | {likelihood:.3f} |"
        assert f"| {said} | {row}" in readme, row
        if not label.startswith("paper") and "calibrated_log_likelihood" in found:
            assert f"{found['calibrated_log_likelihood']['mean']:.3f} for the" in text
    first, second = (summary_of("cifar10-resnet110", label) for label in ("x15", "x25"))
    kept = [ROOT / "results" / "cifar10-resnet110" / "x7" / f"seed-{seed}" / "result.json" for seed in first["seeds"]]
    had = fmean(json.loads(path.read_text())["accuracy"] for path in kept)
    accuracies = [f"{100 * value:.2f} %" for value in (first["accuracy"]["mean"], had, second["accuracy"]["mean"])]
    went_on = f"{accuracies[0]} on the test images, where they had {accuracies[1]}; and from there to "
    assert f"{went_on}{second['ratio']['mean']:.0f} times in 7 more: {accuracies[2]}." in text
    labels = {" dense": "dense", " at 7.4 times": "x7", " at 15": "x15", " at 25": "x25"}
    suited = {label: summary_of("cifar10-resnet110", name) for label, name in labels.items()}
    said = [f"{found['calibrated_log_likelihood']['mean']:.3f}{label}" for label, found in suited.items()]
    assert f"ResNet-110 then has {', '.join(said[:-1])} and {said[-1]}: " in readme
    gains = {
        (name, kind): (
            f"{100 * (found['accuracy']['mean'] - found['map_accuracy']['mean']):.1f}",
            f"{found['log_likelihood']['mean'] - found['map_calibrated_log_likelihood']['mean']:.3f}",
        )
        for name in ("cnn", "resnet110")
        for kind in ("", "tensorized-", "dense-")
        for found in (summary_of(f"cifar10-{name}", f"{kind}svgd-20"),)
    }
    cnn, deep = gains.pop(("cnn", "")), gains.pop(("resnet110", ""))
    assert f"the CNN at 32 times gains {cnn[0]} points of accuracy and {cnn[1]} in log likelihood" in text
    assert f"ResNet-110 at 7.4 times {deep[0]} points and {deep[1]};" in text
    points, nats = (sorted(column, key=float) for column in zip(*gains.values(), strict=True))
    assert f"larger networks gain {points[0]} to {points[-1]} points and {nats[0]} to {nats[-1]}." in text
    ours, large = (summary_of("cifar10-resnet110", f"{kind}svgd-20") for kind in ("", "dense-"))
    together = f"have {20 * ours['params']['mean'] / large['params']['mean']:.1f} times the parameters of"
    assert f"{together} the dense" in text
    assert f"{together} one dense" in readme
    likely = [ours["log_likelihood"]["mean"], large["map_calibrated_log_likelihood"]["mean"]]
    less = 100 * (large["map_accuracy"]["mean"] - ours["accuracy"]["mean"])
    assert f"over seeds ({likely[0]:.3f} and {likely[1]:.3f}), at {less:.1f} points less accuracy;" in text
    assert abs(likely[0] - likely[1]) < ours["log_likelihood"]["spread"]
    had = f"{large['log_likelihood']['mean']:.3f} and {100 * large['accuracy']['mean']:.2f} %"
    assert f"around the dense one have {had}." in text


def test_the_readmes_speed_of_particles_is_that_of_the_benchmarks() -> None:
    text = text_of(README)
    for device, style in (("cuda", ".1f"), ("cpu", ".2f")):
        bench = json.loads((ROOT / "results" / "benchmarks" / f"particles-{device}.json").read_text())
        step = bench["steps"][0]
        assert (step["particles"], step["rank"]) == (50, 20)
        assert f"{step['times_faster']:{style}} times" in text
        assert all(row["within_limit_at_50"] and row["correlation_with_line"] > 0.9 for row in bench["memory"])


SPEED = {
    "layers-cpu": {
        "784x625, ranks 4 2 3, batch 1024, training": "784x625 linear at learned ranks (4, 2, 3), training, batch 1024, 2 CPU cores",  # noqa: E501
        "784x625, ranks 4 2 3, batch 1, inference": "the same, one image, inference",
        "784x625, rank 20, batch 128, training": "the same at rank 20, training, batch 128: it forms its weight",
        "conv 3x3 128->128 on 32x32, middle bond 16, batch 8, training": "3x3 convolution, 128 channels, middle rank 16, training, 2 CPU cores",  # noqa: E501
    },
    "layers-cuda": {
        "4096x4096, rank 4, batch 4096, training, tf32, captured": "4096x4096 at rank 4, batch 4096, training, TF32, in a CUDA graph, H200",  # noqa: E501
        "8192x8192, rank 8, batch 4096, training, tf32, captured": "8192x8192 at rank 8, the same",
    },
    "steps-cuda": {
        "training step, cifar10-cnn, batch 128, tf32": "CIFAR-10 CNN at rank 30, captured step with prior, TF32, H200",
        "training step, cifar10-resnet110, batch 128, tf32": "ResNet-110, the same",
    },
}
"""Per file of the benchmarks, what it claims and how the README calls that."""


def claims(name: str) -> dict[str, float]:
    report = json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text())
    assert not report["quick"]
    return {claim["what"]: claim["measured"] for claim in report["claims"]}


def test_the_readmes_speed_is_that_of_the_benchmarks() -> None:
    text = README.read_text()
    for name, rows in SPEED.items():
        measured = claims(name)
        for what, label in rows.items():
            assert f"| {label} | {measured[what]:.2f} |" in text, label
    steps, words = claims("steps-cuda"), " ".join(text.split())
    particles = "MNIST, 5,000 SVGD iterations of 50 particles, ranks cut on the way"
    assert f"epochs of MNIST take {steps['MNIST, 100 epochs of MAP']:.1f} s" in words
    assert f"SVGD steps of 50 particles {steps[particles]:.1f} s" in words


FORMATS = (
    ("accuracy", 100, ".2f", " %"), ("log_likelihood", 1, ".4f", ""), ("ece", 1, ".4f", ""), ("auroc", 1, ".3f", ""),
)  # fmt: skip


def posterior_cells(summary: dict[str, dict[str, float]], prefix: str) -> list[str]:
    """Mean and spread of each figure, as the README's table has them."""
    return [
        f"{factor * summary[prefix + key]['mean']:{style}} ± {factor * summary[prefix + key]['spread']:{style}}{unit}"
        for key, factor, style, unit in FORMATS
    ]


@pytest.mark.parametrize("particles", [20, 50])
def test_the_figures_of_posteriors_of_mnist_are_those_of_the_results(particles: int) -> None:
    text, summary = text_of(POSTERIOR), summary_of("mnist", f"svgd-{particles}")
    assert summary["seeds"] == [0, 1, 2]
    mean = {key: value["mean"] for key, value in summary.items() if isinstance(value, dict)}
    for label, prefix in ((f"MAP, settings of the {particles}", "map_"), (f"{particles} particles", "")):
        cells = [f"{mean[prefix + 'params']:,.0f}", *posterior_cells(summary, prefix)]
        assert f"| {label} | {' | '.join(cells)} |" in text, cells
    for key, _, _, _ in FORMATS:
        pairs = zip(summary[key]["each"], summary[f"map_{key}"]["each"], strict=True)
        assert key == "ece" or all(ours > point for ours, point in pairs)  # "for every seed"
    assert abs(mean["ece"] - mean["map_ece"]) < summary["map_ece"]["spread"]  # "within the spread"
    assert mean["ece"] > mean["map_ece"]  # "on average a little worse"
    first = particles == 20
    for words in (
        f"AUROC of {mean['auroc_epistemic']:.3f} with 20" if first else f"and {mean['auroc_epistemic']:.3f} with 50",
        f"(ECE {mean['uncalibrated_ece']:.3f} and" if first else f"and {mean['uncalibrated_ece']:.3f}), so its",
        f"errors are {mean['map_calibrated_ece']:.4f} and" if first else f" and {mean['map_calibrated_ece']:.4f}.",
        f"are then {mean['map_calibrated_log_likelihood']:.4f} and"
        if first
        else f" and {mean['map_calibrated_log_likelihood']:.4f}:",
        f"the 20 take {mean['seconds']:.0f} s" if first else f"larger batches, {mean['seconds']:.0f} s",
    ):
        assert words in text, words
    if first:
        together = 20 * mean["params"]
        assert f"(log likelihood {mean['mean_log_likelihood']:.3f})" in text
        alone = f"with one the single network has {mean['map_calibrated_log_likelihood']:.4f}."
        assert alone in text_of(README)
        count = f"{together:,.0f} parameters together, {496_885 / together:.1f} times fewer"
        readme = text_of(README)
        for label, prefix in (("one network (MAP)", "map_"), ("20 particles", "")):
            cells = [f"{mean[prefix + 'params']:,.0f}", *posterior_cells(summary, prefix)]
            assert f"| {label} | {' | '.join(cells)} |" in readme, cells
        assert all(count in document for document in (text, readme))


def test_the_figures_of_posteriors_of_larger_networks_are_those_of_the_results() -> None:
    text, found = text_of(POSTERIOR), {}
    for label, name in (
        ("of few ranks, as above", "svgd-50"),
        ("[of full ranks](../results/mnist/tensorized-svgd-50)", "tensorized-svgd-50"),
        ("[dense](../results/mnist/dense-svgd-50)", "dense-svgd-50"),
    ):
        summary = summary_of("mnist", name)
        assert summary["seeds"] == [0, 1, 2]
        for setting in ("--particles 50", "fit.batch_size=1024", "fit.epochs=76", "fit.finetune_epochs=14"):
            assert setting in summary["command"]
        cells = " | ".join(posterior_cells(summary, ""))
        assert f"| {label} | {summary['params']['mean']:,.0f} | {cells} | {summary['seconds']['mean']:.0f} s |" in text
        found[name] = {key: value["mean"] for key, value in summary.items() if isinstance(value, dict)}
    few, full, dense = found.values()
    assert f"have {dense['params'] / few['params']:.0f} times as many parameters" in text
    assert "no more accurate and no more likely, only better at recognising unfamiliar images" in text
    for key in ("accuracy", "log_likelihood"):
        spread = summary_of("mnist", "svgd-50")[key]["spread"]
        assert dense[key] - few[key] < spread
    assert dense["auroc"] > few["auroc"]
    assert "Those of full ranks are the best in every figure but size." in text
    for key in ("accuracy", "log_likelihood", "auroc"):
        assert full[key] > max(dense[key], few[key])
    assert full["ece"] < min(dense["ece"], few["ece"])
    plain, points, suited = (
        f"{full[key]:.4f} and {dense[key]:.4f}" for key in ("uncalibrated_ece", "map_ece", "map_calibrated_ece")
    )
    assert f"better calibrated ({plain}) than the MAP points of these settings ({points});" in text
    assert f"for those have {suited} then." in text
    for larger in (full, dense):
        assert larger["uncalibrated_ece"] < larger["map_ece"]
        assert abs(larger["ece"] - larger["map_calibrated_ece"]) < 2e-4
    alone = summary_of("mnist", "dense")
    single, own = dense["mean_log_likelihood"], alone["log_likelihood"]["mean"]
    assert f"are worse ({single:.3f}) than a dense MAP point at a rate of its own ({own:.3f})" in text
    assert f"Its own MAP point is as bad ({dense['map_log_likelihood']:.3f}) until" in text
    suited = f"{dense['map_calibrated_log_likelihood']:.3f} and {alone['calibrated_log_likelihood']['mean']:.3f}"
    assert f"then they have {suited}." in text


@pytest.mark.parametrize("particles", [20, 50])
def test_the_methods_figures_of_posteriors_are_those_of_the_results(particles: int) -> None:
    text, folder = text_of(POSTERIOR), ROOT / "results" / "mnist" / f"svgd-{particles}"
    runs = [json.loads((folder / f"seed-{seed}" / "result.json").read_text()) for seed in range(3)]
    lie = [run["posterior"]["diagnostics"] for run in runs]
    mass, push = fmean(d["kernel_mass"] for d in lie), fmean(2 / d["bandwidth"] for d in lie)
    assert f"{mass:.3f} for {particles}" in text
    assert f"{push:.4f} for {particles}" in text
    assert f"{fmean(run['posterior']['temperature'] for run in runs):.2f} for {particles}" in text
    assert len({d["ksd"] > 0 for d in lie}) == 2  # "with either sign"
    for run in runs:
        assert run["validation"]["accuracy"] < run["accuracy"]  # "harder than its test images"
        assert abs(run["posterior"]["map"]["calibrated"]["temperature"] - 1) < 0.1
        for name, bonds in run["posterior"]["own_ranks"].items():
            assert run["ranks"][name][1:-1] == [max(bond) for bond in bonds]  # "always the largest of these"
            assert all(max(bond) - min(bond) <= 3 for bond in bonds)


def test_the_figures_of_particles_around_a_network_are_those_of_the_results() -> None:
    text = text_of(POSTERIOR)
    groups = (
        ("cifar10-cnn/svgd-20", "CNN, 32 times smaller, 3 seeds", 6),
        ("cifar10-cnn/tensorized-svgd-20", "CNN, rank 60 throughout, 3 seeds", 6),
        ("cifar10-cnn/dense-svgd-20", "CNN, dense, 3 seeds", 6),
        ("cifar10-resnet110/svgd-20", "ResNet-110, 7.4 times smaller, 2 seeds", 2),
        ("cifar10-resnet110/tensorized-svgd-20", "ResNet-110, rank 20 throughout, 2 seeds", 2),
        ("cifar10-resnet110/dense-svgd-20", "ResNet-110, dense, 2 seeds", 2),
    )
    wanted = []
    for folder, name, epochs in groups:
        found = summary_of(*folder.split("/"))
        point = (
            "map_accuracy",
            "map_log_likelihood",
            "map_calibrated_log_likelihood",
            "map_calibrated_ece",
            "map_auroc",
        )
        posterior = ("accuracy", "uncalibrated_log_likelihood", "log_likelihood", "ece", "auroc")
        for said, keys in ((name, point), (f"20 particles around it, {epochs} epochs", posterior)):
            mean = [found[key]["mean"] for key in keys]
            row = f"{100 * mean[0]:.2f} % | {mean[1]:.3f} | {mean[2]:.3f} | {mean[3]:.4f} | {mean[4]:.3f}"
            assert f"| {said} | {row} |" in text, row
        assert f"jitter_epochs={epochs} " in found["command"]
        assert f"{len(found['accuracy']['each'])} seeds" in name
        for after, before in list(zip(posterior, point, strict=True))[:3]:
            each = zip(found[after]["each"], found[before]["each"], strict=True)
            assert all(several > one for several, one in each)
        for file in (ROOT / "results" / folder).glob("seed-*/result.json"):
            details = json.loads(file.read_text())["posterior"]
            assert max(details["particle_accuracy"]) < details["map"]["accuracy"]
        wanted.append(found["temperature"]["mean"])
        better = [found[key]["mean"] > found[f"map_{key}"]["mean"] for key in ("auroc",)]
        better.append(found["ece"]["mean"] < found["map_calibrated_ece"]["mean"])
        assert better == [name.startswith("CNN") or "dense" in name, "32" in name]
    assert f"the particles above want {min(wanted):.2f} to {max(wanted):.2f}." in text
    for name, said in (
        ("tensorized", "full ranks a MAP point wants"),
        ("dense", "a dense one, with the settings of its posterior,"),
    ):
        folder = ROOT / "results" / "mnist" / f"{name}-svgd-50"
        several = [json.loads(file.read_text())["posterior"] for file in folder.glob("seed-*/result.json")]
        one, all_ = (
            fmean(p["map"]["calibrated"]["temperature"] for p in several),
            fmean(p["temperature"] for p in several),
        )
        assert f"{said} {one:.1f}, and its particles {all_:.2f}" in text
    deep = summary_of("cifar10-resnet110", "x7")
    rise = f"from {deep['log_likelihood']['mean']:.2f} to {deep['calibrated_log_likelihood']['mean']:.2f}"
    assert f"{rise} (at 7.4 times smaller, four seeds)" in text
    assert len(deep["accuracy"]["each"]) == 4
