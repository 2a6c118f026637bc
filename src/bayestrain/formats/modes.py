"""Factor any positive size into modes: the small sizes whose product is the size, or a little more (padding)."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from bayestrain.errors import ConfigError, ShapeError

PADDING_PENALTY = 1.3  # how much worse (in sum of modes) an exact factorisation may be than a padded one
TYPICAL_MODE = 5.0  # the mode size that the automatic number of cores aims at; larger modes mean fewer cores
MAX_CORES = 4


@lru_cache(maxsize=1024)
def factor(size: int, count: int) -> tuple[int, ...]:
    """Write `size` as a product of `count` modes with the smallest sum, padded only where an exact one is lopsided.

    Large and small modes alternate: ``factor(784, 4) == (7, 4, 7, 4)``.
    """
    if size < 1 or count < 1:
        raise ConfigError(f"A size and a number of modes must be at least 1, got size={size}, count={count}.")

    def score(modes: tuple[int, ...]) -> float:
        total = math.prod(modes)
        return sum(modes) * (1.0 if total == size else PADDING_PENALTY * total / size)

    pool = [*min(_ascending(size, count, 1), key=score)]
    return tuple(pool.pop(-1 if k % 2 == 0 else 0) for k in range(count))


def _ascending(size: int, count: int, smallest: int) -> Iterator[tuple[int, ...]]:
    """Non-decreasing modes that cover `size`, the last of them no larger than it needs to be."""
    if count == 1:
        yield (max(smallest, size),)
        return
    for mode in range(smallest, max(smallest, math.ceil(size ** (1 / count))) + 1):
        for rest in _ascending(-(-size // mode), count - 1, mode):
            yield mode, *rest


def choose_count(*sizes: int) -> int:
    """Number of cores for a matrix whose sides have these sizes: 2 to `MAX_CORES`, set by the smallest side."""
    return max(2, min(MAX_CORES, round(math.log(max(min(sizes), 1)) / math.log(TYPICAL_MODE))))


def check_modes(size: int, modes: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    """`modes` as ints whose product covers `size`, none larger than it needs to be; if None, `count` of our choice."""
    if modes is None:
        return factor(size, count)
    modes = tuple(modes)
    advice = f"Try {what}={factor(size, max(len(modes), 1))}."
    if not modes or not all(hasattr(mode, "__index__") and mode >= 1 for mode in modes):
        raise ShapeError(f"{what} must be positive integers, got {modes}. {advice}")
    modes = tuple(map(int, modes))
    product = math.prod(modes)
    if product < size:
        raise ShapeError(f"The product of {what} must be at least {size}, got {modes} with product {product}. {advice}")
    if any(product // mode * (mode - 1) >= size for mode in modes):
        raise ShapeError(f"{what} are larger than needed: {modes} has product {product} for a size of {size}. {advice}")
    return modes
