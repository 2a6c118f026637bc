"""BayesTrain: compact neural networks whose tensor-train ranks choose themselves."""

from bayestrain.compact import CompactReport, compact_
from bayestrain.convert import TensorizeConfig, TensorizeReport, tensorize_
from bayestrain.errors import BayesTrainError
from bayestrain.layers import TTConv2d, TTLinear
from bayestrain.prior import RankPrior
from bayestrain.ranks import count_parameters, ranks

__version__ = "0.1.0"

__all__ = [
    "BayesTrainError",
    "CompactReport",
    "RankPrior",
    "TTConv2d",
    "TTLinear",
    "TensorizeConfig",
    "TensorizeReport",
    "compact_",
    "count_parameters",
    "ranks",
    "tensorize_",
]
