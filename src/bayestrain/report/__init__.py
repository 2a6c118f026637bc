"""Reports: from run folders to one self-contained HTML page. Importing this room loads matplotlib and jinja2."""

from bayestrain.report.write import write_report

__all__ = ["write_report"]
