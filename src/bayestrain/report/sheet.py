"""Plots side by side in one SVG file that needs no page around it: fixed colours, a font, a white ground."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from bayestrain.report.palette import LIGHT
from bayestrain.report.svg import Plot

ABREAST = 3
PAD, TITLE = 8.0, 18.0
SCALE = 4 / 3
"""Plots are measured in points, a file in pixels."""

ROOT = {
    "xmlns": "http://www.w3.org/2000/svg",
    "font-family": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif",
    "stroke-linejoin": "round",
    "role": "img",
}


def sheet(plots: Sequence[Plot]) -> str:
    """All plots in rows of three, with their titles if there are several, and all that they describe read out."""
    title = TITLE if len(plots) > 1 else 0.0
    placed: list[ElementTree.Element] = []
    across, top = 0.0, PAD
    for start in range(0, len(plots), ABREAST):
        left, tallest = PAD, 0.0
        for plot in plots[start : start + ABREAST]:
            panel = ElementTree.fromstring(plot.svg)
            width, height = float(panel.get("width", 0)), float(panel.get("height", 0))
            if title:
                heading = ElementTree.Element(
                    "text", {"x": f"{left + 3:g}", "y": f"{top + 11:g}", "fill": LIGHT["ink"], "font-size": "11"}
                )
                heading.set("font-weight", "bold")
                heading.text = plot.title
                placed.append(heading)
            keep = {"x": f"{left:g}", "y": f"{top + title:g}", "viewBox": panel.get("viewBox", "")}
            panel.attrib.clear()
            panel.attrib.update(keep, width=f"{width:g}", height=f"{height:g}")
            placed.append(panel)
            left, tallest = left + width + PAD, max(tallest, title + height)
        across, top = max(across, left), top + tallest + PAD
    root = ElementTree.Element("svg", {**ROOT, "aria-label": " ".join(plot.describe for plot in plots)})
    root.set("viewBox", f"0 0 {across:g} {top:g}")
    root.set("width", f"{SCALE * across:.0f}")
    root.set("height", f"{SCALE * top:.0f}")
    ground = {"width": f"{across:g}", "height": f"{top:g}", "fill": LIGHT["card"], "rx": "4"}
    root.append(ElementTree.Element("rect", ground))
    root.extend(placed)
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], text) + "\n"
