"""Running averages of weights, such as an EMA: cores cannot be averaged across a cut."""

from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bayestrain.errors import ConfigError
from bayestrain.nn.factorized import FactorizedWeight


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
def refuse_other_shapes() -> None:
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
