"""Tensor-train layers: parameters and forward passes."""

from bayestrain.layers.base import RankState, TTLayer
from bayestrain.layers.conv import TTConv2d
from bayestrain.layers.linear import TTLinear
from bayestrain.layers.planned import calibrate

__all__ = ["RankState", "TTConv2d", "TTLayer", "TTLinear", "calibrate"]
