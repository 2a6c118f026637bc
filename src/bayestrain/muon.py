"""Muon, an optimiser: the cores of tensor trains move along orthogonalised momentum, everything else as with Adam.

A core is a matrix, its left rank and modes against its right rank or the other way about, and what gradients do to it
is mostly along a few directions of that matrix. Muon (Jordan et al., 2024) takes the momentum's nearest matrix with
orthonormal rows instead, so that all directions move alike. Small ranks gain from it: none of their few indices idles.
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

SIZE = 0.2
"""The root mean square of a step's entries, in learning rates: about that of Adam's steps, so that one rate suits both
(Liu et al., 2025)."""

SPACIOUS, WASTE = 4_000_000, 2
"""A stack of padded matrices may have so many entries (on a GPU, where few operations matter more than small ones), or
so many times those of its cores; else there are several."""


def core_names(model: nn.Module) -> frozenset[str]:
    """The names of all parameters that are cores."""
    return frozenset(
        f"{layer}.cores.{k}".lstrip(".") for layer, found in tt_layers(model).items() for k in range(len(found.cores))
    )


def muon_groups(
    named: Iterable[tuple[str, Tensor]], cores: frozenset[str], *, stacked: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups for `Muon`: those with a name among `cores`, and the rest; `stacked` if each is many in one."""
    both: tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]] = ([], [])
    for name, tensor in named:
        both[name not in cores].append((name, tensor))
    groups = [{"params": both[0], "orthogonal": True, "stacked": stacked}, {"params": both[1], "orthogonal": False}]
    return [group for group in groups if group["params"]]


class Muon(torch.optim.Optimizer):
    """Muon for the cores of a model's tensor trains, AdamW for its other parameters.

    Args:
        params: a model, or groups of parameters. Those of a group with ``orthogonal=True`` are cores,
            ``(left, modes.., right)``; with ``stacked=True`` there is one more dimension in front, of many alike.
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
            params = muon_groups(trained, core_names(params))
        place = lr.device if isinstance(lr, Tensor) else "cpu"
        self._adam = torch.optim.AdamW(
            [torch.zeros(1, device=place)],
            lr,
            betas,
            eps,
            weight_decay,
            capturable=capturable,
            fused=capturable or None,
        )
        own = {"momentum": momentum, "orthogonal": False, "stacked": False}
        super().__init__(params, {**self._adam.defaults, **own})
        self._layouts: dict[Any, list[tuple[list[int], _Layout]]] = {}

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
        for group in self.param_groups:
            if group["orthogonal"]:
                self._move_cores(group)
        return loss

    def _move_cores(self, group: dict[str, Any]) -> None:
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
        for members, layout in self._laid_out(cores, group["stacked"]):
            some = [moves[i] for i in members]
            torch._foreach_sub_([cores[i] for i in members], pieces(layout.orthogonal(join(some)) * lr, some))

    def _laid_out(self, cores: Sequence[Tensor], stacked: bool) -> list[tuple[list[int], _Layout]]:
        """The cores' indices in groups, each with its layout; made anew when shapes have changed."""
        key = (stacked, *((core.shape, core.device) for core in cores))
        if key not in self._layouts:
            if len(self._layouts) > 8:
                self._layouts.clear()  # of shapes that a cut has ended
            shapes = [_matrices(core.shape, stacked) for core in cores]
            packs = _packed(shapes, SPACIOUS if cores[0].is_cuda else 0)
            self._layouts[key] = [
                (members, _Layout([shapes[i] for i in members], cores[0].device)) for members in packs
            ]
        return self._layouts[key]


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
        x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + torch.finfo(x.dtype).tiny
        a, b, c = NEWTON_SCHULZ
        for _ in range(ROUNDS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x * self.factors.to(x.dtype)).flatten().index_select(0, self.places)
