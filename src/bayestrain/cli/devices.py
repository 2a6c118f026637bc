"""`--device`: from what the user says to a device that is there."""

from __future__ import annotations

import re

from bayestrain.errors import ConfigError
from bayestrain.train.settings import suggestion


def resolve(device: str) -> str:
    """The torch device meant by "auto", "cpu", "cuda", "cuda:1" or "mps"; an error if there is none."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        hint = suggestion(device, ["auto", "cpu", "cuda", "mps"])
        raise ConfigError(f"--device must be auto, cpu, cuda, cuda:N or mps, got {device}.{hint}")
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps: this machine or this PyTorch has no MPS. Use --device cpu.")
    if device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            why = "this PyTorch was built without CUDA" if torch.version.cuda is None else "PyTorch finds no GPU"
            raise ConfigError(f"--device {device}: {why}. Use --device cpu.")
        index = int(device.partition(":")[2] or 0)
        if index >= count:
            raise ConfigError(f"--device {device}: there are {count} GPUs, numbered from 0.")
    return device
