"""One budget for all layers: which point of its curve each layer takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from bayestrain.compress.curves import Point


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no smaller or equally small one beats, smallest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.size, point.error)):
        if not found or point.error < found[-1].error:
            found.append(point)
    return found


def hull(points: Sequence[Point]) -> list[Point]:
    """The points of a `front` on the lower convex hull of error against size."""
    found: list[Point] = []
    for point in points:
        while len(found) > 1 and _gain(found[-2], point) >= _gain(found[-2], found[-1]):
            found.pop()
        found.append(point)
    return found


def cost(point: Point) -> float:
    """What an error costs: the error itself while it is small, without bound where nothing is left of a layer."""
    return -math.log1p(-min(point.error, 1 - 1e-9))


def _gain(small: Point, large: Point) -> float:
    """Cost saved per entry."""
    return (cost(small) - cost(large)) / (large.size - small.size)


def spend(fronts: Mapping[str, Sequence[Point]], entries: int) -> dict[str, Point]:
    """A point for every layer, with at most so many entries in all, at nearly the least sum of costs.

    Every layer starts at its smallest point. The step of largest gain along any hull is taken while it fits; what is
    left then buys the best points between.
    """
    chosen = {name: own[0] for name, own in fronts.items()}
    left = entries - sum(point.size for point in chosen.values())
    steps = [
        (-_gain(small, large), number, name, large)
        for name, own in fronts.items()
        for number, (small, large) in enumerate(pairwise(hull(own)))
    ]
    blocked = set()
    for _, _, name, large in sorted(steps, key=lambda step: step[:3]):
        need = large.size - chosen[name].size
        if name not in blocked and need <= left:
            chosen[name], left = large, left - need
        else:
            blocked.add(name)
    while True:
        better = [
            (_gain(chosen[name], point), name, point)
            for name, own in fronts.items()
            for point in own
            if chosen[name].size < point.size <= chosen[name].size + left
        ]
        if not better:
            return chosen
        _, name, point = max(better, key=lambda each: each[:2])
        left -= point.size - chosen[name].size
        chosen[name] = point
