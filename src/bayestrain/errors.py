"""Exceptions and warnings; every message states the rule, the value that broke it, and what to type next."""

from typing import SupportsIndex


class BayesTrainError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(BayesTrainError, ValueError):
    """An argument or setting is outside what the function accepts."""


class ShapeError(BayesTrainError, ValueError):
    """Tensor shapes, modes or ranks do not fit each other."""


class ConversionError(BayesTrainError, TypeError):
    """A module cannot be converted to a factorised layer."""


class DataError(BayesTrainError):
    """A file or data set is missing, damaged or not the expected one."""


class WriteError(BayesTrainError, OSError):
    """A file cannot be written: the disk is full, or this user may not write there."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}. Make room, or choose another place."


class TrainingError(BayesTrainError):
    """Training cannot continue: the loss is not finite, or a checkpoint does not fit."""


class Interrupted(BayesTrainError):
    """The user stopped a run. `folder` holds the checkpoint to resume from."""

    def __init__(self, folder: str, epoch: int) -> None:
        again = f"bayestrain train --resume --out {folder}, or with the same call of fit and resume=True"
        super().__init__(f"Stopped. The checkpoint of epoch {epoch} is in {folder}. Resume with {again}.")
        self.folder, self.epoch = folder, epoch


class ParticleWarning(UserWarning):
    """Particles of a posterior need attention: one is not finite, or all have collapsed to one."""


class HoldWarning(UserWarning):
    """A normalisation may make the scale of a layer's weight free, but the network could not be traced to be sure."""


class CollapseWarning(UserWarning):
    """The prior erases the network instead of pruning its ranks: it is too strong, or came too early."""


class CaptureWarning(UserWarning):
    """A training step cannot be captured in a CUDA graph; training continues uncaptured."""


class DecayWarning(UserWarning):
    """An optimiser applies weight decay to cores, which already have a prior."""


def check_counts(**counts: object) -> None:
    """Raise unless all numbers are integers of at least 1, or None."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, SupportsIndex) or int(value) < 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless the argument called `name` is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {choices}, got {value!r}.")
