"""A training step as a CUDA graph: hundreds of small kernels launched at once instead of one by one."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bayestrain.errors import CaptureWarning
from bayestrain.perf.stacks import Together
from bayestrain.prior import NormalPrior

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

SETTLED = 2  # ordinary steps before one is recorded: libraries set themselves up, and the optimiser makes its state


def can_capture(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of this optimiser can be captured: on a GPU, with a learning rate that is read from there."""
    ready = "fused" if isinstance(optimizer, torch.optim.SGD) else "capturable"
    return all(
        group.get(ready) and isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in optimizer.param_groups
    )


class RecordedStep:
    """One step, recorded without being taken; `replay` takes it for another batch of the same shape."""

    def __init__(self, step: Step, x: Tensor, y: Tensor, side: torch.cuda.Stream | None) -> None:
        self.x, self.y = x.clone(), y.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(x.device):
            torch.cuda.synchronize()
            current, generator = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
            random = generator.clone_state()
            try:
                # Thread-local: what other threads of the process do on the device does not break the recording.
                with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                    self.results = step(self.x, self.y)
            except RuntimeError:
                generator.graphsafe_set_state(random)  # its own still waits for the recording
                raise
            finally:
                torch.cuda.set_stream(current)  # a recording that fails does not restore it

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether a batch has the shapes and types that were recorded."""
        return (x.shape, x.dtype, y.shape, y.dtype) == (self.x.shape, self.x.dtype, self.y.shape, self.y.dtype)

    def replay(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Take the step; the next replay overwrites the tensors returned."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.results


class Capture:
    """Takes the steps of a loop: ordinary ones at first, then one is recorded, and those like it are replayed.

    What a step reads and changes (parameters, lambda, the optimiser's state) must stay where it is in memory; whoever
    moves it calls `forget`. The tensors a step returns are overwritten by the next one.
    """

    def __init__(self) -> None:
        self.refused = False  # whether recording has failed; it is not tried again
        self._beside: torch.cuda.Stream | None = None
        self.side: torch.cuda.Stream | None = None
        """Where steps settle and are recorded: libraries keep handles and workspaces per stream and thread."""
        self.forget()

    def forget(self) -> None:
        """Record again, after some ordinary steps: shapes or places in memory have changed."""
        self.recorded: RecordedStep | None = None
        self._together = Together()
        self._settled: Counter[torch.Size] = Counter()  # ordinary steps by the shape of the batch

    def step(
        self, advance: Step, x: Tensor, y: Tensor, prior: NormalPrior | None, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensor, ...]:
        """Take the step ``advance(x, y)``, which counts with ``prior.step()`` or `hold_` if there is a prior."""
        if (prior is not None and prior.aligns_next) or self.refused or not can_capture(optimizer):
            return advance(x, y)
        if self.recorded is None and self._settled[x.shape] >= SETTLED:
            self._record(advance, x, y, prior, optimizer)
        if self.recorded is None or not self.recorded.fits(x, y):
            self._settled[x.shape] += 1
            return self._aside(advance, x, y)
        if prior is not None:
            prior.steps += 1  # everything else that a step changes is on the device
        return self.recorded.replay(x, y)

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """The start of a step, which a GPU takes beside what follows, until `join`."""
        if device.type == "cuda":
            self._beside = self._beside or torch.cuda.Stream(device)
            self._beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._beside):
            yield

    def join(self, device: torch.device) -> None:
        """Let what follows wait for what was done `beside`."""
        if self._beside is not None:
            torch.cuda.current_stream(device).wait_stream(self._beside)

    def _aside(self, advance: Step, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """An ordinary step on the stream on which one will be recorded."""
        self.side, current = self.side or torch.cuda.Stream(x.device), torch.cuda.current_stream(x.device)
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side), self._together():
            found = advance(x, y)
        current.wait_stream(self.side)
        return found

    def _record(
        self, advance: Step, x: Tensor, y: Tensor, prior: NormalPrior | None, optimizer: torch.optim.Optimizer
    ) -> None:
        counted = 0 if prior is None else prior.steps
        try:
            with self._together():
                self.recorded = RecordedStep(advance, x, y, self.side)
        except RuntimeError as error:
            self.refused = True
            optimizer.zero_grad()  # half a step has left gradients that were never computed
            warnings.warn(
                f"This step cannot be captured in a CUDA graph. Training continues, but is slower: {error}",
                CaptureWarning,
                stacklevel=4,
            )
        if prior is not None:
            prior.steps = counted  # the step was recorded but not taken
