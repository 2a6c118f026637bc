"""Pretrained networks made smaller without training: accuracy against size, for every format and for other methods.

    python benchmarks/pretrained.py FOLDER                   # FOLDER has resnet20-*.th, resnet32-*.th and resnet56-*.th
    python benchmarks/pretrained.py FOLDER --images 2000     # fewer test images
    python benchmarks/pretrained.py --page                   # only write the page of results again

The networks are those of akamaster/pytorch_resnet_cifar10, the data CIFAR-10 (`bayestrain data get cifar10`).
Calibration uses training images without their labels. Writes ``results/benchmarks/pretrained.json`` and, beside it,
``PRETRAINED.md``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.compress import candidates, compression, moments
from bayestrain.compress.compression import LayerCurve
from bayestrain.compress.curves import Point
from bayestrain.train.environment import describe_environment

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks"
RATIOS = (2, 3, 4, 6)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = ("o, i k", "o k, i")
"""The two unfoldings of a kernel; a matrix has one."""

INTRODUCTION = """# Pretrained networks, smaller without training

`make bench-pretrained DATA=folder` writes this page: test accuracy in percent on CIFAR-10 right after compression,
before any training. "Times smaller" counts all parameters and batch norm's vectors; methods of a column have at most
as many. *Calibrated* uses training images without labels.
"""


class Block(nn.Module):
    """Two convolutions beside a shortcut that subsamples and pads channels with zeros (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.missing = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.missing, self.missing)))


class ResNet(nn.Module):
    """The residual networks for CIFAR-10 of He et al. (2015), of depth 6 n + 2."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        number, inputs = (depth - 2) // 6, 16
        for stage, outputs in enumerate((16, 32, 64), start=1):
            strides = [1 if stage == 1 else 2] + [1] * (number - 1)
            blocks = [Block(inputs if k == 0 else outputs, outputs, stride) for k, stride in enumerate(strides)]
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            inputs = outputs
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def pretrained(folder: Path, depth: int) -> ResNet:
    """The network with the weights in a folder."""
    found = sorted(folder.glob(f"resnet{depth}-*.th"))
    if not found:
        raise SystemExit(f"{folder} has no resnet{depth}-*.th. Download it from akamaster/pytorch_resnet_cifar10.")
    state = torch.load(found[0], map_location="cpu", weights_only=True)["state_dict"]
    model = ResNet(depth)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model.eval()


def normalised(images: Tensor) -> Tensor:
    """As the networks were trained."""
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    return (images.float() / 255 - mean) / std


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of correct classes."""
    pairs = zip(images.split(250), labels.split(250), strict=True)
    right = [int((model.eval()(normalised(x)).argmax(1) == y).sum()) for x, y in pairs]
    return 100 * sum(right) / len(labels)


# --- ours -------------------------------------------------------------------------------------------------------------

Errors = dict[str, dict[str, float]]
"""By layer and by method."""

Curves = dict[str, dict[str, LayerCurve]]
"""By kind and by layer."""


def curves_of(model: nn.Module, batches: list[Tensor] | None) -> Curves:
    """The curves of all kinds, with or without calibration."""
    layers, _ = compression.survey(model)
    with torch.no_grad():
        found = {} if batches is None else moments.collect(model, layers, batches, print)
        return {kind: compression.measure(layers, found, (kind,), print) for kind in candidates.kinds()}


def methods(curves: Curves) -> dict[str, dict[str, LayerCurve]]:
    """What competes: every format alone, all with and without truncated SVD, and SVD of the two unfoldings."""

    def union(*kinds: str) -> dict[str, LayerCurve]:
        first = curves[kinds[0]]
        return {n: LayerCurve(first[n].target, [p for k in kinds for p in curves[k][n].points]) for n in first}

    formats = [kind for kind in curves if kind != candidates.SVD]
    plain = {
        name: LayerCurve(own.target, [p for p in own.points if p.candidate and p.candidate.modes in PLAIN])
        for name, own in curves[candidates.SVD].items()
    }
    alone = {kind: curves[kind] for kind in formats}
    return {"auto": union(*curves), "all but SVD": union(*formats), "truncated SVD": plain, **alone}


@torch.no_grad()
def compressed(model: nn.Module, curves: Mapping[str, LayerCurve], ratio: float) -> nn.Module:
    """A copy of the network under a budget."""
    result, before = copy.deepcopy(model), bt.count_parameters(model)
    layers, _ = compression.survey(result)
    chosen = compression.choose(layers, curves, before, int(before / ratio), 0.0)
    compression.replace_(result, layers, curves, chosen, lambda text: None)  # noqa: ARG005
    assert bt.count_parameters(result) <= before / ratio
    return result


# --- others -----------------------------------------------------------------------------------------------------------


