"""How much memory particles will take, known before they do."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayestrain.errors import ConfigError
from bayestrain.infer.method import MakeOptimizer, refuse_lbfgs
from bayestrain.posterior.joint import Joint

CACHE = 48 << 20
"""On a CPU, particles go through the network so many at a time that their activations take about these bytes."""

BACKWARD = 2
"""What a pass needs at its peak: so many times what is saved for the way back, and the largest tensor on the way."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's settings, from malloc.h; 32 MiB is the most that the second one takes."""

MOST_ENTRIES = 2**31 - 1
"""CUDA's libraries take no tensor with more entries."""

PREDICTED_ENTRIES = 1 << 28
"""When particles predict, no tensor on the way should have more: 1 GiB in single precision."""

FEW = 1024
"""So few networks times inputs predict at once, whatever they need."""

PART = 8
"""One in so many inputs is tried, to see how much memory all would take."""

RESERVE = 0.9
"""Part of the free memory that a run may plan with."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training will take: parameters, gradients and the optimiser's state of all particles, and activations
    of as many particles as go through the network at once (`chunk`). `available` is what is free, None if unknown."""

    particles: int
    held: int
    per_particle: int
    chunk: int
    available: int | None

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.chunk * self.per_particle

    def __str__(self) -> str:
        free = "" if self.available is None else f" of {_size(self.available)} free"
        return (
            f"{self.particles} particles need about {_size(self.total)}{free}: {_size(self.held)} for weights, "
            f"gradients and the optimiser, {_size(self.chunk * self.per_particle)} for activations of {self.chunk} "
            "particles at a time"
        )


def held_bytes(shapes: Sequence[Tensor], n: int, states: float) -> int:
    """Bytes of n particles: weights, gradients, and `states` numbers of the optimiser per weight."""
    return int(n * sum(tensor.numel() * tensor.element_size() for tensor in shapes) * (2 + states))


def optimizer_states(make: MakeOptimizer, named: Sequence[tuple[str, Tensor]], device: torch.device) -> float:
    """How many numbers an optimiser keeps per weight of a network, which is given with the names of particles.

    Found by letting it take one step with small tensors of these names, for it may treat some in its own way.
    """
    if not named:
        return 0.0
    probes = [
        (name, torch.zeros(1, *(2 for _ in tensor.shape), device=device, requires_grad=True)) for name, tensor in named
    ]
    for _, probe in probes:
        probe.grad = torch.ones_like(probe)
    optimizer = make(probes)
    refuse_lbfgs(optimizer)
    optimizer.step()
    kept = 0.0
    for (_, tensor), (_, probe) in zip(named, probes, strict=True):
        states = [s for s in optimizer.state[probe].values() if isinstance(s, Tensor) and s.ndim > 0]
        kept += tensor.numel() * sum(state.numel() for state in states) / probe.numel()
    return kept / sum(tensor.numel() for _, tensor in named)


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.bytes = max(self.bytes, made.numel() * made.element_size())
            self.entries = max(self.entries, made.numel())
        return made


class Activations(NamedTuple):
    """What one particle makes on its way through the network and back: bytes, and entries of the largest tensor."""

    bytes: int
    entries: int


def activations(joint: Joint, one: dict[str, Tensor], x: Tensor, y: Tensor) -> Activations:
    """What one particle needs, measured on a copy of it."""
    point = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_floating_point())
        for name, tensor in one.items()
    }
    own = {tensor.untyped_storage().data_ptr() for tensor in (*point.values(), x, y)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(tensor):  # a checkpoint's, and such networks are refused
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    devices = [x.device] if x.device.type == "cuda" else []
    keep_noted = torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept)
    with torch.enable_grad(), torch.random.fork_rng(devices=devices), keep_noted, _Largest() as largest:
        joint.batched({name: tensor[None] for name, tensor in point.items()}, "likelihood", x, y)  # as a step runs it
    return Activations(BACKWARD * (sum(saved.values()) + int(largest.bytes)), int(largest.entries))


@torch.no_grad()
def predicted_at_once(joint: Joint, particles: dict[str, Tensor], x: Tensor, batch_size: int) -> tuple[int, int]:
    """How many particles and how many inputs go through the network at once, for predictions of `x`.

    What a part of the inputs makes in one particle is measured; not where there are few of them, which always fit.
    Particles that train one by one predict so, too.
    """
    n, batch = len(next(iter(particles.values()))), min(batch_size, len(x))
    most = 1 if joint.alone else n
    if n * batch <= FEW:
        return most, batch
    part = -(-batch // PART)
    with _Largest() as largest:
        joint.batched({name: tensor[:1].detach() for name, tensor in particles.items()}, "outputs", x[:part])
    # Too much where the largest is a weight that is formed, which does not grow with the inputs.
    each = int(largest.entries) * batch / part
    fitting = PREDICTED_ENTRIES / max(each, 1.0)
    return min(most, max(1, int(fitting))), max(1, int(batch * min(1.0, fitting)))


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device, as far as the system tells; of a CPU, within the limits of a container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found += [int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if "MemAvailable" in line]
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and Path(used).exists() and (text := Path(limit).read_text().strip()).isdigit():
            found.append(int(text) - int(Path(used).read_text()))
    return max(min(found), 0) if found else None


def retain_freed_memory() -> bool:
    """Let this process keep memory that it frees, where the C library is glibc; whether that was possible.

    By default glibc gives a large block back to the system as soon as it is freed, and the next step pays for it again,
    page by page. A training step on a CPU makes and frees the same large tensors over and over.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_MMAP_THRESHOLD, 1 << 25))


def plan(
    n: int, held: int, allocated: int, one: Activations, device: torch.device, chunk: int | None
) -> MemoryEstimate:
    """Choose how many particles go through the network at once; refuse what cannot fit.

    Args:
        held: bytes that all particles' weights, gradients and optimiser state take; `allocated` of them already do.
        one: what one particle makes on its way.
        chunk: the user's choice, or None to find one.
    """
    available, per_particle = available_bytes(device), one.bytes
    free = None if available is None else int(available * RESERVE) - (held - allocated)
    if chunk is None:
        wanted = CACHE // max(per_particle, 1) if device.type == "cpu" else n
        fitting = n if free is None else free // max(per_particle, 1)
        chunk = max(1, min(n, wanted, fitting, MOST_ENTRIES // max(one.entries, 1)))
    estimate = MemoryEstimate(n, held, per_particle, min(chunk, n), available)
    if free is None or available is None or estimate.chunk * per_particle <= free:
        return estimate
    if free >= per_particle:
        advice = f"Use chunk={max(1, free // max(per_particle, 1))}, or leave chunk out."
    else:
        each = held // n
        most = int((available * RESERVE + allocated - per_particle) // max(each, 1))
        advice = f"Use at most {most} particles." if most >= 2 else "Use smaller batches, or a smaller network."
    raise ConfigError(f"This cannot fit: {estimate}. {advice}")


def _size(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "GB" else f"{count:,.1f} GB"
        count /= 1000
    raise AssertionError
