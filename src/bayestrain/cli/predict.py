"""`bayestrain predict`: the class of pictures, by the network of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayestrain.cli.screen import existing, percent, print_json
from bayestrain.tables import text_table

if TYPE_CHECKING:
    from bayestrain.cli.pictures import Picture
    from bayestrain.predict import ClassPrediction

CLEAR = 0.1
"""Less uncertainty than this, in nats, is none to speak of."""


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, or its model.json.", metavar="RUN")],
    images: Annotated[list[Path], typer.Argument(help="Picture files of any size and mode.", metavar="IMAGE")],
    invert: Annotated[
        bool | None,
        typer.Option(
            "--invert/--no-invert",
            help="Swap dark and bright. MNIST's digits are white on black; a scan on paper wants this.",
            show_default="if the edge is bright and the network gray, unless it has that size; the answer says so",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON array, with every class's probability.")] = False,
) -> None:
    """Say what is on pictures: class and probability; of a posterior also how sure that is, and why.

    A picture is brought to the network's size (keeping its proportions) and to gray or colour as need be. Probabilities
    are at the temperature that the held-out images asked for.

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
    prediction = predicted(run, description, pictures)
    answers = [answer(p, prediction.subset([i]), description["classes"]) for i, p in enumerate(pictures)]
    if as_json:
        print_json(answers)
        return
    several = "particles" in description
    header = ["picture", "class", "probability", *(["90 % of networks say", "doubt"] if several else []),
              "next", "inverted", "changed"]  # fmt: skip
    rows = [
        [a["image"], a["class"], percent(a["probability"]),
         *([f"{percent(a['low'])} - {percent(a['high'])}", a["doubt"]] if several else []),
         f"{a['next']} {percent(a['next_probability'])}", "yes" if a["inverted"] else "no", a["changes"]]
        for a in answers
    ]  # fmt: skip
    print(text_table(header, rows, left_columns=len(header)))


def predicted(run: Path, description: dict[str, Any], pictures: list[Picture]) -> ClassPrediction:
    """What the network, or all particles, say of the pictures."""
    import torch

    from bayestrain.data import normalizer
    from bayestrain.predict import ClassPrediction
    from bayestrain.saved import load_model, load_posterior

    pixels = torch.stack([torch.from_numpy(picture.pixels) for picture in pictures])
    x = normalizer(description["mean"], description["std"])(pixels.float() / 255)
    if "particles" in description:
        found = load_posterior(run).predict(x)
        assert isinstance(found, ClassPrediction)
        return found
    model = load_model(run)
    with torch.inference_mode():
        probabilities = torch.stack([model(one[None])[0] for one in x]).double().softmax(-1)
    return ClassPrediction(probabilities[None], temperature=float(description.get("temperature", 1.0)))


def doubt(prediction: ClassPrediction) -> str:
    """How much is unsure, and whether the picture or the networks are to blame, in words."""
    total, epistemic = float(prediction.total[0]), float(prediction.epistemic[0])
    if total < CLEAR:
        return "none"
    return "networks disagree" if epistemic > 0.5 * total else "picture is unclear"


def answer(picture: Picture, prediction: ClassPrediction, classes: list[str]) -> dict[str, Any]:
    """The answer for one picture; with several particles also how far they differ."""
    probabilities = prediction.mean[0].tolist()
    best, second = sorted(range(len(classes)), key=lambda index: -probabilities[index])[:2]
    uncertainty: dict[str, Any] = {}
    if len(prediction.particle_probabilities) > 1:
        low, high = prediction.interval(0.9)
        uncertainty = {
            "low": float(low[0, best]),
            "high": float(high[0, best]),
            "total": float(prediction.total[0]),
            "aleatoric": float(prediction.aleatoric[0]),
            "epistemic": float(prediction.epistemic[0]),
            "disagreement": float(prediction.disagreement[0]),
            "doubt": doubt(prediction),
        }
    return {
        "image": str(picture.path),
        "class": classes[best],
        "probability": probabilities[best],
        "next": classes[second],
        "next_probability": probabilities[second],
        "temperature": prediction.temperature,
        "probabilities": dict(zip(classes, probabilities, strict=True)),
        **uncertainty,
        "inverted": picture.inverted,
        "changes": ", ".join(picture.changes) or "no",
    }
