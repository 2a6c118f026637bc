"""Maximum a posteriori: one particle that climbs the log density.

::

    theta += lr * grad log p(theta)
"""

from bayestrain.infer.method import Method


class MAP(Method):
    """A single point; arguments as for `Method`."""

    name = "map"
    most = 1
    advice = "Use Ensemble for several."
