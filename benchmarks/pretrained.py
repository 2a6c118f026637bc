"""Pretrained networks made smaller without training: accuracy against size, for every format and for other methods.

    python benchmarks/pretrained.py FOLDER                   # FOLDER has resnet20-*.th, resnet32-*.th and resnet56-*.th
    python benchmarks/pretrained.py FOLDER --device cuda     # test images pass on a GPU; decompositions stay on the CPU
    python benchmarks/pretrained.py FOLDER --resume          # keep the rows that an earlier run has left
    python benchmarks/pretrained.py --page                   # only write the page of results again

The networks are those of akamaster/pytorch_resnet_cifar10, the data CIFAR-10 (`python -m paper.fetch cifar10`).
Calibration uses training images without their labels. Layers are decomposed in several processes. Writes
``results/benchmarks/pretrained.json`` after every row and, beside it, ``PRETRAINED.md``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.compress import candidates, compression, moments
from bayestrain.compress.compression import LayerCurve
from bayestrain.compress.curves import Point, Target, points
from bayestrain.files import write_atomically
from bayestrain.train.environment import describe_environment
from paper import fetch

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
    """Images in [0, 1] as the networks were trained with."""
    mean, std = (torch.tensor(numbers, device=images.device)[:, None, None] for numbers in (MEAN, STD))
    return (images - mean) / std


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Percent of correct classes."""
    model = copy.deepcopy(model).to(images.device).eval()
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    right = [(model(normalised(x / 255)).argmax(1) == y).sum() for x, y in pairs]
    return 100 * int(sum(right)) / len(labels)


# --- ours -------------------------------------------------------------------------------------------------------------

Errors = dict[str, dict[str, float]]
"""By layer and by method."""

Curves = dict[str, dict[str, LayerCurve]]
"""By kind and by layer."""


def quiet(text: str) -> None:
    """Instead of progress."""


