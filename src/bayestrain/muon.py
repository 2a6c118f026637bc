"""Muon, an optimiser: the cores of tensor trains move along orthogonalised momentum, everything else as with AdamW.

A core is a matrix, its left rank and modes against its right rank or the other way about, and its gradient is often
large along a few directions of that matrix. Muon (Jordan et al., 2024) takes the momentum's nearest matrix with
orthonormal rows instead, so that all directions move alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from bayestrain.bonds import join, pieces
from bayestrain.errors import ConfigError
from bayestrain.sizes import tt_layers

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The odd polynomial that brings singular values between 0 and 1 near 1, five times over (Jordan et al.)."""

ROUNDS = 5

EMPTY = 1e-7
"""Momentum of a smaller norm makes smaller steps: what gets no gradient any more comes to rest."""

SIZE = 0.2
"""The root mean square of a step's entries, in learning rates: about that of Adam's steps, so that one rate suits both
(Liu et al., 2025)."""

SPACIOUS, WASTE = 4_000_000, 2
"""A stack of padded matrices may have so many entries (on a GPU, where few operations matter more than small ones), or
so many times those of its cores; else there are several."""


def muon_groups(named: Iterable[tuple[str, Tensor]], model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: cores, and the rest.

    Args:
        named: the parameters of `model` with their names, or those of particles of it, as a `Posterior` has them.
        model: tells which of these are cores.
    """
    cores = {id(core) for layer in tt_layers(model).values() for core in layer.cores}
    dims = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False) if id(p) in cores}
    groups: dict[tuple[bool, bool], list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        own = dims.get(name, dims.get(name.removeprefix("model.")))  # so particles are called
        groups.setdefault((own is not None, own is not None and tensor.ndim > own), []).append((name, tensor))
    return [
        {"params": members, "orthogonal": orthogonal, "stacked": stacked}
        for (orthogonal, stacked), members in sorted(groups.items(), reverse=True)
    ]


class Muon(torch.optim.Optimizer):
    """Muon for the cores of a model's tensor trains, AdamW for its other parameters.

    Args:
        params: a model, or groups of parameters as from `muon_groups`. Those of a group with ``orthogonal=True`` are
            cores, ``(left, modes.., right)``; with ``stacked=True`` there are many alike, along a dimension in front.
        lr: the learning rate, as for Adam: steps of cores are made as large as its steps are.
        momentum: of the cores.
        betas, eps: AdamW's, for the rest.
        weight_decay: for all, decoupled from the gradient.
        capturable: whether steps are to be captured in a CUDA graph; `lr` is then a tensor on the GPU.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[dict[str, Any]],
        lr: float | Tensor = 3e-3,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum must be at least 0 and less than 1, got {momentum}.")
        if isinstance(params, nn.Module):
            trained = ((name, tensor) for name, tensor in params.named_parameters() if tensor.requires_grad)
            groups = muon_groups(trained, params)
        else:
            groups = list(params)
        if not all(isinstance(group, dict) for group in groups):
            raise ConfigError(
                "Muon must know which parameters are cores of tensor trains. Give it the model, as in Muon(model), or "
                "muon_groups(named, model), where named are names and parameters of the model or of particles."
            )
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable,
            "fused": capturable or None,
        }  # fmt: skip
        own = {"momentum": momentum, "orthogonal": False, "stacked": False}
        super().__init__(groups, {**_adamw(defaults).defaults, **own})
        self._prepare()

    def _prepare(self) -> None:
        known = ("lr", "betas", "eps", "weight_decay", "capturable", "fused")
        self._adam = _adamw({key: self.defaults[key] for key in known})
        self._layouts: dict[int, tuple[Any, list[tuple[list[int], _Layout]]]] = {}
        """Per group of parameters, the shapes and devices of now, and how their cores are laid out."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()  # a copy has none of it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those of a group with ``orthogonal=True`` must have the shape of cores."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        least = 2 + group["stacked"]
        if group["orthogonal"] and (odd := [tuple(p.shape) for p in group["params"] if p.ndim < least]):
            self.param_groups.pop()
            raise ConfigError(
                f"A core has a left and a right rank, so with stacked={group['stacked']} at least {least} dimensions; "
                f"there is one of shape {odd[0]}."
            )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure` evaluates the loss again, as torch has it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adam.state = self.state
        self._adam.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
        self._adam.step()
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
        moves = torch._foreach_lerp(gradients, momenta, group["momentum"])  # a look ahead, after Nesterov
        lr = group["lr"]
        if group["weight_decay"]:
            torch._foreach_mul_(cores, 1 - lr * group["weight_decay"])
        for members, layout in self._laid_out(number, cores, group["stacked"]):
            some = [moves[i] for i in members]
            torch._foreach_sub_([cores[i] for i in members], pieces(layout.orthogonal(join(some)) * lr, some))

    def _laid_out(self, number: int, cores: Sequence[Tensor], stacked: bool) -> list[tuple[list[int], _Layout]]:
        """The cores' indices in groups, each with its layout; made anew when shapes have changed."""
        key = [(core.shape, core.device) for core in cores]
        if number not in self._layouts or self._layouts[number][0] != key:
            shapes = [_matrices(core.shape, stacked) for core in cores]
            found = []
            for device in dict.fromkeys(core.device for core in cores):
                here = [i for i, core in enumerate(cores) if core.device == device]
                for pack in _packed([shapes[i] for i in here], SPACIOUS if device.type == "cuda" else 0):
                    members = [here[i] for i in pack]
                    found.append((members, _Layout([shapes[i] for i in members], device)))
            self._layouts[number] = key, found
        return self._layouts[number][1]


