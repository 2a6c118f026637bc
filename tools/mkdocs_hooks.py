"""Hooks of the documentation site.

Tutorials are scripts with cells and become pages, and so do the settings of a run. Some pages and figures come from
other folders of the repository. Formulas become MathML, so the site needs nothing from another host.
"""

from __future__ import annotations

import dataclasses
import html
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = ("paper/README.md", "paper/results/TABLE.md", "results/benchmarks/README.md",
           "results/benchmarks/EXPORT.md", "results/benchmarks/POSTERIORS.md", "results/uci/README.md",
           "results/benchmarks/0.1/README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")  # fmt: skip
FIGURES = ("paper/results/figures/*.svg", "results/benchmarks/0.1/*.svg")
"""What the site shows besides `docs/`, under the same paths."""

CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)


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


def settings() -> str:
    """The page of all settings, from the fields of the config."""
    from bayestrain.train import config

    text = "# Settings\n\nThe settings of `config.toml`, of `bayestrain train --set section.key=value`, and of `fit`.\n"
    for title, section in config.SECTIONS.items():
        text += f"\n## {title}\n\n{section.__doc__}\n\n| setting | default | |\n|---|---|---|\n"
        for each in dataclasses.fields(section):
            value = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            default = "required" if value is dataclasses.MISSING else f"`{config.shown(value)}`"
            choices = ", ".join(f"`{choice}`" for choice in each.metadata["choices"])
            text += f"| `{each.name}` | {default} | {each.metadata['help']}{choices and f': {choices}'} |\n"
    return text


def on_files(files: Any, config: Any) -> Any:
    """Turn every tutorial script into a page, and add what comes from other folders."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.startswith("tutorials/") and file.src_uri.endswith(".py")]:
        files.remove(file)
        name = file.src_uri.removesuffix(".py") + ".md"
        files.append(File.generated(config, name, content=page(file.content_string)))
    files.append(File.generated(config, "settings.md", content=settings()))
    for path in [ROOT / name for name in OUTSIDE] + [path for pattern in FIGURES for path in ROOT.glob(pattern)]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Point links at the pages of the site; a link to a file that the site does not have becomes plain text."""
    here = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if target.startswith("#") or ":" in target:
            return found[0]
        path, hash_, anchor = target.partition("#")
        source = here if here in OUTSIDE else f"docs/{here}"
        uri = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)).removeprefix("docs/")
        uri = re.sub(r"^(tutorials/.*)\.py$", r"\1.md", uri)
        if files.get_file_from_path(uri) is None:
            return label
        return f"{mark}[{label}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    parts = FENCE.split(markdown)  # the odd ones are code
    return "".join(part if k % 2 else LINK.sub(link, part) for k, part in enumerate(parts))


def on_page_content(content: str, **_: Any) -> str:
    """Write every formula as MathML."""
    from latex2mathml.converter import convert

    def formula(found: re.Match[str]) -> str:
        made = convert(html.unescape(found[2].strip()), display="block" if found[1] == "div" else "inline")
        return made.replace("<mi>log</mi>", '<mi>log</mi><mspace width="0.17em"/>')

    return FORMULA.sub(formula, content)
