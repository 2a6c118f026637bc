"""Muon: cores move along orthogonalised momentum, all other parameters as with AdamW.

The gradient of a core is often large along a few directions only. Muon (Jordan et al., 2024) reads the momentum as a
matrix and takes the nearest matrix with orthonormal rows instead, so that all directions move alike. Of the ways to
split the axes of a core in two, in order, it takes the one whose matrix is most nearly square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayestrain.errors import ConfigError
from bayestrain.nn.sizes import factorized_weights

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The odd polynomial that, applied five times, brings singular values between 0 and 1 near 1 (Jordan et al.)."""

ROUNDS = 5

EMPTY = 1e-7
"""Momentum of a smaller norm makes smaller steps: a core without gradients comes to rest."""

SIZE = 0.2
"""The root mean square of a step's entries, in learning rates: about that of Adam, so one rate suits both
(Liu et al., 2025)."""

ROOM, WASTE = 4_000_000, 2
"""On a GPU a stack of padded matrices may have `ROOM` entries, because few operations matter more than small ones;
elsewhere `WASTE` times the entries of its cores."""


def core_names(model: nn.Module) -> dict[str, int]:
    """The names of the model's core parameters, and the number of axes of each."""
    cores = {id(core) for weight in factorized_weights(model).values() for core in weight.cores}
    return {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False) if id(p) in cores}


