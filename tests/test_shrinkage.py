"""The Gaussian-Gamma prior against independent references: torch.distributions, finite differences, scipy."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.distributions import Gamma, Normal

from bayestrain import shrinkage, tt

A, B = 1.7, 5.0


def random_train(seed: int = 0, d: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3), (3, 1), (2, 2), (1, 4), (3, 3)][:d]
    ranks = (3, 4, 2, 3)[: d - 1]
    cores = tt.random_cores(shapes, ranks, 0.3, generator=generator, dtype=torch.float64)
    return cores, [torch.randn(r, generator=generator, dtype=torch.float64) for r in ranks]


@pytest.mark.parametrize("d", [2, 3, 4])
def test_log_prob_is_torch_distributions_term_by_term(d: int) -> None:
    cores, us = random_train(d=d)
    expected = torch.zeros((), dtype=torch.float64)
    for k, core in enumerate(cores):
        for a in range(core.shape[0]):
            for b in range(core.shape[-1]):
                if k == 0:
                    variance = us[0][b].exp() ** 2
                elif k == d - 1:
                    variance = us[-1][a].exp() ** 2
                else:
                    variance = us[k - 1][a].exp() * us[k][b].exp()
                expected = expected + Normal(0.0, variance.sqrt()).log_prob(core[a, ..., b]).sum()
    for u in us:
        expected = expected + Gamma(*torch.tensor([A, B], dtype=torch.float64)).log_prob(u.exp()).sum()
    torch.testing.assert_close(shrinkage.log_prob(cores, us, A, B), expected, rtol=1e-12, atol=1e-9)


def test_gradient_of_log_prob_is_finite_differences() -> None:
    cores, us = random_train()
    inputs = [t.clone().requires_grad_() for t in (*cores, *us)]
    assert torch.autograd.gradcheck(
        lambda *tensors: shrinkage.log_prob(tensors[: len(cores)], tensors[len(cores) :], A, B), inputs
    )


def slope(cores: list[Tensor], us: list[Tensor], bond: int) -> Tensor:
    """d(-log p)/du of one bond by the coefficients of `conditional`."""
    energies = shrinkage.slice_energies(cores)
    sizes = [core.numel() // energy.numel() for core, energy in zip(cores, energies, strict=True)]
    linear, inverse, square = shrinkage.conditional(energies, sizes, us, bond, A)
    u = us[bond - 1]
    return linear - inverse * torch.exp(-u) - 2 * square * torch.exp(-2 * u) + B * torch.exp(u)


def papers_printed_slope(cores: list[Tensor], us: list[Tensor], bond: int) -> Tensor:
    """The gradient printed in the paper: with respect to the variance, no chain-rule factor, no square at the ends."""
    energies = shrinkage.slice_energies(cores)
    variances = [v.exp() for v in shrinkage.log_variances(us)]
    left, right = bond - 1, bond
    entries = [cores[k].numel() // energies[k].numel() for k in (left, right)]
    by_variance = [
        0.5 * (entries[i] / variances[k] - energies[k] / variances[k] ** 2) for i, k in enumerate((left, right))
    ]
    by_lambda = by_variance[0].sum(0) + by_variance[1].sum(1) - (A - 1) / us[bond - 1].exp() + B
    return by_lambda * us[bond - 1].exp()  # d/du = lambda * d/dlambda


@pytest.mark.parametrize("bond", [1, 2, 3])
def test_conditional_slope_is_autograd_and_the_papers_is_not(bond: int) -> None:
    cores, us = random_train()
    u = us[bond - 1].clone().requires_grad_()
    moved = [u if k == bond - 1 else other for k, other in enumerate(us)]
    (expected,) = torch.autograd.grad(-shrinkage.log_prob(cores, moved, A, B), u)
    torch.testing.assert_close(slope(cores, us, bond), expected, rtol=1e-10, atol=1e-10)
    printed = papers_printed_slope(cores, us, bond)
    assert ((printed - expected).abs() / expected.abs() > 0.05).any()


def test_the_docstring_warns_of_the_printed_gradient() -> None:
    assert "printed in the paper" in (shrinkage.conditional.__doc__ or "")


def test_newton_reaches_the_optimum_scipy_finds_in_1000_random_cases() -> None:
    generator = torch.Generator().manual_seed(1)

    def spread(low: float, high: float) -> Tensor:
        """1,000 numbers, log-uniform between the two powers of ten."""
        return 10 ** (low + (high - low) * torch.rand(1000, generator=generator, dtype=torch.float64))

    linear, inverse, square, rate = spread(0, 4), spread(-6, 4), spread(-8, 4), spread(-1, 2)
    u = 6 * torch.randn(1000, generator=generator, dtype=torch.float64)
    for case in range(1000):
        terms = float(linear[case]), inverse[case : case + 1], square[case : case + 1]
        for _ in range(100):
            u[case : case + 1] = shrinkage.newton_step(u[case : case + 1], *terms, float(rate[case]))

    for case in range(1000):
        a, i, s, b = (float(t[case]) for t in (linear, inverse, square, rate))

        def objective(x: float, a: float = a, i: float = i, s: float = s, b: float = b) -> float:
            return a * x + i * math.exp(-x) + s * math.exp(-2 * x) + b * math.exp(x)

        best = minimize_scalar(objective, bounds=(-25, 15), method="bounded", options={"xatol": 1e-10}).x
        assert abs(float(u[case]) - best) < 1e-4, case


def test_gradient_steps_reach_the_same_optimum() -> None:
    cores, us = random_train()
    newton = shrinkage.conditional_mode(cores, us, A, B, 1e-9, sweeps=200)
    energies = shrinkage.slice_energies(cores)
    sizes = [core.numel() // energy.numel() for core, energy in zip(cores, energies, strict=True)]
    slow = list(us)
    for _ in range(5000):
        for k in range(len(slow)):
            terms = shrinkage.conditional(energies, sizes, slow, k + 1, A)
            slow[k] = shrinkage.gradient_step(slow[k], *terms, B, rate=0.1)
    for fast, other in zip(newton, slow, strict=True):
        torch.testing.assert_close(fast, other, rtol=1e-5, atol=1e-5)


def test_floor_is_relative_to_the_bonds_largest_entry() -> None:
    u = torch.tensor([3.0, -40.0, 2.0])
    floored = shrinkage.apply_floor(u, 1e-3)
    torch.testing.assert_close(floored, torch.tensor([3.0, 3.0 + math.log(1e-3), 2.0]))
