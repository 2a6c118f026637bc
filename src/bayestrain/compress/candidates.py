"""What a dense weight may become: formats with layouts, plain truncated SVD among them."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bayestrain.errors import ConfigError
from bayestrain.formats import FORMATS, Format, get
from bayestrain.formats.modes import factor
from bayestrain.nn.layout import Layout

SVD = "svd"
KINDS = (SVD, *(format.name for format in FORMATS))  # plain truncated SVD, and every format

# Modes are separated by commas. o and i are outputs and inputs, k all taps, h and w rows and columns of a kernel; a
# number is that of a factor of an axis that is split.
MATRIX = {
    SVD: ("o, ik",),
    "chains": (
        "o1 i1, o2 i2 k",
        "o1 i1, o2 i2, o3 i3 k",
        "o1, o2, i1, i2 k",
        "o2, o1, i1, i2 k",
        "o1, o2, o3, i1, i2, i3 k",
    ),
    "others": ("o1 i1, o2 i2, o3 i3 k", "o1, o2, i1, i2 k"),
}
KERNEL = {
    SVD: ("o, i k", "o k, i"),
    "chains": ("i, k, o", "k, i, o", "i, o, k", "o1 i1, k, o2 i2", "k, o1 i1, o2 i2", "i1, i2, k, o1, o2"),
    "others": ("i, k, o",),
}
PLANE = {
    SVD: ("o h, i w", "o w, i h"),
    "chains": ("i, h, w, o", "i, w, h, o", "i, h, o w", "i, w, o h", "i h, w, o", "i w, h, o"),
    "others": ("i, h, w, o",),
}
"""For kernels of two axes, in addition."""


@dataclass(frozen=True)
class Candidate:
    """A format with a layout; `kind` is "svd" for a matrix of whole axes, else the format's name."""

    kind: str
    modes: str
    format: Format
    layout: Layout
    whiten: str = "modes"
    """What is whitened before it is decomposed, one of `WAYS`."""


WAYS = ("modes", "channels", "nothing")
"""Every mode by the moment of its inputs and taps, channels alone, or nothing. Where no way is optimal, none is always
the best: truncated SVD, which no layer may be worse than, is tried in all of them."""


def candidates(shape: Sequence[int], wanted: Collection[str], calibrated: bool = True) -> list[Candidate]:
    """All that a weight ``(out, in, *taps)`` may become, of these kinds; without calibration nothing is whitened."""
    _, _, *taps = shape
    tables = [MATRIX] if math.prod(taps) == 1 else [KERNEL, PLANE] if len(taps) == 2 and min(taps) > 1 else [KERNEL]
    found = []
    for table in tables:
        for kind in wanted:
            format = get("tt" if kind == SVD else kind)
            for modes in table[{SVD: SVD, "tt": "chains"}.get(kind, "others")]:
                layout = fold(shape, modes)
                if layout is not None:
                    ways = WAYS if kind == SVD and calibrated else WAYS[:1]
                    found += [Candidate(kind, modes, format, layout, way) for way in ways]
    return found


def fold(shape: Sequence[int], modes: str) -> Layout | None:
    """The layout that a line of the tables describes; None where an axis has no such factors."""
    outputs, inputs, *taps = shape
    parts = [re.findall(r"[oikhw]\d?", mode) for mode in modes.split(",")]
    parts = [[part for part in own if part != "k" or taps] for own in parts]
    plane = any(part in "hw" for own in parts for part in own)
    sizes = {"o": outputs, "i": inputs}
    sizes |= {"h": taps[0], "w": taps[1]} if plane else {"k": math.prod(taps)} if taps else {}
    names, splits = [], []
    for axis, size in sizes.items():
        own = sorted(part for mode in parts for part in mode if part[0] == axis)
        split = factor(size, len(own))
        if math.prod(split) != size or (len(own) > 1 and min(split) == 1):
            return None
        names += own
        splits.append(split)
    order = tuple(tuple(names.index(part) for part in mode) for mode in parts)
    name = "paired" if any("o" in part[0] for mode in parts for part in mode[:1] if len(mode) > 1) else "split"
    return Layout(tuple(shape), tuple(sizes.values()), tuple(splits), order, name)


def checked_kinds(wanted: Sequence[str] | None) -> tuple[str, ...]:
    given = KINDS if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    if not given or not set(given) <= set(KINDS):
        raise ConfigError(f"formats must be some of {KINDS}, got {wanted!r}.")
    return given
