"""Optional speed: the same results as the readable code, faster.

Nothing imports this room by name. `nn.fast.fast` finds `FAST`, unless the environment variable ``BAYESTRAIN_PERF=0``
switches it off. A benchmark justifies everything in it (`benchmarks/`): plans for products with trains, the
prior of all weights at once, training steps as CUDA graphs, and an estimate of a posterior's memory.
"""

from __future__ import annotations

from bayestrain.perf import layers, memory, tables
from bayestrain.perf.capture import Capture


class Fast:
    """What other rooms may use; see `nn.fast`."""

    multiply = staticmethod(layers.multiply)
    expect = staticmethod(layers.expect)
    forget = staticmethod(layers.forget)
    group = staticmethod(tables.group)
    capture = Capture
    memory = memory


FAST = Fast()
