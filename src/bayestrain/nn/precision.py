"""In which precision layers compute under autocast, and whether a pass is being traced."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad


def autocasts(x: Tensor) -> bool:
    """Whether autocast brings this input into its own type; it leaves double precision alone."""
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # the meta device has no autocast
    return on and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast: a weight is materialised in the precision of its cores."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that products with this input are computed in: autocast's, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def traced() -> bool:
    """Whether the pass is being compiled, exported or traced: what it chooses must not depend on the batch."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def transformed() -> bool:
    """Whether a transformation of `torch.func` or forward-mode differentiation is active: then plain operations run."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