def muon_groups(named: Iterable[tuple[str, Tensor]], model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: cores, and all others.

    Args:
        named: names and parameters of `model`, or of the particles of a `Posterior` of such models.
        model: tells which of them are cores.
    """
    axes = core_names(model)
    groups: dict[tuple[bool, bool], list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        own = axes.get(name, axes.get(name.removeprefix("model.")))  # a posterior's parameters have this prefix
        key = (own is not None and own > 1, own is not None and tensor.ndim > own)
        groups.setdefault(key, []).append((name, tensor))
    return [
        {"params": members, "orthogonal": orthogonal, "stacked": stacked}
        for (orthogonal, stacked), members in sorted(groups.items(), reverse=True)
    ]


class Muon(torch.optim.Optimizer):
    """Muon for the cores of a model, AdamW for its other parameters.

    Args:
        params: a model, or groups from `muon_groups`. Parameters of a group with ``orthogonal=True`` are cores; with
            ``stacked=True`` their first axis counts particles.
        lr: learning rate, as for Adam.
        momentum: of the cores.
        betas, eps: of AdamW.
        weight_decay: decoupled, for groups that do not set their own.
        capturable: allow steps to be captured in a CUDA graph; `lr` is then a tensor on the GPU.
    """

    def __init__(
        self, params: nn.Module | Iterable[dict[str, Any]], lr: float | Tensor = 3e-3, *, momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum must be at least 0 and less than 1, got {momentum}.")
        if isinstance(params, nn.Module):
            params = muon_groups([(n, p) for n, p in params.named_parameters() if p.requires_grad], params)
        groups: list[Any] = list(params)
        if not all(isinstance(group, dict) for group in groups):
            raise ConfigError(
                "Muon needs to know which parameters are cores. Pass the model, as in Muon(model), or "
                "muon_groups(named, model)."
            )
        self._options = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable,
            "fused": capturable or None,
        }  # fmt: skip
        own = {"momentum": momentum, "orthogonal": False, "stacked": False}
        super().__init__(groups, {**_adamw(self._options).defaults, **own})
        self._stacks: dict[int, tuple[Any, list[_Stack]]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._options = {
            key: self.defaults[key] for key in ("lr", "betas", "eps", "weight_decay", "capturable", "fused")
        }
        self._stacks = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure` evaluates the loss again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        adam = _adamw(self._options)  # shares groups and state of the other parameters
        adam.state, adam.param_groups = self.state, [group for group in self.param_groups if not group["orthogonal"]]
        adam.step()
        for number, group in enumerate(self.param_groups):
            if group["orthogonal"]:
                self._move_cores(number, group)
        return loss

    def _move_cores(self, number: int, group: dict[str, Any]) -> None:
        cores = [core for core in group["params"] if core.grad is not None]
        if not cores:
            return
        for core in cores:
            if "momentum_buffer" not in self.state[core]:
                self.state[core]["momentum_buffer"] = torch.zeros_like(core)
        gradients = [core.grad for core in cores]
        momenta = [self.state[core]["momentum_buffer"] for core in cores]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        moves = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov
        if group["weight_decay"]:
            torch._foreach_mul_(cores, 1 - group["lr"] * group["weight_decay"])
        key = [(core.shape, core.device) for core in cores]
        if number not in self._stacks or self._stacks[number][0] != key:
            self._stacks[number] = key, _stacks(cores, group["stacked"])
        for stack in self._stacks[number][1]:
            flat = stack.orthogonal(torch.cat([moves[i].flatten() for i in stack.members])) * group["lr"]
            parts = flat.split([moves[i].numel() for i in stack.members])
            shaped = [part.view_as(moves[i]) for i, part in zip(stack.members, parts, strict=True)]
            torch._foreach_sub_([cores[i] for i in stack.members], shaped)


def _adamw(options: dict[str, Any]) -> torch.optim.AdamW:
    lr = options["lr"]
    return torch.optim.AdamW([torch.zeros(1, device=lr.device if isinstance(lr, Tensor) else "cpu")], **options)


class _Matrices(NamedTuple):
    """One parameter as so many matrices."""

    number: int
    rows: int
    columns: int


def _matrices(shape: Sequence[int], stacked: bool) -> _Matrices:
    """A core as the most nearly square of its unfoldings."""
    count, axes = (shape[0], shape[1:]) if stacked else (1, shape)
    splits = [(math.prod(axes[:k]), math.prod(axes[k:])) for k in range(1, len(axes))]
    return _Matrices(count, *max(reversed(splits), key=min))


def _stacks(cores: Sequence[Tensor], stacked: bool) -> list[_Stack]:
    """All cores, those of one device in stacks such that padding does not waste much."""
    shapes = [_matrices(core.shape, stacked) for core in cores]
    packs: list[list[int]] = []
    for i in sorted(range(len(cores)), key=lambda i: (str(cores[i].device), max(shapes[i][1:])), reverse=True):
        device = cores[i].device
        if packs and cores[packs[-1][0]].device == device:
            some = [shapes[j] for j in (*packs[-1], i)]
            padded = sum(s.number for s in some) * max(min(s[1:]) for s in some) * max(max(s[1:]) for s in some)
            if padded <= max(ROOM if device.type == "cuda" else 0, WASTE * sum(map(math.prod, some))):
                packs[-1].append(i)
                continue
        packs.append([i])
    return [_Stack(pack, [shapes[i] for i in pack], cores[pack[0]].device) for pack in packs]


class _Stack:
    """Where the entries of some cores, one after the other, lie in a stack of padded matrices, short sides first."""

    def __init__(self, members: list[int], shapes: Sequence[_Matrices], device: torch.device) -> None:
        self.members = members
        self.size = sum(s.number for s in shapes), max(min(s[1:]) for s in shapes), max(max(s[1:]) for s in shapes)
        _, short, long = self.size
        places, start = [], 0
        for number, rows, columns in shapes:
            matrix = torch.arange(start, start + number)[:, None, None] * (short * long)
            row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
            places.append((matrix + (row * long + column if rows <= columns else column * long + row)).flatten())
            start += number
        self.places = torch.cat(places).to(device)
        factors = [SIZE * math.sqrt(max(s[1:])) for s in shapes for _ in range(s.number)]
        self.factors = torch.tensor(factors, device=device)[:, None, None]
        """Rows of norm 1 become rows whose entries have a root mean square of `SIZE`."""

    def orthogonal(self, flat: Tensor) -> Tensor:
        """The nearest matrices with orthonormal rows, roughly, times the factors."""
        x = flat.new_zeros(math.prod(self.size)).index_copy_(0, self.places, flat).view(self.size)
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(EMPTY)
        a, b, c = NEWTON_SCHULZ
        for _ in range(ROUNDS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x * self.factors.to(x.dtype)).flatten().index_select(0, self.places)
