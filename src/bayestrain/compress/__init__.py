"""Compression: trained dense weights become factorised ones under one budget, before any further training.

`moments` describes what layers multiply on real inputs, `candidates` lists what a weight may become, `curves` measures
error against size, `budget` picks a point of each curve, and `compression` puts the new layers in place.
"""

from bayestrain.compress.compression import CompressedLayer, CompressReport, compress_

__all__ = ["CompressReport", "CompressedLayer", "compress_"]
