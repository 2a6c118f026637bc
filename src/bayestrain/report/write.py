"""`write_report`: from one or several run folders to one HTML file."""

import os
from collections.abc import Sequence
from pathlib import Path

from bayestrain.errors import ReportError
from bayestrain.files import write_atomically
from bayestrain.report.compare import comparison_page
from bayestrain.report.load import load_run
from bayestrain.report.page import run_page


def write_report(run: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, and return its path.

    The file is complete in itself: it asks for nothing from a network and runs no script.

    Args:
        run: a run folder, or several.
        out: the file to write; ``report.html`` in the run folder by default, ``comparison.html`` beside the first of
            several. It appears whole or not at all.
    """
    folders = [Path(run)] if isinstance(run, str | os.PathLike) else [Path(folder) for folder in run]
    if not folders:
        raise ReportError("There is no run to report on. Give at least one run folder.")
    folders = list({folder.resolve(): folder for folder in folders}.values())  # each once
    default = folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / "comparison.html"
    target = default if out is None else Path(out)
    if target.is_dir():
        raise ReportError(f"{target} is a folder. Name the HTML file to write, for example {target / 'report.html'}.")
    runs = [load_run(folder) for folder in folders]
    html = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs, target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, html)
    except OSError as error:
        raise ReportError(f"{target} cannot be written: {error.strerror}. Choose another place with --out.") from error
    return target
