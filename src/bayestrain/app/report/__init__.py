"""The report: a self-contained HTML page of a run, from the files of its folder and without torch."""

from bayestrain.app.report.page import write_report

__all__ = ["write_report"]
