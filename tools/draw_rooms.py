"""Draw the rooms of the package and the imports between them into docs/rooms.svg: ``python tools/draw_rooms.py``.

An arrow says that a room imports another one. Arrows that a longer path implies are left out.
"""

from __future__ import annotations

import ast
import html
import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "rooms.svg"
LEFT_OUT = ("__main__", "errors", "files", "tables")
"""The entry point, and modules that almost every room imports: their arrows would say nothing."""

WIDTH, HEIGHT, ROW = 250, 46, 78
COLUMNS = (10, 310, 610)
"""Left edges of the columns; the longest chain of imports stands in the middle one."""

STYLE = """\
  .room { fill: #eef2fb; stroke: #3f51b5; stroke-width: 1.2 }
  .name { font: 600 14px sans-serif; fill: #1d2340 }
  .job { font: 11px sans-serif; fill: #3d4468 }
  .arrow { fill: none; stroke: #6b7280; stroke-width: 1.3 }"""


def imports() -> dict[str, set[str]]:
    """Per room, the rooms it imports and no longer path leads to."""
    graph = grimp.build_graph("bayestrain")
    rooms = sorted({name.split(".")[1] for name in graph.find_children("bayestrain")} - {*LEFT_OUT})
    direct: dict[str, set[str]] = {}
    for room in rooms:
        modules = {f"bayestrain.{room}", *graph.find_descendants(f"bayestrain.{room}")}
        named = {name for module in modules for name in graph.find_modules_directly_imported_by(module)}
        direct[room] = {name.split(".")[1] for name in named if "." in name} & {*rooms} - {room}

    def reached(room: str) -> set[str]:
        return direct[room].union(*(reached(other) for other in direct[room]))

    return {room: {x for x in direct[room] if not any(x in reached(y) for y in direct[room] - {x})} for room in rooms}


def rows() -> list[list[str]]:
    """The rooms from top to bottom, as the import contract in pyproject.toml has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    split = [[room for room in layer.split(" | ") if room not in LEFT_OUT] for layer in layers]
    return [rooms for rooms in split if rooms]


def chain(arrows: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports."""

    def below(room: str) -> list[str]:
        return [room, *max((below(other) for other in sorted(arrows[room])), key=len, default=[])]

    return max((below(room) for room in sorted(arrows)), key=len)


def job(room: str) -> str:
    """What a room is for: its docstring up to the first mark."""
    path = ROOT / "src" / "bayestrain" / room
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return re.split(r"[:,.]", ast.get_docstring(ast.parse(source)) or "")[0].replace("`", "").replace("\n", " ")


def drawing() -> str:
    """The picture as SVG."""
    arrows, order = imports(), rows()
    middle, imported = chain(arrows), set().union(*arrows.values())
    at = {}
    for row, rooms in enumerate(order):
        for room in rooms:
            column = 1 if room in middle else 0 if arrows[room] and room in imported else 2
            at[room] = COLUMNS[column], 10 + ROW * row
    parts = [box(room, *at[room]) for room in at]
    parts += [arrow(at[room], at[other]) for room in at for other in sorted(arrows[room])]
    size = f'viewBox="0 0 {COLUMNS[-1] + WIDTH + 10} {ROW * (len(order) - 1) + HEIGHT + 20}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Rooms of the package">\n'
        f'<style>\n{STYLE}\n</style>\n<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#6b7280"/></marker></defs>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def box(room: str, x: int, y: int) -> str:
    middle = x + WIDTH // 2
    return (
        f'<rect class="room" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text class="name" x="{middle}" y="{y + 19}" text-anchor="middle">{room}</text>'
        f'<text class="job" x="{middle}" y="{y + 36}" text-anchor="middle">{html.escape(job(room))}</text>'
    )


def arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Straight down in a column; from the middle to the side, then down; into the middle down, then to the side."""
    (x, y), (x2, y2) = start, end
    centre, centre2, level, level2 = x + WIDTH // 2, x2 + WIDTH // 2, y + HEIGHT // 2, y2 + HEIGHT // 2
    if x == x2:
        path = f"M{centre},{y + HEIGHT} V{y2 - 1}"
    elif x == COLUMNS[1]:
        path = f"M{x if x2 < x else x + WIDTH},{level} H{centre2 + 30} V{y2 - 1}"
    else:
        path = f"M{centre - 30},{y + HEIGHT} V{level2} H{x2 + WIDTH + 1 if x > x2 else x2 - 1}"
    return f'<path class="arrow" d="{path}" marker-end="url(#head)"/>'


if __name__ == "__main__":
    PICTURE.write_text(drawing())
