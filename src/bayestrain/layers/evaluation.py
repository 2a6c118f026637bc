"""A network in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bayestrain.layers.base import TTLayer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model.eval()``, and afterwards every module in the mode it had, whatever happened."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
            if isinstance(module, TTLayer) and mode:
                module.train()  # forgets what it formed for predictions
