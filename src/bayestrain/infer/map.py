"""Maximum a posteriori: one particle that climbs the log density.

::

    theta += lr * grad log p(theta)
"""

from typing import ClassVar

from bayestrain.infer.method import Method


class MAP(Method):
    """A single point; arguments as for `Method`."""

    name: ClassVar[str] = "map"
    most: ClassVar[int | None] = 1
    advice: ClassVar[str] = "Use Ensemble for several."
