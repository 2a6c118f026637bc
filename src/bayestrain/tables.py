"""Plain-text tables and sizes, so that every report reads well when printed."""

from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 1) -> str:
    """Align `rows` under `header`; the first `left_columns` columns are left-aligned, the rest right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    align = [str.ljust if i < left_columns else str.rjust for i in range(len(widths))]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = [[put(cell, width) for put, cell, width in zip(align, line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def times(sizes: Iterable[int]) -> str:
    """(28, 28) -> "28x28"."""
    return "x".join(map(str, sizes))
