"""Steps per second and bytes per step of 1, 2 and 4 processes, of one thread each, and a model of their time.

    python benchmarks/scaling.py [--data mnist-mini] [--processes 1 2 4] [--repeats 3]

Trains a posterior by SVGD and a convolutional network on pictures of digits, counts the bytes that every step hands to
collectives, compares them with `bytes_per_step`, and fits a model of the time of a step, which it extends to 256 GPUs.
Writes ``results/benchmarks/scaling.json`` and the tables of ``docs/scaling.md``. It needs as many idle cores as
processes; with fewer, more processes only show that they give the same results.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bayestrain as bt
from bayestrain.files import write_json
from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.nn.fast import fast
from bayestrain.tables import text_table
from bayestrain.train import PriorConfig, fit
from bayestrain.train.distributed import join, rank

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "results/benchmarks/scaling.json", ROOT / "docs/scaling.md"
BATCH, PARTICLES = 128, 8
MARKS = "<!-- scaling -->\n", "<!-- /scaling -->\n"

GPU = {"bytes per second": 50e9, "operations per second": 1e14}
"""Assumed of each of 256 GPUs: one 400 Gb/s link each, and a quarter of what an H200 reaches in TF32."""


INPUT = {"allreduce_": 0, "broadcast_": 0, "alltoall_base_": 1, "allgather_": 1}
"""Collectives, and which of their arguments a process hands over."""


class Bytes(TorchDispatchMode):
    """Counts the bytes that this process hands to collectives, those of PyTorch's own wrappers included."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call.namespace == "c10d" and (name := call._schema.name.partition("::")[2]) in INPUT:
            given = args[INPUT[name]]
            self.total += sum(t.nbytes for t in (given if isinstance(given, list) else [given]))
        return call(*args, **(kwargs or {}))


