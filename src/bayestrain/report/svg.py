"""Matplotlib figures as inline SVG: CSS variables for colours, the page's font, unique ids, hover texts."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from xml.etree import ElementTree

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayestrain.report.palette import LIGHT

WIDTH = 3.7  # inches: narrow, so that a phone shows the text at its natural size
TIP = "tip|"
NAMES = {value: name for name, value in LIGHT.items()}

STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.hashsalt": "bayestrain",
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": LIGHT["ink"],
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["line"],
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.4,
    "legend.borderaxespad": 0.2,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.h_pad": 0.03,
}


@dataclass(frozen=True)
class Plot:
    """One figure of a page. `describe` is read out to those who do not see it."""

    name: str
    title: str
    caption: str
    describe: str
    svg: str


@contextmanager
def drawing(
    height: float, rows: int = 1, width: float = WIDTH, **options: object
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of the house style with `rows` axes above each other, drawn and turned to SVG inside the block."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False, **options)  # type: ignore[call-overload]
        yield figure, list(axes[:, 0])


def tip(artist: Artist, text: str) -> None:
    """Show `text` when the mouse rests on the artist."""
    artist.set_gid(TIP + text)


def inline(figure: Figure, name: str, describe: str) -> str:
    """The figure as an ``<svg>`` element for a page; `name` must be unique on that page. Call it inside `drawing`."""
    buffer = io.BytesIO()
    nothing = {"Date": None, "Creator": None, "Type": None, "Format": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has the glyphs that matplotlib's own font lacks
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in list(element.attrib):
            element.set(key.rpartition("}")[2], element.attrib.pop(key))
    for parent in root.iter():
        for child in [c for c in parent if c.tag in ("metadata", "style")]:
            parent.remove(child)
    referenced = set(re.findall(r"#([\w-]+)", " ".join(_references(root))))
    for element in root.iter():
        _tidy(element, name, referenced)
    width, height = root.get("viewBox", "0 0 1 1").split()[2:]
    keep = {"viewBox": root.get("viewBox", ""), "role": "img", "aria-label": describe, "data-plot": name}
    root.attrib.clear()
    root.attrib.update(keep, width=width, height=height)
    return ElementTree.tostring(root, encoding="unicode")


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for key in ("href", "clip-path", "style"):
            value = element.get(key, "")
            yield from re.findall(r"url\([^)]*\)", value) if key != "href" else [value]


def _tidy(element: ElementTree.Element, name: str, referenced: set[str]) -> None:
    identity = element.get("id")
    if identity is not None:
        del element.attrib["id"]
        if identity.startswith(TIP):
            title = ElementTree.Element("title")
            title.text = identity.removeprefix(TIP)
            element.insert(0, title)
        elif identity in referenced:
            element.set("id", f"{name}-{identity}")
    if href := element.get("href"):
        element.set("href", f"#{name}-{href.removeprefix('#')}")
    if clip := element.get("clip-path"):
        element.set("clip-path", clip.replace("#", f"#{name}-"))
    if path := element.get("d"):
        element.set("d", _shorter(path))
    if element.tag == "text" and element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for key in ("x", "y"):
        if value := element.get(key):
            element.set(key, _shorter(value))
    if style := element.get("style"):
        style = re.sub(r"#[0-9a-f]{6}", lambda match: _variable(match.group()), style)
        element.set("style", re.sub(r"font-family: [^;]*;?\s*", "", style))
    if element.text and not element.text.strip():
        element.text = None
    if element.tail and not element.tail.strip():
        element.tail = None


def _variable(colour: str) -> str:
    return f"var(--{NAMES[colour]})" if colour in NAMES else colour


def _shorter(numbers: str) -> str:
    """One decimal of a point is finer than any screen."""
    short = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match.group()):.1f}".removesuffix(".0"), numbers)
    return " ".join(short.split())
