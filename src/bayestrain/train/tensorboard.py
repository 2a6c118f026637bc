"""TensorBoard logs, for those who ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayestrain.errors import ConfigError


def summary_writer() -> Any:
    """TensorBoard's writer, or an error that says how to get it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "fit.tensorboard is on, but the package tensorboard is not installed. Try: pip install tensorboard"
        ) from error
    return SummaryWriter


class EpochLog:
    """Writes an epoch's numbers under ``tensorboard/`` of the run folder; does nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder is None:
            return
        self.writer = summary_writer()(str(folder / "tensorboard"))

    def write(self, line: dict[str, Any]) -> None:
        """One line of the history."""
        if self.writer is None:
            return
        epoch = line["epoch"]
        for key in ("lr", "prior_weight", "train_loss", "prior_loss", "train_accuracy", "params"):
            if line[key] is not None:
                self.writer.add_scalar(key, line[key], epoch)
        for key, value in (line["validation"] or {}).items():
            self.writer.add_scalar(f"validation/{key}", value, epoch)
        for layer, chain in line["ranks"].items():
            for bond, rank in enumerate(chain[1:-1], start=1):
                self.writer.add_scalar(f"ranks/{layer}/{bond}", rank, epoch)

    def close(self) -> None:
        """Flush."""
        if self.writer is not None:
            self.writer.close()