def bytes_per_step(
    kind: str, processes: int, place: int, entries: int, particles: int = 1, buffers: int = 0, itemsize: int = 4
) -> int:
    """What process number `place` hands to collectives in a step, between alignments.

    `entries` are the trained numbers of a network (of one particle), `buffers` the bytes of its buffers, lambda among
    them.
    """
    if processes == 1:
        return 0
    if kind == "map":  # rows of the batch, twice; gradients; what process 0 has as buffers; two mean losses
        return 2 * 8 + entries * itemsize + buffers + 2 * itemsize
    own = particles * (place + 1) // processes - particles * place // processes
    most = max(particles * (k + 1) // processes - particles * k // processes for k in range(processes))
    columns = entries // processes + (place < entries % processes)
    # Which are alive; rows of particles and gradients; the Gram matrix; columns of directions; four sums of losses.
    return most + 2 * own * entries * itemsize + particles**2 * itemsize + particles * columns * itemsize + 4 * itemsize


def perceptron(width: int = 512) -> nn.Module:
    """A network for particles."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    tensorize_(model, TensorizeConfig(max_rank=20))
    return model


def convolutional() -> nn.Module:
    """A network for data-parallel training, without batch norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    tensorize_(model, TensorizeConfig(max_rank=16))
    return model


def trained(kind: str, width: int, steps: int, epochs: int, name: str) -> Any:
    """A run of `fit` with so many steps per epoch, that neither cuts nor aligns."""
    if name == "mnist-mini":
        pictures = bt.data.load(name).train
    else:
        from paper import fetch  # which is there in the root of the repository

        pictures = fetch.load(name).train
    x, y = next(iter(pictures.batches(steps * BATCH, shuffle=False, generator=None, device=torch.device("cpu"))))
    own: dict[str, Any] = {"prior": PriorConfig(align_every=0), "compact_every": 0, "finetune_epochs": 0}
    own |= {"epochs": epochs, "batch_size": BATCH, "progress": False, "threads": 1, "lr": 1e-3}
    if kind == "svgd":
        return fit(lambda: perceptron(width), (x, y), particles=PARTICLES, **own)
    torch.manual_seed(0)
    return fit(convolutional(), (x, y), **own)


def counted(kind: str, width: int, name: str) -> tuple[int, int]:
    """Bytes of a step, counted and by the formula: what an epoch of six steps has more than one of two."""
    totals, model = [], None
    for steps in (2, 6):
        with Bytes() as count:
            model = trained(kind, width, steps, 1, name).model
        totals.append(count.total)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    fresh = perceptron(width) if kind == "svgd" else convolutional()
    bt.RankPrior(fresh, 1)  # whose lambda the trained one has lost
    entries = sum(p.numel() for p in model.parameters())
    held = sum(b.nbytes for b in fresh.buffers())
    formula = bytes_per_step(kind, processes, rank(), entries, PARTICLES if kind == "svgd" else 1, held)
    return (totals[1] - totals[0]) // 4, formula


def work(kind: str, width: int, name: str, out: Path) -> None:
    """One process of one measurement."""
    torch.set_num_threads(1)
    if (perf := fast()) is not None:
        perf.memory.retain_freed_memory()  # as the command line does
    join(torch.device("cpu"))
    history = trained(kind, width, 15, 3, name).history
    seconds = min(after["seconds"] - before["seconds"] for before, after in pairwise(history)) / 15
    found, formula = counted(kind, width, name)
    if rank() == 0:
        out.write_text(json.dumps({"seconds": seconds, "bytes": found, "formula": formula}))


def measured(kind: str, width: int, processes: int, name: str) -> dict[str, Any]:
    """One measurement, in processes of its own."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        own = [str(Path(__file__)), "--work", kind, str(width), str(out), "--data", name]
        command = [sys.executable, *(torchrun if processes > 1 else ()), *own]
        subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return dict(json.loads(out.read_text()))


def model_of(rows: list[dict[str, Any]], cores: int) -> dict[str, float]:
    """Least squares: seconds = work * share of the work + per_byte * bytes + latency where there are several."""
    svgd = [row for row in rows if row["kind"] == "svgd" and row["processes"] <= cores]
    terms = torch.tensor([[row["entries"] / row["processes"], row["bytes"], row["processes"] > 1] for row in svgd])
    seconds = torch.tensor([[row["seconds"]] for row in svgd])
    weight = 1 / seconds  # relative errors
    found = torch.linalg.lstsq((terms * weight).double(), (seconds * weight).double()).solution.flatten().tolist()
    return dict(zip(("seconds per entry", "seconds per byte", "latency"), found, strict=True))


def on_paper(entries: float, processes: int = 256, particles: int = 1000) -> dict[str, float]:
    """A step on GPUs: the exchange, the kernel, and the passes of the particles on a batch of 1,024 inputs."""
    moved = bytes_per_step("svgd", processes, 0, int(entries), particles)
    kernel = 3 * 2 * particles**2 * entries / processes
    passes = 6 * entries * 1024 * particles / processes
    speed = GPU["operations per second"]
    exchange = moved / GPU["bytes per second"]
    found = {"entries": entries, "bytes": moved, "exchange": exchange, "kernel": kernel / speed}
    return {**found, "passes": passes / speed, "inputs": 1024 * exchange / (passes / speed)}


def tables(result: dict[str, Any]) -> str:
    """The tables of the page."""
    base = {(row["kind"], row["width"]): row["seconds"] for row in result["rows"] if row["processes"] == 1}
    rows = [
        [row["kind"], row["width"], row["processes"], f"{row['entries']:,}", f"{row['bytes']:,}", f"{row['formula']:,}",
         f"{1e3 * row['seconds']:.1f}", f"{base[row['kind'], row['width']] / row['seconds']:.2f}"]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["method", "width", "processes", "entries", "bytes counted", "formula", "ms per step", "speed-up"]
    paper = [
        [f"{row['entries']:.0e}", f"{row['bytes'] / 1e9:.2f}",
         *(f"{1e3 * row[key]:.0f}" for key in ("exchange", "kernel", "passes")), f"{row['inputs']:,.0f}"]
        for row in result["on_paper"]
    ]  # fmt: skip
    titles = [
        "entries of a particle",
        "GB sent by a GPU",
        "ms of exchange",
        "ms of kernel",
        "ms of passes",
        "inputs whose passes take as long as the exchange",
    ]
    fitted = ", ".join(f"{name} {value:.2e}" for name, value in result["model"].items())
    where = f"{result['cpu']}, {result['cores']} cores, load {result['load']:.1f} at the start; torch {result['torch']}"
    return f"{_markdown(header, rows)}\nMeasured on {where}. Fitted: {fitted}.\n\n{_markdown(titles, paper)}"


def _markdown(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def page(result: dict[str, Any]) -> str:
    """The page with these tables between the marks."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    return before + MARKS[0] + "\n" + tables(result) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist-mini")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", nargs=3, metavar=("KIND", "WIDTH", "OUT"))
    chosen = parser.parse_args()
    if chosen.work:
        return work(chosen.work[0], int(chosen.work[1]), chosen.data, Path(chosen.work[2]))
    rows, load_before = [], os.getloadavg()[0]
    cases = [("svgd", 512), ("svgd", 2048), ("map", 0)]
    for kind, width in cases:
        network = perceptron(width) if kind == "svgd" else convolutional()
        runs: dict[int, list[Any]] = {n: [] for n in chosen.processes}
        for _ in range(chosen.repeats):  # in turns, because other work on the machine comes and goes
            for n in chosen.processes:
                runs[n].append(measured(kind, width, n, chosen.data))
        for n, several in runs.items():
            entries = sum(p.numel() for p in network.parameters())
            own = {
                "seconds": statistics.median(run["seconds"] for run in several),
                "all": [run["seconds"] for run in several],
            }
            rows.append({"kind": kind, "width": width, "processes": n, "entries": entries, **several[0], **own})
            print(text_table(["", ""], [[key, str(value)] for key, value in rows[-1].items()], left_columns=1))
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(": ")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    result = {
        "rows": rows, "model": model_of(rows, os.cpu_count() or 1), "on_paper": [on_paper(2e7), on_paper(1e9)],
        "gpu": GPU, "batch": BATCH, "particles": PARTICLES, "cores": os.cpu_count(), "load": load_before,
        "cpu": names[0] if names else platform.machine(), "torch": torch.__version__, "bayestrain": bt.__version__,
    }  # fmt: skip
    write_json(RESULT, result)
    PAGE.write_text(page(result))
    return None


if __name__ == "__main__":
    main()
