"""`bayestrain init`: files to start from."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated

import typer

from bayestrain.errors import ConfigError

STARTER = Path(__file__).parent / "starter"


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; created if necessary.", metavar="DIR")] = Path(),
) -> None:
    """Write a small regression to start from: data, network, settings, and a README with the commands.

    Everything runs as it is, and is meant to be replaced by your own. Files that exist are never overwritten.

    \b
    [bold]Example[/]
      bayestrain init my-task && cd my-task && bayestrain train --config run.toml --out first
    """
    contents = {path.name: path.read_text(encoding="utf-8") for path in STARTER.iterdir() if path.is_file()}
    contents |= tables()
    there = sorted(name for name in contents if (folder / name).exists())
    if there:
        raise ConfigError(f"{folder} already has {', '.join(there)}. Choose another folder: bayestrain init DIR")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(content)
    print(f"Wrote {', '.join(sorted(contents))} to {folder}. Next:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {folder}")
    print("  bayestrain train --config run.toml --out first\n  bayestrain predict first new.csv")


def tables() -> dict[str, str]:
    """A table of Friedman's regression problem, whose last three inputs do not matter, and rows to predict."""
    draw = random.Random(0)
    header, rows = ",".join(f"x{i}" for i in range(1, 9)), [[draw.random() for _ in range(8)] for _ in range(1_003)]
    lines = [",".join(f"{value:.4f}" for value in row) for row in rows]
    noise = [draw.gauss(0, 1) for _ in rows]
    y = [10 * math.sin(math.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4] for x in rows]
    known = [f"{line},{value + e:.4f}" for line, value, e in zip(lines, y, noise, strict=True)]
    return {
        "table.csv": "\n".join([f"{header},y", *known[:-3]]) + "\n",
        "new.csv": "\n".join([header, *lines[-3:]]) + "\n",
    }
