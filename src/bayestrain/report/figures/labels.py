"""Labels beside marks, each where it covers neither a mark nor another label nor the line through the marks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayestrain.report.palette import LIGHT

FONT = 8.5
MARK = 5.5  # half the side of a mark, in points
APART = 4.0  # points by which another mark is further away than a label's own, where there is room
THICK = 3.0  # what a line between marks takes, in points
NEAR = 16.0  # from this distance on a line leads from the label to its mark
DISTANCES = (4.0, 9.0, 16.0, 24.0, 34.0, 46.0)
ANGLES = (90, 270, 45, 135, 315, 225, 0, 180)
"""Where a label may stand: above, below, at the corners, then at the sides."""


@dataclass(frozen=True)
class Box:
    """A rectangle in points on the figure."""

    left: float
    bottom: float
    right: float
    top: float

    def grown(self, by: float) -> "Box":
        """The same with a rim."""
        return Box(self.left - by, self.bottom - by, self.right + by, self.top + by)

    def shared(self, other: "Box") -> float:
        """Area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)

    def distance(self, other: "Box") -> float:
        """Length of the gap between the two."""
        across = max(other.left - self.right, self.left - other.right, 0.0)
        return math.hypot(across, max(other.bottom - self.top, self.bottom - other.top, 0.0))

    def outside(self, frame: "Box") -> float:
        """Area that lies outside of a frame."""
        return (self.right - self.left) * (self.top - self.bottom) - self.shared(frame)


@dataclass(frozen=True)
class Label:
    """A text for the mark at (x, y), whose error bars reach `dx` and `dy` to either side."""

    x: float
    y: float
    text: str
    colour: str
    dx: float = 0.0
    dy: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a label may stand: what it covers there, its offset from the mark and its distance."""

    box: Box
    across: float
    up: float
    distance: float


def place_labels(
    figure: Figure, axes: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]] = ()
) -> None:
    """Write all labels; those with the fewest free places choose first. `lines` are the corners of those that are
    drawn, to be left free. The limits of the axes must be final."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # nothing moves from here on
    frame = _box(axes, *axes.get_xlim(), *axes.get_ylim())
    marks = [list(_mark(axes, label)) for label in labels]
    taken = [box for boxes in marks for box in boxes] + [box for line in lines for box in _along(axes, line)]
    places = [list(_places(axes, label)) for label in labels]

    def costs(number: int) -> list[float]:
        others = [boxes[0] for k, boxes in enumerate(marks) if k != number]
        return [_cost(place.box, marks[number][0], others, taken, frame) for place in places[number]]

    free = [sum(cost == 0 for cost in costs(number)) for number in range(len(labels))]
    chosen: dict[int, Place] = {}
    for number in sorted(range(len(labels)), key=lambda number: free[number]):
        found = costs(number)
        chosen[number] = places[number][found.index(min(found))]  # the first of the best
        taken.append(chosen[number].box.grown(1.5))
    for number, label in enumerate(labels):
        place = chosen[number]
        leading = {"arrowstyle": "-", "color": LIGHT["muted"], "linewidth": 0.6, "shrinkA": 1, "shrinkB": 5}
        axes.annotate(
            label.text, (label.x, label.y), (place.across, place.up), textcoords="offset points", ha="center",
            va="center", fontsize=FONT, color=label.colour, arrowprops=leading if place.distance >= NEAR else None,
            zorder=6,
        )  # fmt: skip


def _places(axes: Axes, label: Label) -> Iterator[Place]:
    """Where a label may stand, best first."""
    text = axes.text(label.x, label.y, label.text, fontsize=FONT)
    extent = text.get_window_extent()
    text.remove()
    width, height = (72 / axes.figure.dpi * size for size in (extent.width, extent.height))
    middle = _box(axes, label.x, label.x, label.y, label.y)
    for distance in DISTANCES:
        for angle in ANGLES:
            cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            across = round(cosine * (MARK + distance) + math.copysign(width / 2, cosine) * (abs(cosine) > 0.1), 1)
            up = round(sine * (MARK + distance) + math.copysign(height / 2, sine) * (abs(sine) > 0.1), 1)
            x, y = middle.left + across, middle.bottom + up
            box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            yield Place(box, across, up, distance)


def _cost(box: Box, own: Box, others: Sequence[Box], taken: Sequence[Box], frame: Box) -> float:
    """What a label at this place would cover or leave, and how much nearer it would be to another's mark."""
    covered = sum(box.shared(other) for other in taken) + 4 * box.outside(frame)
    return covered + 8 * sum(max(box.distance(own) + APART - box.distance(other), 0.0) for other in others)


def _mark(axes: Axes, label: Label) -> Iterator[Box]:
    """What the mark and its error bars cover."""
    x, y, dx, dy = label.x, label.y, label.dx, label.dy
    boxes = ((_box(axes, x, x, y, y), MARK, MARK),
             (_box(axes, max(x - dx, x / 10), x + dx, y, y), 0.0, 2.5),
             (_box(axes, x, x, y - dy, y + dy), 2.5, 0.0))  # fmt: skip
    for box, wide, high in boxes:
        yield Box(box.left - wide, box.bottom - high, box.right + wide, box.top + high)


def _along(axes: Axes, line: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """What a line covers, as a row of small boxes."""
    corners = [_box(axes, x, x, y, y) for x, y in line]
    for one, other in pairwise(corners):
        across, up = other.left - one.left, other.bottom - one.bottom
        number = max(1, math.ceil(math.hypot(across, up) / THICK))
        for k in range(number + 1):
            x, y = one.left + across * k / number, one.bottom + up * k / number
            yield Box(x, y, x, y).grown(THICK / 2)


def _box(axes: Axes, x1: float, x2: float, y1: float, y2: float) -> Box:
    """A rectangle of the axes in points; the axes may run to the left or down."""
    points = 72 / axes.figure.dpi
    corners = axes.transData.transform([(x1, y1), (x2, y2)]) * points
    (left, right), (bottom, top) = sorted(corners[:, 0].tolist()), sorted(corners[:, 1].tolist())
    return Box(left, bottom, right, top)
