"""The Gaussian-Gamma prior that prunes ranks, for any equation, as functions of cores and ``u = log lambda``.

Every bond has a vector ``lambda`` with one positive entry per rank index, and every lambda is Gamma(a, b). An entry of
a core is Gaussian with mean 0. Its log variance is the sum over the core's bonds of ``power * u[bond]`` at the entry's
indices. The powers of one core add up to 2 (`Equation.powers`): an inner core of a train has variance
``lambda * lambda'``, its first and last core ``lambda ** 2``, a core of three bonds the power 2/3 of each. A core
without bonds is Normal(0, other_variance).

When a lambda goes to zero, every slice at its index vanishes and the rank falls. The density grows without bound on the
way, so callers keep a floor under ``u`` (`apply_floor`).

`us` holds one vector per bond, in the order of ``equation.bonds``, and `linear` the coefficients that `linear_terms`
counts. Nothing here branches on a value, so `torch.vmap` and CUDA graphs work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from bayestrain.formats.equation import Equation, Labels
from bayestrain.nn.factorized import FLOOR, GAMMA_RATE, GAMMA_SHAPE

OTHER_VARIANCE = 100.0
"""The paper's prior variance of every parameter that no lambda governs."""

LIMIT = 30.0
"""Largest ``|log lambda|``: its exponentials and their products stay finite in single precision."""

MAX_NEWTON_STEP = 2.0
"""Largest change of ``log lambda`` in one update: far from the mode the conditional is flat and Newton overshoots."""

Linear = Sequence["float | Tensor"]
"""Per bond the coefficient of ``u`` in ``-log p``, one number or one per index."""

Falling = Mapping[float, Tensor]
"""``{power p: coefficients of exp(-p * u)}``, one coefficient per index of a bond."""

Move = Callable[[Tensor, "float | Tensor", Falling], Tensor]
"""``(u, linear, falling) -> u``, one step on a bond's conditional: `newton_step` or `gradient_step`."""


def exact(cores: Sequence[Tensor]) -> list[Tensor]:
    """The cores in single precision at least: half precision holds neither their squares nor sums of them."""
    return [core if core.dtype in (torch.float32, torch.float64) else core.float() for core in cores]


# --- the density ------------------------------------------------------------------------------------------------------


def precisions(
    equation: Equation, us: Sequence[Tensor], other_variance: float = OTHER_VARIANCE
) -> list[Tensor | float]:
    """Per core ``1 / variance`` of its entries, broadcastable to the core.

    The gradient of the log density with respect to a core is ``-precision * core``.
    """
    u = dict(zip(equation.bonds, us, strict=True))
    cores = zip(equation.cores, equation.powers, strict=True)
    return [_precision(labels, powers, u) if powers else 1.0 / other_variance for labels, powers in cores]


def _precision(labels: Labels, powers: Mapping[str, float], u: Mapping[str, Tensor]) -> Tensor:
    """``1 / variance`` by these bonds of a core."""
    terms = [
        (u[bond] * -power).reshape([-1 if label == bond else 1 for label in labels]) for bond, power in powers.items()
    ]
    return torch.exp(sum(terms[1:], terms[0]))


@lru_cache(maxsize=4096)
def linear_terms(
    equation: Equation, shapes: tuple[torch.Size, ...], start: tuple[int, ...] | None = None, a: float = GAMMA_SHAPE
) -> tuple[float, ...]:
    """Per bond the coefficient of ``u`` in ``-log p(cores, lambda)``: half its power for every entry at an index.

    Entries are counted at the ranks `start` of a core's other bonds: those before any cut (default: those of now).
    Indices that were cut are zero, but count as entries of the cores they were cut from. Otherwise every cut would
    weaken the prior on the other bonds of these cores.
    """
    counted = equation.sizes(shapes) | dict(zip(equation.bonds, start or equation.ranks(shapes), strict=True))
    found = dict.fromkeys(equation.bonds, 1.0 - a)
    for labels, powers in zip(equation.cores, equation.powers, strict=True):
        for bond, power in powers.items():
            found[bond] += 0.5 * power * math.prod(counted[label] for label in labels if label != bond)
    return tuple(found.values())


def log_prob(
    equation: Equation,
    cores: Sequence[Tensor],
    us: Sequence[Tensor],
    linear: Linear,
    a: float = GAMMA_SHAPE,
    b: float = GAMMA_RATE,
    other_variance: float = OTHER_VARIANCE,
) -> Tensor:
    """``log p(cores | lambda) + log p(lambda)``, every constant included (Hawkins & Zhang 2019, eqs. 9-11).

    Terms that depend on nothing but indices that were cut are left out.
    """
    cores, inverse = exact(cores), precisions(equation, us, other_variance)
    entries, lambdas = sum(core.numel() for core in cores), sum(u.numel() for u in us)
    free = sum(core.numel() for core, powers in zip(cores, equation.powers, strict=True) if not powers)
    constant = -0.5 * (math.log(2 * math.pi) * entries + math.log(other_variance) * free)
    terms = [-0.5 * (core.square() * own).sum() for core, own in zip(cores, inverse, strict=True)]
    terms += [-(u * coefficient + u.exp() * b).sum() for u, coefficient in zip(us, linear, strict=True)]
    return torch.stack(terms).sum() + (constant + lambdas * (a * math.log(b) - math.lgamma(a)))


