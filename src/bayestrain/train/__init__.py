"""One way to train: `fit` for any module, data and likelihood; `run` for what the command line trains."""

from bayestrain.train.callbacks import Callback, Plan, ProgressPrinter
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig, RunConfig, RunSettings, TensorizeSettings
from bayestrain.train.fit import FitResult, fit
from bayestrain.train.folder import RunFolder
from bayestrain.train.muon import Muon, muon_groups

__all__ = [
    "Callback", "FitConfig", "FitResult", "Muon", "Plan", "PosteriorConfig", "PriorConfig", "ProgressPrinter",
    "RunConfig", "RunFolder", "RunSettings", "TensorizeSettings", "fit", "muon_groups",
]  # fmt: skip
