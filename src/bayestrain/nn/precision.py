"""In which precision layers compute under autocast, and whether a pass is being traced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

LOWERED = (torch.float32, torch.float16, torch.bfloat16)
"""Types that autocast brings into its own."""


def _autocast_is_on(x: Tensor) -> bool:
    kind = x.device.type  # the meta device, for one, knows no autocast
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast: a weight is materialised in the precision of its cores."""
    return torch.autocast(x.device.type, enabled=False) if _autocast_is_on(x) else nullcontext()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for this input."""
    return _autocast_is_on(x) and x.dtype in LOWERED


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that products with this input are computed in: autocast's, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def traced() -> bool:
    """Whether the pass is being compiled, exported or traced: what it chooses must not depend on the batch."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