def _adamw(options: dict[str, Any]) -> torch.optim.AdamW:
    """The one that moves the rest: it gets their groups and state at each step."""
    lr = options["lr"]
    return torch.optim.AdamW([torch.zeros(1, device=lr.device if isinstance(lr, Tensor) else "cpu")], **options)


class _Matrices(NamedTuple):
    """One parameter: so many matrices with so many rows and columns."""

    number: int
    rows: int
    columns: int

    @property
    def short(self) -> int:
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)


def _matrices(shape: Sequence[int], stacked: bool) -> _Matrices:
    """A core as the more nearly square of its two unfoldings."""
    count, (left, *modes, right) = (shape[0], shape[1:]) if stacked else (1, shape)
    size = math.prod(modes)
    tall, wide = _Matrices(count, left * size, right), _Matrices(count, left, size * right)
    return tall if tall.short >= wide.short else wide


def _packed(shapes: Sequence[_Matrices], room: int) -> list[list[int]]:
    """Indices of matrices that go into one stack, such that padding does not waste much."""
    packs: list[list[int]] = []
    for i in sorted(range(len(shapes)), key=lambda i: shapes[i].long, reverse=True):
        if packs and _is_compact([shapes[j] for j in (*packs[-1], i)], room):
            packs[-1].append(i)
        else:
            packs.append([i])
    return packs


def _is_compact(shapes: Sequence[_Matrices], room: int) -> bool:
    padded = sum(s.number for s in shapes) * max(s.short for s in shapes) * max(s.long for s in shapes)
    return padded <= max(room, WASTE * sum(s.number * s.rows * s.columns for s in shapes))


class _Layout:
    """Where the entries of some cores, one after the other, stand in a stack of padded matrices, short sides first."""

    def __init__(self, shapes: Sequence[_Matrices], device: torch.device) -> None:
        self.size = sum(s.number for s in shapes), max(s.short for s in shapes), max(s.long for s in shapes)
        _, short, long = self.size
        places, start = [], 0
        for s in shapes:
            matrix = torch.arange(start, start + s.number)[:, None, None] * (short * long)
            row, column = torch.arange(s.rows)[:, None], torch.arange(s.columns)[None, :]
            places.append((matrix + (row * long + column if s.rows <= s.columns else column * long + row)).flatten())
            start += s.number
        self.places = torch.cat(places).to(device)
        factors = [SIZE * math.sqrt(s.long) for s in shapes for _ in range(s.number)]
        self.factors = torch.tensor(factors, device=device)[:, None, None]
        """Rows of unit length become rows of entries with a root mean square of `SIZE`."""

    def orthogonal(self, flat: Tensor) -> Tensor:
        """The nearest matrices with orthonormal rows, roughly, times the factors."""
        x = flat.new_zeros(math.prod(self.size)).index_copy_(0, self.places, flat).view(self.size)
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(EMPTY)
        a, b, c = NEWTON_SCHULZ
        for _ in range(ROUNDS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x * self.factors.to(x.dtype)).flatten().index_select(0, self.places)
