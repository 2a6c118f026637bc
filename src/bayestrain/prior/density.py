"""The Gaussian-Gamma prior that prunes ranks, for any equation, as functions of cores and ``u = log lambda``.

Every bond has a vector ``lambda`` with one positive entry per rank index, and every lambda is Gamma(a, b). An entry of
a core is Gaussian with mean 0. Its log variance is the sum over the core's bonds of ``power * u[bond]`` at the entry's
indices. The powers of one core add up to 2 (`Equation.powers`): an inner core of a train has variance
``lambda * lambda'``, its first and last core ``lambda ** 2``. A core without bonds is Normal(0, other_variance).

When a lambda goes to zero, every slice at its index vanishes and the rank falls. The density grows without bound on the
way, hence the floor under ``u`` (`apply_floor`). `us` holds one vector per bond, in the order of ``equation.bonds``.
Nothing branches on a value, so `torch.vmap` and CUDA graphs work.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bayestrain.formats.equation import Equation, Labels
from bayestrain.nn.factorized import FLOOR, GAMMA_RATE, GAMMA_SHAPE

OTHER_VARIANCE = 100.0
"""The paper's prior variance of every parameter that no lambda governs."""

LIMIT = 30.0
"""Largest ``|log lambda|``, also between cores that are zero: products of exponentials stay finite in single."""

MAX_STEP = 2.0
"""Largest change of ``log lambda`` in one update: far from the mode the conditional is flat and Newton overshoots."""

RATE = 0.1
"""Step size of the gradient update."""

Move = Callable[[Tensor, float | Tensor, Mapping[float, Tensor], float], Tensor]
"""``(u, linear, falling, b) -> u``, one step on a bond's conditional: `newton_step` or `gradient_step`."""


def exact(cores: Sequence[Tensor]) -> list[Tensor]:
    """The cores in single precision at least: half precision holds neither their squares nor sums of them."""
    return [core if core.dtype in (torch.float32, torch.float64) else core.float() for core in cores]


@lru_cache(maxsize=4096)
def linear_terms(
    equation: Equation, shapes: tuple[torch.Size, ...], start: tuple[int, ...] | None = None, a: float = GAMMA_SHAPE
) -> tuple[float, ...]:
    """Per bond the coefficient of ``u`` in ``-log p(cores, lambda)``: half its power for every entry at an index.

    Entries are counted at the ranks `start` before any cut (default: those of now), else every cut would weaken the
    prior on the other bonds of its cores.
    """
    counted = equation.sizes(shapes) | dict(zip(equation.bonds, start or equation.ranks(shapes), strict=True))
    found = dict.fromkeys(equation.bonds, 1.0 - a)
    for labels, powers in zip(equation.cores, equation.powers, strict=True):
        for bond, power in powers.items():
            found[bond] += 0.5 * power * math.prod(counted[label] for label in labels if label != bond)
    return tuple(found.values())


def _precision(labels: Labels, powers: Mapping[str, float], u: Mapping[str, Tensor]) -> Tensor | float:
    """``1 / variance`` that these bonds give to a core's entries, broadcastable to the core."""
    shapes = {bond: [-1 if label == bond else 1 for label in labels] for bond in powers}
    terms = [(u[bond] * -power).reshape(shapes[bond]) for bond, power in powers.items()]
    return torch.exp(sum(terms[1:], terms[0])) if terms else 1.0


def log_prob(
    equation: Equation,
    cores: Sequence[Tensor],
    us: Sequence[Tensor],
    a: float = GAMMA_SHAPE,
    b: float = GAMMA_RATE,
    start: tuple[int, ...] | None = None,
    other_variance: float = OTHER_VARIANCE,
) -> Tensor:
    """``log p(cores | lambda) + log p(lambda)`` (Hawkins & Zhang 2019, eqs. 9-11), but for constants of cut indices."""
    linear = linear_terms(equation, tuple(core.shape for core in cores), start, a)
    u, terms, constant = dict(zip(equation.bonds, us, strict=True)), [], 0.0
    for core, labels, powers in zip(exact(cores), equation.cores, equation.powers, strict=True):
        precision = _precision(labels, powers, u) if powers else 1.0 / other_variance
        terms.append(-0.5 * (core.square() * precision).sum())
        constant -= 0.5 * core.numel() * math.log(2 * math.pi * (1.0 if powers else other_variance))
    for own, coefficient in zip(us, linear, strict=True):
        terms.append(-(own * coefficient + own.exp() * b).sum())
        constant += own.numel() * (a * math.log(b) - math.lgamma(a))
    return torch.stack(terms).sum() + constant


