"""Inference on stacked tensors: a log density goes in, particles come out. Depends on torch only.

Every method is built from a log density and starting particles, and then stepped.
"""

from bayestrain.infer.diagnostics import Diagnostics, diagnose, stein_discrepancy
from bayestrain.infer.ensemble import Ensemble
from bayestrain.infer.kernels import Kernel, imq, median_bandwidth, rbf
from bayestrain.infer.map import MAP
from bayestrain.infer.method import MakeOptimizer, Method, StepInfo
from bayestrain.infer.particles import count, stack
from bayestrain.infer.sgld import SGLD
from bayestrain.infer.svgd import SVGD

METHODS: dict[str, type[Method]] = {method.name: method for method in (SVGD, Ensemble, SGLD, MAP)}

__all__ = [
    "MAP", "METHODS", "SGLD", "SVGD", "Diagnostics", "Ensemble", "Kernel", "MakeOptimizer", "Method", "StepInfo",
    "count", "diagnose", "imq", "median_bandwidth", "rbf", "stack", "stein_discrepancy",
]  # fmt: skip
