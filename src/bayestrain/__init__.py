"""BayesTrain: compact neural networks for PyTorch that find their own tensor ranks while they train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayestrain.hub import watch

if TYPE_CHECKING:  # for type checkers and editors
    from bayestrain import formats, infer
    from bayestrain.app import data as data
    from bayestrain.compact import compact_
    from bayestrain.compress import compress_
    from bayestrain.io import export, load, save, to_plain
    from bayestrain.nn import (
        TensorConv1d,
        TensorConv2d,
        TensorConv3d,
        TensorEmbedding,
        TensorizeConfig,
        TensorLinear,
        count_parameters,
        ranks,
        summary,
        tensorize_,
    )
    from bayestrain.posterior import Posterior
    from bayestrain.prior import RankPrior
    from bayestrain.train.fit import fit

__version__ = "0.2.0"

__all__ = [
    "Posterior", "RankPrior", "TensorConv1d", "TensorConv2d", "TensorConv3d", "TensorEmbedding", "TensorLinear",
    "TensorizeConfig", "compact_", "compress_", "count_parameters", "export", "fit", "formats", "infer", "load",
    "ranks", "save", "summary", "tensorize_", "to_plain",
]  # fmt: skip

_HOMES = {"Posterior": "posterior", "RankPrior": "prior", "compact_": "compact", "compress_": "compress"}
_HOMES |= {"fit": "train", **dict.fromkeys(("export", "load", "save", "to_plain"), "io")}
"""The rooms of public names; all others are in `nn`."""
_ROOMS = {*_HOMES.values(), "app", "errors", "formats", "hub", "infer", "nn", "perf"}

watch()  # models of transformers save and load with their own methods


def __getattr__(name: str) -> Any:  # names load when they are first used: `bayestrain --help` does not wait for torch
    if name in _ROOMS:
        return import_module(f"bayestrain.{name}")
    if name == "data":
        return import_module("bayestrain.app.data")
    if name in __all__:
        return getattr(import_module(f"bayestrain.{_HOMES.get(name, 'nn')}"), name)
    raise AttributeError(f"module 'bayestrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS, "data"})
