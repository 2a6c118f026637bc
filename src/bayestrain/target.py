"""The rounding tolerance that makes a network as small as somebody wants it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayestrain import tt
from bayestrain.errors import ConfigError
from bayestrain.layers import TTLayer
from bayestrain.sizes import count_parameters, tt_layers

LARGEST = 1.0 - 1e-9
"""The largest tolerance there is: below 1."""

HALVINGS = 40

MARGIN = 1e-6
"""What is added to a tolerance, relatively: whoever rounds with it, on another device perhaps, finds singular values
that differ in their last digits, and those of a nearly empty index have few digits in common."""

NOISE = 1e-14
"""The same for tolerances that are hardly more than rounding."""


@dataclass(frozen=True)
class Roundable:
    """One layer as a tolerance sees it.

    `tails` has, per bond, the relative errors of keeping the largest 0, 1, .., R singular values; `sizes` are the
    products of the cores' modes; `share` is the part of the tolerance that each bond gets.
    """

    tails: Sequence[Tensor]
    sizes: Sequence[int]
    share: float

    def entries(self, tol: float) -> int:
        """Entries of all cores after rounding with this tolerance; at most so many, if bonds are cut one by one."""
        return self._entries([max(int((tail > tol * self.share).sum()), 1) for tail in self.tails])

    @property
    def fewest(self) -> int:
        """Entries with every rank at 1."""
        return self._entries([1 for _ in self.tails])

    def _entries(self, inner: Sequence[int]) -> int:
        chain = (1, *inner, 1)
        return sum(left * size * right for left, size, right in zip(chain[:-1], self.sizes, chain[1:], strict=True))


def tolerance_for(model: nn.Module, parameters: int, least: float = 0.0) -> float:
    """A tolerance, not below `least`, with which ``compact_(model, tol)`` leaves at most `parameters`.

    It is the smallest by the spectra of the weights as they are; where much is cut, `compact_` finds a little less to
    keep at the later bonds. All layers get the same tolerance, so that each gives up what it can spare. The model is
    not changed. Where not even the largest tolerance, just below 1, leaves so few, it is that one: the weights of such
    a model have no small parts.
    """
    layers = []
    cores = 0
    for layer in tt_layers(model).values():
        exact = [core.detach().cpu().double() for core in layer.cores]
        cores += sum(core.numel() for core in exact)
        share = weight_share(layer, exact) / math.sqrt(max(len(exact) - 1, 1))
        tails = [relative_tails(values[None])[0] for values in tt.bond_spectra(exact)]
        layers.append(Roundable(tails, [math.prod(core.shape[1:-1]) for core in exact], share))
    return smallest_tolerance(layers, count_parameters(model) - cores, parameters, least)


def weight_share(layer: TTLayer, cores: Sequence[Tensor]) -> float:
    """The norm of a layer's weight relative to that of its train: less than 1 where padded modes hold more than it.

    Tolerances are those of weights, so what rounds trains gets so much less.
    """
    if not layer.is_padded:
        return 1.0
    return float(torch.linalg.vector_norm(layer.dense_weight(cores)) / tt.norm(cores).clamp_min(1e-300))


def smallest_tolerance(layers: Sequence[Roundable], others: int, parameters: int, least: float) -> float:
    """By bisection: sizes fall as the tolerance rises. `others` are the parameters that are in no core."""

    def size(tol: float) -> int:
        return others + sum(layer.entries(tol) for layer in layers)

    fewest = others + sum(layer.fewest for layer in layers)
    if fewest > parameters:
        raise ConfigError(
            f"{parameters:,} parameters are too few: with every rank at 1 there are {fewest:,}, of which "
            f"{others:,} are in no tensor train. Allow more, or tensorize more layers."
        )
    if size(least) <= parameters:
        return least
    low, high = max(least, 1e-12), LARGEST
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if size(middle) > parameters else (low, middle)
    return min(high * (1 + MARGIN) + NOISE, LARGEST)


def relative_tails(values: Tensor) -> Tensor:
    """``(n, R)`` singular values to ``(n, R + 1)``: the relative error of keeping the largest 0, 1, .., R of them."""
    energy = values.square()
    tail = torch.cat([energy.flip(1).cumsum(1).flip(1), energy.new_zeros(len(energy), 1)], dim=1)
    return (tail / tail[:, :1].clamp_min(1e-300)).sqrt()


def dense_parameters(model: nn.Module) -> int:
    """What the model would have with ordinary layers, counted as `count_parameters` does."""
    spared = sum(layer.dense_parameters - layer.parameters_left for layer in tt_layers(model).values())
    return count_parameters(model) + spared
