"""How layers start: the variance of a fresh weight, and the bias."""

import math

import torch
from torch import Tensor

from bayestrain.errors import ConfigError

INITS = ("he", "paper")


def start_variance(init: str, *, fan_in: int, entries: int) -> float:
    """Variance of the full weight's entries: He's ``2 / fan_in``, or the paper's ``sqrt(2 / entries)``."""
    if init not in INITS:
        raise ConfigError(f"init must be one of {INITS}, got {init!r}.")
    return 2.0 / max(fan_in, 1) if init == "he" else math.sqrt(2.0 / max(entries, 1))


def default_bias(size: int, fan_in: int, like: Tensor) -> Tensor:
    """Uniform in ``+-1/sqrt(fan_in)``, as `nn.Linear` and `nn.Conv2d` start theirs."""
    bound = 1.0 / math.sqrt(max(fan_in, 1))
    return torch.empty(size, dtype=like.dtype, device=like.device).uniform_(-bound, bound)
