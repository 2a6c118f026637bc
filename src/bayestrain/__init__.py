"""BayesTrain: compact neural networks whose tensor-train ranks choose themselves.

Names are loaded when used: importing the package is light, and `bayestrain --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayestrain import data, infer, models, predict
    from bayestrain.compact import CompactReport, compact_
    from bayestrain.convert import TensorizeConfig, TensorizeReport, tensorize_
    from bayestrain.errors import BayesTrainError
    from bayestrain.forming import FormTogether
    from bayestrain.layers import TTConv2d, TTLinear, calibrate
    from bayestrain.muon import Muon, muon_groups
    from bayestrain.posterior import ParticleModel, Posterior, around, independent
    from bayestrain.predict import Classification, ClassPrediction, Likelihood, Regression, RegressionPrediction
    from bayestrain.prior import NormalPrior, RankPrior
    from bayestrain.saved import load_model, load_posterior, save_model, save_posterior
    from bayestrain.sizes import count_parameters, ranks
    from bayestrain.speed import PlanReport, plan_report
    from bayestrain.target import ranks_for
    from bayestrain.train.config import FitConfig, PriorConfig
    from bayestrain.train.fitting import fit, fit_posterior
    from bayestrain.train.loop import FitResult

__version__ = "0.1.0"

__all__ = [
    "BayesTrainError",
    "ClassPrediction",
    "Classification",
    "CompactReport",
    "FitConfig",
    "FitResult",
    "FormTogether",
    "Likelihood",
    "Muon",
    "NormalPrior",
    "ParticleModel",
    "PlanReport",
    "Posterior",
    "PriorConfig",
    "RankPrior",
    "Regression",
    "RegressionPrediction",
    "TTConv2d",
    "TTLinear",
    "TensorizeConfig",
    "TensorizeReport",
    "around",
    "calibrate",
    "compact_",
    "count_parameters",
    "data",
    "fit",
    "fit_posterior",
    "independent",
    "infer",
    "load_model",
    "load_posterior",
    "models",
    "muon_groups",
    "plan_report",
    "predict",
    "ranks",
    "ranks_for",
    "save_model",
    "save_posterior",
    "tensorize_",
]

_HOMES = {
    "compact": ("CompactReport", "compact_"),
    "convert": ("TensorizeConfig", "TensorizeReport", "tensorize_"),
    "errors": ("BayesTrainError",),
    "forming": ("FormTogether",),
    "layers": ("TTConv2d", "TTLinear", "calibrate"),
    "muon": ("Muon", "muon_groups"),
    "posterior": ("ParticleModel", "Posterior", "around", "independent"),
    "predict": ("ClassPrediction", "Classification", "Likelihood", "Regression", "RegressionPrediction"),
    "prior": ("NormalPrior", "RankPrior"),
    "saved": ("load_model", "load_posterior", "save_model", "save_posterior"),
    "sizes": ("count_parameters", "ranks"),
    "speed": ("PlanReport", "plan_report"),
    "target": ("ranks_for",),
    "train.config": ("FitConfig", "PriorConfig"),
    "train.fitting": ("fit", "fit_posterior"),
    "train.loop": ("FitResult",),
}


def __getattr__(name: str) -> Any:
    if name in ("data", "infer", "models", "predict"):
        return import_module(f"bayestrain.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"bayestrain.{home}"), name)
    raise AttributeError(f"module 'bayestrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
