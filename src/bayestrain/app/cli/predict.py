"""`bayestrain predict`: what a run's network predicts for pictures or rows of numbers, and how certain it is."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayestrain.app.cli.runs import Device, Finished, loaded
from bayestrain.errors import DataError
from bayestrain.tables import text_table, times

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS = (".csv", ".json", ".npy", ".pt")
Json = dict[str, Any]


def predict(
    folder: Finished,
    inputs: Annotated[list[Path], typer.Argument(help="Pictures, or .csv, .json, .npy or .pt files of inputs.",
                                                 metavar="INPUT")],
    invert: Annotated[bool | None, typer.Option(help="Swap dark and bright in pictures, as digits scanned from paper "
                                                "need it.", show_default="for grey pictures with a bright edge"),
                     ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with all numbers.")] = False,
) -> None:  # fmt: skip
    """Predict classes or values, with probability or interval; a posterior also says how certain it is, and why.

    Pictures may have any size. Only use runs you trust: the function that a run names is called.

    ```sh
    bayestrain predict runs/digits-seed0 seven.png
    bayestrain predict first new.csv --json
    ```
    """
    ask, _, particles = predictor(folder, device)
    rows = ask(inputs, invert)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    cells = [words(row, particles) for row in rows]
    header = list(dict.fromkeys(key for row in cells for key in row))
    print(text_table(header, [[row.get(key, "") for key in header] for row in cells], left_columns=len(header)))


def predictor(folder: Path, device: str) -> tuple[Callable[[list[Path], bool | None], list[Json]], Json, int]:
    """What predicts for files with a run's network, which any threads may call; the run's result and its particles."""
    model, result = loaded(folder, device)

    def ask(inputs: list[Path], invert: bool | None) -> list[Json]:
        x, labels = read_inputs(inputs, result, invert)
        found = answers(model.predict(x), result["classes"])
        return [answer | label for answer, label in zip(found, labels, strict=True)]

    return ask, result, len(model)


def read_inputs(paths: list[Path], result: Json, invert: bool | None) -> tuple["Tensor", list[dict[str, str]]]:
    """All inputs as one batch, and for each its name and what was changed in a picture."""
    import torch

    shape, parts, labels = tuple(result["input_shape"]), [], []
    for path in paths:
        changes: list[str] = []
        if path.suffix.lower() in ARRAYS:
            rows = read_array(path, shape).to(getattr(torch, result["input_dtype"]))
        elif len(shape) == 3 and shape[0] in (1, 3):
            from bayestrain.app.data.pictures import read_picture

            pixels, changes = read_picture(path, shape, invert)
            rows = torch.from_numpy(pixels).float()[None] / 255
            if result.get("mean"):
                mean, std = (torch.tensor(result[key])[:, None, None] for key in ("mean", "std"))
                rows = (rows - mean) / std
        else:
            raise DataError(f"{path} must be a .csv, .json, .npy or .pt file: an input has the shape {times(shape)}.")
        parts.append(rows)
        names = [str(path)] if len(rows) == 1 else [f"{path}, row {i}" for i in range(1, len(rows) + 1)]
        labels += [{"input": name, "changed": ", ".join(changes)} for name in names]
    return torch.cat(parts), labels


def read_array(path: Path, shape: tuple[int, ...]) -> "Tensor":
    """The rows of a .csv (a header is skipped), .json, .npy or .pt file, each an input of the given shape."""
    import numpy as np
    import torch

    kind = path.suffix.lower()
    try:
        if kind == ".csv":
            lines = path.read_text(encoding="utf-8-sig").strip().splitlines()
            header = bool(lines) and not lines[0].startswith(tuple("+-.0123456789"))
            if not lines[header:]:
                raise ValueError("it has no row")
            content = np.loadtxt(lines[header:], delimiter=",", ndmin=2)
        elif kind == ".json":
            known = json.loads(path.read_bytes())
            if not (isinstance(known, dict) and known.keys() == {"inputs"}):
                raise ValueError('it must be {"inputs": [[..], ..]}')
            content = np.array(known["inputs"])
        elif kind == ".npy":
            content = np.load(path, allow_pickle=False)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
        found = torch.as_tensor(content)
    except Exception as error:  # NumPy and PyTorch raise anything on damage
        raise DataError(f"{path} cannot be read as rows of numbers: {str(error).partition('. ')[0]}.") from None
    if found.shape == shape:
        found = found[None]
    if not found.ndim or not len(found) or math.prod(found.shape[1:]) != math.prod(shape):
        needed = f"but an input of this network has the shape {times(shape)}. Give one input per row, and no target"
        raise DataError(f"{path} has the shape {times(found.shape)}, {needed}.")
    if not bool(found.isfinite().all()):
        raise DataError(f"{path} has values that are not finite numbers. Replace them first.")
    return found.reshape(-1, *shape)


def answers(prediction: Any, classes: list[str]) -> list[Json]:
    """What is predicted for each input, in numbers."""
    low, high = prediction.interval(0.9)
    values = {"prediction": prediction.mean, "low": low, "high": high}
    values |= {name: getattr(prediction, name) for name in ("total", "aleatoric", "epistemic")}
    if prediction.mean.shape[1:] == (1,):  # one number; there are two or more classes
        values = {name: value.squeeze(1) for name, value in values.items()}
    columns = (value.tolist() for value in values.values())
    rows = [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)]
    for row, reason in zip(rows, prediction.reasons() if hasattr(prediction, "reasons") else (), strict=False):
        p = row.pop("prediction")
        best, second = sorted(range(len(p)), key=lambda k: -p[k])[:2]
        names = list(classes or map(str, range(len(p))))
        row |= {
            "class": names[best], "probability": p[best], "low": row["low"][best], "high": row["high"][best],
            "next": names[second], "next_probability": p[second], "reason": reason,
            "probabilities": dict(zip(names, p, strict=True)),
        }  # fmt: skip
    return rows


def words(row: Json, particles: int) -> dict[str, str]:
    """An answer as the cells of a table."""
    cells = {"input": row["input"]}
    if "class" in row:
        cells |= {"class": row["class"], "probability": f"{row['probability']:.2%}"}
        if particles > 1:
            cells["90% of networks"] = f"{row['low']:.2%} - {row['high']:.2%}"
        cells |= {"certainty": row["reason"], "next": f"{row['next']} {row['next_probability']:.2%}"}
    else:
        keys = ("prediction", "low", "high", "epistemic", "total")
        outputs = list(zip(*(row[key] if isinstance(row[key], list) else [row[key]] for key in keys), strict=True))
        cells["prediction"] = "  ".join(f"{value:.5g}" for value, *_ in outputs)
        cells["90% interval"] = "  ".join(f"{low:.5g} .. {high:.5g}" for _, low, high, *_ in outputs)
        if particles > 1:
            cells["networks disagree"] = "  ".join(f"{part / all:.0%} of the variance" for *_, part, all in outputs)
    return cells | ({"changed": row["changed"]} if row["changed"] else {})
