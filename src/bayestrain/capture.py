"""A training step as a CUDA graph: hundreds of small kernels launched at once instead of one by one."""

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from bayestrain.errors import CaptureWarning
from bayestrain.prior import Prior

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

STEADY = 2
"""Ordinary steps before one is captured: libraries set themselves up, the optimiser makes its state."""


def can_capture(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of this optimiser can be captured: on a GPU, with a learning rate that is read from there."""
    ready = "fused" if isinstance(optimizer, torch.optim.SGD) else "capturable"
    return all(
        group.get(ready) and isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in optimizer.param_groups
    )


class Capture:
    """Takes the steps of a loop: ordinary ones at first, then one is recorded, and its like are replayed.

    What a step reads and changes (parameters, lambda, the optimiser's state) must stay where it is in memory; whoever
    moves it calls `forget`. What a step returns is overwritten by the next one.
    """

    def __init__(self) -> None:
        self.recorded: RecordedStep | None = None
        self.steady: Counter[torch.Size] = Counter()
        """Ordinary steps since the last `forget`, by the shape of the batch."""
        self.refused = False
        """Whether recording has failed; it is not tried again."""

    def forget(self) -> None:
        """Shapes or places in memory have changed: record anew, after steps that let everything settle."""
        self.recorded, self.steady = None, Counter()

    def step(
        self, advance: Step, x: Tensor, y: Tensor, prior: Prior | None, optimizer: torch.optim.Optimizer
    ) -> tuple[Tensor, ...]:
        """Take the step ``advance(x, y)``, which ends with ``prior.step()`` if there is a prior."""
        if (prior is not None and prior.aligns_next) or self.refused or not can_capture(optimizer):
            return advance(x, y)  # an alignment is rare, and no work for a graph
        if self.recorded is None and self.steady[x.shape] >= STEADY:
            self._record(advance, x, y, prior, optimizer)
        if self.recorded is None or not self.recorded.fits(x, y):
            self.steady[x.shape] += 1
            return advance(x, y)
        if prior is not None:
            prior.steps += 1  # all else that a step changes is on the device
        return self.recorded.replay(x, y)

    def _record(
        self, advance: Step, x: Tensor, y: Tensor, prior: Prior | None, optimizer: torch.optim.Optimizer
    ) -> None:
        counted = 0 if prior is None else prior.steps
        try:
            self.recorded = RecordedStep(advance, x, y)
        except RuntimeError as error:
            self.refused = True
            optimizer.zero_grad()  # half a step has left gradients that were never computed
            warnings.warn(
                f"This step cannot be captured in a CUDA graph and goes on uncaptured, which is slower: {error}",
                CaptureWarning,
                stacklevel=4,
            )
        if prior is not None:
            prior.steps = counted  # recorded, but not taken


class RecordedStep:
    """One step, recorded without being taken; `replay` takes it for another batch of the same shape."""

    def __init__(self, step: Step, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(x.device):
            torch.cuda.synchronize()
            stream, generator = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
            random = generator.clone_state()
            try:
                with torch.cuda.graph(self.graph):
                    self.results = step(self.x, self.y)
            except RuntimeError:
                generator.graphsafe_set_state(random)  # its own still waits for the recording
                raise
            finally:
                torch.cuda.set_stream(stream)  # a recording that fails does not leave its own

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether a batch has the shape that was recorded."""
        return (
            x.shape == self.x.shape and y.shape == self.y.shape and (x.dtype, y.dtype) == (self.x.dtype, self.y.dtype)
        )

    def replay(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Take the step; the tensors returned are overwritten by the next replay."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.results
