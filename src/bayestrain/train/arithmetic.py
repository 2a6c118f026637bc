"""How a step computes on its device: the precision of products, and how images lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bayestrain.layers import TTConv2d


def lowered(precision: str, device: torch.device) -> torch.autocast:
    """Autocast for "bf16"; without its cache on a GPU, where a captured step would go on with weights of another."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=device.type != "cuda")


@contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """For "tf32" on a GPU: float32 matrix products in TF32, forward and backward, and only here."""
    if precision != "tf32" or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def wants_channels_last(model: nn.Module, device: torch.device | str) -> bool:
    """Whether a model's images should lie channels last: on a GPU convolutions are faster on them."""
    return torch.device(device).type == "cuda" and any(
        isinstance(module, nn.Conv2d | TTConv2d) for module in model.modules()
    )


def channels_last(x: Tensor) -> Tensor:
    """The same images, channels last in memory; what is no batch of images stays as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
