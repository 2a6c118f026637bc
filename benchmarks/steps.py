"""Training steps of whole networks on a GPU, captured in CUDA graphs, and two whole trainings on MNIST.

    python benchmarks/steps.py --device cuda --mnist FOLDER
    python benchmarks/steps.py --quick                       # tiny, on a CPU, not captured: to see that it runs

A step is forward, backward, Adam, and with a prior also its gradient and the update of lambda. The same code captures
the dense network, the tensorised one without and with its prior; they are replayed in turns in one process. Rank
indices are aligned every hundred steps, outside of the graph; that share is added. Writes
``results/benchmarks/steps-DEVICE.json``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import arguments, claim, write
from timing import TOLERANCE, autocast, cast, interleaved, measure_rounds, precision, relative_error, summarise
from torch import Tensor, nn

from bayestrain import count_parameters, models
from bayestrain.errors import BayesTrainError
from bayestrain.forming import FormTogether
from bayestrain.grouped import Scale
from bayestrain.posterior import Posterior, independent
from bayestrain.prior import Gradients, RankPrior
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.experiment import tensorize
from bayestrain.train.fitting import fit
from bayestrain.train.material import Material, augmentation, load_material
from bayestrain.train.subject import make_optimizer, make_prior

NETWORKS = {"cifar10-cnn": 1.2, "cifar10-resnet110": 1.3}
"""Targets for the step with the prior, as a multiple of the dense step."""
PRIOR_SHARE = 0.05
RANKS = {"cifar10-cnn": 30, "cifar10-resnet110": 20}
"""The paper's, at which all that is recorded was measured."""

BATCH = 128
NUM_DATA = 45_000
EPOCHS = 100
ITERATIONS, PARTICLES = 5_000, 50
WARMUP = 4


class Step:
    """A network's training step on one fixed batch; on a GPU it is captured and `take` replays it."""

    def __init__(self, model: nn.Module, prior: RankPrior | None, x: Tensor, y: Tensor, kind: str) -> None:
        self.model, self.prior, self.x, self.y = model.train(), prior, x, y
        self.forming = FormTogether(model)
        self.forward = cast(model, kind, x.device.type)
        on_gpu = x.device.type == "cuda"
        rate = torch.tensor(1e-5, device=x.device) if on_gpu else 1e-5
        self.optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=on_gpu)
        self.scales: list[Scale | None] = []
        self.side = torch.cuda.Stream() if on_gpu and prior is not None else None
        self.take: Callable[[], object] = self.advance
        if on_gpu:
            self.take = self.capture()

    def advance(self) -> Tensor:
        """One step, arranged as in `bayestrain.fit`: the prior beside the network, on a GPU in a stream of its own."""
        self.optimizer.zero_grad(set_to_none=True)
        added = self._prior() if self.side is None else self._prior_beside(self.side)
        with self.forming():
            loss = F.cross_entropy(self.forward(self.x).float(), self.y)
        loss.backward()
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        if added is not None:
            added.add_()
        self.optimizer.step()
        if self.prior is not None:
            self.prior.step(move=False, scales=self.scales)
        return loss

    def _prior(self) -> Gradients | None:
        if self.prior is None:
            return None
        self.prior.steps = 0  # no alignment here: it is rare, and no work for a graph
        self.prior.move_lambdas_()
        self.scales = self.prior.scales()
        return self.prior.gradients(self.prior.weight)

    def _prior_beside(self, side: torch.cuda.Stream) -> Gradients | None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return self._prior()

    def capture(self) -> Callable[[], object]:
        """The step as a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.advance()
        return graph.replay

    def align(self) -> None:
        """The prior's step with an alignment."""
        assert self.prior is not None
        self.prior.steps = self.prior.align_every - 1
        self.prior.step()


def build(experiment: str, depth: int | None, device: str) -> tuple[nn.Module, nn.Module, RunConfig]:
    """The dense network and the tensorised one, in channels-last."""
    config = toml.named(experiment, overrides=[f"tensorize.max_rank={RANKS[experiment]}"])
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = models.resnet_cifar(depth) if depth else models.BUILDERS[config.experiment.model](num_classes=10)
        made.append(model)
    dense, ours = made
    tensorize(ours, config.tensorize)
    for model in made:
        model.to(device)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):  # not the whole model: a linear core has four dimensions as well
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return dense, ours, config


