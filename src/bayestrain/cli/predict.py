"""`bayestrain predict`: the class of pictures, by the network of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayestrain.cli.screen import existing, percent, print_json
from bayestrain.tables import text_table

if TYPE_CHECKING:
    from bayestrain.cli.pictures import Picture


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, its model.json or model.safetensors.", metavar="RUN")],
    images: Annotated[list[Path], typer.Argument(help="Picture files of any size and mode.", metavar="IMAGE")],
    invert: Annotated[
        bool | None,
        typer.Option(
            "--invert/--no-invert",
            help="Swap dark and bright. MNIST's digits are white on black; a scan on paper wants this.",
            show_default="if the edge is bright and the network is gray; the answer says so",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON array, with every class's probability.")] = False,
) -> None:
    """Say what is on pictures: class and probability.

    A picture is brought to the network's size (keeping its proportions) and to gray or colour as need be.

    \b
    [bold]Examples[/]
      bayestrain predict runs/mnist-seed0 seven.png
      bayestrain predict runs/mnist-seed0 scans/*.jpg --invert --json
    """
    from bayestrain.cli.pictures import read_picture
    from bayestrain.saved import read_description, require

    description = read_description(existing(run))[1]
    require(description, "input_shape", "classes", "mean", "std")
    channels, height, width = description["input_shape"]
    pictures = [read_picture(image, (channels, height, width), invert) for image in images]
    probabilities = predicted(run, description, pictures)
    answers = [answer(p, row, description["classes"]) for p, row in zip(pictures, probabilities, strict=True)]
    if as_json:
        print_json(answers)
        return
    rows = [
        [a["image"], a["class"], percent(a["probability"]), f"{a['next']} {percent(a['next_probability'])}",
         "yes" if a["inverted"] else "no", a["changes"]]
        for a in answers
    ]  # fmt: skip
    print(text_table(["picture", "class", "probability", "next", "inverted", "changed"], rows, left_columns=6))


def predicted(run: Path, description: dict[str, Any], pictures: list[Picture]) -> list[list[float]]:
    """Class probabilities, one row per picture."""
    import torch

    from bayestrain.saved import load_model

    model = load_model(run)
    mean, std = (torch.tensor(description[key])[:, None, None] for key in ("mean", "std"))
    rows: list[list[float]] = []
    with torch.inference_mode():
        for picture in pictures:
            pixels = torch.from_numpy(picture.pixels).float() / 255
            rows.append(model(((pixels - mean) / std)[None]).softmax(-1)[0].tolist())
    return rows


def answer(picture: Picture, probabilities: list[float], classes: list[str]) -> dict[str, Any]:
    best, second = sorted(range(len(classes)), key=lambda index: -probabilities[index])[:2]
    return {
        "image": str(picture.path),
        "class": classes[best],
        "probability": probabilities[best],
        "next": classes[second],
        "next_probability": probabilities[second],
        "probabilities": dict(zip(classes, probabilities, strict=True)),
        "inverted": picture.inverted,
        "changes": ", ".join(picture.changes) or "no",
    }
