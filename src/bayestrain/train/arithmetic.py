"""How a step computes on its device: the precision of products, and how images lie in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from bayestrain.layers import TTConv2d
from bayestrain.layers.planned import tf32_products


def lowered(precision: str, device: torch.device) -> torch.autocast:
    """Autocast for "bf16"; without its cache on a GPU, where a captured step would go on with weights of another."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=device.type != "cuda")


def products(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """For "tf32" on a GPU: float32 matrix products in TF32, forward and backward, and only here."""
    return tf32_products() if precision == "tf32" and device.type == "cuda" else nullcontext()


def wants_channels_last(model: nn.Module, device: torch.device | str) -> bool:
    """Whether a model's images should lie channels last: on a GPU convolutions are faster on them."""
    return torch.device(device).type == "cuda" and any(
        isinstance(module, nn.Conv2d | TTConv2d) for module in model.modules()
    )


def channels_last(x: Tensor) -> Tensor:
    """The same images, channels last in memory; what is no batch of images stays as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
