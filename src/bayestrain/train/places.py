"""Where a run folder has what a run can go on from. No torch here, so that the command line can look at once."""

from pathlib import Path

LAST = "checkpoint-last.pt"

MAP = "map"
"""Sub-folder of a posterior's run: the MAP point to start around or to compare with, a whole run of its own."""

START = "from_run.json"
"""Where the network that a run began with came from, if it was that of another run."""

TAKING = f".{MAP}.partial"
"""The same while it is being taken over from another run."""


def has_work(folder: Path) -> bool:
    """Whether there is something to go on from: the run's own checkpoint, or that or the end of its MAP point."""
    return any((folder / place).is_file() for place in (LAST, f"{MAP}/{LAST}", f"{MAP}/result.json"))
