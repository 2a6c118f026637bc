"""The algebra of any equation against numpy's einsum; decompositions against what is planted and brute force."""

import math

import numpy as np
import pytest
import torch
from networks import EQUATIONS, NAMED, Written, random_cores, written
from torch import Tensor
from torch.testing import assert_close

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.formats import Equation, algebra, fitting, get, trees
from bayestrain.formats.align import align, balance

SEEDED = [pytest.param(equation, seed, id=f"{seed}: {equation}") for seed, equation in enumerate(EQUATIONS)]
TREES = [equation for equation in EQUATIONS if equation.is_tree]


def ranks_of(cores: list[Tensor], equation: Equation) -> tuple[int, ...]:
    return equation.ranks([core.shape for core in cores])


def reference(equation: Equation, cores: list[Tensor]) -> np.ndarray:
    """The full tensor by one call of numpy's einsum."""
    number = {label: n for n, label in enumerate(dict.fromkeys(x for core in equation.cores for x in core))}
    args: list[object] = []
    for core, labels in zip(cores, equation.cores, strict=True):
        args += [core.numpy(), [number[x] for x in labels]]
    return np.einsum(*args, [number[x] for x in equation.modes], optimize=True)


@pytest.mark.parametrize(("equation", "seed"), SEEDED)
def test_tensors_norms_and_inner_products_are_numpys(equation: Equation, seed: int) -> None:
    cores = random_cores(equation, seed)
    sizes = equation.sizes([core.shape for core in cores])
    shapes = equation.shapes([sizes[m] for m in equation.modes], [2] * len(equation.bonds))
    others = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    a, b = reference(equation, cores), reference(equation, others)
    assert_close(algebra.dense(equation, cores).numpy(), a)
    assert_close(float(algebra.norm(equation, cores)), float(np.linalg.norm(a)))
    assert_close(float(algebra.inner(equation, cores, others)), float((a * b).sum()))


@pytest.mark.parametrize(("equation", "seed"), SEEDED)
def test_contributions_and_errors_of_dropping_indices_are_exact(equation: Equation, seed: int) -> None:
    cores = random_cores(equation, seed, ranks=(2, 3))
    whole = reference(equation, cores)
    for bond, found in zip(equation.bonds, algebra.contributions(equation, cores), strict=True):
        for r in range(len(found)):
            left = algebra.keep(equation, cores, bond, torch.tensor([i for i in range(len(found)) if i != r]))
            assert_close(float(found[r]), float(np.linalg.norm(whole - reference(equation, left))))
    cores = random_cores(equation, seed, ranks=(3, 4))
    whole = reference(equation, cores)
    for bond in equation.bonds:
        order, errors = algebra.drop_order(equation, cores, bond)
        exact = []
        for count in range(1, len(order)):
            left = algebra.keep(equation, cores, bond, order[count:].sort().values)
            exact.append(float(np.linalg.norm(whole - reference(equation, left))))
        assert_close(errors[:-1].tolist(), np.maximum.accumulate(exact).tolist())


@pytest.mark.parametrize(("equation", "seed"), SEEDED)
def test_aligning_changes_no_tensor_and_survives_a_hostile_gauge(equation: Equation, seed: int) -> None:
    cores = random_cores(equation, seed)
    for bond in equation.bonds:  # one core's slices become large, another's small: the same tensor
        first, second, *_ = equation.owners(bond)
        cores[first], cores[second] = cores[first] * 1e3, cores[second] * 1e-3
    whole = reference(equation, cores)
    assert_close(reference(equation, align(equation, cores)), whole, rtol=1e-8, atol=1e-8)


def singular_values(equation: Equation, whole: Tensor, bond: str) -> Tensor:
    """Those of a tree's full tensor, unfolded at a bond: one side has the modes of a core and of all behind it."""
    child = next(child for child, _, own in equation.branches if own == bond)
    side = {child}
    for k, parent, _ in reversed(equation.branches):  # parents come before their children
        side |= {k} if parent in side else set()
    inside = {label for k in side for label in equation.cores[k]}
    order = sorted(range(whole.ndim), key=lambda n: equation.modes[n] not in inside)
    rows = [whole.shape[n] for n in order if equation.modes[n] in inside]
    return torch.linalg.svdvals(whole.permute(order).reshape(math.prod(rows), -1))


def close_to_start(found: Tensor, expected: Tensor, tol: float) -> None:
    """The two agree where both have entries, and the others are zero."""
    padded = torch.nn.utils.rnn.pad_sequence([found, expected])
    assert_close(padded[:, 0], padded[:, 1], rtol=tol, atol=tol)


@pytest.mark.parametrize("equation", TREES, ids=str)
def test_a_tree_is_aligned_and_rounded_by_its_singular_values(equation: Equation) -> None:
    cores = random_cores(equation, 3, sizes=(3, 4), ranks=(2, 4))
    whole, aligned = algebra.dense(equation, cores), align(equation, cores, live=1e-9)
    for bond, found in zip(equation.bonds, algebra.contributions(equation, aligned), strict=True):
        close_to_start(found.sort(descending=True).values, singular_values(equation, whole, bond), 1e-6)
    cores = random_cores(equation, 5, sizes=(3, 4), ranks=(2, 4))
    cores[0] = cores[0] * 1e30  # their squares are in range, too
    cores[-1] = cores[-1] * 1e-30
    whole, full = algebra.dense(equation, cores), [64] * len(equation.bonds)
    spectra = [singular_values(equation, whole, bond) for bond in equation.bonds]
    _, values, log_scale = trees.singular_gauge(equation, cores)
    for found, expected in zip((own * log_scale.exp() for own in values), spectra, strict=True):
        close_to_start(found, expected, 1e-12)
    exact = tuple(int((own > 1e-10 * own[0]).sum()) for own in spectra)
    for tol in (0.0, 0.1, 0.5):
        for found in (trees.round(equation, cores, tol, full), trees.decompose(equation, whole, tol, full)):
            assert float((algebra.dense(equation, found) - whole).norm() / whole.norm()) <= max(tol, 1e-12)
            assert tol > 0.0 or ranks_of(found, equation) == exact
    assert set(ranks_of(trees.round(equation, cores, 0.0, [1] * len(full)), equation)) <= {1}


