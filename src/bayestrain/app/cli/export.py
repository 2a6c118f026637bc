"""`bayestrain export`: a finished run as one file for another runtime, whose outputs say how certain they are."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bayestrain.app.cli.runs import Finished, finished
from bayestrain.errors import ConfigError


def export(
    folder: Finished,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="onnx, pt2 or executorch.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", show_default=False, help="File to write. "
                                             "Default: model.FORMAT in the run's folder.")] = None,
    weights: Annotated[str | None, typer.Option("--weights", metavar="BITS", show_default=False,
                                                help="int8 or bf16 stores weights in fewer bits.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Inputs at a time that the file is made with, and the "
                                       "most that ExecuTorch will take.")] = 8,
) -> None:  # fmt: skip
    """Write a run's network or posterior as one file, after comparing its outputs with PyTorch's.

    It returns the mean prediction, and the total, aleatoric and epistemic uncertainty. Its metadata name the classes
    and what pictures were normalised with. A run names the function that builds its network, and that function is
    called: only use runs you trust.

    ```sh
    bayestrain export runs/digits-seed0
    bayestrain export runs/digits-seed0 --format pt2 --weights int8 --out digits.pt2
    ```
    """
    result: dict[str, Any] = finished(folder).result
    if not result.get("input_shape"):
        raise ConfigError("this network takes several tensors. Export it in Python: bayestrain.export(model, ..)")
    import torch

    from bayestrain.io import export as write
    from bayestrain.posterior import Classification
    from bayestrain.train.run import load_run

    model = load_run(folder)
    if isinstance(model.likelihood, Classification) and result["calibrated"]:
        model.likelihood.temperature = result["calibrated"]["temperature"]
    shape = batch, *result["input_shape"]
    dtype = getattr(torch, result["input_dtype"])
    example = torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    known = {key: result[key] for key in ("name", "classes", "mean", "std", "input_shape") if result.get(key)}
    print(write(model, out or folder / f"model.{format}", format, example=example, weights=weights, metadata=known))
