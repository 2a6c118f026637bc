"""The report: one self-contained HTML page for a run, one for a comparison of several.

It reads the files of a run folder and nothing else: no torch, no layer types, no formats.
"""

from bayestrain.app.report.compare import write_comparison
from bayestrain.app.report.page import write_report

__all__ = ["write_comparison", "write_report"]
