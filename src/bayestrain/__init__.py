"""BayesTrain: compact neural networks whose tensor-train ranks choose themselves.

Names are loaded when used: importing the package is light, and `bayestrain --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayestrain import data, models
    from bayestrain.compact import CompactReport, compact_
    from bayestrain.convert import TensorizeConfig, TensorizeReport, tensorize_
    from bayestrain.errors import BayesTrainError
    from bayestrain.layers import TTConv2d, TTLinear
    from bayestrain.prior import RankPrior
    from bayestrain.saved import load_model, save_model
    from bayestrain.sizes import count_parameters, ranks
    from bayestrain.train.config import FitConfig, PriorConfig
    from bayestrain.train.loop import FitResult, fit

__version__ = "0.1.0"

__all__ = [
    "BayesTrainError",
    "CompactReport",
    "FitConfig",
    "FitResult",
    "PriorConfig",
    "RankPrior",
    "TTConv2d",
    "TTLinear",
    "TensorizeConfig",
    "TensorizeReport",
    "compact_",
    "count_parameters",
    "data",
    "fit",
    "load_model",
    "models",
    "ranks",
    "save_model",
    "tensorize_",
]

_HOMES = {
    "compact": ("CompactReport", "compact_"),
    "convert": ("TensorizeConfig", "TensorizeReport", "tensorize_"),
    "errors": ("BayesTrainError",),
    "layers": ("TTConv2d", "TTLinear"),
    "prior": ("RankPrior",),
    "saved": ("load_model", "save_model"),
    "sizes": ("count_parameters", "ranks"),
    "train.config": ("FitConfig", "PriorConfig"),
    "train.loop": ("FitResult", "fit"),
}


def __getattr__(name: str) -> Any:
    if name in ("data", "models"):
        return import_module(f"bayestrain.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"bayestrain.{home}"), name)
    raise AttributeError(f"module 'bayestrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
