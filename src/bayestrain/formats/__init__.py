"""Low-rank formats: each is an einsum, and everything else follows from it.

To add a format, write one file with a `Format` and name it in `FORMATS` (docs/tutorials/new_format.py).
"""

from bayestrain.errors import ConfigError
from bayestrain.formats.algebra import contract, contributions, dense, norm
from bayestrain.formats.cp import CP
from bayestrain.formats.equation import Equation
from bayestrain.formats.format import Format
from bayestrain.formats.ring import TensorRing
from bayestrain.formats.tt import TensorTrain
from bayestrain.formats.tucker import Tucker

FORMATS: tuple[Format, ...] = (TensorTrain(), CP(), Tucker(), TensorRing())
"""Every format that layers, saved files and the tests know by name."""


def get(name: str | Format) -> Format:
    """The format of this name; a `Format` is returned as it is."""
    for format in FORMATS:
        if name == format.name:
            return format
    if isinstance(name, Format):
        return name
    raise ConfigError(f"format must be one of {tuple(format.name for format in FORMATS)}, got {name!r}.")


__all__ = ["FORMATS", "Equation", "Format", "TensorTrain", "contract", "contributions", "dense", "get", "norm"]
