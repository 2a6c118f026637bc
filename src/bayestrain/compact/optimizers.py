"""What happens to an optimiser's state when a parameter is cut."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from bayestrain.compact.averages import refuse_other_shapes
from bayestrain.errors import ConfigError

_earlier_shapes: Any = WeakTensorKeyDictionary()
"""Parameters that were cut, with the shapes they had."""

_register_once = cache(register_optimizer_step_pre_hook)


def carry_state_(
    optimizer: Optimizer | None, parameter: Tensor, before: torch.Size, take: Callable[[Tensor], Tensor] | None
) -> None:
    """Slice the state of a parameter, which had the shape `before`, with `take`; without it the state restarts.

    An optimiser not given here that has state of the old shape refuses its next step: a fused one would read too far.
    """
    _register_once(_refuse_old_state)
    refuse_other_shapes()
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
    _earlier_shapes.setdefault(parameter, []).append(before)
    if optimizer is None or not (known := optimizer.state.pop(parameter, {})):
        return
    moments = {key: value for key, value in known.items() if isinstance(value, Tensor) and value.ndim}
    if take is not None and all(value.shape == before for value in moments.values()):
        optimizer.state[parameter] = known | {key: take(value) for key, value in moments.items()}
    elif isinstance(optimizer, torch.optim.SGD) and moments:
        # Fused SGD needs a buffer of all parameters or of none; one of zeros does what none does, without dampening.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _refuse_old_state(optimizer: Optimizer, *_: object) -> None:
    for parameter, shapes in list(_earlier_shapes.items()):
        state = optimizer.state.get(parameter, {})
        for value in state.values():
            if isinstance(value, Tensor) and value.shape != parameter.shape and value.shape in shapes:
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of shape {tuple(value.shape)} for a core that compact_ has "
                    f"cut to {tuple(parameter.shape)}. Call compact_(model, optimizer=optimizer), so that the state "
                    "follows, or make a new optimiser."
                )
        if state:  # it has followed: no need to check this in every step
            del _earlier_shapes[parameter]
