"""The tensor train: a chain of cores, one per mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from bayestrain.formats.equation import Equation
from bayestrain.formats.format import Format


class TensorTrain(Format):
    """``ax, xby, yc -> abc``: entry (i, j, k) is the product of the matrices that i, j and k select from the cores."""

    name: ClassVar[str] = "tt"
    splits: ClassVar[bool] = True

    def equation(self, modes: Sequence[int]) -> Equation:
        count = len(modes)
        mode, bond = [f"m{k}" for k in range(count)], [f"r{k}" for k in range(count + 1)]
        cores = [(bond[k], mode[k], bond[k + 1]) for k in range(count)]
        ends = (bond[0], bond[-1])
        return Equation(tuple(tuple(x for x in core if x not in ends) for core in cores), tuple(mode))

    def shown_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """With the ranks of 1 at both ends, as is usual for trains."""
        return (1, *ranks, 1)
