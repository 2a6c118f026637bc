"""What layers need to follow plans: the machine they run on, and merged factors kept between calls."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bayestrain import plans

Formed = TypeVar("Formed")

MEASURED: dict[str, plans.Machine] = {}
"""Machines that were calibrated in this process, by kind of device."""

MOST_KEPT = 256
"""Shapes of inputs whose plans a layer remembers."""

COMPILED_ROWS, COMPILED_PLACES = 256, 256 * 256
"""Batch, and positions of a convolution's output, that a compiled layer is planned for: its plan must not depend on the
batch, or every size is compiled anew."""


def machine(device: str, dtype: torch.dtype) -> plans.Machine:
    """What a plan's cost is reckoned with on this kind of device, for products of this type."""
    tf32 = device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _machine(device, dtype, tf32, torch.get_num_threads(), MEASURED.get(device))


@contextmanager
def tf32_products() -> Iterator[None]:
    """Float32 matrix products on a GPU in TF32, only here.

    PyTorch has an older and a newer way to say so, and whoever used the newer one cannot read the older one.
    """
    matmul, elsewhere = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    kept, untouched = matmul.fp32_precision, elsewhere.fp32_precision
    set_precision: Callable[[str], None] = torch.set_float32_matmul_precision
    try:
        before, tf32 = torch.get_float32_matmul_precision(), "high"
    except RuntimeError:
        before, tf32 = matmul.fp32_precision, "tf32"
        set_precision = partial(setattr, matmul, "fp32_precision")
    set_precision(tf32)
    try:
        yield
    finally:
        set_precision(before)
        matmul.fp32_precision, elsewhere.fp32_precision = kept, untouched


@lru_cache(maxsize=64)
def _machine(kind: str, dtype: torch.dtype, tf32: bool, threads: int, measured: plans.Machine | None) -> plans.Machine:
    if kind == "cuda":
        found = measured or plans.CUDA
        if dtype in (torch.bfloat16, torch.half):
            return found.faster(2.0)
        return found.faster({torch.float32: 1.0 if tf32 else 0.15}.get(dtype, 0.15))
    found = measured or plans.CPU_THREAD
    return found.faster(threads * {torch.float64: 0.5}.get(dtype, 1.0))


@torch.no_grad()
def calibrate(device: torch.device | str = "cpu") -> plans.Machine:
    """Measure a device's rate and bandwidths, which takes about a second, and plan with them in this process.

    What is not measured (how the rate falls for small products, the cost of an operation) stays as it ships. A layer in
    evaluation mode goes on with the plans it has made until its next ``eval()``.
    """
    place = torch.device(device)
    known = plans.CUDA if place.type == "cuda" else plans.CPU_THREAD
    size = 4096 if place.type == "cuda" else 1024
    a, b = torch.randn(size, size, device=place), torch.empty(size, size, device=place)
    with tf32_products() if place.type == "cuda" else nullcontext():
        product = _seconds(lambda: torch.mm(a, a, out=b), place)
    turned = b.view(size // 32, 32, size).transpose(0, 1)
    copying = _seconds(lambda: turned.copy_(a.view(32, size // 32, size)), place)
    reading = _seconds(lambda: torch.mv(a, a[0]), place)
    threads = 1 if place.type == "cuda" else torch.get_num_threads()
    rate = 2 * size**3 / product / threads / (size / (size + known.half)) ** 3
    moved = 4 * size**2
    MEASURED[place.type] = replace(
        known, rate=rate, conv_rate=known.conv_rate * rate / known.rate, bandwidth=2 * moved / copying,
        reading=moved / reading,
    )  # fmt: skip
    return MEASURED[place.type]


def _seconds(work: Callable[[], object], place: torch.device, rounds: int = 15) -> float:
    """The median time of some work."""
    times = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def traced() -> bool:
    """Whether the pass is being recorded for other inputs: then its plan must not depend on this one."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def transformed() -> bool:
    """Whether a transformation of `torch.func` or forward-mode differentiation is at work: only plain torch will do."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class Kept:
    """What a layer formed for inference, kept as long as its cores are the same; and the plan it last ran.

    A change is seen by the tensors' version counters and addresses. Writing through ``core.data`` hides it from the
    counter, and so does a replayed CUDA graph; a call of ``train()`` or ``eval()``, or any pass with gradients, makes
    all be formed anew. Tensors made in inference mode have no counter; for these `run` must not be called.
    """

    def __init__(self) -> None:
        self.plan: plans.Plan | None = None
        self._key: list[int] = []
        self._held: list[Tensor] = []
        self._runs: dict[object, object] = {}
        self._formed: dict[object, object] = {}

    def forget(self) -> None:
        """Drop what was formed."""
        if self._key:
            self._key, self._held, self._runs, self._formed = [], [], {}, {}

    def run(self, cores: Collection[Tensor], name: object, make: Callable[[], Formed]) -> Formed:
        """What `make` returns for inputs of this name, from before if it can be."""
        key = [number for core in cores for number in (core.data_ptr(), core._version)]
        if key != self._key:
            self.forget()
            # The cores are held, so that no other tensor can come to lie at their address.
            self._key, self._held = key, [core.detach() for core in cores]
        found = self._runs.get(name)
        if found is None:
            if len(self._runs) >= MOST_KEPT:
                self._runs.clear()
            found = self._runs[name] = make()
        return found  # type: ignore[return-value]

    def formed(self, name: object, form: Callable[[], Formed]) -> Formed:
        """What `form` returns, formed once for all inputs that need it. Only inside of `run`."""
        if name not in self._formed:
            self._formed[name] = form()
        return self._formed[name]  # type: ignore[return-value]

    def __deepcopy__(self, memo: object) -> "Kept":
        return Kept()

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()
