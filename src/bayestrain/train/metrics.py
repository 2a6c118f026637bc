"""What a network or a posterior predicts for images, and how good that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bayestrain.data import Images
from bayestrain.layers.evaluation import evaluating
from bayestrain.posterior import ParticleModel
from bayestrain.predict import ClassPrediction, check_classes
from bayestrain.train.arithmetic import channels_last, wants_channels_last

Transform = Callable[[Tensor], Tensor]

IGNORED = -100
"""The label that `torch.nn.functional.cross_entropy` passes over."""


@torch.no_grad()
def outputs(
    network: nn.Module | ParticleModel,
    images: Images,
    transform: Transform,
    device: torch.device | str,
    batch_size: int = 1000,
) -> Tensor:
    """Logits ``(particles, N, classes)`` on the CPU, in evaluation mode; a network counts as one particle."""
    batches: Iterator[Tensor] = (transform(x) for x, _ in images.batches(batch_size, shuffle=False, device=device))
    if isinstance(network, ParticleModel):
        return torch.cat([network.outputs(x, batch_size).cpu() for x in batches], dim=1)
    if wants_channels_last(network, device):
        batches = map(channels_last, batches)
    with evaluating(network):
        return torch.cat([network(x).cpu()[None] for x in batches], dim=1)


@torch.no_grad()
def check_labels(network: nn.Module, x: Tensor, labels: Tensor) -> None:
    """Refuse labels that the network has no output for; on a GPU they would end in an assertion that names none.

    Those that `cross_entropy` passes over do not count, nor networks whose outputs are no table of classes.
    """
    with evaluating(network):
        found = network(channels_last(x) if wants_channels_last(network, x.device) else x)
    labels = labels[labels != IGNORED]
    if len(labels) and isinstance(found, Tensor) and found.ndim == 2:
        check_classes(labels, found.shape[1])


def predict(
    network: nn.Module | ParticleModel, images: Images, transform: Transform, device: torch.device | str
) -> ClassPrediction:
    """Class probabilities on the CPU, in double precision; at a posterior's own temperature."""
    probs = outputs(network, images, transform, device).double().softmax(2)
    return ClassPrediction(probs, temperature(network))


def temperature(network: nn.Module | ParticleModel) -> float:
    """A posterior's temperature; that of a network is 1."""
    return float(getattr(network.joint.likelihood, "temperature", 1.0)) if isinstance(network, ParticleModel) else 1.0


def measured(prediction: ClassPrediction, labels: Tensor) -> dict[str, float]:
    """Accuracy, log likelihood, ECE and Brier score; of a posterior also what its particles have on average."""
    found = prediction.metrics(labels.cpu())
    if len(prediction.particle_probabilities) == 1:
        del found["mean_log_likelihood"]  # the same as log_likelihood
    else:
        found["disagreement"] = float(prediction.disagreement.mean())
    return found


def evaluator(
    images: Images, transform: Transform, device: torch.device | str
) -> Callable[[nn.Module | ParticleModel], dict[str, float]]:
    """An `evaluate` for `fit` and `fit_posterior`: the metrics on these images."""
    return lambda network: measured(predict(network, images, transform, device), images.labels)
