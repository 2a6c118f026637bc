"""Decompositions against what is planted, and against a search by brute force."""

from __future__ import annotations

import math

import pytest
import torch
from networks import EQUATIONS, random_cores
from torch import Tensor
from torch.testing import assert_close

from bayestrain.formats import Equation, algebra, fitting, get

PLANTED = [
    ("cp", (4, 5, 3), 3), ("cp", (5, 5, 5), 5), ("cp", (4, 4, 4), 5), ("cp", (3, 4, 2, 5), 3), ("cp", (20, 20, 20), 18),
    ("ring", (4, 5, 3), (2, 2, 2)), ("ring", (6, 5, 6), (3, 2, 3)), ("ring", (6, 7, 8), (2, 2, 3)),
    ("ring", (3, 4, 2, 5), (2, 2, 2, 2)), ("ring", (30, 30, 30), (5, 5, 5)),
    ("tucker", (6, 7, 8), (2, 2, 3)), ("tucker", (9, 20, 30), (3, 4, 5)), ("tucker", (3, 4, 2, 5), 2),
]  # fmt: skip


def error(equation: Equation, cores: list[Tensor], tensor: Tensor) -> float:
    return float((algebra.dense(equation, cores) - tensor).norm() / tensor.norm())


@pytest.mark.parametrize(("name", "sizes", "rank"), PLANTED)
def test_random_tensors_of_exact_ranks_are_recovered(name: str, sizes: tuple[int, ...], rank: object) -> None:
    format, errors = get(name), []
    equation, ranks = format.equation(sizes), format.max_ranks(sizes, rank)  # type: ignore[arg-type]
    for seed in range(10):
        generator = torch.Generator().manual_seed(77 + seed)
        start = algebra.random_cores(equation, sizes, ranks, 1.0, generator=generator, dtype=torch.float64)
        tensor = algebra.dense(equation, start)
        errors.append(error(equation, format.decompose(tensor, max_rank=ranks), tensor))
    assert sum(own < 1e-6 for own in errors) >= (10 if name == "tucker" else 9), errors


@pytest.mark.parametrize("name", ["cp", "ring", "tucker"])
@pytest.mark.parametrize("seed", range(2))
def test_no_search_by_brute_force_ends_nearer(name: str, seed: int) -> None:
    """Eight random starts of alternating least squares, 60 sweeps each, on a tensor that has no low rank."""
    format, sizes = get(name), (5, 6, 7)
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(sizes, generator=generator, dtype=torch.float64)
    equation, ranks, best = format.equation(sizes), format.max_ranks(sizes, 2), math.inf
    for _ in range(8):
        cores = algebra.random_cores(equation, sizes, ranks, 1.0, generator=generator, dtype=torch.float64)
        best = min(best, error(equation, algebra.refit(equation, cores, [(tensor, equation.modes)], 60), tensor))
    assert error(equation, format.decompose(tensor, max_rank=2), tensor) <= 1.005 * best


@pytest.mark.parametrize("equation", EQUATIONS, ids=str)
def test_slopes_are_the_derivatives(equation: Equation) -> None:
    cores = random_cores(equation, 1)
    if not equation.modes:
        return
    found = fitting.slopes(equation, cores)
    exact = torch.autograd.functional.jacobian(lambda *own: algebra.dense(equation, own).flatten(), tuple(cores))
    assert_close(found, torch.cat([part.flatten(1) for part in exact], dim=1))


@pytest.mark.parametrize("name", ["cp", "ring"])
def test_the_leading_directions_hold_a_tensor_of_low_rank(name: str) -> None:
    format, sizes = get(name), (20, 30, 6)
    equation, ranks = format.equation(sizes), format.max_ranks(sizes, 2)
    tensor = algebra.dense(equation, algebra.random_cores(equation, sizes, ranks, 1.0, dtype=torch.float64))
    small, bases = fitting.inside(equation, tensor, ranks)
    width = 2 if name == "cp" else 4
    assert small.shape == (width, width, width)
    _, cores = fitting.nearest(equation, small, ranks)
    assert_close(algebra.dense(equation, fitting.outside(equation, cores, bases)), tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_a_ring_is_nearer_than_a_train_and_smaller_at_one_error(scale: float) -> None:
    ring, train, sizes = get("ring"), get("tt"), (6, 7, 8)
    equation, chain = ring.equation(sizes), train.equation(sizes)
    tensor = algebra.dense(equation, algebra.random_cores(equation, sizes, (2, 2, 2), 1.0, dtype=torch.float64))
    tensor = tensor + scale * torch.randn_like(tensor)
    errors = [
        error(own, format.decompose(tensor, max_rank=2), tensor) for own, format in ((equation, ring), (chain, train))
    ]
    assert errors[0] < errors[1]
    found = [format.decompose(tensor, tol=0.3) for format in (ring, train)]
    assert error(equation, found[0], tensor) <= 0.3
    sizes = [sum(core.numel() for core in own) for own in found]
    assert sizes[0] < sizes[1] or (scale and sizes[0] == sizes[1])


@pytest.mark.parametrize(
    ("modes", "equation"),
    [
        ((9, 16, 16), "r0.r1.r2, m0.r0, m1.r1, m2.r2 -> m0.m1.m2"),
        ((16, 3, 3, 16), "r0.m1.m2.r3, m0.r0, m3.r3 -> m0.m1.m2.m3"),  # small modes stay in the core
        ((512, 64), "r0.m1, m0.r0 -> m0.m1"),  # a matrix: truncated SVD
        ((1, 16, 32), "m0.r1.m2, m1.r1 -> m0.m1.m2"),  # a 1x1 convolution is one, too
        ((2, 3, 2), "r0.r1.r2, m0.r0, m1.r1, m2.r2 -> m0.m1.m2"),
        ((6,), "m0 -> m0"),
    ],
)  # fmt: skip
def test_where_tucker_has_factors(modes: tuple[int, ...], equation: str) -> None:
    assert str(get("tucker").equation(modes)) == equation


def test_a_ring_of_two_modes_is_a_train_and_no_rank_is_larger_than_a_train_needs() -> None:
    assert get("ring").equation((5, 6)) == get("tt").equation((5, 6))
    assert get("ring").max_ranks((4, 5, 3)) == (4, 5, 5)
