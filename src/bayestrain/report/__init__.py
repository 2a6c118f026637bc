"""Reports: run folders to one self-contained HTML page, all seeds to one table. Loads matplotlib and jinja2."""

from bayestrain.report.write import write_report
from bayestrain.report.write_table import write_table

__all__ = ["write_report", "write_table"]
