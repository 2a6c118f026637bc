"""The few exceptions BayesTrain raises on purpose.

Every message states the rule, the value that broke it, and what to do next.
"""


class BayesTrainError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(BayesTrainError, ValueError):
    """An argument or setting is outside what the function accepts."""


class ShapeError(BayesTrainError, ValueError):
    """Tensor shapes, modes or ranks do not fit each other."""


class ConversionError(BayesTrainError, TypeError):
    """A module cannot be turned into a tensor-train layer."""


class DataError(BayesTrainError):
    """A data set is missing, damaged or not the official one."""


class ReportError(BayesTrainError):
    """A run folder cannot be turned into a report."""


class TrainingError(BayesTrainError):
    """Training cannot go on: the loss is no longer finite, or a checkpoint does not fit."""


class Interrupted(BayesTrainError):
    """The user stopped a run. `folder` holds the checkpoint to resume from."""

    def __init__(self, folder: str, epoch: int) -> None:
        super().__init__(f"Stopped. The checkpoint of epoch {epoch} is in {folder}.")
        self.folder, self.epoch = folder, epoch


class ParticleWarning(UserWarning):
    """Particles of a posterior need a look: one is broken, or all have become one."""


class HoldWarning(UserWarning):
    """Layers stand before a batch norm, but it is not certain that their scale is free."""


class CaptureWarning(UserWarning):
    """A training step cannot be captured in a CUDA graph; training goes on, slower."""
