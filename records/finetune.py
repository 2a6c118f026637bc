"""A pretrained ResNet made smaller by `compress_`, then fine-tuned on CIFAR-10: test accuracy against size.

    python -m records.finetune --folder FOLDER --depth 56 --ratio 2 --out runs/resnet56-2x --device cuda
    python -m records.finetune --folder FOLDER --depth 56 --ratio 4 --out runs/resnet56-4x --device cuda
    python -m records.finetune --folder FOLDER --depth 20 --ratio 4 --out runs/resnet20-4x --device cuda

FOLDER has the networks of akamaster/pytorch_resnet_cifar10. `--hold-out 0.1` leaves training images for validation, to
compare settings; the pretrained networks have seen them. Test images are read once, at the end. A run that was stopped
continues when it is started again: ``--out`` keeps the compressed network and checkpoints.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch
from torch import Tensor

import bayestrain as bt
from bayestrain.compress.candidates import KINDS
from bayestrain.files import write_json
from bayestrain.train.environment import describe_environment
from benchmarks.pretrained import accuracy, normalised, pretrained
from paper import fetch
from paper.augment import flip, pad_crop

VALIDATION_SEED = 0
"""All runs hold out the same images."""


def varied(images: Tensor) -> Tensor:
    """Crop a random window and mirror half of the images; the CPU's generator, which checkpoints keep, decides."""
    return normalised(flip(pad_crop(images, 4, torch.default_generator), torch.default_generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the pretrained weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result, the networks and checkpoints")
    parser.add_argument("--depth", type=int, default=56, choices=(20, 32, 56))
    parser.add_argument("--ratio", type=float, default=2.0, help="how many times smaller")
    parser.add_argument("--formats", nargs="+", choices=KINDS, help="what compress_ may use; all, if left out")
    parser.add_argument("--calibration", type=int, default=1_024, help="training images for calibration")
    parser.add_argument("--teacher", type=int, help="depth of the teacher; the original, if left out; 0: none")
    parser.add_argument("--epochs", type=int, default=20, help="0: only compress")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--hold-out", type=float, default=0.0, help="the part of the training images for validation")
    parser.add_argument("--images", type=int, help="so many images for training and the test, for trying things out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", help="of the code, where there is no git to ask")
    given = parser.parse_args()

    splits, validation = fetch.load("cifar10"), None
    test, train = splits.test.subset(range(len(splits.test))[: given.images]), splits.train
    if given.hold_out:
        train, validation = train.split(given.hold_out, VALIDATION_SEED)
        validation = validation.augmented(normalised)
    train = train.subset(range(len(train))[: given.images]).augmented(varied)

    dense, compressed = pretrained(given.folder, given.depth), given.out / "compressed"
    if not compressed.exists():
        model = pretrained(given.folder, given.depth)
        batches = normalised(train.images[: given.calibration] / 255).split(128)
        print(bt.compress_(model, ratio=given.ratio, calibration=batches, formats=given.formats))
        bt.save(model, compressed)
    if not given.epochs:
        return
    model = bt.load(compressed, into=pretrained(given.folder, given.depth))
    teacher = None if given.teacher == 0 else pretrained(given.folder, given.teacher or given.depth)
    run = given.out / "fit"
    result = bt.fit(
        model, train, validation, prior=False, teacher=teacher, seed=given.seed, device=given.device,
        folder=run, resume=any(run.glob("checkpoint*.pt")), search=False, epochs=given.epochs, batch_size=given.batch,
        optimizer=given.optimizer, lr=given.lr, lr_warmup_epochs=1.0, weight_decay=given.weight_decay,
        decay_cores=True, clip_norm=1.0, precision=given.precision,
    )  # fmt: skip
    bt.save(model, given.out / "model")

    test = test.to(given.device)
    torch.backends.cudnn.allow_tf32 = False
    first = bt.load(compressed, into=pretrained(given.folder, given.depth))
    networks = {"dense_accuracy": dense, "compressed_accuracy": first, "accuracy": model}
    dense_parameters, parameters = bt.count_parameters(dense), bt.count_parameters(model)
    environment = describe_environment(torch.device(given.device))
    found = {
        "command": "python -m records.finetune " + shlex.join(sys.argv[1:]),
        "parameters": parameters, "dense_parameters": dense_parameters, "ratio": dense_parameters / parameters,
        **{name: accuracy(network, test.images, test.labels) for name, network in networks.items()},
        "validation": result.validation, "ranks": bt.ranks(model), "seconds": result.seconds,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()},
        "environment": environment | ({"commit": given.commit} if given.commit else {}),
    }  # fmt: skip
    write_json(given.out / "result.json", found)
    print({key: value for key, value in found.items() if "accuracy" in key or "parameters" in key})


if __name__ == "__main__":
    main()
