"""Numbers as people read them."""

from collections.abc import Iterable
from datetime import timedelta


def count(value: float) -> str:
    """3625 -> "3,625"."""
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    """137.07 -> "137×"."""
    return f"{value:,.0f}×" if value >= 99.5 else f"{value:.3g}×"


def percent(value: float, digits: int = 2) -> str:
    """0.9856 -> "98.56%"."""
    return f"{100 * value:.{digits}f}%"


def number(value: float) -> str:
    """Any number in three digits or its whole part: -0.04583 -> "-0.0458"."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:#.3g}".removesuffix(".")


def duration(seconds: float) -> str:
    """112 -> "0:01:52"."""
    return str(timedelta(seconds=round(seconds)))


def plural(number: int, noun: str) -> str:
    """2, "layer" -> "2 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def join(values: Iterable[object], separator: str = ", ") -> str:
    """(7, 5, 3) -> "7, 5, 3"."""
    return separator.join(map(str, values))
