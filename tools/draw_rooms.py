"""Draw the rooms of the package from the imports there are, into docs/rooms.md: ``python tools/draw_rooms.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

SMALL = ("errors", "files", "tables")
"""Modules that almost every room imports; arrows to them would say nothing."""


def drawing() -> str:
    """The page, with an arrow for every import between rooms that no longer path implies."""
    graph = grimp.build_graph("bayestrain")
    rooms = sorted(name.split(".")[1] for name in graph.find_children("bayestrain"))
    rooms = [room for room in rooms if room not in (*SMALL, "__main__")]
    direct: dict[str, set[str]] = {room: set() for room in rooms}
    for room in rooms:
        own = {f"bayestrain.{room}", *graph.find_descendants(f"bayestrain.{room}")}
        for module in own:
            for imported in graph.find_modules_directly_imported_by(module):
                target = imported.split(".")[1] if "." in imported else ""
                if target in direct and target != room:
                    direct[room].add(target)

    def reached(room: str) -> set[str]:
        return direct[room].union(*(reached(other) for other in direct[room])) if direct[room] else set()

    arrows = [
        f"  {room} --> {other}"
        for room in rooms
        for other in sorted(direct[room])
        if not any(other in reached(between) for between in direct[room] - {other})
    ]
    return (
        "# Rooms\n\nWhich room imports which, drawn by `tools/draw_rooms.py` from the imports there are. Arrows that\n"
        "a longer path implies are left out, and so are `errors`, `files` and `tables`, which almost every room\n"
        "imports. `perf` is imported by nobody: it plugs in at `nn/fast.py`.\n\n```mermaid\ngraph TD\n"
        + "\n".join(arrows)
        + "\n```\n"
    )


if __name__ == "__main__":
    page = Path(__file__).parent.parent / "docs" / "rooms.md"
    if "--check" in sys.argv:
        sys.exit(0 if page.exists() and page.read_text() == drawing() else f"{page} is out of date: run this script.")
    page.write_text(drawing())
