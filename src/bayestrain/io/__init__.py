"""Models that leave the process: saved folders, ordinary PyTorch modules, and files for other runtimes."""

from bayestrain.io.export import ExportReport, export
from bayestrain.io.plain import to_plain
from bayestrain.io.save import load, save

__all__ = ["ExportReport", "export", "load", "save", "to_plain"]
