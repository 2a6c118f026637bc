"""Compacted networks against dense ones on a CPU: 10,000 images in batches, and single images.

    python benchmarks/inference.py

The networks of the three experiments, their ranks cut until they are as many times smaller as in the paper. Weights are
random: time does not depend on them. Both sides take the batch size and the memory format that is best for them; images
are brought into it within the time. The dense network in PyTorch's own format is told beside. Writes
``results/benchmarks/inference-cpu.json``.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import arguments, claim, write
from timing import interleaved, relative_error
from torch import Tensor, nn

from bayestrain import count_parameters, models
from bayestrain.convert import TensorizeConfig, replace_layers, tensorize_
from bayestrain.layers import TTConv2d, TTLayer, TTLinear
from bayestrain.sizes import tt_layers
from bayestrain.train import toml
from bayestrain.train.config import TensorizeSettings
from bayestrain.train.experiment import tensorize

IMAGES = 10_000
BATCHES = (16, 64, 256, 1000)
FORMATS = {"": torch.contiguous_format, " channels last": torch.channels_last}
LEARNED = Path("results/mnist/default/seed-0/result.json")


@dataclass(frozen=True)
class Network:
    """One experiment's network and how many times smaller the paper makes it."""

    experiment: str
    ratio: float
    shape: tuple[int, int, int]


NETWORKS = (
    Network("mnist", 137.0, (1, 28, 28)),
    Network("cifar10-cnn", 15.8, (3, 32, 32)),
    Network("cifar10-resnet110", 7.4, (3, 32, 32)),
)


def with_rank(experiment: str, rank: int) -> nn.Module:
    """The experiment's network, tensorised with this rank everywhere."""
    config = toml.named(experiment)
    model = models.BUILDERS[config.experiment.model](num_classes=10)
    settings = config.tensorize
    tensorize(model, TensorizeSettings(max_rank=rank, keep_dense=settings.keep_dense, modes=settings.modes))
    return model


def compacted(network: Network) -> tuple[nn.Module, str]:
    """The largest common rank that makes the network small enough; MNIST's ranks are those that were learned."""
    config = toml.named(network.experiment)
    dense = count_parameters(models.BUILDERS[config.experiment.model](num_classes=10))
    if network.experiment == "mnist" and LEARNED.exists():
        ranks = json.loads(LEARNED.read_text())["ranks"]
        model: nn.Module = models.mnist_mlp()
        for name, chain in ranks.items():
            modes = {name: config.tensorize.modes[name]}
            tensorize_(model, TensorizeConfig(tuple(chain[1:-1]), modes=modes), lambda _, n, name=name: n == name)
        return model, "learned ranks of results/mnist/default/seed-0"
    for rank in range(config.tensorize.max_rank, 0, -1):
        model = with_rank(network.experiment, rank)
        if dense / count_parameters(model) >= network.ratio:
            return model, f"rank {rank} everywhere"
    raise ValueError(f"{network.experiment} does not get {network.ratio} times smaller at any rank")


def densified(model: nn.Module) -> nn.Module:
    """A plain dense network with the same function."""
    twin = copy.deepcopy(model)
    swaps: dict[nn.Module, nn.Module] = {}
    for layer in tt_layers(twin).values():
        assert isinstance(layer, TTLinear | TTConv2d)
        swaps[layer] = layer.to_dense()
    replace_layers(twin, swaps)
    return twin


@torch.no_grad()
def error(model: nn.Module, dense: nn.Module, x: Tensor) -> float:
    """Of the compacted network's outputs, against the dense network in double precision."""
    exact = copy.deepcopy(dense).double()(x.double())
    found = relative_error(model(x), exact)
    assert found < 1e-3, f"outputs differ by {found:.1e}"
    return found


