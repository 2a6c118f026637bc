"""Training runs: configs here, the loop and the run folder beside them.

Importing this is light; `bayestrain.train.experiment` and `bayestrain.train.fitting` bring torch.
"""

from bayestrain.train.config import (
    DataConfig,
    ExperimentConfig,
    FitConfig,
    PriorConfig,
    RunConfig,
    TensorizeSettings,
)
from bayestrain.train.progress import Progress, Silent

__all__ = [
    "DataConfig",
    "ExperimentConfig",
    "FitConfig",
    "PriorConfig",
    "Progress",
    "RunConfig",
    "Silent",
    "TensorizeSettings",
]
