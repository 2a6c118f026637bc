"""The ranks that make a network as small as somebody wants it, where that changes its weights least."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from numbers import Integral

import torch
from torch import Tensor, nn

from bayestrain import tt
from bayestrain.errors import ConfigError
from bayestrain.layers import TTLayer
from bayestrain.sizes import count_parameters, ranks, tt_layers


@dataclass(frozen=True)
class Roundable:
    """One layer as a cut to a size sees it; `sizes` are the products of the cores' modes."""

    shares: Sequence[Sequence[float]]
    """Per bond, the square of every singular value relative to the square of the weight's norm, largest first."""
    sizes: Sequence[int]

    def entries(self, chain: Sequence[int]) -> int:
        """Entries of all cores with these ranks, the ones at the ends among them."""
        return sum(left * size * right for left, size, right in zip(chain[:-1], self.sizes, chain[1:], strict=True))

    def change(self, chain: Sequence[int]) -> float:
        """The relative change of the weight that rounding to these ranks makes, at most."""
        kept = zip(self.shares, chain[1:-1], strict=True)
        return math.sqrt(sum(math.fsum(bond[rank:]) for bond, rank in kept))


@dataclass(frozen=True)
class SizedRanks:
    """Ranks of every layer, with the ones at the ends; by `change` at most each weight changes, relatively."""

    ranks: dict[str, tuple[int, ...]]
    change: float


def ranks_for(model: nn.Module, parameters: int) -> dict[str, tuple[int, ...]]:
    """The ranks that ``compact_(model, parameters=..)`` would leave, as `ranks` has them. The model is not changed."""
    check_parameters(parameters)
    layers = tt_layers(model)
    if not layers:
        raise ConfigError("The model has no tensor-train layer. Call bayestrain.tensorize_(model) first.")
    for name, layer in layers.items():
        check_finite(name, layer)
    return sized(model, parameters).ranks


def sized(model: nn.Module, parameters: int) -> SizedRanks:
    """Ranks with which the model has at most so many parameters, found in the spectra of its weights."""
    if (size := count_parameters(model)) <= parameters:
        return SizedRanks(ranks(model), 0.0)
    layers = {}
    for name, layer in tt_layers(model).items():
        exact = [core.detach().cpu().double() for core in layer.cores]
        size -= sum(core.numel() for core in exact)
        share = torch.tensor([weight_share(layer, exact)], dtype=torch.float64)
        layers[name] = roundable([squares(values[None], share)[0] for values in tt.bond_spectra(exact)], exact)
    return cheapest_ranks(layers, size, parameters)


def check_parameters(parameters: int) -> None:
    """Refuse what is no number of parameters."""
    if isinstance(parameters, bool) or not isinstance(parameters, Integral) or parameters < 1:
        raise ConfigError(f"parameters must be an integer of at least 1, got {parameters!r}.")


def check_finite(name: str, layer: TTLayer) -> None:
    """Refuse a layer whose weight is broken."""
    if not all(bool(torch.isfinite(core).all()) for core in layer.cores):
        raise ConfigError(
            f"Layer {name!r} has NaN or infinite weights and cannot be compacted. "
            "Go back to a checkpoint from before training diverged."
        )


def roundable(shares: Iterable[Tensor], cores: Iterable[Tensor]) -> Roundable:
    """A layer with these cores; a share that is rounding noise, which `tt.round_cores` keeps no rank for, is none."""
    least = (10 * torch.finfo(torch.float64).eps) ** 2
    found = [bond[: max(int((bond > least * len(bond) ** 2 * bond[0]).sum()), 1)].tolist() for bond in shares]
    return Roundable(found, [math.prod(core.shape[1:-1]) for core in cores])


def squares(values: Tensor, shares: Tensor) -> Tensor:
    """``(n, R)`` singular values to their squares, relative to that of the weight, whose norm is a share of theirs."""
    energy = values.square()
    return energy / energy.sum(1, keepdim=True).clamp_min(1e-300) / shares[:, None].clamp_min(1e-150).square()


