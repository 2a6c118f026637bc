"""Models, inputs and reference solutions that the tests of compression share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bayestrain.compress.curves import Target

SHAPES = {
    "linear": (12, 18),
    "kernel": (8, 6, 3, 3),
    "point": (9, 12, 1, 1),
    "line": (6, 8, 5),
    "block": (4, 6, 2, 2, 2),
}


class Network(nn.Module):
    """Two convolutions and a linear layer, for images of 4 channels and 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 12, 3, stride=2, bias=False)
        self.head = nn.Linear(12 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).flatten(1))


def images(number: int = 64) -> Tensor:
    """Smooth images: their patches are far from white."""
    return nn.functional.avg_pool2d(torch.randn(number, 4, 12, 12), 5, stride=1)


def moment(size: int) -> Tensor:
    """A second moment with eigenvalues over three decades."""
    q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    return (q * torch.logspace(0, -3, size, dtype=torch.float64)) @ q.mT


def target(shape: tuple[int, ...], calibrated: str = "") -> Target:
    """A random weight of slowly falling singular values, compared by itself, by patches or by channels."""
    outputs, inputs, *taps = shape
    weight = torch.randn(shape, dtype=torch.float64)
    weight *= torch.logspace(0, -1, inputs, dtype=torch.float64).reshape(1, -1, *[1] * len(taps))
    size = {"": 0, "patches": weight[0].numel(), "channels": inputs}[calibrated]
    return Target(weight, moment(size) if size else None)


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """A matrix with only the first singular directions."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the model keeps its modules, parameters, values, modes and hooks."""

    def held() -> tuple[Any, ...]:
        modules = dict(model.named_modules(remove_duplicate=False))
        kept = [(module.training, len(module._forward_pre_hooks)) for module in modules.values()]
        return modules, dict(model.named_parameters(remove_duplicate=False)), kept

    before = held()
    values = model.state_dict()
    state = {n: t.clone() for n, t in values.items() if isinstance(t, Tensor) and not nn.parameter.is_lazy(t)}
    yield
    for own, old in zip(held()[:2], before[:2], strict=True):
        assert own.keys() == old.keys()
        assert all(own[name] is thing for name, thing in old.items())
    assert held()[2] == before[2]
    for name, value in state.items():
        assert_close(model.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)
