"""BayesTrain: compact neural networks for PyTorch that find their own tensor ranks while they train.

Names are loaded when they are first used, so importing the package is light and `bayestrain --help` does not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayestrain import formats, infer
    from bayestrain.app import data as data
    from bayestrain.compact import compact_
    from bayestrain.io import load, save
    from bayestrain.nn import TensorConv2d, TensorizeConfig, TensorLinear, count_parameters, ranks, tensorize_
    from bayestrain.overview import summary
    from bayestrain.posterior import Posterior
    from bayestrain.prior import RankPrior
    from bayestrain.train import fit

__version__ = "0.2.0"

__all__ = [
    "Posterior",
    "RankPrior",
    "TensorConv2d",
    "TensorLinear",
    "TensorizeConfig",
    "compact_",
    "count_parameters",
    "fit",
    "formats",
    "infer",
    "load",
    "ranks",
    "save",
    "summary",
    "tensorize_",
]

_HOMES = {
    "Posterior": "posterior",
    "RankPrior": "prior",
    "TensorConv2d": "nn",
    "TensorLinear": "nn",
    "TensorizeConfig": "nn",
    "compact_": "compact",
    "count_parameters": "nn",
    "fit": "train",
    "load": "io",
    "ranks": "nn",
    "save": "io",
    "summary": "overview",
    "tensorize_": "nn",
}
_ROOMS = ("app", "compact", "errors", "formats", "infer", "io", "nn", "perf", "posterior", "prior", "train")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"bayestrain.{_HOMES[name]}"), name)
    if name == "data":
        return import_module("bayestrain.app.data")
    if name in _ROOMS:
        return import_module(f"bayestrain.{name}")
    raise AttributeError(f"module 'bayestrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS, "data"})