def test_balancing_gives_every_core_the_same_share_of_each_component() -> None:
    equation = NAMED["cp"]
    cores = random_cores(equation, 0, sizes=(3, 5), ranks=(3, 3))
    cores[0] = cores[0] * torch.tensor([1e-4, 1.0, 1e4], dtype=torch.float64)
    balanced = balance(equation, cores, "r")
    assert_close(algebra.dense(equation, balanced), algebra.dense(equation, cores))
    norms = torch.stack([core.norm(dim=0) for core in balanced])
    assert_close(norms, norms[:1].expand_as(norms))


@pytest.mark.parametrize(("equation", "seed"), [case for case in SEEDED if case.values[0].bonds])
def test_refitting_brings_cut_cores_nearer_to_the_tensor_they_came_from(equation: Equation, seed: int) -> None:
    cores = random_cores(equation, seed, sizes=(3, 4), ranks=(3, 3))
    whole = algebra.dense(equation, cores)
    cut = algebra.keep(equation, cores, equation.bonds[0], torch.tensor([0, 1]))
    refitted = algebra.refit(equation, cut, algebra.operands(equation, cores), sweeps=2)
    assert [core.shape for core in refitted] == [core.shape for core in cut]
    before, after = (float((algebra.dense(equation, own) - whole).norm()) for own in (cut, refitted))
    assert after <= before * (1 + 1e-6)


def test_many_modes_have_small_intermediates_and_any_number_of_labels() -> None:
    train = get("tt").equation([4] * 20)
    cores = algebra.random_cores(train, [4] * 20, [8] * 19, 1.0, dtype=torch.float64)
    pairs = algebra.operands(train, cores) + algebra.operands(train, cores, train.bonds)
    plan = algebra.plan(tuple((labels, tuple(core.shape)) for core, labels in pairs), ())
    assert plan.largest <= 8 * 4 * 8  # the dense tensor has 4^20 entries
    assert_close(float(algebra.norm(train, cores)), 2.0**20)
    assert all(len(found) == 8 for found in algebra.contributions(train, cores))
    train = get("tt").equation([1] * 40)
    cores = [torch.ones(shape, dtype=torch.float64) for shape in train.shapes([1] * 40, [2] * 39)]
    assert float(algebra.inner(train, cores, cores)) == 4.0**39


@pytest.mark.parametrize("variance", [0.5, 1e-8])
@pytest.mark.parametrize("equation", NAMED.values(), ids=NAMED)
def test_random_cores_have_the_variance_asked_for(equation: Equation, variance: float) -> None:
    modes = [5] * len(equation.modes)
    cores = algebra.random_cores(equation, modes, [3] * len(equation.bonds), variance, dtype=torch.float64)
    assert_close(float(algebra.dense(equation, cores).square().mean()), variance)


@pytest.mark.parametrize(("text", "error"), [
    ("ax, xb -> abz", "exactly one core"),
    ("ax, b -> ab", "join at least two cores"),
    ("ax, ax -> a", "exactly one core"),
    ("aa -> a", "only once"),
])  # fmt: skip
def test_an_equation_that_makes_no_sense_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        written(text)


def test_max_ranks_are_cut_and_contradicting_cores_refused() -> None:
    with pytest.raises(ShapeError, match="must agree"):
        NAMED["train"].ranks([(2, 3), (4, 2, 2), (2, 2)])
    train, tucker, cp = (Written(NAMED[kind]) for kind in ("train", "tucker", "cp"))
    assert train.max_ranks((2, 5, 3), 100) == (2, 3)
    assert tucker.max_ranks((2, 5, 30), 100) == (2, 5, 10)
    assert cp.max_ranks((2, 5, 3), 100) == (6,)
    with pytest.raises(ConfigError, match="at least 1"):
        train.max_ranks((2, 5, 3), 0)
    with pytest.raises(ShapeError, match="one per bond"):
        train.max_ranks((2, 5, 3), (1, 2, 3))


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
    equation, ranks = format.equation(sizes), format.max_ranks(sizes, rank)
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


@pytest.mark.parametrize(("modes", "equation"), [
    ((9, 16, 16), "r0.r1.r2, m0.r0, m1.r1, m2.r2 -> m0.m1.m2"),
    ((16, 3, 3, 16), "r0.m1.m2.r3, m0.r0, m3.r3 -> m0.m1.m2.m3"),  # small modes stay in the core
    ((512, 64), "r0.m1, m0.r0 -> m0.m1"),  # a matrix: truncated SVD
    ((1, 16, 32), "m0.r1.m2, m1.r1 -> m0.m1.m2"),  # a 1x1 convolution is one, too
    ((2, 3, 2), "r0.r1.r2, m0.r0, m1.r1, m2.r2 -> m0.m1.m2"),
    ((6,), "m0 -> m0"),
])  # fmt: skip
def test_where_tucker_has_factors(modes: tuple[int, ...], equation: str) -> None:
    assert str(get("tucker").equation(modes)) == equation


def test_a_ring_of_two_modes_is_a_train_and_no_rank_is_larger_than_a_train_needs() -> None:
    assert get("ring").equation((5, 6)) == get("tt").equation((5, 6))
    assert get("ring").max_ranks((4, 5, 3)) == (4, 5, 5)