def kernels_of(model: nn.Module) -> dict[str, nn.Conv2d]:
    """All convolutions but the first."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and n != "conv1"}


def share_of(model: nn.Module, ratio: float) -> float:
    """What is left of each of these where the whole model shall be so many times smaller."""
    whole = sum(kernel.weight.numel() for kernel in kernels_of(model).values())
    return (bt.count_parameters(model) / ratio - bt.count_parameters(model) + whole) / whole


def uniform(model: nn.Module, ratio: float, method: str) -> nn.Module:
    """tensorly's decomposition of all convolutions but the first, each to the same share of its size."""
    import tensorly as tl
    from tensorly import decomposition

    tl.set_backend("pytorch")
    result = copy.deepcopy(model)
    share = share_of(model, ratio)
    for kernel in kernels_of(result).values():
        weight = kernel.weight.detach()
        tensor = weight.flatten(2).permute(1, 2, 0).contiguous()  # inputs, taps, outputs
        inputs, taps, outputs = tensor.shape

        def entries(rank: int, sizes: tuple[int, int, int] = (inputs, taps, outputs)) -> int:
            i, k, o = sizes
            if method == "parafac":
                return rank * (i + k + o)
            a, b = min(rank, i, o * k), min(rank, o, i * k)
            return i * a + a * k * b + b * o

        rank = 1
        while entries(rank + 1) <= share * weight.numel():
            rank += 1
        a, b = min(rank, inputs), min(rank, outputs)
        if method == "parafac":
            found = tl.cp_to_tensor(decomposition.parafac(tensor, rank, n_iter_max=50, init="random", random_state=0))
        elif method == "partial_tucker":
            (core, factors), _ = decomposition.partial_tucker(tensor, rank=[a, b], modes=[0, 2])
            found = tl.tenalg.multi_mode_dot(core, factors, modes=[0, 2])
        else:
            found = tl.tt_to_tensor(decomposition.tensor_train(tensor, rank=[1, a, b, 1]))
        with torch.no_grad():
            kernel.weight.copy_(found.permute(2, 0, 1).reshape(weight.shape))
    return result


@torch.no_grad()
def rounded(model: nn.Module) -> tuple[nn.Module, float]:
    """Weights of 8 bits with a scale of 32 bits per output, and how many times fewer bytes that takes."""
    result, floats = copy.deepcopy(model), bt.count_parameters(model)
    size = 4.0 * floats
    for module in result.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            scale = module.weight.flatten(1).abs().amax(1).reshape(-1, *[1] * (module.weight.ndim - 1)) / 127
            module.weight.copy_((module.weight / scale).round() * scale)
            size -= 3 * module.weight.numel() - 4 * len(scale)
    return result, 4.0 * floats / size


# --- layer by layer ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def layer_by_layer(model: nn.Module, curves: Curves, others: Mapping[str, nn.Module], ratio: float) -> Errors:
    """For every layer that tensorly decomposes the relative change by every method, at equal size."""
    rivals, errors = methods(curves), Errors()
    for name, layer in kernels_of(model).items():
        target, size = rivals["auto"][name].target(), int(share_of(model, ratio) * layer.weight.numel())
        own = errors.setdefault(name, {})
        for method, other in others.items():
            change = other.get_submodule(name).weight.double() - target.weight
            own[method] = math.sqrt(float(target.loss(change) / target.norm))
        smaller = [point.error for point in rivals["truncated SVD"][name].points if point.size <= size]
        own["truncated SVD"] = math.sqrt(min(smaller, default=1.0))
        for method in ("all but SVD", "auto"):
            own[method] = rivals[method][name].best(Point(size, 0.0))[2]
    return errors


# --- results ----------------------------------------------------------------------------------------------------------


def page(results: Path) -> str:
    """The page of recorded results."""
    report = json.loads((results / "pretrained.json").read_text())
    about, text = report["environment"], INTRODUCTION
    text += (
        f"\n{about['cpu']}; torch {about['torch']}; Python {about['python']}; commit {about['commit'][:10]}; "
        f"{about['started'][:10]}; {report['images']:,} test images, {report['calibration']:,} for calibration; "
        f"`{report['command']}`.\n"
    )
    for network in report["networks"]:
        ratios = sorted({row["ratio"] for row in network["rows"] if row["budget"]})
        text += f"\n## ResNet-{network['depth']}\n\n"
        text += f"{network['parameters']:,} parameters, {network['accuracy']:.2f} %.\n\n"
        text += f"| method | {' | '.join(f'{ratio:g} times smaller' for ratio in ratios)} |\n"
        text += f"| --- |{' --: |' * len(ratios)}\n"
        for method in dict.fromkeys(row["method"] for row in network["rows"] if row["budget"]):
            own = {row["ratio"]: row["accuracy"] for row in network["rows"] if row["method"] == method}
            cells = [f"{own[ratio]:.2f}" if ratio in own else "" for ratio in ratios]
            text += f"| {method} | {' | '.join(cells)} |\n"
        text += layers_table(network["layers"])
        for row in network["rows"]:
            if not row["budget"]:
                text += f"\n{row['method']}: {row['accuracy']:.2f} % at {row['ratio']:.2f} times smaller.\n"
    return text


