"""The prior of any equation against independent references: torch.distributions, finite differences, scipy."""

import math

import pytest
import torch
from networks import written
from prior_kit import CLOSE, EQUATIONS, OTHER, A, B, random_network, slow_log_prob
from scipy.optimize import minimize_scalar
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.formats.equation import Equation
from bayestrain.prior import density
from bayestrain.prior.density import log_prob

networks = pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS.keys())


def terms(equation: Equation, cores: list[Tensor], us: list[Tensor], bond: int) -> tuple[float, dict[float, Tensor]]:
    linear = density.linear_terms(equation, tuple(core.shape for core in cores), a=A)
    return linear[bond], density.falling_terms(equation, density.energies(equation, cores), us, bond)


def value(u: Tensor, linear: float, falling: dict[float, Tensor], b: float = B) -> Tensor:
    """The conditional of one bond, up to a constant."""
    return linear * u + sum(c * torch.exp(-p * u) for p, c in falling.items()) + b * torch.exp(u)


@networks
def test_log_prob_is_torch_distributions_entry_by_entry(equation: Equation) -> None:
    cores, us = random_network(equation)
    found = log_prob(equation, cores, us, A, B, other_variance=OTHER)
    torch.testing.assert_close(found, slow_log_prob(equation, cores, us), rtol=1e-12, atol=1e-9)
    inputs = [t.clone().requires_grad_() for t in (*cores, *us)]
    assert torch.autograd.gradcheck(lambda *t: log_prob(equation, t[: len(cores)], t[len(cores) :], A, B), inputs)


@networks
def test_cut_indices_go_on_counting(equation: Equation) -> None:
    """Cutting the first index of two bonds, which is zero, changes the gradient of nothing that is left."""
    cores, us = random_network(equation)
    start = equation.ranks([core.shape for core in cores])
    for bond in equation.bonds[:2]:
        for core in equation.owners(bond):
            cores[core].select(equation.axis(core, bond), 0).zero_()

    def left(cores: list[Tensor], us: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for k, bond in enumerate(equation.bonds[:2]):
            cores = algebra.keep(equation, cores, bond, torch.arange(1, start[k]))
        return cores, [u[1:] if k < 2 else u for k, u in enumerate(us)]

    def gradients(cores: list[Tensor], us: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        cores, us = ([t.clone().requires_grad_() for t in own] for own in (cores, us))
        found = torch.autograd.grad(log_prob(equation, cores, us, A, B, start), [*cores, *us])
        return list(found[: len(cores)]), list(found[len(cores) :])

    torch.testing.assert_close(gradients(*left(cores, us)), left(*gradients(cores, us)), **CLOSE)


@networks
def test_the_conditional_is_the_density_of_one_bond_and_its_mode_is_found(equation: Equation) -> None:
    cores, us = random_network(equation)
    for bond in range(len(us)):
        u = us[bond].clone().requires_grad_()
        moved = [u if k == bond else other for k, other in enumerate(us)]
        (expected,) = torch.autograd.grad(-log_prob(equation, cores, moved, A, B), u)
        (found,) = torch.autograd.grad(value(u, *terms(equation, cores, us, bond)).sum(), u)
        torch.testing.assert_close(found, expected, **CLOSE)
    mode = density.conditional_mode(equation, cores, us, A, B, floor=1e-9, sweeps=300)
    inputs = [u.clone().requires_grad_() for u in mode]
    if inputs:
        for slope in torch.autograd.grad(log_prob(equation, cores, inputs, A, B), inputs):
            assert slope.abs().max() < 1e-6
    for own, u in zip(mode, us, strict=True):
        assert own.shape == u.shape
    still = [torch.zeros_like(core, dtype=torch.float32) for core in cores]
    found = density.conditional_mode(equation, still, [u.float() for u in us], sweeps=40)
    assert all((u == -density.LIMIT).all() for u in found)
    assert log_prob(equation, still, found).isfinite()


def test_the_gradient_printed_in_the_paper_is_another() -> None:
    """It is the derivative with respect to the variance: no chain-rule factor, no square at the ends."""
    equation = EQUATIONS["chain"]
    cores, us = random_network(equation)
    u = us[1].clone().requires_grad_()
    (expected,) = torch.autograd.grad(-log_prob(equation, cores, [us[0], u, us[2]], A, B), u)
    variances = [(us[0][:, None] + us[1]).exp(), (us[1][:, None] + us[2]).exp()]
    energies = [core.square().sum(1) for core in cores[1:3]]
    entries = [core.shape[1] for core in cores[1:3]]
    left, right = (0.5 * (n / v - e / v**2) for n, v, e in zip(entries, variances, energies, strict=True))
    printed = (left.sum(0) + right.sum(1) - (A - 1) / us[1].exp() + B) * us[1].exp()
    assert ((printed - expected).abs() / expected.abs() > 0.05).any()


def spread(low: float, high: float, generator: torch.Generator, count: int = 1000) -> Tensor:
    """Numbers log-uniform between two powers of ten."""
    return 10 ** (low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("powers", [(1.0, 2.0), (2.0,), (2 / 3, 2.0), (0.5, 2 / 3, 1.0, 2.0), (0.4,)])
def test_newton_reaches_the_optimum_scipy_finds(powers: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    linear, rate = spread(0, 4, generator), spread(-1, 2, generator)
    falling = {power: spread(-6, 4, generator) for power in powers}
    u = 6 * torch.randn(1000, generator=generator, dtype=torch.float64)
    for _ in range(100):
        u = density.newton_step(u, linear, falling, rate)
    for case in range(0, 1000, 10):

        def objective(x: float, case: int = case) -> float:
            own = {power: c[case] for power, c in falling.items()}
            return float(value(torch.tensor(x, dtype=torch.float64), linear[case], own, rate[case]))

        best = minimize_scalar(objective, bounds=(-80, 15), method="bounded", options={"xatol": 1e-10}).x
        assert abs(float(u[case]) - best) < 1e-4, case


@pytest.mark.parametrize(
    ("text", "expected"),
    [("av, vbw, wcx, xdy, ye -> abcde", (0, 1, 0, 1)), ("xyz, ax, by, cz -> abc", (0, 1, 2)), ("ab -> ab", ())],
)
def test_bonds_of_one_colour_share_no_core(text: str, expected: tuple[int, ...]) -> None:
    assert density.colours(written(text)) == expected


def test_floor_is_relative_to_the_bonds_largest_entry() -> None:
    floored = density.apply_floor(torch.tensor([3.0, -40.0, 2.0]), 1e-3)
    torch.testing.assert_close(floored, torch.tensor([3.0, 3.0 + math.log(1e-3), 2.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype) -> None:
    equation = EQUATIONS["chain"]
    cores, us = random_network(equation)
    low = [(100 * core).to(dtype) for core in cores]  # their squares leave half precision
    found = log_prob(equation, low, [u.float() for u in us])
    exact = log_prob(equation, [core.double() for core in low], us)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=0)
    moved = density.conditional_mode(equation, low, [u.to(dtype) for u in us], sweeps=2)
    assert all(u.dtype == dtype and u.isfinite().all() for u in moved)
