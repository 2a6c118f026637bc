"""BayesTrain: compact neural networks for PyTorch that find their own tensor ranks while they train.

Names are loaded when they are first used, so importing the package is light and `bayestrain --help` does not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayestrain.hub import watch

if TYPE_CHECKING:  # for type checkers and editors
    from bayestrain import formats as formats
    from bayestrain import infer as infer
    from bayestrain.app import data as data
    from bayestrain.compact import compact_ as compact_
    from bayestrain.compress import compress_ as compress_
    from bayestrain.io import export as export
    from bayestrain.io import load as load
    from bayestrain.io import save as save
    from bayestrain.io import to_plain as to_plain
    from bayestrain.nn import TensorConv1d as TensorConv1d
    from bayestrain.nn import TensorConv2d as TensorConv2d
    from bayestrain.nn import TensorConv3d as TensorConv3d
    from bayestrain.nn import TensorEmbedding as TensorEmbedding
    from bayestrain.nn import TensorizeConfig as TensorizeConfig
    from bayestrain.nn import TensorLinear as TensorLinear
    from bayestrain.nn import count_parameters as count_parameters
    from bayestrain.nn import ranks as ranks
    from bayestrain.nn import summary as summary
    from bayestrain.nn import tensorize_ as tensorize_
    from bayestrain.posterior import Posterior as Posterior
    from bayestrain.prior import RankPrior as RankPrior
    from bayestrain.train import fit as fit

__version__ = "0.2.0"

watch()  # models of transformers save and load with their own methods

_PUBLIC = {
    "compact": ("compact_",),
    "compress": ("compress_",),
    "io": ("export", "load", "save", "to_plain"),
    "nn": (
        "TensorConv1d",
        "TensorConv2d",
        "TensorConv3d",
        "TensorEmbedding",
        "TensorLinear",
        "TensorizeConfig",
        "count_parameters",
        "ranks",
        "summary",
        "tensorize_",
    ),
    "posterior": ("Posterior",),
    "prior": ("RankPrior",),
    "train": ("fit",),
}
_HOMES = {name: room for room, names in _PUBLIC.items() for name in names}
_ROOMS = (*_PUBLIC, "app", "errors", "formats", "hub", "infer", "perf")

__all__ = sorted([*_HOMES, "formats", "infer"])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"bayestrain.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return import_module(f"bayestrain.{name}")
    if name == "data":
        return import_module("bayestrain.app.data")
    raise AttributeError(f"module 'bayestrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS, "data"})
