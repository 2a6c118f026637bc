"""What is timed in one version of the package; `old_and_new.py` runs this file once with each version on its path.

The process reads a JSON command per line: ``{"open": row}`` prepares a row; ``{"time": calls, "what": "ours"}`` answers
with the mean seconds of so many calls. Where a row has a dense twin, ``"what": "dense"`` times that. All but the
adapters below is common to both versions.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayestrain
from paper import networks

OLD = not hasattr(bayestrain, "TensorLinear")
DEVICE = os.environ.get("BENCHMARK_DEVICE", "cpu")
MODES = ((7, 4, 7, 4), (5, 5, 5, 5))
BATCH = 128

Call = Callable[[], object]
Calls = dict[str, Call]
"""What a row times: "ours", and "dense" where it has a dense twin."""


# --- the two versions -------------------------------------------------------------------------------------------------


def linear(ranks: int | Sequence[int]) -> nn.Module:
    """A 784x625 layer."""
    ins, outs = MODES
    make = bayestrain.TTLinear if OLD else bayestrain.TensorLinear
    return make(784, 625, in_modes=ins, out_modes=outs, max_rank=ranks)


def convolution(middle: int) -> nn.Module:
    """A 3x3 convolution of 128 channels with this rank between inputs and outputs, full ranks elsewhere."""
    make = bayestrain.TTConv2d if OLD else bayestrain.TensorConv2d
    full = list(make(128, 128, 3, max_rank=10**9).ranks[1:-1])
    full[2] = middle  # taps, two modes of inputs | two modes of outputs
    return make(128, 128, 3, padding=1, max_rank=full)


def images(shape: tuple[int, ...], number: int) -> Any:
    """Random images and labels."""
    if OLD:
        from bayestrain.data import Images
    else:
        from bayestrain.app.data import Images
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (number, *shape), generator=generator, dtype=torch.uint8)
    return Images(pixels, torch.randint(0, 10, (number,), generator=generator)).to(DEVICE)


def train(
    model: nn.Module, data: Any, epochs: int, precision: str = "float32", align_every: int = 100, **options: Any
) -> Any:
    """`fit` without cuts on the way."""
    settings = {
        "epochs": epochs, "finetune_epochs": 0, "batch_size": BATCH, "lr": 1e-4, "compact_every": 0,
        "schedule": "constant", "precision": precision,
    }  # fmt: skip
    if OLD:
        from bayestrain.train.fitting import fit

        from bayestrain.train.config import FitConfig, PriorConfig

        prior = PriorConfig(align_every=align_every)
        return fit(model, data, None, FitConfig(**settings), prior=prior, device=DEVICE, **options)
    from bayestrain.train import PriorConfig

    prior = PriorConfig(align_every=align_every)
    return bayestrain.fit(model, data, device=DEVICE, progress=False, prior=prior, **settings, **options)


def posterior(number: int) -> Any:
    """SVGD particles of the MNIST network."""
    from bayestrain.posterior import Posterior, independent

    def build() -> nn.Module:
        return tensorized("mnist_mlp", 20)

    def adam(named: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-4, device=DEVICE) if DEVICE == "cuda" else 1e-4
        return torch.optim.Adam(named, lr=rate, capturable=DEVICE == "cuda")

    models = [model.to(DEVICE) for model in independent(build, number)]
    return Posterior(models, 57_000, optimizer=adam)


def tensorized(name: str, rank: int) -> nn.Module:
    """One of the paper's networks, factorised unless the rank is 0; its first convolution stays dense."""
    torch.manual_seed(0)
    model: nn.Module = getattr(networks, name)()
    if not rank:
        return model
    dense = {"cifar10_cnn": ("conv1",), "resnet110": ("stem.conv",)}.get(name, ())
    bayestrain.tensorize_(
        model, bayestrain.TensorizeConfig(rank), lambda _, layer: layer not in dense and "shortcut" not in layer
    )
    return model


# --- rows -------------------------------------------------------------------------------------------------------------


def layer(model: nn.Module, x: Tensor, training: bool = True) -> Calls:
    """Forward and backward of a layer, or its forward pass in evaluation mode, and the same of its dense twin."""
    return {"ours": one_layer(model, x, training), "dense": one_layer(model.to_dense(), x, training)}


def one_layer(model: nn.Module, x: Tensor, training: bool) -> Call:
    # Rows share x: each gets a leaf of its own.
    model, x = model.to(DEVICE).train(training), x.to(DEVICE, copy=True).requires_grad_(training)
    with torch.no_grad():
        gradient = torch.randn(model(x).shape, device=DEVICE)  # not in the strides that a version gives its output
    tensors = [x, *model.parameters()]

    def forward_and_backward() -> None:
        for tensor in tensors:
            tensor.grad = None
        model(x).backward(gradient)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    return forward_and_backward if training else forward


