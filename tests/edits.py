"""Changes of a JSON file on disk."""

import json
from pathlib import Path
from typing import Any


def edit(file: Path, where: str = "", drop: str = "", **changes: Any) -> None:
    """Change or drop an entry of a JSON file, or of what lies behind the keys in `where`."""
    whole = place = json.loads(file.read_text())
    for key in where.split():
        place = place[key]
    place.update(changes)
    place.pop(drop, None)
    file.write_text(json.dumps(whole))


def put(file: Path, where: str, value: Any) -> None:
    """Set the entry behind these keys."""
    *keys, last = where.split()
    edit(file, " ".join(keys), **{last: value})
