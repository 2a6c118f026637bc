"""How good probabilities and uncertainties are: scores, out-of-distribution detection, and one temperature.

The mean of particles that are each well calibrated is underconfident: where they disagree it is flat. A single network
that memorised its training data is overconfident. Raising the mean to the power 1 / temperature, fitted to held-out
data, fixes both (pool first, then calibrate: Rahaman & Thiery 2021). It changes no predicted class.
"""

import math

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError

ECE_BINS = 15

LEAST = 1e-300
"""The smallest probability of which a logarithm is taken."""


def classification_metrics(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, mean log likelihood, expected calibration error (15 bins) and multi-class Brier score.

    The calibration error (Guo et al. 2017) is the mean gap between confidence and accuracy, by confidence.
    """
    probs = off_mps(probs).double()
    labels = checked_labels(labels, probs)
    confidence, predicted = probs.max(1)
    right = (predicted == labels).double()
    bins = (confidence * ECE_BINS).long().clamp_max(ECE_BINS - 1)
    gaps = probs.new_zeros(ECE_BINS).index_add(0, bins, confidence - right)
    return {
        "accuracy": float(right.mean()),
        "log_likelihood": float(label_log_probs(probs, labels).mean()),
        "ece": float(gaps.abs().sum() / len(labels)),
        "brier": float((probs - torch.nn.functional.one_hot(labels, probs.shape[1])).square().sum(1).mean()),
    }


def label_log_probs(probs: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithms, in double precision, of the probabilities ``(.., N, C)`` of the labels ``(N,)``."""
    labels = checked_labels(labels, probs).expand(probs.shape[:-1])
    return probs.gather(-1, labels[..., None]).squeeze(-1).double().clamp_min(LEAST).log()


def checked_labels(labels: Tensor, probs: Tensor, read: bool = True) -> Tensor:
    """Check the labels of N inputs against ``(.., N, C)``, their values if they may be `read`; return them as int64."""
    number, classes = probs.shape[-2:]
    if number == 0 or labels.shape != (number,) or labels.is_floating_point():
        raise ShapeError(
            f"There must be one whole class number per input and at least one input, got {labels.dtype} of shape "
            f"{tuple(labels.shape)} for {number} inputs. Type labels.argmax(1) for one-hot rows, else labels.long()."
        )
    if read and not 0 <= labels.min() <= labels.max() < classes:
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise ConfigError(f"Labels must lie between 0 and {classes - 1}, got {found}. Number the classes from 0.")
    return labels.to(probs.device, torch.int64)


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Return how well an uncertainty separates out-of-distribution inputs from inputs like the training data.

    It is the probability that an outside input scores higher than an inside one, with ties counted half: 1 if it
    always does, 0.5 by chance.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
    0.9166666666666666
    """
    inside, outside = (scores.detach().cpu().double().flatten() for scores in (scores_in, scores_out))
    if not (len(inside) and len(outside)) or bool(torch.cat([inside, outside]).isnan().any()):
        raise ConfigError("There must be at least one score inside and one outside, and none may be NaN.")
    inside = inside.sort().values
    below, up_to = (torch.searchsorted(inside, outside, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(inside))


def check_temperature(temperature: float) -> None:
    """Raise unless probabilities can be raised to the power 1 / temperature."""
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be positive and finite, got {temperature}.")


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Return ``probs ** (1 / temperature)``, normalised over the last dimension."""
    return probs if temperature == 1.0 else (_logs(probs) / temperature).softmax(-1)


def fit_temperature(particle_probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the mean of the particles' ``(n, N, C)`` has the largest log likelihood.

    The labels ``(N,)`` must be those of data the network was not trained on.
    """
    if particle_probabilities.ndim != 3:
        raise ShapeError(
            f"Probabilities must be (particles, inputs, classes), got {tuple(particle_probabilities.shape)}."
        )
    labels = checked_labels(labels, particle_probabilities)
    logs = _logs(particle_probabilities.detach().mean(0, dtype=torch.float64))
    of_labels = float(logs.gather(1, labels[:, None]).mean())
    # The log likelihood is concave in 1 / temperature. It rises while the labels' logs exceed those expected.
    low, high = math.log(0.1), math.log(10.0)  # temperatures beyond these are not sought
    while high - low > 1e-3:
        middle = (low + high) / 2
        expected = float(((logs / math.exp(middle)).softmax(1) * logs).sum(1).mean())
        low, high = (low, middle) if of_labels > expected else (middle, high)
    return math.exp((low + high) / 2)


def checked_targets(targets: Tensor, shape: torch.Size) -> Tensor:
    """Return the targets of a regression if they have the shape of the outputs."""
    if targets.shape != shape or 0 in shape:
        raise ShapeError(
            f"Targets must have the shape of the outputs, {tuple(shape)}, got {tuple(targets.shape)}. For one output "
            "per datum type outputs.squeeze(1) in the network, or targets[:, None]."
        )
    return targets


def _logs(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def off_mps(values: Tensor) -> Tensor:
    """Detach values and move them from MPS, which has no double precision."""
    return (values.cpu() if values.device.type == "mps" else values).detach()