def weight_share(layer: TTLayer, cores: Sequence[Tensor]) -> float:
    """The norm of a layer's weight relative to that of its train: less than 1 where padded modes hold more than it.

    Tolerances are those of weights, so what rounds trains gets so much less.
    """
    if not layer.is_padded:
        return 1.0
    return float(torch.linalg.vector_norm(layer.dense_weight(cores)) / tt.norm(cores).clamp_min(1e-300))


def cheapest_ranks(layers: Mapping[str, Roundable], others: int, parameters: int) -> SizedRanks:
    """One rank index after the other goes, always the one of the lowest price; then what there is room for comes back.

    `others` are the parameters that are in no core.
    """
    chains = {name: [1, *map(len, layer.shares), 1] for name, layer in layers.items()}

    def freed(name: str, bond: int) -> int:
        """Entries that an index at this bond takes."""
        chain, sizes = chains[name], layers[name].sizes
        return chain[bond - 1] * sizes[bond - 1] + sizes[bond] * chain[bond + 1]

    def price(name: str, bond: int, index: int) -> float:
        """What an index is of its weight, against the root of what it takes.

        By all that it takes, the sum over the layers of their squared changes would be about the smallest. But that
        hits wide layers hard, and what a layer loses does more harm the more it has lost.
        """
        return layers[name].shares[bond - 1][index] / math.sqrt(freed(name, bond))

    def bonds() -> Iterator[tuple[str, int]]:
        return ((name, bond) for name, chain in chains.items() for bond in range(1, len(chain) - 1))

    fewest = others + sum(layer.entries([1] * len(chains[name])) for name, layer in layers.items())
    if fewest > parameters:
        raise ConfigError(
            f"{parameters:,} parameters are too few: with every rank at 1 there are {fewest:,}, of which "
            f"{others:,} are in no tensor train. Allow more, or tensorize more layers."
        )
    room = parameters - others - sum(layer.entries(chains[name]) for name, layer in layers.items())
    last = [(price(name, bond, chains[name][bond] - 1), name, bond) for name, bond in bonds() if chains[name][bond] > 1]
    heapify(last)
    while room < 0:
        known, name, bond = heappop(last)
        now = price(name, bond, chains[name][bond] - 1)
        if now > known:  # a neighbour's rank has fallen since: prices only rise
            heappush(last, (now, name, bond))
            continue
        room += freed(name, bond)
        chains[name][bond] -= 1
        if (rank := chains[name][bond]) > 1:
            heappush(last, (price(name, bond, rank - 1), name, bond))

    def can_grow(name: str, bond: int) -> bool:
        chain, layer = chains[name], layers[name]
        most = min(chain[bond - 1] * layer.sizes[bond - 1], layer.sizes[bond] * chain[bond + 1])
        return chain[bond] < min(len(layer.shares[bond - 1]), most) and freed(name, bond) <= room

    for name, layer in layers.items():  # more than its neighbours can use, an index stands for nothing
        before = layer.entries(chains[name])
        chains[name][1:-1] = tt.feasible_ranks(layer.sizes, chains[name][1:-1])
        room += before - layer.entries(chains[name])
    while fitting := [(price(*at, chains[at[0]][at[1]]), *at) for at in bonds() if can_grow(*at)]:
        _, name, bond = max(fitting)
        room -= freed(name, bond)
        chains[name][bond] += 1
    change = max((layer.change(chains[name]) for name, layer in layers.items()), default=0.0)
    return SizedRanks({name: tuple(chain) for name, chain in chains.items()}, change)


def dense_parameters(model: nn.Module) -> int:
    """What the model would have with ordinary layers, counted as `count_parameters` does."""
    spared = sum(layer.dense_parameters - layer.parameters_left for layer in tt_layers(model).values())
    return count_parameters(model) + spared
