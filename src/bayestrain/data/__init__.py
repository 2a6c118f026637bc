"""Data sets: `load` gives one by name, `get` only fetches it, `catalog` lists them.

`Images` and `Splits` are what `load` returns; `pad_crop`, `shift`, `flip` and `cutout` augment whole batches;
`normalizer` shifts and scales them.
"""

from bayestrain.data.augment import cutout, flip, pad_crop, shift
from bayestrain.data.fetch import Entry, Found, cache_folder, catalog, get
from bayestrain.data.images import Images, Splits, normalizer
from bayestrain.data.loading import load

__all__ = [
    "Entry",
    "Found",
    "Images",
    "Splits",
    "cache_folder",
    "catalog",
    "cutout",
    "flip",
    "get",
    "load",
    "normalizer",
    "pad_crop",
    "shift",
]
