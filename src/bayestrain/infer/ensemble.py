"""Plain ascent: one particle finds the maximum a posteriori, several are a deep ensemble (Lakshminarayanan 2017)."""

from bayestrain.infer.method import Method


class MAP(Method):
    """A single point that climbs the log density; arguments as for `Method`."""

    name = "map"
    most = 1
    advice = "Use Ensemble for several."


class Ensemble(Method):
    """Particles that do not interact, each climbing the log density; arguments as for `Method`."""

    name = "ensemble"
    fewest = 2
    advice = "Use MAP for a single point."
