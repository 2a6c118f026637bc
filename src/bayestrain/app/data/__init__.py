"""Data sets: `load` returns one by name, `get` only fetches it, `catalog` lists them.

`load` returns `Splits` of `Images`; `shift`, `pad_crop`, `flip` and `cutout` augment whole batches of them.
"""

from bayestrain.app.data.augment import cutout, flip, pad_crop, shift
from bayestrain.app.data.fetch import Found, cache_folder, catalog, get
from bayestrain.app.data.images import Images, Splits, load

__all__ = ["Found", "Images", "Splits", "cache_folder", "catalog", "cutout", "flip", "get", "load", "pad_crop", "shift"]
