"""The format kit: every format named in `FORMATS` inherits these tests."""

import math

import pytest
import torch
from networks import MINIMAL
from torch import Tensor
from torch.testing import assert_close

from bayestrain import formats
from bayestrain.errors import ConfigError
from bayestrain.formats import FORMATS, Format, algebra

SIZES = [(6,), (6, 5), (4, 5, 3), (3, 4, 2, 5)]

pytestmark = pytest.mark.parametrize("format", [*FORMATS, *MINIMAL], ids=lambda format: format.name)


def planted(format: Format, sizes: tuple[int, ...], rank: int = 2, seed: int = 0) -> tuple[tuple[int, ...], Tensor]:
    """Ranks, and a tensor of entries near 1 that has them."""
    torch.manual_seed(100 + seed)  # decompositions start at seed 0
    equation, ranks = format.equation(sizes), format.max_ranks(sizes, rank)
    cores = algebra.random_cores(equation, sizes, ranks, 1.0, dtype=torch.float64)
    return ranks, algebra.dense(equation, cores)


def error(format: Format, cores: list[Tensor], tensor: Tensor) -> float:
    found = algebra.dense(format.equation(tensor.shape), [core.double() for core in cores])
    return float((found - tensor.double()).norm() / tensor.double().norm())


def test_it_is_found_by_name(format: Format) -> None:
    assert formats.get(format) is format
    assert [other.name for other in FORMATS].count(format.name) == (format in FORMATS)
    if format in FORMATS:
        assert formats.get(format.name) is format
        return
    with pytest.raises(ConfigError, match="format must be one of"):
        formats.get(format.name)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_its_equation_makes_a_tensor_of_the_modes(format: Format, sizes: tuple[int, ...]) -> None:
    equation = format.equation(sizes)
    cores = [torch.randn(shape) for shape in equation.shapes(sizes, format.max_ranks(sizes, 3))]
    assert algebra.dense(equation, cores).shape == sizes
    assert equation == format.equation(list(sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_a_tensor_that_has_the_format_is_recovered(format: Format, sizes: tuple[int, ...], seed: int) -> None:
    ranks, tensor = planted(format, sizes, seed=seed)
    cores = format.decompose(tensor, max_rank=ranks)
    assert format.equation(sizes).ranks([core.shape for core in cores]) == ranks
    assert error(format, cores, tensor) < 1e-3


@pytest.mark.parametrize("tol", [0.05, 0.3])
def test_the_tolerance_is_kept(format: Format, tol: float) -> None:
    _, tensor = planted(format, (4, 5, 3))
    tensor = tensor + 0.1 * torch.randn_like(tensor)
    cores = format.decompose(tensor, tol)
    assert error(format, cores, tensor) <= tol
    if tol > 0.2:
        assert sum(core.numel() for core in cores) < sum(core.numel() for core in format.decompose(tensor, 0.01))


def test_more_rank_means_less_error(format: Format) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(4, 5, 3, dtype=torch.float64)
    found = [error(format, format.decompose(tensor, max_rank=rank), tensor) for rank in (1, 2, 4)]
    assert 1.0 > found[0] > found[1] > found[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept_and_arguments_are_not_changed(format: Format, dtype: torch.dtype) -> None:
    ranks, tensor = planted(format, (4, 5, 3))
    own = tensor.to(dtype)
    before = own.clone()
    cores = format.decompose(own, max_rank=ranks)
    assert {core.dtype for core in cores} == {dtype}
    assert torch.equal(own, before)
    assert error(format, cores, tensor) < {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-3)


def test_extreme_scales_zeros_and_infinities(format: Format) -> None:
    ranks, tensor = planted(format, (4, 5, 3))
    for scale in (1e-18, 1e18):
        assert error(format, format.decompose(scale * tensor, max_rank=ranks), scale * tensor) < 1e-3
    cores = format.decompose(torch.zeros(4, 5, 3))
    assert all(core.isfinite().all() for core in cores)
    assert float(algebra.dense(format.equation((4, 5, 3)), cores).abs().max()) == 0.0
    with pytest.raises(ConfigError, match="NaN or infinite"):
        format.decompose(torch.full((4, 5, 3), math.nan))
    with pytest.raises(ConfigError, match="tol"):
        format.decompose(torch.ones(4, 5, 3), tol=1.0)


def test_aligning_keeps_the_tensor_and_shows_a_planted_rank(format: Format) -> None:
    """Cores with more indices than the tensor needs: what the surplus contributes is little."""
    sizes = (5, 6, 7)
    ranks, tensor = planted(format, sizes)
    equation = format.equation(sizes)
    cores = [core.double() for core in format.decompose(tensor, max_rank=ranks)]
    wide = [torch.zeros(shape, dtype=torch.float64) for shape in equation.shapes(sizes, [r + 1 for r in ranks])]
    for new, old in zip(wide, cores, strict=True):
        new[tuple(slice(n) for n in old.shape)] = old
    aligned = format.align(equation, wide)
    assert [core.shape for core in aligned] == [core.shape for core in wide]
    assert_close(algebra.dense(equation, aligned), algebra.dense(equation, wide))
    for found, rank in zip(algebra.contributions(equation, aligned), ranks, strict=True):
        assert int((found > 1e-6 * found.max()).sum()) <= rank


def test_rounding_finds_a_planted_rank_and_its_spectra(format: Format) -> None:
    ranks, tensor = planted(format, (5, 6, 7))
    equation = format.equation(tensor.shape)
    if not format.rounds(equation):
        with pytest.raises(ConfigError, match="cannot round"):
            format.round(equation, format.decompose(tensor, max_rank=ranks))
        return
    wide = format.decompose(tensor + 1e-6 * torch.randn_like(tensor), max_rank=4)
    for bond, rank in zip(format.spectra(equation, wide), ranks, strict=True):
        assert bool((bond.diff() <= 1e-9).all())
        assert int((bond > 1e-3 * bond[0]).sum()) == rank
    rounded = format.round(equation, wide, tol=1e-3)
    assert equation.ranks([core.shape for core in rounded]) == ranks
    assert error(format, rounded, tensor) < 2e-3
    capped = format.round(equation, wide, max_rank=1)
    assert set(equation.ranks([core.shape for core in capped])) == {1}
