"""Muon (Jordan et al., 2024): cores move along orthogonalised momentum, all other parameters as with AdamW.

A core's gradient is often large along a few directions only; the nearest orthonormal matrix moves all equally.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.errors import ConfigError
from bayestrain.nn.sizes import factorized_weights

NEWTON_SCHULZ, ROUNDS = (3.4445, -4.7750, 2.0315), 5  # so many times it brings singular values below 1 near 1
EMPTY = 1e-7  # momentum of a smaller norm makes smaller steps: a core without gradients comes to rest
SIZE = 0.2  # of a step's entries (RMS), in learning rates: about Adam's, so one rate suits both (Liu et al., 2025)


def muon_groups(
    named: Iterable[tuple[str, Tensor]], model: nn.Module, *, decay_cores: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: the cores of `model`, or of particles of it, and all other parameters.

    Cores have no weight decay unless `decay_cores`: they have a prior already.
    """
    cores = {id(core) for weight in factorized_weights(model).values() for core in weight.cores}
    axes = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False) if id(p) in cores}
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        own = axes.get(name.removeprefix("model."), 0)  # a posterior's parameters have this prefix
        options: dict[str, Any] = {"orthogonal": own > 1, "stacked": 0 < own < tensor.ndim}
        if own and not decay_cores:
            options["weight_decay"] = 0.0
        groups.setdefault(tuple(options.items()), []).append((name, tensor))
    return [{"params": groups[options], **dict(options)} for options in sorted(groups, reverse=True)]


class Muon(torch.optim.AdamW):
    """Muon for the cores of a model, AdamW for its other parameters.

    Args:
        params: a model, or groups from `muon_groups`: those with ``orthogonal=True`` hold cores, whose first axis
            counts particles with ``stacked=True``.
        lr: learning rate, as for Adam.
        momentum: of the cores.
        options: of `torch.optim.AdamW`.
    """

    def __init__(
        self, params: nn.Module | Iterable[Any], lr: float | Tensor = 3e-3, *, momentum: float = 0.95, **options: Any
    ) -> None:
        if isinstance(params, nn.Module):
            params = muon_groups([(n, p) for n, p in params.named_parameters() if p.requires_grad], params)
        groups = list(params)
        if not all(isinstance(group, dict) and "orthogonal" in group for group in groups):
            raise ConfigError("Muon needs to know the cores: pass the model, or muon_groups(named, model).")
        super().__init__([{"momentum": momentum, **group} for group in groups], lr, **{"weight_decay": 0.0, **options})
        self._step_supports_amp_scaling = False  # a GradScaler has to unscale the gradients of cores, too

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                self._move_cores(group)
        return loss

    @torch.no_grad()
    def _move_cores(self, group: dict[str, Any]) -> None:
        if not (cores := [core for core in group["params"] if core.grad is not None]):
            return
        for core in cores:
            if not self.state[core]:
                self.state[core] = {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(core)}  # as in AdamW
        gradients = [core.grad for core in cores]
        momenta = [self.state[core]["momentum_buffer"] for core in cores]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        moves = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov
        if group["weight_decay"]:
            torch._foreach_mul_(cores, 1 - group["lr"] * group["weight_decay"])
        pairs = zip(cores, _orthogonal([_unfolded(move, group["stacked"]) for move in moves]), strict=True)
        torch._foreach_sub_(cores, [move.reshape(core.shape) * group["lr"] for core, move in pairs])


def _unfolded(core: Tensor, stacked: bool) -> Tensor:
    """A core as its most nearly square matrix, for each particle: ``(n, rows, columns)``."""
    axes = core.shape[1:] if stacked else core.shape
    splits = [(math.prod(axes[:k]), math.prod(axes[k:])) for k in range(1, len(axes))]
    return core.reshape(-1, *max(reversed(splits), key=min))


def _orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Roughly the nearest matrices with orthonormal rows or columns, times `SIZE`; similar shapes go together."""
    short = [m if m.shape[1] <= m.shape[2] else m.mT for m in matrices]
    packs: dict[Any, list[int]] = {}
    for i, m in enumerate(short):
        packs.setdefault((m.device, *(size.bit_length() for size in m.shape[1:])), []).append(i)
    found = list(matrices)
    for pack in packs.values():
        rows, columns = (max(short[i].shape[axis] for i in pack) for axis in (1, 2))
        x = torch.cat([F.pad(m, (0, columns - m.shape[2], 0, rows - m.shape[1])) for m in (short[i] for i in pack)])
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(EMPTY)
        a, b, c = NEWTON_SCHULZ
        for _ in range(ROUNDS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        for i, block in zip(pack, x.split([len(short[i]) for i in pack]), strict=True):
            _, rows, columns = short[i].shape
            move = block[:, :rows, :columns] * (SIZE * math.sqrt(columns))
            found[i] = move if short[i] is matrices[i] else move.mT
    return found
