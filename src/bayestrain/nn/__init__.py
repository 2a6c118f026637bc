"""Factorised weights and the layers that use them.

A layer knows how to use a weight, and a weight how it is stored: `FactorizedWeight` holds the cores, the format and the
layout, a `TensorLayer` multiplies by it or looks up its rows, `tensorize_` puts them into a model.
"""

from bayestrain.nn.conv import TensorConv1d, TensorConv2d, TensorConv3d, TensorConvTranspose2d
from bayestrain.nn.embedding import TensorEmbedding, TensorEmbeddingBag
from bayestrain.nn.factorized import FactorizedWeight, RankState
from bayestrain.nn.layer import TensorLayer
from bayestrain.nn.layout import Layout
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.overview import Summary, summary
from bayestrain.nn.sizes import count_parameters, dense_parameters, factorized_weights, ranks
from bayestrain.nn.tensorize import TensorizeConfig, tensorize_

__all__ = [
    "FactorizedWeight", "Layout", "RankState", "Summary", "TensorConv1d", "TensorConv2d", "TensorConv3d",
    "TensorConvTranspose2d", "TensorEmbedding", "TensorEmbeddingBag", "TensorLayer", "TensorLinear", "TensorizeConfig",
    "count_parameters", "dense_parameters", "factorized_weights", "ranks", "summary", "tensorize_",
]  # fmt: skip