@cache
def opened(file: Path) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The weights of layers and the second moments of their inputs: large, so processes read them from a file."""
    return torch.load(file, mmap=True, weights_only=True)  # type: ignore[no-any-return]


def target_of(file: Path, name: str) -> Target:
    """What stands for a layer in such a file."""
    return Target(*opened(file)[name])


@torch.no_grad()
def write_targets(file: Path, model: nn.Module, batches: Sequence[Tensor] | None) -> None:
    """Write it, with moments where there are calibration batches, which pass on their own device."""
    found: dict[str, Tensor] = {}
    if batches is not None:
        passing = copy.deepcopy(model).to(batches[0].device)
        known = moments.collect(passing, compression.survey(passing)[0], batches, quiet)
        found = {name: own.cpu() for name, own in known.items()}
    layers = compression.survey(model)[0].items()
    torch.save({name: (layer.weight.detach().clone(), found.get(name)) for name, layer in layers}, file)


@torch.no_grad()
def curve_of(file: Path, name: str, kind: str) -> LayerCurve:
    """What a layer may become, of one kind."""
    target = target_of(file, name)
    wanted = candidates.candidates(target.weight.shape, (kind,), target.moment is not None)
    return LayerCurve(partial(target_of, file, name), points(target, wanted))


def curves_of(pool: Executor, file: Path, model: nn.Module) -> Callable[[], Curves]:
    """The curves of all kinds, once they are there."""
    names = compression.survey(model)[0]
    waiting = {kind: {n: pool.submit(curve_of, file, n, kind) for n in names} for kind in candidates.KINDS}
    return lambda: {kind: {n: each.result() for n, each in own.items()} for kind, own in waiting.items()}


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
def best(curve: LayerCurve, point: Point) -> tuple[candidates.Candidate, list[Any], float]:
    """What a layer becomes at a point; arrays, because tensors would keep files open between processes."""
    candidate, cores, error = curve.best(point)
    return candidate, [core.numpy() for core in cores], error


class Awaited:
    """A layer that another process decomposes."""

    def __init__(self, pool: Executor, curve: LayerCurve, point: Point) -> None:
        self.fit = pool.submit(best, curve, point)

    def best(self, point: Point) -> tuple[candidates.Candidate, list[Tensor], float]:  # noqa: ARG002
        """As that of a `LayerCurve`."""
        candidate, cores, error = self.fit.result()
        return candidate, [torch.from_numpy(core) for core in cores], error


def compressed(
    pool: Executor, model: nn.Module, curves: Mapping[str, LayerCurve], ratio: float
) -> Callable[[], nn.Module]:
    """A copy of the network under a budget, once it is there."""
    result, before = copy.deepcopy(model), bt.count_parameters(model)
    layers, _ = compression.survey(result)
    chosen = compression.choose(layers, curves, before, int(before / ratio), 0.0)
    fits: Any = {n: Awaited(pool, curves[n], point) for n, point in chosen.items() if point.candidate is not None}

    def built() -> nn.Module:
        with torch.no_grad():
            compression.replace_(result, layers, fits, chosen, quiet)
        assert bt.count_parameters(result) <= before / ratio
        return result

    return built


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
def layer_by_layer(
    pool: Executor, model: nn.Module, curves: Curves, others: Mapping[str, nn.Module], ratio: float
) -> Callable[[], Errors]:
    """For every layer that tensorly decomposes the relative change by every method, at equal size."""
    rivals, share, kernels = methods(curves), share_of(model, ratio), kernels_of(model)
    size = {name: int(share * layer.weight.numel()) for name, layer in kernels.items()}
    ours = {
        name: {m: pool.submit(best, rivals[m][name], Point(size[name], 0.0)) for m in ("all but SVD", "auto")}
        for name in kernels
    }

    @torch.no_grad()
    def found() -> Errors:
        errors = Errors()
        for name, fits in ours.items():
            target, own = rivals["auto"][name].target(), errors.setdefault(name, {})
            for method, other in others.items():
                change = other.get_submodule(name).weight.double() - target.weight
                own[method] = math.sqrt(float(target.loss(change) / target.norm))
            smaller = [point.error for point in rivals["truncated SVD"][name].points if point.size <= size[name]]
            own["truncated SVD"] = math.sqrt(min(smaller, default=1.0))
            own |= {method: fit.result()[2] for method, fit in fits.items()}
        return errors

    return found


# --- results ----------------------------------------------------------------------------------------------------------


def page(results: Path) -> str:
    """The page of recorded results."""
    report = json.loads((results / "pretrained.json").read_text())
    about, text = report["environment"], INTRODUCTION
    machine = ", ".join(filter(None, [about["cpu"], about["gpu"]]))
    text += (
        f"\n{machine}; torch {about['torch']}; Python {about['python']}; commit {str(about['commit'])[:10]}; "
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


def rows_of(
    pool: Executor, options: argparse.Namespace, model: nn.Module, network: dict[str, Any], batches: Sequence[Tensor],
    temporary: Path,
) -> Iterator[tuple[dict[str, Any], nn.Module | Errors]]:  # fmt: skip
    """The rows that a network lacks, each with the network or the errors to be measured or written there."""
    rows = {(row["method"], row["ratio"]) for row in network["rows"]}
    layers = {(row["ratio"], row["calibrated"]) for row in network["layers"]}
    sources = {", calibrated": batches, "": None}
    waiting = {}
    for label, given in sources.items():
        file = temporary / f"targets{label}.pt"
        write_targets(file, model, given)
        waiting[label] = curves_of(pool, file, model)
    small, times = rounded(model)
    rest: list[tuple[str, float, nn.Module]] = [("int8 weights, a scale per output", times, small)]
    for other in (20, 32):
        if other < network["depth"] and list(options.folder.glob(f"resnet{other}-*.th")):
            dense = pretrained(options.folder, other)
            ratio = bt.count_parameters(model) / bt.count_parameters(dense)
            rest.append((f"ResNet-{other}, trained as it is", ratio, dense))
    others: dict[float, dict[str, nn.Module]] = {ratio: {} for ratio in options.ratios}
    for method in ("tensor_train", "partial_tucker", "parafac") if find_spec("tensorly") is not None else ():
        for ratio, own in others.items():
            with warnings.catch_warnings(action="ignore"):
                found = own[f"tensorly {method}"] = uniform(model, ratio, method)
            rest.append((f"tensorly {method}, same share for every layer", ratio, found))
    for method, ratio, found in rest:
        if (method, ratio) not in rows:
            yield {"method": method, "ratio": ratio, "budget": method.startswith("tensorly")}, found
    made: list[tuple[dict[str, Any], Callable[[], nn.Module | Errors]]] = []
    for label, ready in waiting.items():
        measured = ready()
        for method, curves in methods(measured).items():
            for ratio in options.ratios:
                if (method + label, ratio) not in rows:
                    row = {"method": method + label, "ratio": ratio, "budget": True}
                    made.append((row, compressed(pool, model, curves, ratio)))
        for ratio, own in others.items():
            if (ratio, bool(label)) not in layers:
                row = {"ratio": ratio, "calibrated": bool(label)}
                made.append((row, layer_by_layer(pool, model, measured, own, ratio)))
    for row, make in made:
        yield row, make()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the pretrained weights")
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 56])
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="how many times smaller")
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--calibration", type=int, default=1_024, help="training images for calibration")
    parser.add_argument("--validation", action="store_true", help="measure on training images, for development")
    parser.add_argument("--device", default="cpu", help="where calibration and test images pass")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that decompose layers, one thread each")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--commit", help="of the code, where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    options = parser.parse_args()
    if options.page:
        (options.results / "PRETRAINED.md").write_text(page(options.results))
        return
    if options.folder is None:
        parser.error("name the folder of the pretrained weights")
    torch.backends.cudnn.allow_tf32 = False
    splits = fetch.load("cifar10")
    tested = (splits.train if options.validation else splits.test).to(options.device)
    images, labels = tested.images[-options.images :], tested.labels[-options.images :]
    batches = normalised(splits.train.images[: options.calibration].to(options.device) / 255).split(128)
    environment = describe_environment(torch.device(options.device))
    report = {
        "command": " ".join(["python benchmarks/pretrained.py FOLDER", *sys.argv[2:]]),
        "images": len(images), "calibration": options.calibration, "networks": [],
        "environment": environment | ({"commit": options.commit} if options.commit else {}),
    }  # fmt: skip
    if options.resume:
        earlier = json.loads((options.results / "pretrained.json").read_text())
        if (earlier["images"], earlier["calibration"]) != (report["images"], report["calibration"]):
            parser.error("the earlier run had other images")
        report = earlier
    options.results.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # after every row: a run that is stopped leaves what it has
        write_atomically(options.results / "pretrained.json", (json.dumps(report, indent=1) + "\n").encode())
        (options.results / "PRETRAINED.md").write_text(page(options.results))

    started = time.perf_counter()
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawned, torch.set_num_threads, (1,)) as pool:
        for depth in options.depths:
            model = pretrained(options.folder, depth)
            network = next((each for each in report["networks"] if each["depth"] == depth), None)
            if network is None:
                network = {"depth": depth, "parameters": bt.count_parameters(model),
                           "accuracy": accuracy(model, images, labels), "rows": [], "layers": []}  # fmt: skip
                report["networks"].append(network)
            with tempfile.TemporaryDirectory() as temporary:
                for row, found in rows_of(pool, options, model, network, batches, Path(temporary)):
                    if isinstance(found, nn.Module):
                        row["accuracy"] = accuracy(found, images, labels)
                        what = f"{row['method']} {row['ratio']:.2f}: {row['accuracy']:.2f} %"
                    else:
                        row["errors"], what = found, f"layer by layer {row['ratio']:g}"
                    network["rows" if isinstance(found, nn.Module) else "layers"].append(row)
                    print(f"{time.perf_counter() - started:.0f} s: ResNet-{depth} {what}", flush=True)
                    save()


if __name__ == "__main__":
    main()
