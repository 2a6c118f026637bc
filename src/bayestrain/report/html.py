"""Templates to HTML, with the style sheet and both sets of colours inside."""

from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from bayestrain.report.palette import DARK, LIGHT, css


def render(template: str, context: dict[str, Any]) -> str:
    """Fill a template; everything that comes from a run folder is escaped."""
    environment = Environment(
        loader=PackageLoader("bayestrain.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    style = resources.files("bayestrain.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    style = style.replace("LIGHT_COLOURS", css(LIGHT)).replace("DARK_COLOURS", css(DARK))
    return environment.get_template(template).render(style=style, version=_version(), **context)


def _version() -> str:
    try:
        return version("bayestrain")
    except PackageNotFoundError:
        return "(not installed)"