def energies(equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
    """Per core the sums of its squared entries over the modes, whose axes stay with size 1."""
    found = []
    for core, labels in zip(exact(cores), equation.cores, strict=True):
        modes = [axis for axis, label in enumerate(labels) if label in equation.modes]
        found.append(core.square().sum(modes, keepdim=True) if modes else core.square())
    return found


def falling_terms(
    equation: Equation, energies: Sequence[Tensor], us: Sequence[Tensor], bond: int
) -> dict[float, Tensor]:
    """Per power p the coefficients of ``exp(-p * u)``, one per index, in the conditional of the bond number `bond`.

    Per index ``-log p(u | cores, other bonds)`` is ``linear * u + sum over p of falling[p] * exp(-p * u) + b * exp(u)``
    up to a constant: convex in ``u``. A core where the bond has power p contributes to ``falling[p]`` half its
    `energies` at the index, divided by what its other bonds give to the variance. (The paper lacks the chain rule.)
    """
    u, label = dict(zip(equation.bonds, us, strict=True)), equation.bonds[bond]
    falling: dict[float, Tensor] = {}
    for core in equation.owners(label):
        labels, others = equation.cores[core], dict(equation.powers[core])
        power = others.pop(label)
        half = 0.5 * energies[core] * _precision(labels, others, u)
        if rest := [axis for axis, own in enumerate(labels) if own != label]:
            half = half.sum(rest)
        falling[power] = falling[power] + half if power in falling else half
    return falling


def _derivatives(u: Tensor, linear: float | Tensor, falling: Mapping[float, Tensor], b: float) -> tuple[Tensor, Tensor]:
    curvature = b * torch.exp(u)
    slope = curvature + linear
    for power, coefficients in falling.items():
        term = power * coefficients * torch.exp(-power * u)
        slope, curvature = slope - term, curvature + power * term
    return slope, curvature


def newton_step(u: Tensor, linear: float | Tensor, falling: Mapping[float, Tensor], b: float) -> Tensor:
    """One clipped Newton step towards the minimum of the convex conditional."""
    slope, curvature = _derivatives(u, linear, falling, b)
    return u - (slope / curvature).clamp(-MAX_STEP, MAX_STEP)


def gradient_step(u: Tensor, linear: float | Tensor, falling: Mapping[float, Tensor], b: float) -> Tensor:
    """One gradient step on the same conditional, with the slope measured per entry of the slices that ``u`` governs."""
    slope, _ = _derivatives(u, linear, falling, b)
    entries = linear.clamp_min(1.0) if isinstance(linear, Tensor) else max(linear, 1.0)
    return u - (RATE * slope / entries).clamp(-MAX_STEP, MAX_STEP)


def apply_floor(u: Tensor, floor: float) -> Tensor:
    """Keep every entry (of the last axis) at least `floor` times the largest, and all of them within `LIMIT`."""
    return torch.maximum(u, u.amax(-1, keepdim=True) + math.log(floor)).clamp(-LIMIT, LIMIT)


@lru_cache(maxsize=1024)
def colours(equation: Equation) -> tuple[int, ...]:
    """A number per bond, such that no two bonds of the same number share a core: they could as well move together."""
    found: dict[str, int] = {}
    for bond in equation.bonds:
        taken = {found.get(other) for core in equation.owners(bond) for other in equation.bonds_of(core)}
        found[bond] = min(colour for colour in range(len(equation.bonds)) if colour not in taken)
    return tuple(found.values())


def conditional_mode(
    equation: Equation,
    cores: Sequence[Tensor],
    us: Sequence[Tensor],
    a: float = GAMMA_SHAPE,
    b: float = GAMMA_RATE,
    floor: float = FLOOR,
    start: tuple[int, ...] | None = None,
    sweeps: int = 100,
    move: Move = newton_step,
) -> list[Tensor]:
    """``u`` moved towards its joint mode given the cores, by rounds of one step per bond, colour by colour."""
    linear, own = linear_terms(equation, tuple(core.shape for core in cores), start, a), energies(equation, cores)
    result = [u.to(own[0].dtype) for u in us]  # half precision has energies in single
    for bond in sorted(range(len(us)), key=colours(equation).__getitem__) * sweeps:
        moved = move(result[bond], linear[bond], falling_terms(equation, own, result, bond), b)
        result[bond] = apply_floor(moved, floor)
    return [u.to(before.dtype) for u, before in zip(result, us, strict=True)]