def epoch(
    name: str, rank: int, shape: tuple[int, ...], number: int, precision: str, align_every: int, before: int
) -> Calls:
    """An epoch of MAP training by `fit`, as it counts its seconds itself: captured on a GPU, prior and lambda included.

    The dense network has a Normal prior. The epochs `before` are not counted: the capture is in them, and alignments
    that are more frequent at first.
    """
    data = images(shape, number)

    def call(rank: int) -> float:
        search = {"search": bool(rank)} if OLD else {}
        model = tensorized(name, rank).to(DEVICE)
        history = train(model, data, before + 3, precision, align_every, **search).history
        seconds = [line["seconds"] for line in history]
        return (seconds[before + 3] - seconds[before]) / 3

    return {"ours": lambda: call(rank), "dense": lambda: call(0)}


def particles(number: int) -> Calls:
    """100 SVGD steps, one of which aligns in both versions; before step 200 this one aligns more often."""
    group = posterior(number)
    x = torch.rand(BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y = torch.randint(0, 10, (BATCH,), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def steps(count: int) -> None:
        for _ in range(count):
            group.step(x, y)

    steps(200)
    return {"ours": lambda: steps(100)}


def resume() -> Calls:
    """`fit` with ``resume=True`` on a finished run: it reads the checkpoint and takes the final cut."""
    data, folder = images((1, 28, 28), 1280), Path(tempfile.mkdtemp(prefix="bayestrain-benchmark-"))
    train(tensorized("mnist_mlp", 20), data, 1, folder=folder)
    return {"ours": lambda: train(tensorized("mnist_mlp", 20), data, 1, folder=folder, resume=True)}


def rows() -> dict[str, Callable[[], Calls]]:
    """Every row by name."""
    torch.manual_seed(0)
    x, picture = torch.randn(BATCH, 784), torch.randn(8, 128, 32, 32)
    found: dict[str, Callable[[], Calls]] = {
        "784x625, rank 20, batch 128, training": lambda: layer(linear(20), x),
        "784x625, ranks 4 2 3, batch 128, training": lambda: layer(linear((4, 2, 3)), x),
        "784x625, ranks 4 2 3, batch 1024, training": lambda: layer(linear((4, 2, 3)), x.repeat(8, 1)),
        "784x625, ranks 4 2 3, batch 128, inference": lambda: layer(linear((4, 2, 3)), x, training=False),
        "784x625, ranks 4 2 3, batch 1, inference": lambda: layer(linear((4, 2, 3)), x[:1], training=False),
        "conv 3x3 128->128 on 32x32, middle bond 16, batch 8, training": lambda: layer(convolution(16), picture),
        "MNIST network, 100 steps of MAP training": lambda: epoch(
            "mnist_mlp", 20, (1, 28, 28), 12_800, "float32", 100, 2
        ),
        "MNIST network, 100 steps of 20 particles, one aligns": lambda: particles(20),
        "resume": resume,
    }
    if DEVICE == "cuda":
        found = {"MNIST network, 100 SVGD steps of 50 particles, one aligns": lambda: particles(50)}
        found |= {  # as in the presets of these networks, without alignment
            f"{title}, 40 captured steps of MAP training, {kind}": (
                lambda name=name, rank=rank, kind=kind: epoch(
                    name, rank, (3, 32, 32), 5_120, kind, align_every=0, before=1
                )
            )
            for kind in ("bf16", "tf32")
            for title, name, rank in (("CNN", "cifar10_cnn", 30), ("ResNet-110", "resnet110", 20))
        }
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    calls: Calls = {}
    available = rows()
    for line in sys.stdin:
        command = json.loads(line)
        if "open" in command:
            calls = available[command["open"]]()
            answer: Any = {"calls": list(calls)}
        elif "rows" in command:
            answer = {"rows": list(available), "package": str(Path(bayestrain.__file__).parent)}
        else:
            answer = {"seconds": timed(calls[command["what"]], command["time"])}
        print(json.dumps(answer), flush=True)


def timed(call: Call, calls: int) -> float:
    """Mean seconds of a call; a call that returns a number has timed itself."""
    gc.collect()
    _wait()
    started = time.perf_counter()
    own = [result for result in (call() for _ in range(calls)) if isinstance(result, float)]
    _wait()
    return sum(own) / len(own) if own else (time.perf_counter() - started) / calls


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
