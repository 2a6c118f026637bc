"""Refuse networks that run parts of themselves again on the way back: by then other weights stand in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from bayestrain.errors import ConfigError
from bayestrain.posterior.joint import Joint

ADVICE = (
    "The network runs parts of itself again in the backward pass (torch.utils.checkpoint?), when a particle's weights "
    "are no longer in it. Turn that off; a smaller chunk saves memory, too."
)


def refuse_recomputing(joint: Joint, one: dict[str, Tensor], x: Tensor, y: Tensor) -> bool:
    """Take one particle's gradient while the network's own weights, which nobody should see, are not finite.

    False if that tells nothing, because the gradient is broken anyway.
    """
    point = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in one.items()}
    own = [p for name, p in joint.named_parameters() if name in point]
    try:
        if _is_finite(joint, point, own, [torch.full_like(p, math.nan) for p in own], x, y):
            return True
        if _is_finite(joint, point, own, [p.detach() for p in own], x, y):
            raise ConfigError(ADVICE)
        return False
    except RuntimeError as error:  # within vmap torch notices, in one of two ways
        if isinstance(error, CheckpointError) or "escaped from inside a function being vmapped" in str(error):
            raise ConfigError(ADVICE) from error
        raise


def _is_finite(
    joint: Joint, point: dict[str, Tensor], own: list[torch.nn.Parameter], values: list[Tensor], x: Tensor, y: Tensor
) -> bool:
    """Whether the particle's gradient is, with these values in the network's own weights."""
    kept = [p.data for p in own]
    leaves = [tensor for tensor in point.values() if tensor.requires_grad]
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices=devices):  # the same random numbers each time
        try:
            _stand_in(own, values)
            found = joint.batched({name: tensor[None] for name, tensor in point.items()}, "likelihood", x, y)
            gradients = torch.autograd.grad(found["density"].sum(), leaves, allow_unused=True)
            return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        finally:
            _stand_in(own, kept)


def _stand_in(own: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    for p, value in zip(own, values, strict=True):
        p.data = value
    torch.clear_autocast_cache()  # what it holds was made of other values
