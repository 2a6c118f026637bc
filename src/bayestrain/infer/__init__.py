"""Inference on stacked tensors: a log density in, particles out. Knows no module and no tensor train.

`SVGD`, `Ensemble`, `MAP` and `SGLD` are used alike: made from a log density and start particles, then stepped.
"""

from bayestrain.infer.diagnostics import Diagnostics, diagnose, stein_discrepancy
from bayestrain.infer.ensemble import Ensemble
from bayestrain.infer.kernels import Kernel, imq, median_bandwidth, rbf
from bayestrain.infer.map import MAP
from bayestrain.infer.method import Method, StepInfo
from bayestrain.infer.particles import Particles, count, stack
from bayestrain.infer.sgld import SGLD, Langevin
from bayestrain.infer.svgd import SVGD

METHODS: dict[str, type[Method]] = {method.name: method for method in (SVGD, Ensemble, SGLD, MAP)}

__all__ = [
    "MAP",
    "METHODS",
    "SGLD",
    "SVGD",
    "Diagnostics",
    "Ensemble",
    "Kernel",
    "Langevin",
    "Method",
    "Particles",
    "StepInfo",
    "count",
    "diagnose",
    "imq",
    "median_bandwidth",
    "rbf",
    "stack",
    "stein_discrepancy",
]
