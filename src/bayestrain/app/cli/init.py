"""`bayestrain init`: files to start from."""

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
    contents |= {"table.csv": table(1_000, with_target=True), "new.csv": table(3, with_target=False)}
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


def table(rows: int, with_target: bool) -> str:
    """Rows of Friedman's regression problem, whose last three inputs do not matter."""
    draw = random.Random(rows)
    lines = [[*(f"x{i}" for i in range(1, 9)), "y"]]
    for _ in range(rows):
        x = [draw.random() for _ in range(8)]
        y = 10 * math.sin(math.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4] + draw.gauss(0, 1)
        lines.append([f"{value:.4f}" for value in (*x, y)])
    return "".join(",".join(line if with_target else line[:-1]) + "\n" for line in lines)