def plans(model: nn.Module, x: Tensor) -> dict[str, str]:
    """The plan that every TT layer takes for this input."""
    found: dict[str, str] = {}

    def note(name: str) -> Any:
        def hook(layer: TTLayer, args: tuple[Tensor, ...]) -> None:
            found[name] = layer.plan_for(args[0]).name

        return hook

    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in tt_layers(model).items()]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def arranged(x: Tensor, how: str) -> Tensor:
    """A batch in the memory format of a way to run, which is a batch size and perhaps "channels last"."""
    _, _, suffix = how.partition(" ")
    return x.contiguous(memory_format=FORMATS[f" {suffix}" if suffix else ""])


def whole(model: nn.Module, images: Tensor, how: str) -> Any:
    """Classify all images in batches."""

    def call() -> None:
        for x in images.split(int(how.split()[0])):
            model(arranged(x, how)).argmax(1)

    return call


@torch.no_grad()
def measure(network: Network, images: int, rounds: int, passes: int) -> dict[str, Any]:
    """Throughput at the best batch size of each side, and the time of a single image."""
    torch.manual_seed(0)
    small, how = compacted(network)
    dense = densified(small)
    for model in (small, dense):
        model.eval()
    x = torch.randn(images, *network.shape)
    largest_error = error(small, dense, x[:64])
    last = copy.deepcopy(dense).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def run(name: str, images: Tensor, how: str) -> Any:
        return whole(small if name == "ours" else last if "last" in how else dense, images, how)

    best, tried = {}, {}
    formats = list(FORMATS) if network.shape[0] > 1 else [""]
    ways = [f"{size}{form}" for size in BATCHES if size <= images for form in formats]
    for name in ("dense", "ours"):
        calls = {how: run(name, x[: int(how.split()[0])], how) for how in ways}
        times = interleaved(calls, rounds=max(3, rounds // 8), at_least=1e-2)
        tried[name] = {how: int(how.split()[0]) / times[how]["seconds"] for how in times}
        best[name] = max(tried[name], key=lambda how, name=name: tried[name][how])
    usual = max((how for how in ways if "last" not in how), key=lambda how: tried["dense"][how])
    runs = {name: run(name, x, best[name]) for name in ("dense", "ours")}
    if usual != best["dense"]:
        runs["dense in the usual format"] = run("dense", x, usual)
    full = interleaved(runs, rounds=passes, at_least=0.0)
    one = x[:1].clone()
    single = interleaved({"dense": lambda: dense(one), "ours": lambda: small(one)}, rounds=rounds, at_least=2e-2)
    return {
        "experiment": network.experiment,
        "ranks": how,
        "times_smaller": count_parameters(dense) / count_parameters(small),
        "images": images,
        "images_per_second_by_batch": tried,
        "batch": best,
        "seconds_of_all_images": full,
        "speedup": 1 / full["ours"]["ratio"],
        "speedup_over_usual_format": full.get("dense in the usual format", {"ratio": 1.0})["ratio"]
        / full["ours"]["ratio"],
        "single_image": single,
        "single_image_ratio": single["ours"]["ratio"],
        "plans": {
            "batch": plans(small, arranged(x[: int(best["ours"].split()[0])], best["ours"])),
            "single image": plans(small, one),
        },
        "largest_error": largest_error,
    }


def main() -> None:
    parser = arguments(__doc__, devices=("cpu",))
    parser.add_argument("--passes", type=int, default=3, help="times that all images are classified by each side")
    options = parser.parse_args()
    rounds, passes, images = options.rounds, options.passes, IMAGES
    if options.quick:
        rounds, passes, images = 3, 1, 64
    rows, claims = [], []
    for network in NETWORKS:
        found = measure(network, images, rounds, passes)
        rows.append(found)
        name = f"{network.experiment}, {found['times_smaller']:.1f} times smaller"
        claims.append(claim(f"{name}, {images:,} images", found["speedup"], 1.5, ">=", "times dense's throughput"))
        claims.append(claim(f"{name}, single images", found["single_image_ratio"], 1.3, "<=", "of dense's time"))
    write("inference", options, claims, {"rows": rows})


if __name__ == "__main__":
    main()
