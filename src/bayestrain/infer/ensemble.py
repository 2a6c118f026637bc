"""Deep ensemble: particles that start apart and climb the log density, each for itself."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from bayestrain.infer.method import Method


class Ensemble(Method):
    """SVGD with nobody else in sight: the direction is the gradient; arguments as for `Method`."""

    name: ClassVar[str] = "ensemble"
    fewest: ClassVar[int] = 2
    advice: ClassVar[str] = "Use MAP for a single point."

    def direction_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        """The gradient is the direction."""
