"""A training step as a CUDA graph: hundreds of small kernels launched at once instead of one by one."""

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def can_capture(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether steps of this optimiser can be captured: on a GPU, with a learning rate that is read from a tensor."""
    return device.type == "cuda" and all(
        group.get("capturable", False) and isinstance(group["lr"], Tensor) for group in optimizer.param_groups
    )


class CapturedStep:
    """One step, recorded without being taken; `replay` takes it for another batch of the same shape.

    What the step reads and changes (particles, lambda, the optimiser's state) must stay where it is in memory.
    """

    def __init__(self, step: Step, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.results = step(self.x, self.y)

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether a batch has the shape that was captured."""
        return x.shape == self.x.shape and y.shape == self.y.shape and x.dtype == self.x.dtype

    def replay(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Take the step; the tensors returned are overwritten by the next replay."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.results
