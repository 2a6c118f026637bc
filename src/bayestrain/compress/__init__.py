"""Compression: trained dense weights become factorised ones under one budget, before any further training."""

from bayestrain.compress.compression import CompressedLayer, CompressReport, compress_

__all__ = ["CompressReport", "CompressedLayer", "compress_"]
