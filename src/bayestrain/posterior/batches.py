"""Batches that particles cannot learn from, refused in plain words."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.posterior.model import ParticleModel
from bayestrain.predict import Classification, checked_labels


@contextmanager
def checked_batch(model: ParticleModel, x: Tensor, y: Tensor) -> Iterator[None]:
    """Refuse an empty batch; where PyTorch refuses labels or the network, say which ones there may be.

    Labels are only looked at once something went wrong: reading them would make every step on a GPU wait.
    """
    if len(y) == 0:
        raise ConfigError("There is no datum in this batch. Leave empty batches out.")
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "Batching rule not implemented" in str(error) or "data-dependent control flow" in str(error):
            raise ConfigError(
                "The network cannot run for many particles at once: it has an operation that torch.vmap does not know, "
                f"as LSTMs are, or branches on values. PyTorch says: {str(error).split('. ')[0]}."
            ) from error
        if isinstance(model.joint.likelihood, Classification) and "out of bounds" in str(error):
            checked_labels(y, model.outputs(x))
        raise
