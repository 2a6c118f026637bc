"""Data: `load` returns the digits that ship with the package as `Splits` of `Images`."""

from bayestrain.app.data.images import Images, Splits, load

__all__ = ["Images", "Splits", "load"]
