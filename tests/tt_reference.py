"""Trains to test with, and the oracle: numpy's SVD of the full tensor's unfoldings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from layer_kit import slow_dense
from torch import Tensor

from bayestrain import gauge, tt


def gaussian_train(
    sizes: Sequence[int | tuple[int, ...]], ranks: Sequence[int], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Cores with standard normal entries."""
    chain = (1, *ranks, 1)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [
        torch.randn(left, *shape, right, dtype=dtype)
        for left, shape, right in zip(chain[:-1], shapes, chain[1:], strict=True)
    ]


def decaying_train(sizes: Sequence[int], decay: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """A train of full ranks in which rank index r of every bond is damped by ``decay ** r``."""
    cores = gaussian_train(sizes, tt.feasible_ranks(sizes), dtype)
    return [core * decay ** torch.arange(core.shape[-1], dtype=dtype) for core in cores]


def unfoldings(tensor: Tensor, bonds: int | None = None) -> list[np.ndarray]:
    array = tensor.detach().double().numpy()
    return [array.reshape(math.prod(array.shape[:k]), -1) for k in range(1, bonds or array.ndim)]


def singular_values(tensor: Tensor) -> list[np.ndarray]:
    return [np.linalg.svd(matrix, compute_uv=False) for matrix in unfoldings(tensor)]


def delta_rank(values: np.ndarray, delta: float) -> int:
    """The smallest rank >= 1 of a matrix within `delta` of the one with these singular values (Eckart and Young)."""
    for rank in range(1, len(values)):
        if math.sqrt(float((values[rank:] ** 2).sum())) <= delta:
            return rank
    return len(values)


def random_gauge(cores: Sequence[Tensor], spread: float = 1.0) -> list[Tensor]:
    """The same tensor after a random invertible matrix at every bond."""
    result = list(cores)
    for bond in range(1, len(cores)):
        rank = cores[bond].shape[0]
        left, right = (torch.linalg.qr(torch.randn(rank, rank, dtype=cores[0].dtype)).Q for _ in range(2))
        result = gauge.change_gauge(
            result, bond, left * torch.exp(spread * torch.randn(rank, dtype=left.dtype)) @ right
        )
    return result


def diagonal_gauge(cores: Sequence[Tensor]) -> list[Tensor]:
    result = list(cores)
    for bond in range(1, len(cores)):
        scale = torch.exp(3 * torch.randn(cores[bond].shape[0], dtype=cores[0].dtype))
        result = gauge.change_gauge(result, bond, torch.diag(scale))
    return result


@st.composite
def trains(draw: st.DrawFn, min_cores: int = 1, two_modes: bool = False) -> list[Tensor]:
    d = draw(st.integers(min_cores, 5))
    mode = st.tuples(st.integers(1, 3), st.integers(1, 3)) if two_modes else st.integers(1, 4)
    sizes = draw(st.lists(mode, min_size=d, max_size=d))
    ranks = draw(st.lists(st.integers(1, 5), min_size=d - 1, max_size=d - 1))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return gaussian_train(sizes, ranks)


@st.composite
def decaying_tensors(draw: st.DrawFn) -> Tensor:
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    torch.manual_seed(draw(st.integers(0, 1000)))
    decay = draw(st.sampled_from([0.1, 0.3, 0.6, None]))
    if decay is None:  # no decay at all
        return torch.randn(sizes, dtype=torch.float64)
    return slow_dense(decaying_train(sizes, decay))


tolerances = st.sampled_from([0.003, 0.01, 0.03, 0.1, 0.3, 0.7])
