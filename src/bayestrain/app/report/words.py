"""Numbers as people read them; a value that is not known is a dash."""

from collections.abc import Iterable

UNKNOWN = "–"


def count(value: float | None) -> str:
    """3625 -> "3,625"."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def short_count(value: float, _position: object = None) -> str:
    """A tick of an axis of counts: 27235 -> "27.2k"."""
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= pair[0]), (1, ""))
    return f"{value / size:.3g}{unit}"


def ratio(value: float | None) -> str:
    """137.07 -> "137×"."""
    return UNKNOWN if value is None else f"{value:,.0f}×" if value >= 99.5 else f"{value:.3g}×"


def percent(value: float | None, digits: int = 2) -> str:
    """0.9856 -> "98.56%"."""
    return UNKNOWN if value is None else f"{100 * value:.{digits}f}%"


def number(value: float | None) -> str:
    """Any number in three digits or its whole part: -0.04583 -> "-0.0458"."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:#.3g}".removesuffix(".")


def duration(seconds: float | None) -> str:
    """112 -> "1 min 52 s"."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes // 60} h {minutes % 60} min".removeprefix("0 h ")


def plural(number: int, noun: str) -> str:
    """2, "layer" -> "2 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short_name(name: str, most: int = 22) -> str:
    """A long name without its middle, so that a figure has room for more than names."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most - most // 2) :]}"


def join(values: Iterable[object], separator: str = ", ") -> str:
    """(7, 5, 3) -> "7, 5, 3"."""
    return separator.join(map(str, values))
