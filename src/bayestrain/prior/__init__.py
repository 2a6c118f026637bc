"""The Gaussian-Gamma prior of any equation, from which ranks follow, and held scales.

`density` has the formulas, `groups` applies them to weights, `RankPrior` is what a training loop uses, `hold` finds
layers whose scale a normalisation makes free.
"""

from bayestrain.prior.groups import Group
from bayestrain.prior.hold import normalised_layers
from bayestrain.prior.rank_prior import NormalPrior, RankPrior, check_weight_decay

__all__ = ["Group", "NormalPrior", "RankPrior", "check_weight_decay", "normalised_layers"]
