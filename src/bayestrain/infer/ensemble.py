"""Deep ensembles (Lakshminarayanan et al. 2017): independent particles, each climbing its own log density.

::

    theta_k += lr * grad log p(theta_k)
"""

from bayestrain.infer.method import Method


class Ensemble(Method):
    """Particles that do not interact; arguments as for `Method`."""

    name = "ensemble"
    fewest = 2
    advice = "Use MAP for a single point."
