"""Data sets: `load` returns one by name as `Splits` of `Images`, `get` only fetches it, `SPECS` describes them."""

from bayestrain.app.data.fetch import SPECS, cache_folder, get
from bayestrain.app.data.images import Images, Splits, load

__all__ = ["SPECS", "Images", "Splits", "cache_folder", "get", "load"]
