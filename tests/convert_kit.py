"""What tests of `tensorize_` share: two networks, and a watch over one that must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.testing import assert_close


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 6))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, (1, 3), stride=2, bias=False),
        nn.Flatten(), nn.Linear(8 * 4 * 3, 5),
    )  # fmt: skip


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the model keeps its modules, parameters and values."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: p.clone() for name, p in parameters.items() if not nn.parameter.is_lazy(p)}
    training = [module.training for module in model.modules()]
    yield
    after = dict(model.named_modules(remove_duplicate=False))
    assert list(after) == list(modules)
    assert all(after[name] is module for name, module in modules.items())
    assert all(p is parameters[name] for name, p in model.named_parameters(remove_duplicate=False))
    for name, value in values.items():
        assert_close(parameters[name], value, rtol=0, atol=0, equal_nan=True)
    assert training == [module.training for module in model.modules()]
