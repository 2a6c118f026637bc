"""What happens to an optimiser's state when a parameter changes its shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from bayestrain.errors import ConfigError

_left_behind: Any = WeakTensorKeyDictionary()
"""Parameters that were cut without their optimiser, with the shapes they had."""


def check_optimizer(
    optimizer: torch.optim.Optimizer, layer: str, leaves: Iterable[Tensor | None], *, slices: bool
) -> None:
    """Refuse an optimiser whose state cannot follow a cut of these parameters."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS keeps one flat vector for all parameters, which cannot follow their new shapes. "
            "Compact without optimizer=, then make a new one."
        )
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for k, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if leaf.requires_grad and id(leaf) not in known:
            raise ConfigError(f"The optimiser does not hold core {k} of layer {layer!r}. Pass the one that trains it.")
        for key, value in optimizer.state.get(leaf, {}).items() if slices else ():
            if isinstance(value, Tensor) and value.ndim and value.shape != leaf.shape:
                raise ConfigError(
                    f"The optimiser's state {key!r} for core {k} of layer {layer!r} has shape {tuple(value.shape)}, "
                    f"not the core's {tuple(leaf.shape)}, and cannot be sliced. Leave rule out: the state restarts."
                )


def slice_state_(optimizer: torch.optim.Optimizer, parameter: Tensor, take: Callable[[Tensor], Tensor]) -> None:
    """Cut everything that an optimiser knows entry by entry of a parameter as the parameter itself was cut."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            state[key] = take(value)


def restart_state_(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Forget what an optimiser knows of a parameter that has a new shape."""
    known: dict[str, Any] = optimizer.state.pop(parameter, {})
    if isinstance(optimizer, torch.optim.SGD) and known.get("momentum_buffer") is not None:
        # Fused SGD needs a buffer of all parameters or of none; one of zeros does what none does, without dampening.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def expect_no_old_state(parameter: Tensor, shape: torch.Size) -> None:
    """Make the next step of an optimiser fail that still has state for a parameter of this earlier shape.

    PyTorch does not check this everywhere: fused optimisers read beyond the end of the new parameter.
    """
    _watch_optimizers()
    _left_behind.setdefault(parameter, []).append(shape)


@lru_cache(maxsize=1)
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_old_state)


def _refuse_old_state(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter, shapes in list(_left_behind.items()):
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.shape in shapes:
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of shape {tuple(value.shape)} for a core that compact_ has "
                    f"cut to {tuple(parameter.shape)}. Call compact_(model, optimizer=optimizer), so that the state "
                    "follows, or make a new optimiser."
                )
