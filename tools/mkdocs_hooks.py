"""Hooks of the documentation site: tutorials are scripts with cells, shown as pages."""

from __future__ import annotations

import re
from typing import Any

CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def page(script: str) -> str:
    """A script whose cells begin with ``# %%`` or ``# %% [markdown]``, as Markdown."""
    _, *parts = CELL.split(script)
    cells = []
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        if kind:
            cells.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()))
        else:
            cells.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(cells) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Give every tutorial script a page beside it."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".py")]:
        files.remove(file)
        name = file.src_uri.removesuffix(".py") + ".md"
        files.append(File.generated(config, name, content=page(file.content_string)))
    return files
