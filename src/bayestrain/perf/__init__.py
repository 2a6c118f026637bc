"""Optional speed: the same results as the readable code, faster.

No other room imports this one by name. `nn.fast.fast` finds it, unless the environment variable ``BAYESTRAIN_PERF=0``
switches it off. A benchmark justifies everything in it (`benchmarks/`): plans for products with trains, kernels for two
factors, the prior of all weights at once, training steps as CUDA graphs and without idle biases, and an estimate of a
posterior's memory.
"""

from bayestrain.perf import memory
from bayestrain.perf.biases import IdleBiases
from bayestrain.perf.capture import Capture
from bayestrain.perf.layers import compiled, expect, forget, multiply
from bayestrain.perf.lookup import rows
from bayestrain.perf.tables import group

__all__ = ["Capture", "IdleBiases", "compiled", "expect", "forget", "group", "memory", "multiply", "rows"]
