"""All particles at once against a Python loop over them: time of one SVGD step, and memory.

    python benchmarks/particles.py                     # on a CPU
    python benchmarks/particles.py --device cuda

The loop does what a user would write: every particle's loss, backward pass and lambda step one after the other, then
the same n x n kernel and one Adam over all. Steps alternate in one process, times are medians; beside each timing the
two are compared in double precision. Memory is the peak of a process of its own for each number of particles. Writes
``results/benchmarks/particles-DEVICE.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import models
from bayestrain.infer.kernels import rbf, squared_distances
from bayestrain.infer.particles import groups, matrix, parts
from bayestrain.infer.svgd import stein_direction_
from bayestrain.posterior import Posterior, independent, retain_freed_memory
from bayestrain.train.environment import describe_environment

MODES = {"1": ((7, 4, 7, 4), (5, 5, 5, 5)), "3": ((25, 25), (5, 2))}
NUM_DATA = 57_000
LR = 1e-4
NUMBERS = (5, 10, 20, 50, 100)


def tensorized(rank: int = 20) -> nn.Module:
    model = models.mnist_mlp(num_classes=10)
    bt.tensorize_(model, bt.TensorizeConfig(rank, modes=MODES))
    return model


def adam(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=LR)


def batch(size: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 1, 28, 28, generator=generator, dtype=torch.float64)
    return x.to(device, dtype), torch.randint(0, 10, (size,), generator=generator).to(device)


class Loop:
    """SVGD with a Python loop over networks."""

    def __init__(self, networks: list[nn.Module]) -> None:
        self.networks = networks
        self.priors = [bt.RankPrior(model, NUM_DATA) for model in networks]
        self.named = [dict(model.named_parameters()) for model in networks]
        self.stacked = {k: torch.stack([p[k].detach() for p in self.named]) for k in self.named[0]}
        self.optimizer = adam(list(self.stacked.values()))
        for i, parameters in enumerate(self.named):
            for name, parameter in parameters.items():
                parameter.data = self.stacked[name][i]  # a network's weights are a view of the stack

    def step(self, x: Tensor, y: Tensor) -> None:
        n = len(self.networks)
        gradients = {name: torch.empty_like(tensor) for name, tensor in self.stacked.items()}
        for i, (model, prior) in enumerate(zip(self.networks, self.priors, strict=True)):
            loss = F.cross_entropy(model(x), y) + prior.loss()
            found = torch.autograd.grad(loss, list(self.named[i].values()))
            for name, gradient in zip(self.named[i], found, strict=True):
                gradients[name][i] = -NUM_DATA * gradient
        alive = torch.ones(n, dtype=torch.bool, device=x.device)
        K, slope = rbf(squared_distances(self.stacked, alive))  # (n, n) each
        for names in groups(self.stacked):  # small tensors side by side, as `SVGD` has them
            tensors = [self.stacked[name] for name in names]
            move = matrix([gradients[name] for name in names])  # (n, columns)
            stein_direction_(matrix(tensors), move, K, slope, alive)
            move.mul_(-n / NUM_DATA)
            for tensor, part in zip(tensors, parts(move, tensors), strict=True):
                tensor.grad = part
        self.optimizer.step()
        for prior in self.priors:
            prior.step()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str) -> float:
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - started


def compare(n: int, rank: int, size: int, device: str, repeats: int) -> dict[str, Any]:
    """Median times of a step, one after the other in turns, and how far apart the results are in double precision."""
    exact = []
    for dtype in (torch.float64, torch.float32):
        networks = [model.to(device, dtype) for model in independent(lambda: tensorized(rank), n)]
        together = Posterior(networks, NUM_DATA, optimizer=adam)
        loop = Loop([model.to(device, dtype) for model in independent(lambda: tensorized(rank), n)])
        x, y = batch(size, device, dtype)
        for _ in range(3):
            together.step(x, y)
            loop.step(x, y)
        exact.append(
            max(float((together.particles[f"model.{k}"].detach() - t).abs().max()) for k, t in loop.stacked.items())
        )
    assert exact[0] < 1e-10, f"the two ways differ by {exact[0]}"
    times: dict[str, list[float]] = {"together": [], "loop": []}
    for _ in range(repeats):
        times["together"].append(timed(lambda: together.step(x, y), device))
        times["loop"].append(timed(lambda: loop.step(x, y), device))
    ratios = [slow / fast for slow, fast in zip(times["loop"], times["together"], strict=True)]
    return {
        "particles": n,
        "rank": rank,
        "batch": size,
        "chunk": together.method.chunk,
        "seconds": statistics.median(times["together"]),
        "seconds_loop": statistics.median(times["loop"]),
        "times_faster": statistics.median(ratios),
        "repeats": repeats,
        "largest_difference_float64": exact[0],
    }


def peak_bytes(n: int, kind: str, device: str) -> int:
    """Peak memory of a process that takes some steps with n particles; called in that process."""
    build = tensorized if kind == "tensorized" else lambda: models.mnist_mlp(num_classes=10)
    posterior = Posterior([model.to(device) for model in independent(build, n)], NUM_DATA, optimizer=adam)
    x, y = batch(128, device)
    for _ in range(3):
        posterior.step(x, y)
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()  # not getrusage: that remembers the parent
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def memory(kind: str, device: str) -> dict[str, Any]:
    """Peaks for several numbers of particles, and a straight line through them."""
    peaks = {}
    for n in NUMBERS:
        command = [sys.executable, __file__, "--device", device, "--peak", str(n), "--kind", kind]
        peaks[n] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    xs, ys = list(map(float, peaks)), list(map(float, peaks.values()))
    slope, start = statistics.linear_regression(xs, ys)
    build = tensorized() if kind == "tensorized" else models.mnist_mlp(num_classes=10)
    size = sum(p.numel() for p in build.parameters())
    return {
        "network": kind,
        "parameters_each": size,
        "peak_bytes": peaks,
        "bytes_per_particle": slope,
        "bytes_at_no_particle": start,
        "correlation_with_line": statistics.correlation(xs, ys),
        "limit_at_50": 24 * 50 * size + 1_000_000_000,
        "within_limit_at_50": peaks[50] < 24 * 50 * size + 1_000_000_000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="tensorized", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak is not None:
        print(peak_bytes(arguments.peak, arguments.kind, arguments.device))
        return
    place = torch.device(arguments.device)
    retained = retain_freed_memory()  # as bayestrain train does; for both ways
    report = {
        "command": f"python benchmarks/particles.py --device {arguments.device} --repeats {arguments.repeats}",
        "steps": [compare(50, rank, 128, arguments.device, arguments.repeats) for rank in (20, 4)],
        "memory": [memory(kind, arguments.device) for kind in ("tensorized", "dense")],
        "threads": torch.get_num_threads(),
        "freed_memory_retained": retained,
        "environment": describe_environment(place),
    }
    for row in report["steps"]:
        print(f"rank {row['rank']}: {row['seconds'] * 1e3:.1f} ms, loop {row['seconds_loop'] * 1e3:.1f} ms, "
              f"{row['times_faster']:.1f}x faster")  # fmt: skip
    for row in report["memory"]:
        print(f"{row['network']}: {row['bytes_per_particle'] / 1e6:.2f} MB per particle, "
              f"at 50 {row['peak_bytes'][50] / 1e9:.2f} GB, limit {row['limit_at_50'] / 1e9:.2f} GB")  # fmt: skip
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"particles-{arguments.device}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
