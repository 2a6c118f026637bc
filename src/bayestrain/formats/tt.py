"""The tensor train: a chain of cores, one per mode."""

from collections.abc import Sequence
from typing import ClassVar

from bayestrain.formats.equation import Equation
from bayestrain.formats.format import Format


class TensorTrain(Format):
    """``ax, xby, yc -> abc``: entry (i, j, k) is the product of the matrices that i, j and k select from the cores."""

    name: ClassVar[str] = "tt"
    splits: ClassVar[bool] = True

    def equation(self, modes: Sequence[int]) -> Equation:
        mode = tuple(f"m{k}" for k in range(len(modes)))
        bond = [(), *((f"r{k}",) for k in range(1, len(modes))), ()]
        return Equation(tuple((*bond[k], m, *bond[k + 1]) for k, m in enumerate(mode)), mode)

    def shown_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """With the ranks of 1 at both ends, as is usual for trains."""
        return (1, *ranks, 1)