def layers_table(layers: list[dict[str, Any]]) -> str:
    """Mean relative changes of layers at equal sizes, and where ours is no larger than any other."""
    if not layers:
        return ""
    names = list(next(iter(layers[0]["errors"].values())))
    text = f"\nMean relative change of layers, at equal size:\n\n| change of | {' | '.join(names)} | auto best in |"
    text += f"\n| --- |{' --: |' * (len(names) + 1)}\n"
    for part in layers:
        errors = list(part["errors"].values())
        means = [sum(own[name] for own in errors) / len(errors) for name in names]
        best = sum(own["auto"] <= min(own.values()) for own in errors)
        what = "outputs (calibrated)" if part["calibrated"] else "weights"
        cells = " | ".join(f"{mean:.3f}" for mean in means)
        text += f"| {what}, {part['ratio']:g} times smaller | {cells} | {best} of {len(errors)} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the pretrained weights")
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 56])
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="how many times smaller")
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--calibration", type=int, default=1_024, help="training images for calibration")
    parser.add_argument("--validation", action="store_true", help="measure on training images, for development")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    options = parser.parse_args()
    if options.page:
        (options.results / "PRETRAINED.md").write_text(page(options.results))
        return
    if options.folder is None:
        parser.error("name the folder of the pretrained weights")
    torch.set_num_threads(options.threads)
    splits = bt.data.load("cifar10")
    tested = splits.train if options.validation else splits.test
    images, labels = tested.images[-options.images :], tested.labels[-options.images :]
    batches = list(normalised(splits.train.images[: options.calibration]).split(128))
    networks: list[dict[str, Any]] = []
    report = {
        "command": " ".join(["python benchmarks/pretrained.py FOLDER", *sys.argv[2:]]),
        "images": len(images), "calibration": options.calibration, "networks": networks,
        "environment": describe_environment(torch.device("cpu")),
    }  # fmt: skip
    options.results.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # after every row: a run that is stopped leaves what it has
        (options.results / "pretrained.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.results / "PRETRAINED.md").write_text(page(options.results))

    for depth in options.depths:
        model = pretrained(options.folder, depth)
        rows: list[dict[str, Any]] = []
        networks.append({"depth": depth, "parameters": bt.count_parameters(model),
                         "accuracy": accuracy(model, images, labels), "rows": rows, "layers": []})  # fmt: skip

        def add(method: str, ratio: float, make: Callable[[], nn.Module], budget: bool = True,
                rows: list[dict[str, Any]] = rows, depth: int = depth) -> None:  # fmt: skip
            started = time.perf_counter()
            found = make()
            seconds = time.perf_counter() - started
            rows.append({"method": method, "ratio": ratio, "budget": budget, "seconds": round(seconds, 1),
                         "accuracy": accuracy(found, images, labels)})  # fmt: skip
            print(f"ResNet-{depth} {method} {ratio:.2f}: {rows[-1]['accuracy']:.2f} % ({seconds:.0f} s)", flush=True)
            save()

        small, times = rounded(model)
        add("int8 weights, a scale per output", times, lambda small=small: small, budget=False)
        for other in (20, 32):
            if other < depth and list(options.folder.glob(f"resnet{other}-*.th")):
                dense = pretrained(options.folder, other)
                ratio = bt.count_parameters(model) / bt.count_parameters(dense)
                add(f"ResNet-{other}, trained as it is", ratio, lambda dense=dense: dense, budget=False)
        others: dict[float, dict[str, nn.Module]] = {ratio: {} for ratio in options.ratios}
        for method in ("tensor_train", "partial_tucker", "parafac") if find_spec("tensorly") is not None else ():
            for ratio, own in others.items():
                with warnings.catch_warnings(action="ignore"):
                    own[f"tensorly {method}"] = net = uniform(model, ratio, method)
                add(f"tensorly {method}, same share for every layer", ratio, lambda net=net: net)
        for given in (batches, None):
            measured, calibrated = curves_of(model, given), "" if given is None else ", calibrated"
            for method, curves in methods(measured).items():
                for ratio in options.ratios:
                    add(method + calibrated, ratio, lambda r=ratio, own=curves, net=model: compressed(net, own, r))
            for ratio, own in others.items():
                networks[-1]["layers"].append({"ratio": ratio, "calibrated": given is not None,
                                               "errors": layer_by_layer(model, measured, own, ratio)})  # fmt: skip
                save()


if __name__ == "__main__":
    main()