def error(model: nn.Module, x: Tensor, kind: str, device: str) -> float:
    """Relative error of the outputs, in evaluation mode, against the same network in double precision."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double().eval()(x.double())
        with precision(kind), autocast(kind, device):
            return relative_error(copy.deepcopy(model).eval()(x), exact)


def compare(experiment: str, kind: str, device: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Dense, tensorised, and tensorised with prior: the three steps in turns."""
    depth, batch = (8 if quick and "resnet" in experiment else None), (4 if quick else BATCH)
    dense, ours, config = build(experiment, depth, device)
    x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device=device)
    errors = {"dense": error(dense, x, kind, device), "ours": error(ours, x, kind, device)}
    allowed = max(TOLERANCE[kind], 3 * errors["dense"])  # rounding adds up over a hundred layers, for dense ones too
    assert errors["ours"] < allowed, (
        f"outputs are wrong by {errors['ours']:.1e}, those of dense by {errors['dense']:.1e}"
    )
    sizes = {"dense": count_parameters(dense), "ours": count_parameters(ours)}
    with_prior = copy.deepcopy(ours)
    prior = make_prior(config.prior, with_prior, NUM_DATA, NUM_DATA // BATCH)
    with precision(kind):
        steps = {
            "dense": Step(dense, None, x, y, kind),
            "ours": Step(ours, None, x, y, kind),
            "ours with prior": Step(with_prior, prior, x, y, kind),
        }
        calls = {name: step.take for name, step in steps.items()}
        raw = measure_rounds(calls, rounds=rounds, at_least=0.0 if quick else 2e-2, device=device)
        steps["ours with prior"].align()  # the first one sets libraries up
        align = interleaved({"align": steps["ours with prior"].align}, rounds=3, at_least=0.0, device=device)["align"]
    assert all(bool(p.isfinite().all()) for p in with_prior.parameters()), "the training step broke a weight"
    times, share = summarise(raw, "dense"), summarise(raw, "ours")["ours with prior"]["ratio"] - 1
    aligned = 1 + align["seconds"] / max(prior.align_every, 1) / times["ours with prior"]["seconds"]
    return {
        "title": f"{experiment}, batch {batch}, {kind}",
        "captured": device == "cuda",
        "parameters": sizes,
        "times": times,
        "align_seconds": align["seconds"],
        "align_every": prior.align_every,
        "ratio": times["ours with prior"]["ratio"],
        "ratio_with_alignment": times["ours with prior"]["ratio"] * aligned,
        "prior_share": share,
        "prior_share_with_alignment": (1 + share) * aligned - 1,
        "errors": errors,
    }


def mnist(folder: Path | None, quick: bool, overrides: Sequence[str] = ()) -> tuple[RunConfig, Material]:
    """The experiment and all 60,000 digits; if it shall be quick, the few that ship with the package."""
    source = ["data.name=mnist-mini"] if quick else [f"data.folder={folder.resolve()}"] if folder else []
    config = toml.named("mnist", overrides=[*source, "data.validation_fraction=0", *overrides])
    return config, load_material(config, with_outside=False)


def map_training(folder: Path | None, device: str, quick: bool) -> dict[str, Any]:
    """MAP by `fit`, with the settings of the experiment, for a hundred epochs in all."""
    finetune = toml.named("mnist").fit.finetune_epochs
    searched, tuned = (1, 1) if quick else (EPOCHS - finetune, finetune)
    config, material = mnist(folder, quick, [f"fit.epochs={searched}", f"fit.finetune_epochs={tuned}"])
    torch.manual_seed(0)
    model = models.mnist_mlp()
    tensorize(model, config.tensorize)
    train, test = (material.train.subset(range(1000)) if quick else material.train), material.splits.test.to(device)
    settings: dict[str, Any] = {"prior": config.prior, "augment": augmentation(config.data, material.splits)}
    started = time.perf_counter()
    found = fit(model, train, None, config.fit, device=device, **settings)
    wall = time.perf_counter() - started
    with torch.no_grad():
        right = (model.eval()(material.splits.normalize(test.images / 255)).argmax(1) == test.labels).float().mean()
    return {
        "epochs": searched + tuned, "images": len(train), "batch": config.fit.batch_size, "seconds": found.seconds,
        "wall_seconds": wall, "accuracy": float(right), "parameters": count_parameters(model),
    }  # fmt: skip


def svgd(folder: Path | None, device: str, compacting: bool, quick: bool) -> dict[str, Any]:
    """SVGD iterations as the experiment makes them, with or without cutting ranks on the way."""
    config, material = mnist(folder, quick)
    number, iterations = (3, 6) if quick else (PARTICLES, ITERATIONS)
    place = torch.device(device)
    train, change = material.train.to(place), augmentation(config.data, material.splits)
    noise = torch.Generator(place).manual_seed(0)
    epoch = len(train) // config.fit.batch_size

    def make() -> nn.Module:
        model = models.mnist_mlp()
        tensorize(model, config.tensorize)
        return model

    def adam(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return make_optimizer(config.fit, named, config.fit.lr, model=make(), capturable=device == "cuda")

    posterior = Posterior(
        [model.to(place) for model in independent(make, number)], len(train), optimizer=adam,
        prior=lambda model: make_prior(config.prior, model, len(train), epoch),
    )  # fmt: skip
    done, first = 0, 0 if quick else int(config.fit.compact_from)
    started = time.perf_counter()
    while done < iterations:
        batches = train.batches(config.fit.batch_size, shuffle=True, device=place, augment=lambda x: change(x, noise))
        for x, y in batches:
            if len(y) == config.fit.batch_size:
                posterior.step(x, y)
                done += 1
            if done == iterations:
                break
        if compacting and done // epoch >= first:
            posterior.compact_(rule="contribution")
    if device == "cuda":
        torch.cuda.synchronize()
    wall = time.perf_counter() - started
    assert all(bool(tensor.isfinite().all()) for tensor in posterior.particles.values()), "particles broke"
    return {
        "iterations": iterations, "particles": number, "batch": config.fit.batch_size, "compacting": compacting,
        "wall_seconds": wall, "ranks": {name: list(chain) for name, chain in posterior.ranks.items()},
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mnist", type=Path, help="folder of the MNIST files; left out: fetched")
    parser.add_argument("--only", choices=("steps", "mnist"), help="one half of it")
    options = parser.parse_args()
    device, rounds = options.device, 3 if options.quick else options.rounds
    torch.backends.cudnn.benchmark = True
    claims, steps = [], []
    trainings: dict[str, Any] = {}
    for kind in ("float32",) if device == "cpu" else ("tf32", "bf16"):
        for experiment, target in NETWORKS.items() if options.only != "mnist" else ():
            found = compare(experiment, kind, device, rounds, options.quick)
            steps.append(found)
            share = found["prior_share_with_alignment"]
            claims.append(claim(f"training step, {found['title']}", found["ratio_with_alignment"], target))
            claims.append(claim(f"prior's share, {found['title']}", share, PRIOR_SHARE, unit="of the step without"))
    if options.only != "steps":
        try:
            trainings = {"map": map_training(options.mnist, device, options.quick)}
            trainings["svgd"] = [svgd(options.mnist, device, cutting, options.quick) for cutting in (True, False)]
            limits = (40.0, 20.0) if device == "cuda" and not options.quick else (None, None)
            found, (cutting, plain) = trainings["map"], trainings["svgd"]
            claims.append(claim(f"MNIST, {found['epochs']} epochs of MAP", found["wall_seconds"], limits[0], unit="s"))
            for run, how in ((cutting, "ranks cut on the way"), (plain, "ranks left as they are")):
                what = f"MNIST, {run['iterations']:,} SVGD iterations of {run['particles']} particles, {how}"
                claims.append(claim(what, run["wall_seconds"], limits[1], unit="s"))
        except BayesTrainError as error:
            trainings = {"left_out": str(error)}
            print(f"MNIST is left out: {error}")
    write("steps", options, claims, {"steps": steps, "trainings": trainings})


if __name__ == "__main__":
    main()
