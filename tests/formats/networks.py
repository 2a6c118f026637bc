"""Random tensor networks of every kind, for tests that must hold for any equation."""

import random
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.formats import Equation, Format


def written(text: str) -> Equation:
    """The equation that reads like this, with labels of single characters."""
    left, _, right = text.replace(" ", "").partition("->")
    return Equation(tuple(tuple(core) for core in left.split(",")), tuple(right))


NAMED = {
    "train": written("ax, xby, yc -> abc"),
    "cp": written("ar, br, cr -> abc"),
    "tucker": written("xyz, ax, by, cz -> abc"),
    "tucker-2, one mode without a core": written("xbz, ax, cz -> abc"),
    "ring": written("rax, xby, ycr -> abc"),
    "star": written("xyzw, ax, by, cz, dw -> abcd"),
    "shared bond beside a chain": written("axr, xbr, cr -> abc"),
    "core without bonds": written("a, bx, xc -> abc"),
    "weights along a shared bond": written("ar, br, r -> ab"),
    "one core": written("ab -> ab"),
}


def random_equation(seed: int) -> Equation:
    """A connected network of 2 to 6 cores, sometimes with loops, shared bonds, and cores of no or two modes."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    owners = [(rng.randrange(k), k) for k in range(1, count)]  # a tree
    owners += [rng.sample(range(count), rng.randint(2, count)) for _ in range(rng.randint(0, 2))]  # loops, shared bonds
    cores: list[list[str]] = [[f"r{bond}" for bond, own in enumerate(owners) if k in own] for k in range(count)]
    modes = []
    for k in range(count):
        for _ in range(rng.choice((0, 1, 1, 1, 2)) or int(k == count - 1 and not modes)):
            modes.append(f"m{len(modes)}")
            cores[k].append(modes[-1])
    for core in cores:
        rng.shuffle(core)
    rng.shuffle(modes)
    return Equation(tuple(map(tuple, cores)), tuple(modes))


def random_cores(
    equation: Equation, seed: int, sizes: tuple[int, int] = (2, 4), ranks: tuple[int, int] = (1, 3)
) -> list[Tensor]:
    """Gaussian cores in double precision with random sizes and ranks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    modes = [rng.randint(*sizes) for _ in equation.modes]
    bonds = [rng.randint(*ranks) for _ in equation.bonds]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in equation.shapes(modes, bonds)]


EQUATIONS = [*NAMED.values(), *(random_equation(seed) for seed in range(12))]


class Written(Format):
    """A format of one equation, whatever the sizes of the modes."""

    name: ClassVar[str] = "written"

    def __init__(self, equation: Equation) -> None:
        self.own = equation

    def equation(self, modes: Sequence[int]) -> Equation:  # noqa: ARG002
        return self.own


class Star(Format):
    """``axs, bxs, cs -> abc``: a bond that all cores share, and another between the first two."""

    name: ClassVar[str] = "a star"

    def equation(self, modes: Sequence[int]) -> Equation:
        if len(modes) == 1:
            return written("a -> a")
        cores = [(f"m{k}", "x", "s") if k < 2 else (f"m{k}", "s") for k in range(len(modes))]
        return Equation(tuple(cores), tuple(f"m{k}" for k in range(len(modes))))


class TuckerTwo(Format):
    """``xbz, ax, cz -> abc``: modes of at most three entries have no core of their own."""

    name: ClassVar[str] = "a Tucker-2"

    def equation(self, modes: Sequence[int]) -> Equation:
        mode = tuple(f"m{k}" for k in range(len(modes)))
        bond = {k: f"r{k}" for k, size in enumerate(modes) if size > 3 and len(modes) > 1}
        return Equation((tuple(bond.get(k, m) for k, m in enumerate(mode)), *((mode[k], bond[k]) for k in bond)), mode)


MINIMAL: tuple[Format, ...] = (Star(), TuckerTwo())
"""Formats that are only their equation; they are in no list, and yet everything works."""
