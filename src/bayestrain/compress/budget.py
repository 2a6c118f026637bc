"""One budget for all layers: which point of its curve each layer takes."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from bayestrain.compress.curves import Point

EXCHANGES = 5  # rounds in which pairs of layers exchange entries, at most


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
    return (cost(small) - cost(large)) / (large.size - small.size)


def spend(fronts: Mapping[str, Sequence[Point]], entries: int) -> dict[str, Point]:
    """A point for every layer, with at most so many entries in all, at nearly the least sum of costs.

    From the smallest points, steps of largest gain along the hulls are taken; then pairs of layers exchange entries.
    """
    chosen = {name: own[0] for name, own in fronts.items()}
    left = entries - sum(point.size for point in chosen.values())
    steps = [
        (-_gain(small, large), name, number, large)
        for name, own in fronts.items()
        for number, (small, large) in enumerate(pairwise(hull(own)))
    ]
    blocked = set()
    for _, name, _, large in sorted(steps, key=lambda step: step[:3]):
        need = large.size - chosen[name].size
        if name not in blocked and need <= left:
            chosen[name], left = large, left - need
        else:
            blocked.add(name)
    for _ in range(EXCHANGES):
        before = sum(map(cost, chosen.values()))
        for name, own in fronts.items():
            left += chosen[name].size
            chosen[name] = _largest(own, left)
            left -= chosen[name].size
        for a, b in combinations(fronts, 2):
            left += chosen[a].size + chosen[b].size
            pairs = [
                (one, _largest(fronts[b], left - one.size)) for one in fronts[a] if one.size + fronts[b][0].size <= left
            ]
            chosen[a], chosen[b] = min(pairs, key=lambda pair: cost(pair[0]) + cost(pair[1]))
            left -= chosen[a].size + chosen[b].size
        if sum(map(cost, chosen.values())) >= before * (1 - 1e-9):
            break
    return chosen


def _largest(points: Sequence[Point], room: int) -> Point:
    """The largest point of a front, hence the best, with at most so many entries."""
    return points[bisect_right(points, room, key=lambda point: point.size) - 1]
