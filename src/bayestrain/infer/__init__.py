"""Inference on stacked tensors: gradients of a log density go in, particles come out. Depends on torch only.

Every method is built from a function that computes gradients and from starting particles, and is then stepped::

    method = SVGD(value_and_grad(log_density), particles, lambda named: torch.optim.Adam(named, lr=1e-2))
    for batch in batches:
        method.step(batch)

A new method is one file: a subclass of `Method` that overrides `direction`, and its name in `METHODS`.
"""

from bayestrain.infer.anchored import Anchored
from bayestrain.infer.hmc import HMC
from bayestrain.infer.kernels import Diagnostics, Kernel, diagnose, imq, median_bandwidth, rbf
from bayestrain.infer.method import Ensemble, MakeOptimizer, Method, StepInfo, value_and_grad
from bayestrain.infer.particles import Spread, count, stack
from bayestrain.infer.sgld import SGLD
from bayestrain.infer.svgd import SVGD

METHODS: dict[str, type[Method]] = {method.name: method for method in (Anchored, SVGD, Ensemble, SGLD, HMC)}

__all__ = [
    "HMC", "METHODS", "SGLD", "SVGD", "Anchored", "Diagnostics", "Ensemble", "Kernel", "MakeOptimizer", "Method",
    "Spread", "StepInfo", "count", "diagnose", "imq", "median_bandwidth", "rbf", "stack", "value_and_grad",
]  # fmt: skip
