"""A model's tensor-train layers in groups, each with the `Bonds` that treat it as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.bonds import Bonds, Move, copy_, groups, join, pieces, repeated
from bayestrain.layers import TTLayer
from bayestrain.layers.base import RankState


@dataclass(frozen=True)
class Layout:
    """What stays the same while shapes do."""

    names: list[str]
    bonds: Bonds
    held: frozenset[str]
    is_held: Tensor
    """``(G,)``, on the layers' device."""
    core_is_held: list[bool]
    core_is_trained: list[bool]
    lambda_is_trained: list[bool]
    """Whether the cores beside it are, per bond."""
    companions: dict[tuple[tuple[int, int], ...], Tensor]
    """Per list of (row, size): for every entry its row in the table of factors."""


class Scale(NamedTuple):
    """Per layer the norm that is held, and the factor that leads to it."""

    norm: Tensor
    factor: Tensor


@dataclass(frozen=True)
class Group:
    """Layers of one dtype and device, with the tensors that stand in them now (particles, perhaps)."""

    layers: dict[str, TTLayer]
    states: list[RankState]
    cores: list[Tensor]
    log_lambdas: list[Tensor]
    layout: Layout

    @property
    def bonds(self) -> Bonds:
        """The layout's."""
        return self.layout.bonds

    def scale(self) -> Scale:
        """What brings every weight back to its held norm; the first norm that is not zero is held from then on."""
        held = [state.held_norm for state in self.states]
        size, norm = self.bonds.norms(join(self.cores)), join(held)
        norm = torch.where(self.layout.is_held & (norm <= 0), size, norm)
        factor = torch.where(self.layout.is_held & (size > 0), norm / size, torch.ones_like(size))
        return Scale(norm, factor)

    def hold_scale_(self, norms: Mapping[str, Sequence[_BatchNorm]], scale: Scale | None = None) -> None:
        """Bring weights back to their held norms: cores, lambda, bias and running statistics move together.

        A `scale` taken a moment ago will do: what has changed since then is made good the next time.
        """
        if not self.layout.held:
            return
        norm, factor = scale or self.scale()
        held = [state.held_norm for state in self.states]
        per_core, factor = self.bonds.shares(factor, self.cores[0].dtype)
        flat, u = self.bonds.scaled(join(self.cores), join(self.log_lambdas), per_core)
        copy_(held, pieces(norm, held))
        copy_(self.log_lambdas, pieces(u, self.log_lambdas))
        kept = self.layout.core_is_held
        copy_(list(compress(self.cores, kept)), list(compress(pieces(flat, self.cores), kept)))
        self._scale_companions_(norms, factor)

    def align_(self, move: Move, a: float, floor: float, sweeps: int) -> None:
        """Turn the rank indices to the singular directions; lambda moves to where the new cores want it."""
        kept, free = self.layout.core_is_trained, self.layout.lambda_is_trained
        if not any(kept):
            return
        flat = self.bonds.aligned(join(self.cores))
        copy_(list(compress(self.cores, kept)), list(compress(pieces(flat, self.cores), kept)))
        u = self.bonds.moved(join(self.cores), join(self.log_lambdas), move, a, floor, sweeps)
        copy_(list(compress(self.log_lambdas, free)), list(compress(pieces(u, self.log_lambdas), free)))

    def _scale_companions_(self, norms: Mapping[str, Sequence[_BatchNorm]], factor: Tensor) -> None:
        """Biases and running means go with the factor, running variances with its square."""
        rows: dict[int, tuple[int, Tensor]] = {}
        for row, (name, layer) in enumerate(self.layers.items()):
            if name not in self.layout.held:
                continue
            if layer.bias is not None:
                rows[id(layer.bias)] = row, layer.bias
            for norm in norms[name]:
                mean, variance = norm.running_mean, norm.running_var
                if mean is not None and variance is not None:
                    rows[id(mean)] = row, mean
                    rows[id(variance)] = len(self.layers) + row, variance
        if not rows:
            return
        targets = [target for _, target in rows.values()]
        key = tuple((row, target.numel()) for row, target in rows.values())
        if key not in self.layout.companions:
            self.layout.companions[key] = repeated(key).to(factor.device)
        by_entry = torch.cat([factor, factor.square()]).index_select(0, self.layout.companions[key])
        copy_(targets, pieces(join(targets) * by_entry, targets))


class Groups:
    """The groups of these layers, made anew when ranks, dtype or device change.

    Args:
        layers: by name; those without a lambda are left out.
        trained: names of the layers whose cores may change.
        held: names of the layers whose scale is held, if they are trained.
    """

    def __init__(self, layers: Mapping[str, TTLayer], trained: frozenset[str], held: frozenset[str]) -> None:
        self.layers, self.trained, self.held = layers, trained, held & trained
        self._key: object = None
        self._layouts: list[Layout] = []

    def now(self) -> list[Group]:
        """The groups with the tensors of now."""
        states = {name: state for name, layer in self.layers.items() if (state := layer.rank_state) is not None}
        cores: dict[str, list[Tensor]] = {name: list(self.layers[name].cores) for name in states}
        key = [
            (name, state.started_with, *((core.shape, core.dtype, core.device) for core in cores[name]))
            for name, state in states.items()
        ]
        layouts = self._layouts
        if key != self._key:
            layouts = self._lay_out(states, cores)
            # Inside of torch.func.grad all new tensors belong to that call.
            if not any(torch._C._functorch.is_functorch_wrapped_tensor(layout.is_held) for layout in layouts):
                self._key, self._layouts = key, layouts
        return [
            Group(
                {name: self.layers[name] for name in layout.names},
                [states[name] for name in layout.names],
                [core for name in layout.names for core in cores[name]],
                [u for name in layout.names for u in states[name].log_lambdas],
                layout,
            )
            for layout in layouts
        ]

    def _lay_out(self, states: Mapping[str, RankState], cores: Mapping[str, list[Tensor]]) -> list[Layout]:
        alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name in states:
            alike.setdefault((cores[name][0].dtype, cores[name][0].device), []).append(name)
        trains = {
            name: [(core.shape[0], core.shape[1:-1].numel(), core.shape[-1]) for core in own]
            for name, own in cores.items()
        }
        found = []
        for (dtype, device), names in alike.items():
            for chosen in groups([trains[name] for name in names]):
                own = [names[i] for i in chosen]
                bonds = Bonds([trains[name] for name in own], [states[name].dropped for name in own], dtype, device)
                held = self.held & set(own)
                is_held = torch.tensor([name in held for name in own], device=device)
                core_is_held = [name in held for name in own for _ in cores[name]]
                core_is_trained = [name in self.trained for name in own for _ in cores[name]]
                lambda_is_trained = [name in self.trained for name in own for _ in states[name].log_lambdas]
                found.append(Layout(own, bonds, held, is_held, core_is_held, core_is_trained, lambda_is_trained, {}))
        return found
