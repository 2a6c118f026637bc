"""How particles start: independently, which makes the posterior diverse, or around one point, as in the paper."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from bayestrain.errors import ConfigError


def independent(build: Callable[[], nn.Module], n: int, seed: int = 0) -> list[nn.Module]:
    """Call `build` n times, each with its own random numbers; the global generator is left as it was."""
    models = []
    with torch.random.fork_rng(devices=[]):
        for i in range(n):
            torch.manual_seed(seed * 1_000_003 + i)
            models.append(build())
    return models


@torch.no_grad()
def around(model: nn.Module, n: int, scale: float = 1e-2, seed: int = 0) -> list[nn.Module]:
    """Copy a trained network n times, with Gaussian noise of `scale` times its RMS added to every trainable tensor.

    All copies lie in one mode of the posterior and stay there: cheap, but hardly more diverse than the point.
    """
    if not scale > 0:
        raise ConfigError(f"scale must be positive, or all particles coincide, got {scale}.")
    generator = torch.Generator().manual_seed(seed)
    copies = [copy.deepcopy(model) for _ in range(n)]
    for parameter in (p for twin in copies for p in twin.parameters() if p.requires_grad):
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter.device)
        parameter.add_(noise * scale * parameter.square().mean().sqrt())
    return copies
