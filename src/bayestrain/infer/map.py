"""Maximum a posteriori: one particle that climbs the log density."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer.method import Method


class MAP(Method):
    """A single point; arguments as for `Method`."""

    name: ClassVar[str] = "map"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.n != 1:
            raise ConfigError(f"MAP is a single point, got {self.n} particles. Use Ensemble for several.")

    def direction_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        """The gradient is the direction."""
