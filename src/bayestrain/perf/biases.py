"""Biases that a batch norm removes again: adding them, and summing their gradients, takes a good part of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bayestrain.nn import TensorConv2d
from bayestrain.prior import normalised_layers


class IdleBiases:
    """Leaves idle biases out of a pass and its backward pass inside of ``with idle():``, which changes no result.

    A bias of a convolution is idle if nothing but batch norms follow, in training mode. Their outputs do not depend on
    it, so its gradient is zero; their running means do, so it is added to these.
    """

    def __init__(self, model: nn.Module) -> None:
        at, kinds = dict[str, Any](model.named_modules()), (nn.Conv2d, TensorConv2d)
        found = {at[name]: [at[own] for own in norms] for name, norms in normalised_layers(model, kinds).sure.items()}
        known = {own for own in at.values() if type(own) is nn.BatchNorm2d and own.momentum and own.track_running_stats}
        known |= {own for own in found if type(own) in kinds and own.bias is not None}
        self.found = {own: norms for own, norms in found.items() if known.issuperset([own, *norms])}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        idle = [(own, own.bias, norms) for own, norms in self.found.items() if all(norm.training for norm in norms)]
        try:
            for own, _, _ in idle:
                own._parameters["bias"] = None
            yield
        finally:
            for own, bias, _ in idle:
                own._parameters["bias"] = bias
        if behind := [(norm, bias.detach()) for _, bias, norms in idle for norm in norms]:
            moves = torch._foreach_mul([bias for _, bias in behind], [norm.momentum for norm, _ in behind])
            torch._foreach_add_([norm.running_mean for norm, _ in behind], list(moves))
        if new := [bias for _, bias, _ in idle if bias.requires_grad and bias.grad is None]:
            for bias, zero in zip(new, torch._foreach_mul([bias.detach() for bias in new], 0.0), strict=True):
                bias.grad = zero
