"""What tests of the documents share: their texts, and the summaries of the results they speak of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README, METHOD, POSTERIOR, EXPERIMENTS = (
    ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("method", "posterior", "experiments")),
)  # fmt: skip


def summary_of(experiment: str, label: str) -> dict[str, Any]:
    """The summary of a line's runs, none of which may have failed."""
    found: dict[str, Any] = json.loads((ROOT / "results" / experiment / label / "summary.json").read_text())
    assert found["failed"] == []
    return found


def text_of(document: Path) -> str:
    """A document in one line."""
    return " ".join(document.read_text().split())
