"""The report: self-contained HTML pages of a run or of several, from the files of run folders and without torch."""

from bayestrain.app.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
