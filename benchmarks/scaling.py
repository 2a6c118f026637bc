"""How time and memory grow with rank, layer size, batch, number of layers and number of particles.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --device cuda

Every point is a training step without optimiser (forward and backward) against the dense one, in turns in one process;
the particles' points are whole SVGD steps. Memory: on a GPU the peak of training steps with Adam, on a CPU the bytes
that weights, gradients and Adam hold plus what the forward pass keeps for the backward pass. Writes
``results/benchmarks/scaling-DEVICE.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from layers import peak
from record import arguments, write
from rows import LARGE, LEARNED, LINEAR, Row, build, compare
from timing import interleaved, precision, train_call
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import models
from bayestrain.posterior import Posterior, independent

WIDTH = 512
PARTICLE_BATCH = 128
HELD = 4
"""Copies of a parameter in training with Adam: itself, its gradient, two moments."""


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """What a forward pass keeps for the backward pass, parameters themselves not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(x).sum()
    return sum(kept.values())


def memory(row: Row, device: str) -> dict[str, int]:
    """Bytes of training with the dense layer and with ours."""
    if device == "cuda":
        return {"dense": peak(row, True, None)["bytes"], "ours": peak(row, False, None)["bytes"]}
    case = build(row, device)
    return {
        name: HELD * sum(p.numel() * p.element_size() for p in module.parameters()) + kept_bytes(module, case.x)
        for name, module in (("dense", case.dense), ("ours", case.layer))
    }


def curve(rows: Sequence[tuple[int, Row]], device: str, rounds: int, at_least: float) -> list[dict[str, Any]]:
    """One point for each row."""
    points = []
    for at, row in rows:
        found = compare(row, device, rounds, at_least)
        points.append({"at": at, **found, "memory_bytes": memory(row, device)})
        print(f"{row.title}: {found['ratio']:.2f} of dense, plan {found['plan']}", flush=True)
    return points


def depth(number: int, device: str, rounds: int, at_least: float, kind: str) -> dict[str, Any]:
    """A perceptron of so many layers, dense and tensorised."""
    torch.manual_seed(0)
    networks = {}
    for name in ("dense", "ours"):
        parts: list[nn.Module] = []
        for _ in range(number):
            parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        networks[name] = nn.Sequential(*parts).to(device)
    bt.tensorize_(networks["ours"], bt.TensorizeConfig(max_rank=8))
    x = torch.randn(128, WIDTH, device=device)
    gradient = torch.randn_like(x)
    calls = {name: train_call(net, list(net.parameters()), x, gradient) for name, net in networks.items()}
    with precision(kind):
        times = interleaved(calls, rounds=rounds, at_least=at_least, device=device)
    return {
        "at": number,
        "title": f"{number} layers of {WIDTH}x{WIDTH}",
        "times": times,
        "ratio": times["ours"]["ratio"],
    }


def particles(number: int, device: str, rounds: int) -> dict[str, Any]:
    """One SVGD step of so many tensorised MNIST perceptrons."""

    def make() -> nn.Module:
        model = models.mnist_mlp()
        bt.tensorize_(model, bt.TensorizeConfig(20, modes={"1": LINEAR.modes or (None, None), "3": ((25, 25), (5, 2))}))
        return model

    def adam(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-4, device=device) if device == "cuda" else 1e-4
        return torch.optim.Adam(tensors, lr=rate, capturable=device == "cuda")

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    posterior = Posterior([model.to(device) for model in independent(make, number)], 60_000, optimizer=adam)
    x = torch.rand(PARTICLE_BATCH, 1, 28, 28, device=device)
    y = torch.randint(0, 10, (PARTICLE_BATCH,), device=device)
    for _ in range(4):  # the GPU's step is captured on the way
        posterior.step(x, y)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = interleaved({"ours": lambda: posterior.step(x, y)}, rounds=rounds, at_least=1e-3, device=device)
    point: dict[str, Any] = {"at": number, "title": f"{number} particles", "times": times}
    if device == "cuda":
        point["memory_bytes"] = {"ours": torch.cuda.max_memory_allocated() - before}
    return point


def main() -> None:
    options = arguments(__doc__).parse_args()
    device, rounds, at_least = options.device, min(options.rounds, 15), 1e-2
    kind = "tf32" if device == "cuda" else "float32"
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    depths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    numbers: tuple[int, ...] = (2, 5, 10, 20, 50, 100)
    if device == "cuda":
        base, batch_base = replace(LARGE, precision=kind), replace(LARGE, rank=8, precision=kind)
        sizes, size_batch = (512, 1024, 2048, 4096, 8192, 16384), 4096
        ranks, batches = (2, 4, 8, 16, 32, 64), (16, 64, 256, 1024, 4096, 16384)
    else:
        base, batch_base = LINEAR, LEARNED
        sizes, size_batch = (256, 512, 1024, 2048, 4096), 128
        ranks, batches = (2, 4, 8, 12, 16, 20, 32), (1, 4, 16, 64, 256, 1024, 4096)
    if options.quick:
        rounds, at_least = 3, 1e-3
        base = replace(base, inputs=256, outputs=256, modes=None, batch=32)
        batch_base = replace(batch_base, rank=4, inputs=256, outputs=256, modes=None)
        sizes, ranks, batches, depths, numbers = (64, 128, 256), (2, 4, 8), (1, 8, 64), (1, 2), (2, 4)
    by_size = [(n, Row(n, n, 8, size_batch, precision=kind)) for n in sizes]
    curves = {
        "rank": curve([(rank, replace(base, rank=rank)) for rank in ranks], device, rounds, at_least),
        "layer size": curve(by_size, device, rounds, at_least),
        "batch": curve([(n, replace(batch_base, batch=n)) for n in batches], device, rounds, at_least),
        "layers": [depth(number, device, rounds, at_least, kind) for number in depths],
        "particles": [particles(number, device, rounds) for number in numbers],
    }
    write("scaling", options, [], {"curves": curves})


if __name__ == "__main__":
    main()
