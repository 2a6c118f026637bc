"""Compaction: ranks that do not matter are cut, to a tolerance or to a parameter budget, in a network or n particles.

`rules` cut one weight and find ranks for a number of parameters, `weights` holds what is cut (particles of a network,
of which a plain model is one), `optimizers` slices or restarts the optimiser's state and averages of weights.
"""

from bayestrain.compact.compaction import RULES, CompactedLayer, CompactReport, compact_
from bayestrain.compact.optimizers import restart_average_

__all__ = ["RULES", "CompactReport", "CompactedLayer", "compact_", "restart_average_"]
