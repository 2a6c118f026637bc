"""How good class probabilities are: accuracy, log likelihood, calibration error, Brier score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayestrain.data import Images

ECE_BINS = 15

Transform = Callable[[Tensor], Tensor]


@torch.no_grad()
def probabilities(
    model: nn.Module, images: Images, transform: Transform, device: torch.device | str, batch_size: int = 1000
) -> Tensor:
    """Class probabilities ``(N, classes)`` on the CPU, in double precision, with the model in evaluation mode."""
    was_training = model.training
    model.eval()
    rows = [
        torch.log_softmax(model(transform(x)).cpu().double(), dim=1).exp()
        for x, _ in images.batches(batch_size, shuffle=False, device=device)
    ]
    model.train(was_training)
    return torch.cat(rows)


def classification_metrics(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, mean log likelihood, expected calibration error (15 bins, L1) and multi-class Brier score."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    labels = labels.cpu()
    of_label = probs.gather(1, labels[:, None]).squeeze(1)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    ece = multiclass_calibration_error(probs.float(), labels, probs.shape[1], n_bins=ECE_BINS, norm="l1")
    return {
        "accuracy": float((probs.argmax(1) == labels).double().mean()),
        "log_likelihood": float(of_label.clamp_min(1e-300).log().mean()),
        "ece": float(ece),
        "brier": float((probs - one_hot).square().sum(1).mean()),
    }


def evaluator(
    images: Images, transform: Transform, device: torch.device | str
) -> Callable[[nn.Module], dict[str, float]]:
    """An `evaluate` for `fit`: the metrics of a model on these images."""
    return lambda model: classification_metrics(probabilities(model, images, transform, device), images.labels)
