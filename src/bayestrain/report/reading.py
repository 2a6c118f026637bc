"""Read numbers and JSON from a run folder: what cannot be read is named, with what to do about it."""

import json
import math
from pathlib import Path
from typing import Any

from bayestrain.errors import ReportError
from bayestrain.report.run import Scores

Json = dict[str, Any]


SPARE = "Delete it to leave its part out of the report."


def read_json(path: Path, advice: str = SPARE) -> Json | None:
    """A JSON object, or None if there is no such file; `advice` is for one that cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise ReportError(f"{path} cannot be read: {error}. {advice}") from error
    if not isinstance(content, dict):
        raise ReportError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def as_number(value: Any, name: str) -> float | None:
    """A number; None stays None, and what is not finite becomes it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} must be a number, not {value!r}")
    return float(value) if math.isfinite(value) else None


def number(record: Json, key: str) -> float | None:
    """The number under a key; None if it is absent or not finite."""
    if not isinstance(record, dict):
        raise ValueError(f"{key!r} must stand in an object, not in {record!r}")
    return as_number(record.get(key), key)


def whole(record: Json, key: str) -> int | None:
    """The same as an integer."""
    value = number(record, key)
    return None if value is None else int(value)


def read_scores(record: Json) -> Scores:
    """The headline figures that a result has."""
    calibrated = record.get("calibrated") or {}
    return Scores(
        dense_params=whole(record, "dense_params"),
        params=whole(record, "params"),
        accuracy=number(record, "accuracy"),
        log_likelihood=number(record, "log_likelihood"),
        ece=number(record, "ece"),
        brier=number(record, "brier"),
        seconds=number(record, "seconds"),
        peak_memory_bytes=whole(record, "peak_memory_bytes"),
        temperature=number(calibrated, "temperature"),
        calibrated_ece=number(calibrated, "ece"),
        calibrated_log_likelihood=number(calibrated, "log_likelihood"),
        calibrated_brier=number(calibrated, "brier"),
    )
