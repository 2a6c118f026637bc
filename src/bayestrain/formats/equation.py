"""`Equation`: a tensor network as an einsum, for example ``ax, xby, yc -> abc`` for a tensor train of three modes.

Labels in the output are *modes*. Labels that are summed over are *bonds*: each has a rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bayestrain.errors import ConfigError, ShapeError

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Equation:
    """The labels (strings of any length) of every core's axes, and the modes of the tensor they make, in order."""

    cores: tuple[Labels, ...]
    modes: Labels

    def __post_init__(self) -> None:
        if any(len(set(labels)) != len(labels) for labels in (*self.cores, self.modes)):
            raise ConfigError(f"A label may appear only once in a core and once in the output, got {self}.")
        if wrong := [mode for mode in self.modes if len(self.owners(mode)) != 1]:
            raise ConfigError(f"Every mode must belong to exactly one core, but {wrong} do not in {self}.")
        if lone := [bond for bond in self.bonds if len(self.owners(bond)) < 2]:
            raise ConfigError(f"A bond must join at least two cores, but {lone} belong to one in {self}.")

    @cached_property
    def bonds(self) -> Labels:
        """The labels that are summed over, in order of first appearance."""
        return tuple(dict.fromkeys(label for core in self.cores for label in core if label not in self.modes))

    @cached_property
    def powers(self) -> tuple[dict[str, float], ...]:
        """Per core the power of each bond's ``lambda`` in an entry's variance; the powers of a core add up to 2."""
        bonds = [self.bonds_of(k) for k in range(len(self.cores))]
        return tuple(dict.fromkeys(own, 2 / max(len(own), 1)) for own in bonds)

    @cached_property
    def branches(self) -> tuple[tuple[int, int, str], ...]:
        """``(core, parent, bond)`` of all cores but core 0, the root; children come before their parents."""
        found, reached = [], [0]
        for k in reached:
            for bond in self.bonds_of(k):
                for child in self.owners(bond):
                    if child not in reached:
                        reached.append(child)
                        found.append((child, k, bond))
        return tuple(found[::-1])

    @cached_property
    def is_tree(self) -> bool:
        """Whether cutting any bond splits the network in two: every bond joins two cores, and there is no loop."""
        pairs = all(len(self.owners(bond)) == 2 for bond in self.bonds)
        return pairs and len(self.bonds) == len(self.branches) == len(self.cores) - 1

    def owners(self, label: str) -> tuple[int, ...]:
        """The numbers of the cores that have this label."""
        return tuple(k for k, core in enumerate(self.cores) if label in core)

    def axis(self, core: int, label: str) -> int:
        """The axis of a core that this label names."""
        return self.cores[core].index(label)

    def bonds_of(self, core: int) -> Labels:
        """The bonds of one core, in the order of its axes."""
        return tuple(label for label in self.cores[core] if label not in self.modes)

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of every label, from the shapes of the cores; raises `ShapeError` if they contradict each other."""
        found: dict[str, int] = {}
        if [len(labels) for labels in self.cores] != [len(shape) for shape in shapes]:
            raise ShapeError(f"Cores of {self} have one axis per label, got shapes {list(map(tuple, shapes))}.")
        for labels, shape in zip(self.cores, shapes, strict=True):
            for label, size in zip(labels, shape, strict=True):
                if found.setdefault(label, size) != size:
                    raise ShapeError(f"Label {label!r} of {self} has sizes {found[label]} and {size}; they must agree.")
        return found

    def shapes(self, mode_sizes: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the cores for these sizes of the modes and ranks of the bonds."""
        size = dict(zip(self.modes, mode_sizes, strict=True)) | dict(zip(self.bonds, ranks, strict=True))
        return [tuple(size[label] for label in core) for core in self.cores]

    def entries(self, mode_sizes: Sequence[int], ranks: Sequence[int]) -> int:
        """How many entries the cores have with these sizes and ranks."""
        return sum(map(math.prod, self.shapes(mode_sizes, ranks)))

    def ranks(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The rank of every bond, from the shapes of the cores."""
        sizes = self.sizes(shapes)
        return tuple(sizes[bond] for bond in self.bonds)

    def __str__(self) -> str:
        joint = "" if all(len(label) == 1 for core in self.cores for label in core) else "."
        return f"{', '.join(joint.join(core) for core in self.cores)} -> {joint.join(self.modes)}"
