"""Numbers as people read them."""

import math

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def count(value: float | None) -> str:
    """3625 -> "3,625"."""
    return "–" if value is None else f"{value:,.0f}"


def short_count(value: float, _position: object = None) -> str:
    """Tick of an axis of counts: 27235 -> "27k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ratio(value: float | None) -> str:
    """137.07 -> "137×"."""
    if value is None:
        return "–"
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.1f}×"


def percent(value: float | None, digits: int = 2) -> str:
    """0.9856 -> "98.56 %"."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def signed(value: float | None, digits: int = 3) -> str:
    """-0.0458 -> "−0.046"."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """112 -> "1 min 52 s"; of what took long, only what matters of it."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return "–"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def short(value: float, _position: object = None) -> str:
    """Any number in three digits or its whole part: 1108.2 -> "1,108"."""
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")


def power(value: float, _position: object = None) -> str:
    """Tick of a logarithmic axis: 0.001 -> "10⁻³"."""
    if value <= 0:
        return ""
    exponent = round(math.log10(value))
    return {0: "1", 1: "10"}.get(exponent, "10" + str(exponent).translate(SUPERSCRIPT))


def tolerance(value: float) -> str:
    """0.01 -> "1 %"; below a tenth of a percent with as many digits as it needs."""
    return f"{100 * value:.2g} %" if value < 0.095 else f"{100 * value:.0f} %"


def short_name(name: str, most: int = 20) -> str:
    """A long name without its middle, so that a figure has room for more than names."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"


def plural(number: int, noun: str) -> str:
    """2, "layer" -> "2 layers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def method(name: str) -> str:
    """Name of a way to a posterior: "svgd" -> "SVGD"."""
    return {"svgd": "SVGD", "sgld": "SGLD", "ensemble": "deep ensemble"}.get(name, name)


def area(value: float | None) -> str:
    """Area under a curve: 0.98251 -> "0.983"; what is all but 1 keeps the digits that say so."""
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 0.9985 or value == 1 else f"{value:.5f}"
