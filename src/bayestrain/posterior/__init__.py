"""A posterior over a network's weights: particles that train, shrink and predict together."""

from bayestrain.posterior.compaction import stacked_cores, stacked_log_lambdas
from bayestrain.posterior.joint import CallableLikelihood, Joint
from bayestrain.posterior.memory import MemoryEstimate, retain_freed_memory
from bayestrain.posterior.model import ParticleModel
from bayestrain.posterior.posterior import Posterior, PosteriorStep
from bayestrain.posterior.starts import around, independent

__all__ = [
    "CallableLikelihood",
    "Joint",
    "MemoryEstimate",
    "ParticleModel",
    "Posterior",
    "PosteriorStep",
    "around",
    "independent",
    "retain_freed_memory",
    "stacked_cores",
    "stacked_log_lambdas",
]
