"""Run folders for the tests of the report: one trained here in seconds, one invented, as large as ResNet-110."""

import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn import functional as F

import bayestrain as bt
from bayestrain import data, tt
from bayestrain.errors import ReportError
from bayestrain.models import mnist_mlp
from bayestrain.report.figures.certainty import reliability_bins
from bayestrain.report.load import load_run
from bayestrain.report.run import Evaluation
from bayestrain.sizes import tt_layers

CONFIG = """\
[experiment]
name = "{name}"
preset = "default"
kind = "low-rank"
model = "mnist_mlp"
seed = {seed}

[fit]
epochs = {epochs}
finetune_epochs = {finetune}
round_tol = 0.01
"""


def train_run(folder: Path, *, epochs: int = 2, seed: int = 0, images: int = 4000, weight: float = 1.0) -> Path:
    """Train on "mnist-mini" with a user's own loop and write what the engine writes.

    The one epoch of phase "finetune" stands for it in the files only: nothing is trained in it.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    digits = data.load("mnist-mini")
    train, validation = digits.train.subset(range(images)).split(0.1, seed=0)
    model = mnist_mlp()
    dense_params = bt.count_parameters(model)
    dense_layers = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_children()}
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=20))
    start = {name: layer.parameters_left for name, layer in tt_layers(model).items()}
    max_ranks = bt.ranks(model)
    steps = math.ceil(len(train) / 64)
    prior = bt.RankPrior(model, num_data=len(train), weight=weight, warmup_steps=steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def accuracy(images: data.Images) -> float:
        with torch.no_grad():
            logits = model(digits.normalize(images.images.float() / 255))
        return float((logits.argmax(1) == images.labels).float().mean())

    def record(epoch: int, loss: float | None, train_accuracy: float | None) -> dict[str, Any]:
        held = {"accuracy": accuracy(validation)}
        lambdas = {name: [u.tolist() for u in us] for name, us in prior.lambdas().items()}
        ranks = {name: list(r) for name, r in bt.ranks(model).items()}
        return {"epoch": epoch, "phase": "search", "seconds": time.perf_counter() - started, "lr": 1e-2,
                "prior_weight": 1.0, "train_loss": loss, "prior_loss": 0.0, "train_accuracy": train_accuracy,
                "validation": held, "params": bt.count_parameters(model), "ranks": ranks,
                "lambdas": lambdas}  # fmt: skip

    history = [record(0, None, None)]
    for epoch in range(1, epochs + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / epochs))
        for x, y in train.batches(64, shuffle=True, generator=torch.Generator().manual_seed(epoch)):
            loss = F.cross_entropy(model(digits.normalize(x)), y)
            (loss + prior.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()
            prior.step()
        bt.compact_(model, rule="contribution", optimizer=optimizer)
        history.append(record(epoch, float(loss.detach()), accuracy(train)))
    spectra = {"tol": 0.01, "layers": {
        name: {"bonds": [s.tolist() for s in tt.bond_spectra([c.detach() for c in layer.cores])]}
        for name, layer in tt_layers(model).items()
    }}  # fmt: skip
    bt.compact_(model, tol=0.01)
    for name, layer in tt_layers(model).items():
        spectra["layers"][name]["cut"] = list(layer.ranks)[1:-1]
        spectra["layers"][name]["earlier"] = [[] for _ in layer.ranks[1:-1]]
    history.append({**record(epochs + 1, None, accuracy(train)), "phase": "finetune", "lambdas": {}})
    return _write(folder, model, digits, history, spectra, dense_params, dense_layers, start, max_ranks, seed)


def _write(
    folder: Path,
    model: nn.Module,
    digits: data.Splits,
    history: list[dict[str, Any]],
    spectra: dict[str, Any],
    dense_params: int,
    dense_layers: dict[str, int],
    start: dict[str, int],
    max_ranks: dict[str, tuple[int, ...]],
    seed: int,
) -> Path:
    with torch.no_grad():
        probabilities = model(digits.normalize(digits.test.images.float() / 255)).softmax(1)
    labels = digits.test.labels
    entropy = -(probabilities * probabilities.clamp_min(1e-12).log()).sum(1)
    hardest = entropy.topk(24).indices
    none = np.zeros((0, 1, 1, 1), np.uint8)
    ece = reliability_bins(Evaluation(probabilities.double().numpy(), labels.numpy(), np.zeros(0, np.int64), none))[1]
    layers = tt_layers(model)
    params = bt.count_parameters(model)
    epochs = history[-2]["epoch"]
    return write_folder(
        folder,
        config=CONFIG.format(name="mnist-mini", seed=seed, epochs=epochs, finetune=1),
        history=history,
        spectra=spectra,
        model={
            "format": 1, "model": "mnist_mlp", "num_classes": 10, "classes": list(digits.classes),
            "layers": {name: {"kind": "linear", "in_modes": list(layer.in_modes), "out_modes": list(layer.out_modes),
                              "ranks": list(layer.ranks)} for name, layer in layers.items()},
        },
        evaluation={
            "probabilities": probabilities.numpy(), "labels": labels.numpy(), "hardest": hardest.numpy(),
            "hardest_images": digits.test.images[hardest].numpy(),
        },
        result={
            "experiment": "mnist-mini", "preset": "default", "kind": "low-rank", "seed": seed,
            "dense_params": dense_params, "params": params, "ratio": dense_params / params,
            "ranks": {name: list(layer.ranks) for name, layer in layers.items()},
            "max_ranks": {name: list(ranks) for name, ranks in max_ranks.items()},
            "layer_params": {name: {"dense": dense_layers[name], "start": start[name], "now": layer.parameters_left}
                             for name, layer in layers.items()},
            "accuracy": float((probabilities.argmax(1) == labels).float().mean()),
            "log_likelihood": float(probabilities[torch.arange(len(labels)), labels].clamp_min(1e-12).log().mean()),
            "ece": ece, "validation": None, "seconds": history[-1]["seconds"],
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device": "cpu", "command": "bayestrain train mnist-mini --out runs/mnist-mini", "status": "finished",
        },
    )  # fmt: skip


def deep_run(folder: Path, *, layers: int = 71, epochs: int = 60, seed: int = 0) -> Path:
    """An invented run of ResNet-110's size: many layers of four bonds, ranks that fall at different epochs."""
    rng = np.random.default_rng(seed)
    names = [f"stack{2 + (k >= layers // 2)}.{k // 2 % 18}.conv{1 + k % 2}" for k in range(layers)]
    dense_names = [f"stack1.{k // 2}.conv{1 + k % 2}" for k in range(36)] + ["stem.conv", "fc"]
    widths = [32 if k < layers // 2 else 64 for k in range(layers)]
    modes = {32: [4, 8], 64: [8, 8]}
    caps = {name: [9, 20, 20, min(20, modes[w][1])] for name, w in zip(names, widths, strict=True)}
    final = {name: [max(1, int(cap * rng.beta(1.3, 2.2))) for cap in caps[name]] for name in names}
    fall = {name: [rng.uniform(4, 40) for _ in caps[name]] for name in names}

    def ranks_at(name: str, epoch: int) -> list[int]:
        paths = zip(caps[name], final[name], fall[name], strict=True)
        return [round(end + (cap - end) / (1 + math.exp((epoch - when) / 3))) for cap, end, when in paths]

    def size(ranks: list[int], width: int) -> int:
        ends, sizes = [1, *ranks, 1], [9, *modes[width], *modes[width]]
        return sum(ends[k] * n * ends[k + 1] for k, n in enumerate(sizes)) + width

    history = []
    for epoch in range(epochs + 6):
        ranks = {name: ranks_at(name, epoch) for name in names}
        search = epoch <= epochs
        lambdas = {
            name: [(np.where(np.arange(cap) < rank, 0.5, 0.5 * np.exp(-epoch / 8)) * rng.uniform(0.5, 1, cap)).tolist()
                   for cap, rank in zip(caps[name], final[name], strict=True)]
            for name in names
        }  # fmt: skip
        params = 90_000 + sum(size(ranks[name], w) for name, w in zip(names, widths, strict=True))
        grown = 1 - 0.62 * math.exp(-epoch / 9)
        history.append({
            "epoch": epoch, "phase": "search" if search else "finetune", "seconds": 60.0 * epoch,
            "train_loss": None if epoch == 0 else 1 - grown, "train_accuracy": 0.93 * grown if epoch else None,
            "validation": {"accuracy": 0.9 * grown + rng.normal(0, 0.006)}, "params": params,
            "ranks": {name: [1, *r, 1] for name, r in ranks.items()}, "lambdas": lambdas if search else {},
        })  # fmt: skip
    spectra = {
        name: {"bonds": [np.sort(np.where(np.arange(cap) < rank, rng.uniform(0.1, 1, cap),
                                          10 ** rng.uniform(-6, -2.6, cap)))[::-1].tolist()
                         for cap, rank in zip(caps[name], final[name], strict=True)],
               "cut": final[name], "earlier": [[] for _ in final[name]]}
        for name in names
    }  # fmt: skip
    dense_params = 1_742_762
    now = {name: size(final[name], w) for name, w in zip(names, widths, strict=True)}
    counts = {name: {"dense": 9 * w * w + w, "start": size(caps[name], w), "now": now[name]}
              for name, w in zip(names, widths, strict=True)}  # fmt: skip
    left = {name: {"dense": 2320, "start": 2320, "now": 2320} for name in dense_names}
    params = 90_000 + sum(now.values())
    logits = rng.normal(0, 1, (2000, 10)) * rng.uniform(0.5, 6, (2000, 1))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.array([rng.choice(10, p=p) for p in probabilities])
    return write_folder(
        folder,
        config=CONFIG.format(name="cifar10-resnet110", seed=seed, epochs=epochs, finetune=5),
        history=history,
        spectra={"tol": 0.01, "layers": spectra},
        model={
            "classes": ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
            "layers": {name: {"kind": "conv2d", "kernel_size": [3, 3], "in_modes": modes[w], "out_modes": modes[w]}
                       for name, w in zip(names, widths, strict=True)},
        },
        evaluation={
            "probabilities": probabilities.astype(np.float32), "labels": labels, "hardest": np.arange(24),
            "hardest_images": rng.integers(0, 255, (24, 3, 32, 32)).astype(np.uint8),
        },
        result={
            "experiment": "cifar10-resnet110", "preset": "default", "kind": "low-rank", "seed": seed,
            "dense_params": dense_params, "params": params, "ratio": dense_params / params,
            "ranks": {name: [1, *final[name], 1] for name in names},
            "max_ranks": {name: [1, *caps[name], 1] for name in names}, "layer_params": {**left, **counts},
            "accuracy": 0.8891 + 0.002 * seed, "log_likelihood": -0.383, "ece": 0.021, "brier": 0.17,
            "validation": None, "seconds": 5020.0, "peak_memory_bytes": 9_000_000_000, "device": "cuda",
            "command": "bayestrain train cifar10-resnet110 --device cuda", "status": "finished",
        },
    )  # fmt: skip


def write_folder(folder: Path, *, config: str, history: list[dict[str, Any]], spectra: dict[str, Any],
                 model: dict[str, Any], evaluation: dict[str, Any], result: dict[str, Any]) -> Path:  # fmt: skip
    """All files of a run folder that a report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    environment = {"bayestrain": "0.1.0", "python": "3.11.2", "torch": torch.__version__, "platform": "Linux",
                   "cpu": "Test CPU, 2 cores", "gpu": None, "threads": 2, "commit": "95708fb0000", "dirty": False,
                   "started": "2026-11-15T09:12:44"}  # fmt: skip
    for name, content in (("spectra", spectra), ("model", model), ("result", result), ("environment", environment)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    save_file({name: np.ascontiguousarray(array) for name, array in evaluation.items()},
              folder / "evaluation.safetensors")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("runs") / "mini", images=1500)


def copy_of(run: Path, into: Path, *, without: tuple[str, ...] = ()) -> Path:
    """The run folder's files, except some."""
    into.mkdir(parents=True)
    for file in run.iterdir():
        if file.name not in without:
            (into / file.name).write_bytes(file.read_bytes())
    return into


def test_all_of_a_run_is_read(trained: Path) -> None:
    run = load_run(trained)
    assert (run.experiment, run.preset, run.kind, run.seed, run.finished) == (
        "mnist-mini",
        "default",
        "low-rank",
        0,
        True,
    )
    assert [layer.name for layer in run.tensor_layers] == ["1", "3"]
    assert run.tensor_layers[0].max_ranks == (20, 20, 20)
    assert run.tensor_layers[0].sizes == (35, 20, 35, 20)
    assert run.total_epochs == 3
    assert run.finetune_start == 2
    assert [record.epoch for record in run.history] == [0, 1, 2, 3]
    assert run.missing == ()


def test_an_interrupted_run_is_read_from_its_history(trained: Path, tmp_path: Path) -> None:
    late = ("result.json", "spectra.json", "evaluation.safetensors", "model.json")
    folder = copy_of(trained, tmp_path / "run", without=late)
    whole = (folder / "history.jsonl").read_text()
    (folder / "history.jsonl").write_text(whole[: len(whole) - 40])  # killed while writing the last line
    run = load_run(folder)
    assert not run.finished
    assert [record.epoch for record in run.history] == [0, 1, 2]
    assert run.tensor_layers[0].max_ranks == (20, 20, 20)
    assert run.missing == ("result.json", "model.json", "spectra.json", "evaluation.safetensors")


def test_an_epoch_written_again_after_resuming_counts_once(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path / "run")
    lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
    again = json.dumps({**json.loads(lines[1]), "params": 12345}) + "\n"
    (folder / "history.jsonl").write_text("".join([*lines[:2], again, *lines[2:]]))
    run = load_run(folder)
    assert [record.epoch for record in run.history] == [0, 1, 2, 3]
    assert run.history[1].params == 12345


def test_a_run_in_parts_names_the_commit_of_each(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path / "run")
    last = json.loads((folder / "environment.json").read_text())
    for earlier, commits in (
        ([{"commit": "1" * 40, "dirty": True}, {"commit": None}, {"commit": "95708fb0000", "dirty": False}],
         "111111111 + changes, then 95708fb00"),
        ([{"commit": "95708fb0000"}, {"commit": "2" * 40}], "95708fb00, then 222222222, then 95708fb00"),
        ("none", "95708fb00"),
    ):  # fmt: skip
        (folder / "environment.json").write_text(json.dumps({**last, "earlier": earlier}))
        assert load_run(folder).commits == commits


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", r"result\.json cannot be read: .*line 1 column 2"),
        ("result.json", "[]", r"result\.json must hold a JSON object, not a list"),
        ("result.json", "{}", r'result\.json has no "params"'),
        ("result.json", '{"params": "many"}', r"result\.json: 'params' must be a number, not 'many'"),
        ("result.json", '{"params": 5, "calibrated": 3}', r"'temperature' must stand in an object, not in 3"),
        ("model.json", '{"classes": null}', r'model\.json: "classes" must be a list, not None'),
        ("result.json", '{"params": 5, "ranks": {"1": 3}}', r'result\.json: "ranks", .* is malformed'),
        ("history.jsonl", "{}\n{}\n", r"history\.jsonl, line 1: not an epoch of a training"),
        ("spectra.json", '{"tol": 0.1}', r"spectra\.json is malformed .* Delete it to leave the spectra out"),
        ("spectra.json", '{"tol": 0.1, "layers": {"1": {"bonds": [[1.0]], "cut": []}}}', "1 bonds but 0 ranks"),
        (
            "spectra.json",
            '{"tol": 0.1, "layers": {"1": {"bonds": [[]], "cut": [1]}}}',
            "a bond without singular values",
        ),
        ("spectra.json", '{"tol": 0.1, "layers": {"1": {"bonds": [[1.0]], "cut": [1]}}}', r"malformed .*'earlier'"),
        (
            "model.json",
            '{"layers": {"1": {"kind": "conv2d", "in_modes": [784], "out_modes": [300]}}}',
            r"""malformed, or "layers" of model\.json .*'kernel_size'""",
        ),
        ("evaluation.safetensors", "no", r"evaluation\.safetensors is damaged or malformed"),
        ("config.toml", "a =", r"config\.toml cannot be read: Invalid value \(at"),
    ],
)
def test_a_damaged_file_is_named(trained: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = copy_of(trained, tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(ReportError, match=message):
        load_run(folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"neither result\.json nor a history\.jsonl"):
        load_run(tmp_path)
    with pytest.raises(ReportError, match="there is no such folder"):
        load_run(tmp_path / "nowhere")