# --- the conditional of one bond --------------------------------------------------------------------------------------


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
    """What the conditional of the bond number `bond`, given cores and other bonds, has of ``exp(-p * u)``, per power p.

    Per index ``-log p(u | cores, other bonds)`` is ``linear * u + sum over p of falling[p] * exp(-p * u) + b * exp(u)``
    up to a constant: convex in ``u``. A core where the bond has power p contributes to ``falling[p]`` half its
    `energies` at the index, divided by what its other bonds give to the variance.

    The gradient printed in the paper is the derivative with respect to an entry's *variance*: the chain-rule factor of
    the neighbouring lambda is missing, and the square at the first and last core is not treated. It does not agree with
    finite differences; this one does.
    """
    u, label = dict(zip(equation.bonds, us, strict=True)), equation.bonds[bond]
    falling: dict[float, Tensor] = {}
    for core in equation.owners(label):
        labels, others = equation.cores[core], dict(equation.powers[core])
        power = others.pop(label)
        half = 0.5 * energies[core] * (_precision(labels, others, u) if others else 1.0)
        if rest := [axis for axis, own in enumerate(labels) if own != label]:
            half = half.sum(rest)
        falling[power] = falling[power] + half if power in falling else half
    return falling


def _slope(u: Tensor, linear: float | Tensor, falling: Falling, b: float) -> tuple[Tensor, Tensor]:
    """First and second derivative of the conditional."""
    curvature = b * torch.exp(u)
    slope = curvature + linear
    for power, coefficients in falling.items():
        term = power * coefficients * torch.exp(-power * u)
        slope, curvature = slope - term, curvature + power * term
    return slope, curvature


def newton_step(u: Tensor, linear: float | Tensor, falling: Falling, b: float) -> Tensor:
    """One clipped Newton step towards the minimum of the convex conditional."""
    slope, curvature = _slope(u, linear, falling, b)
    return u - (slope / curvature).clamp(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)


def gradient_step(u: Tensor, linear: float | Tensor, falling: Falling, b: float, rate: float) -> Tensor:
    """One gradient step on the same conditional, with the slope measured per entry of the slices that ``u`` governs."""
    slope, _ = _slope(u, linear, falling, b)
    entries = linear.clamp_min(1.0) if isinstance(linear, Tensor) else max(linear, 1.0)
    return u - (rate * slope / entries).clamp(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)


def apply_floor(u: Tensor, floor: float) -> Tensor:
    """Keep every entry at least `floor` times the bond's largest lambda, and all of them within `LIMIT`.

    Between cores that are exactly zero nothing stops the largest lambda itself from falling; the limit does. Bonds may
    be stacked; the last axis is that of one bond's entries.
    """
    return torch.maximum(u, u.amax(-1, keepdim=True) + math.log(floor)).clamp(-LIMIT, LIMIT)


@lru_cache(maxsize=1024)
def update_order(equation: Equation) -> tuple[int, ...]:
    """The order in which sweeps update the bonds: coloured so that no two of one colour share a core, colour by colour.

    Bonds of one colour do not see each other and could as well move together, as they do in `perf`. In a chain the
    first, third, .. bond come before the second, fourth, ..
    """
    colours: dict[str, int] = {}
    for bond in equation.bonds:
        taken = {colours.get(other) for core in equation.owners(bond) for other in equation.bonds_of(core)}
        colours[bond] = min(colour for colour in range(len(equation.bonds)) if colour not in taken)
    return tuple(sorted(range(len(equation.bonds)), key=list(colours.values()).__getitem__))


def sweep(
    equation: Equation,
    cores: Sequence[Tensor],
    us: Sequence[Tensor],
    linear: Linear,
    move: Move,
    floor: float = FLOOR,
    sweeps: int = 1,
) -> list[Tensor]:
    """``u`` of every bond after rounds of one step per bond on its conditional, in `update_order`."""
    own = energies(equation, cores)
    result = [u.to(own[0].dtype) for u in us]  # half precision has energies in single
    for bond in update_order(equation) * sweeps:
        moved = move(result[bond], linear[bond], falling_terms(equation, own, result, bond))
        result[bond] = apply_floor(moved, floor)
    return [u.to(before.dtype) for u, before in zip(result, us, strict=True)]


def conditional_mode(
    equation: Equation,
    cores: Sequence[Tensor],
    us: Sequence[Tensor],
    a: float = GAMMA_SHAPE,
    b: float = GAMMA_RATE,
    floor: float = FLOOR,
    start: tuple[int, ...] | None = None,
    sweeps: int = 100,
) -> list[Tensor]:
    """``u`` moved towards its joint mode given the cores, by rounds of Newton steps."""
    linear = linear_terms(equation, tuple(core.shape for core in cores), start, a)
    return sweep(equation, cores, us, linear, partial(newton_step, b=b), floor, sweeps)
