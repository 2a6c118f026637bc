"""Data sets: `load` returns one by name, `get` only fetches it, `SPECS` describes them.

`load` returns `Splits` of `Images`; `shift`, `pad_crop`, `flip` and `cutout` augment whole batches of them.
"""

from bayestrain.app.data.augment import cutout, flip, pad_crop, shift
from bayestrain.app.data.fetch import SPECS, cache_folder, get, home
from bayestrain.app.data.images import Images, Splits, load

__all__ = ["SPECS", "Images", "Splits", "cache_folder", "cutout", "flip", "get", "home", "load", "pad_crop", "shift"]
