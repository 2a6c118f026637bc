"""How much memory the particles of a posterior will take, measured on one of them before training starts."""

import ctypes
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bayestrain.errors import ConfigError
from bayestrain.nn import TensorConv2d

CACHE = 48 << 20  # bytes of activations, about, of the particles that run at a time on a CPU
BUSY = 32 << 20  # bytes with which convolutions of one particle keep a GPU busy; groups would only be slower
BACKWARD = 2  # a pass needs at its peak so many times what it saves for the backward pass and its largest tensor
MOST_ENTRIES = 2**31 - 1  # CUDA's libraries take no tensor with more
PREDICTED_ENTRIES = 1 << 28  # the most that a tensor may have when particles predict: 1 GiB in single precision
RESERVE = 0.9  # the part of the free memory that a run may plan with

CONTAINER_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Where Linux reports the memory that a container may use, and does use, by the version of control groups."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training will take."""

    particles: int
    held: int  # for the weights, gradients and optimiser state of all particles
    per_particle: int  # for the activations of each of `chunk` particles that run at once
    chunk: int
    available: int | None  # free now; None if unknown

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self.chunk * self.per_particle

    def __str__(self) -> str:
        free = "" if self.available is None else f" of {_size(self.available)} free"
        return (
            f"{self.particles} particles need about {_size(self.total)}{free}: {_size(self.held)} for weights, "
            f"gradients and the optimiser, {_size(self.total - self.held)} for activations of {self.chunk} particles "
            "at a time"
        )


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.bytes, self.entries = max(self.bytes, made.nbytes), max(self.entries, made.numel())
        return made


def activations(run: Callable[[], object], own: Iterable[Tensor], device: torch.device) -> tuple[int, int]:
    """The bytes that the pass `run` and its backward pass take, and the entries of the largest tensor.

    Tensors in `own`, such as parameters and inputs, do not count. Random numbers are drawn as if it had not run.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not torch._C._functorch.is_batchedtensor(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a node that saved the tensor itself and that tensor would keep each other alive

    devices = [device] if device.type == "cuda" else []
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
    with torch.enable_grad(), torch.random.fork_rng(devices=devices), hooks, _Largest() as largest:
        result = run()
    del result  # only now: while the graph is alive, no two saved tensors lie at one address
    return BACKWARD * (sum(saved.values()) + largest.bytes), largest.entries


@torch.no_grad()
def predicted_at_once(run: Callable[[int], object], particles: int, batch: int) -> tuple[int, int]:
    """How many particles, and how many inputs, should go through the network at once to predict `batch` inputs.

    ``run(k)`` must send k inputs through one particle; the largest tensor it makes is measured.
    """
    part = -(-batch // 8)
    with _Largest() as largest:
        run(part)
    # This is too much where the largest tensor is a materialised weight, which does not grow with the inputs.
    fitting = PREDICTED_ENTRIES / max(largest.entries * batch / part, 1.0)
    return min(particles, max(1, int(fitting))), max(1, int(batch * min(1.0, fitting)))


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device as far as the system reports it; that of a CPU within the limits of a container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu" or not (info := Path("/proc/meminfo")).exists():
        return None
    found = [1024 * int(line.split()[1]) for line in info.read_text().splitlines() if line.startswith("MemAvailable:")]
    for limit, used in CONTAINER_LIMITS:
        most, now = Path("/sys/fs/cgroup", limit), Path("/sys/fs/cgroup", used)
        if most.exists() and now.exists() and (text := most.read_text().strip()).isdigit():
            found.append(int(text) - int(now.read_text()))
    return max(min(found), 0) if found else None


def check_particles(model: nn.Module, n: int) -> None:
    """Raise `ConfigError` if n networks like this one cannot fit where it is, before the others are built."""
    own = [parameter for parameter in model.parameters() if not nn.parameter.is_lazy(parameter)]
    held = 4 * sum(parameter.nbytes for parameter in own)  # as `Posterior.estimate_memory` has it
    if held and (free := available_bytes(own[0].device)) is not None and n * held > free:
        needed = f"{n:,} particles need about {_size(n * held)} of {_size(free)} free for weights and the optimiser"
        raise ConfigError(f"This cannot fit: {needed}. Use at most {free // held:,} particles.")


def choose_chunk(
    n: int, held: int, allocated: int, one: tuple[int, int], model: nn.Module, device: torch.device, chunk: int | None
) -> MemoryEstimate:
    """Choose how many of n particles go through the network at once; raise `ConfigError` if they cannot fit.

    Args:
        held: bytes that all particles' weights, gradients and optimiser state take; `allocated` of them already do.
        one: the `activations` of one particle.
        chunk: the user's choice, or None to find one.
    """
    available, (size, entries) = available_bytes(device), one
    free = math.inf if available is None else available * RESERVE - (held - allocated)
    fitting = free / max(size, 1)
    if chunk is None:
        convolving = any(isinstance(module, nn.Conv2d | TensorConv2d) for module in model.modules())
        busy = device.type == "cuda" and convolving and size > BUSY
        wanted = CACHE // max(size, 1) if device.type == "cpu" else 1 if busy else n
        chunk = int(max(1, min(n, wanted, fitting, MOST_ENTRIES // max(entries, 1))))
    estimate = MemoryEstimate(n, held, size, min(chunk, n), available)
    if estimate.chunk > fitting:
        most = int((free + held - size) // max(held // n, 1))
        advice = f"Use at most {most} particles." if most >= 2 else "Use smaller batches, or a smaller network."
        advice = f"Use chunk={int(fitting)}, or leave chunk out." if fitting >= 1 else advice
        raise ConfigError(f"This cannot fit: {estimate}. {advice}")
    return estimate


def retain_freed_memory() -> None:
    """Let this process keep the memory it frees, where the C library is glibc.

    By default glibc returns a large block to the system as soon as it is freed, and the next training step pays for it
    again, page by page: a step of 20 particles on MNIST takes 1.4 times as long.
    """
    trim_threshold, mmap_threshold = -1, -3  # from malloc.h; the second one takes at most 32 MiB
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 1 << 25)


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
