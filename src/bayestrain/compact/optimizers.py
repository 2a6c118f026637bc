"""What follows when a parameter is cut: the state of its optimiser, and running averages of weights such as an EMA."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from bayestrain.errors import ConfigError
from bayestrain.nn.factorized import FactorizedWeight

_earlier_shapes: Any = WeakTensorKeyDictionary()  # parameters that were cut, with the shapes they had
_checked: WeakSet[Optimizer] = WeakSet()  # optimisers that have made a step since the latest cut
_register_once = cache(register_optimizer_step_pre_hook)


def carry_state_(
    optimizer: Optimizer | None, parameter: Tensor, before: torch.Size, take: Callable[[Tensor], Tensor] | None
) -> None:
    """Slice the state of a parameter, which had the shape `before`, with `take`; without it the state restarts.

    An optimiser not given here that has state of the old shape refuses its next step: a fused one would read too far.
    """
    _register_once(_refuse_old_state)
    _checked.clear()
    _refuse_other_averages()
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
    if optimizer in _checked:
        return
    for parameter, shapes in list(_earlier_shapes.items()):
        for value in optimizer.state.get(parameter, {}).values():
            known = isinstance(value, Tensor) and any(_fits(value, shape) for shape in shapes)
            if known and not _fits(value, parameter.shape):
                raise ConfigError(
                    f"{type(optimizer).__name__} has state of shape {tuple(value.shape)} for a core of "
                    f"{tuple(parameter.shape)}, which compact_ has cut. Call compact_(model, optimizer=optimizer), so "
                    "that the state follows, or make a new optimiser."
                )
    _checked.add(optimizer)


def _fits(value: Tensor, shape: torch.Size) -> bool:
    """Whether state is of a parameter of this shape, or of its rows or columns as Adafactor's is."""
    return value.ndim == len(shape) and all(n in (1, size) for n, size in zip(value.shape, shape, strict=True))


@torch.no_grad()
def restart_average_(averaged: nn.Module, model: nn.Module) -> None:
    """Start the average of every factorised weight again, from the model's; that of all else continues.

    Call it with an `AveragedModel`, or any copy of the model that holds averages, after `compact_` and after a step of
    the prior that aligns rank indices: the mean of cores that are turned differently is no average of the weights.
    """
    old, new = ([m for m in one.modules() if isinstance(m, FactorizedWeight)] for one in (averaged, model))
    if [(weight.format, weight.layout) for weight in old] != [(weight.format, weight.layout) for weight in new]:
        raise ConfigError("The average is of another network: its factorised weights are not those of the model.")
    for own, weight in zip(old, new, strict=True):
        own.rank_state = None
        own.load_state_dict({name: value.to(own.cores[0].device) for name, value in weight.state_dict().items()})


@cache
def _refuse_other_averages() -> None:
    """Let `AveragedModel` say what to do when its model was cut, instead of that shapes do not match."""
    update: Any = AveragedModel.update_parameters

    @wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        for (name, own), new in zip(self.module.named_parameters(), model.parameters(), strict=False):
            if own.shape != new.shape and "cores." in name:
                raise ConfigError(
                    f"{name} has the shape {tuple(new.shape)} since the last cut, its average {tuple(own.shape)}. Call "
                    "bayestrain.compact.restart_average_(averaged, model), or start averaging after the last cut."
                )
        update(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
