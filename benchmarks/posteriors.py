"""How wide and how right posteriors are, method by method, where the exact answer is known or can be sampled.

    python benchmarks/posteriors.py              # every part, in pieces that are skipped when their file has them
    python benchmarks/posteriors.py linear       # one part: linear, gaussian, network, laplace
    python benchmarks/posteriors.py --page       # only write the page of results again

*linear*: Bayesian linear regression in 1 to 60 dimensions; *gaussian*: the same with correlated inputs, so that the
posterior is a Gaussian with standard deviations about a factor of 3 apart; *network*: a perceptron on 1,000 images of
the embedded MNIST digits at 14 x 14, against Hamiltonian Monte Carlo; *laplace*: a trained network there. Writes a file
per part, ``results/benchmarks/posteriors-PART.json``, and ``results/benchmarks/POSTERIORS.md``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import bayestrain as bt
from bayestrain.posterior import ClassPrediction, Posterior, Regression, auroc, laplace
from bayestrain.prior import NormalPrior
from bayestrain.train.environment import describe_environment

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks"
PAGE = RESULTS / "POSTERIORS.md"

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "anchored": ("anchored", {}),
    "svgd": ("svgd", {}),
    "ensemble": ("ensemble", {}),
    "ensemble without prior": ("ensemble", {}),
    "sgld": ("sgld", {}),
    "sgld, memory 0.99": ("sgld", {"memory": 0.99}),
    "hmc": ("hmc", {"warmup": 75}),
}
STEPS_OF_ALL, STEPS = 500, {"hmc": 150}

# --- linear models ----------------------------------------------------------------------------------------------------

DIMENSIONS, PARTICLES, NOISE = (1, 5, 20, 60), 50, 0.5
SEEDS = {"anchored": 20}
"""Of the other methods 3."""


def kept_variance(method: str, dimensions: int, seed: int, spread: float) -> float:
    """Epistemic variance of linear regression, as a share of the exact one; input scales differ by up to `spread`."""
    kind, options = METHODS[method]
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    number = max(4 * dimensions, 40)
    scales = torch.logspace(0, math.log10(spread), dimensions, dtype=torch.float64)
    turn = torch.linalg.qr(draw(dimensions, dimensions)).Q
    x, new = (draw(n, dimensions) * scales @ turn for n in (number, 200))
    y = x @ draw(dimensions, 1) + NOISE * draw(number, 1)
    covariance = torch.linalg.inv(x.mT @ x / NOISE**2 + torch.eye(dimensions))
    models = [nn.Linear(dimensions, 1, bias=False).double() for _ in range(PARTICLES)]
    for model in models:
        nn.init.zeros_(model.weight).data.add_(draw(1, dimensions))  # drawn from the prior
    steps = STEPS.get(method, STEPS_OF_ALL)
    if kind == "sgld":
        largest = float(torch.linalg.matrix_norm(x, 2)) ** 2 / NOISE**2  # curvature of the log density
        lr = 0.1 / largest**0.5 if options else 0.1 * number / largest  # a tenth of the largest stable step
        options, steps = {**options, "lr": lr, "seed": seed}, 3 * STEPS_OF_ALL
    elif kind == "hmc":
        options = {**options, "seed": seed}
    else:
        options = {**options, "optimizer": lambda named: torch.optim.Adam(named, lr=0.1)}
    posterior = Posterior(
        models, number, likelihood=Regression(NOISE), method=kind, **options,
        prior=lambda net: NormalPrior(net, number, variance=1.0),
    )  # fmt: skip
    group = posterior.method.optimizer.param_groups[0]
    start = group["lr"]
    for step in range(steps):
        if kind != "hmc":
            group["lr"] = start * 0.5 * (1 + math.cos(math.pi * step / steps)) if kind != "sgld" else start
        posterior.step(x, y)
    found = posterior.predict(new).epistemic.squeeze(1) * PARTICLES / (PARTICLES - 1)
    return float(found.mean() / ((new @ covariance) * new).sum(1).mean())


def linear(part: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Seed by seed; in one dimension there are no scales to differ."""
    spread, dimensions = (1.0, DIMENSIONS) if part == "linear" else (3.0, DIMENSIONS[1:])
    for method in (name for name in METHODS if name != "ensemble without prior"):
        for seed in range(SEEDS.get(method, 3)):
            for d in dimensions:
                yield f"{part}/{method}/{d}/{seed}", functools.partial(kept_variance, method, d, seed, spread)


# --- a network against Hamiltonian Monte Carlo ------------------------------------------------------------------------

WIDTH, MEMBERS, CHAINS, EPOCHS, BATCH, LR = 20, 50, 8, 150, 100, 0.02
HMC_STEPS, HMC_BURN, HMC_EVERY, LEAPFROGS = 300, 120, 5, 30
NETWORK = ("anchored", "svgd", "ensemble", "ensemble without prior")


class Scaled(nn.Linear):
    """A linear layer whose prior of Normal(0, 1) means weights Normal(0, 2 / inputs)."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * (2 / self.in_features) ** 0.5, self.bias)


@functools.cache
def digits() -> dict[str, Tensor]:
    """1,000 images for training and testing each; "turned" is the test set rotated by a quarter."""
    from bayestrain.app.data import load

    splits, found = load("mnist-mini"), {}
    for name, images in (("train", splits.train), ("test", splits.test)):
        x, y = next(images.batches(1000, shuffle=False))
        x = (avg_pool2d(x, 2) - 0.1321) / 0.3096  # the moments of the training pixels
        found |= {f"{name} x": x.flatten(1), f"{name} y": y}
        if name == "test":
            found["turned x"] = x.rot90(1, (2, 3)).flatten(1)
    return found


def particles(method: str, number: int, start: int, **options: Any) -> Posterior:
    """Networks that start at draws from their prior."""
    kind, own = METHODS[method]
    generator, models = torch.Generator().manual_seed(start), []
    for _ in range(number):
        net = nn.Sequential(Scaled(196, WIDTH), nn.ReLU(), Scaled(WIDTH, 10))
        for p in net.parameters():
            p.data.normal_(generator=generator)
        models.append(net)
    weight = 0.0 if method == "ensemble without prior" else 1.0
    prior = functools.partial(NormalPrior, num_data=1000, variance=1.0, weight=weight)
    return Posterior(models, 1000, method=kind, prior=prior, **{**own, **options})


def reference(seed: int) -> dict[str, Any]:
    """The mean prediction of Hamiltonian Monte Carlo chains, and how far half of them are from the others."""
    data = digits()
    posterior = particles("hmc", CHAINS, seed, leapfrogs=LEAPFROGS, warmup=100, lr=3e-3, seed=seed)
    kept: dict[str, list[Tensor]] = {"test": [], "turned": []}
    for step in range(HMC_STEPS):
        posterior.step(data["train x"], data["train y"])
        if step >= HMC_BURN and step % HMC_EVERY == 0:
            for name, predictions in kept.items():
                predictions.append(posterior.predict(data[f"{name} x"]).particle_probabilities)
    stacked = {name: torch.stack(predictions).mean(0) for name, predictions in kept.items()}  # per chain
    halves = [stacked["test"][::2].mean(0), stacked["test"][1::2].mean(0)]
    group = posterior.method.optimizer.param_groups[0]
    return {
        "probabilities": {name: each.mean(0).tolist() for name, each in stacked.items()},
        "halves": compare(*halves), "lr": group["lr"], "acceptance": group["acceptance"],
        "accuracy": float((stacked["test"].mean(0).argmax(1) == data["test y"]).double().mean()),
        "log_likelihood": float(stacked["test"].mean(0).gather(1, data["test y"][:, None]).log().mean()),
    }  # fmt: skip


def compare(one: Tensor, other: Tensor) -> dict[str, float]:
    """Agreement of the most probable class, and total variation."""
    agreement = (one.argmax(1) == other.argmax(1)).double().mean()
    return {"agreement": float(agreement), "tv": float(0.5 * (one - other).abs().sum(1).mean())}


def network(method: str, seed: int, hmc: dict[str, Any]) -> dict[str, Any]:
    """What particles predict, next to the reference."""
    data = digits()
    posterior = particles(method, MEMBERS, 100 + seed, optimizer=lambda named: torch.optim.Adam(named, lr=LR))
    generator, step = torch.Generator().manual_seed(seed), 0
    group, steps = posterior.method.optimizer.param_groups[0], EPOCHS * 1000 // BATCH
    for _ in range(EPOCHS):
        for chosen in torch.randperm(1000, generator=generator).split(BATCH):
            group["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / steps))
            posterior.step(data["train x"][chosen], data["train y"][chosen])
            step += 1
    found, turned = posterior.predict(data["test x"]), posterior.predict(data["turned x"])
    of_hmc = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in hmc["probabilities"].items()}
    return {
        **found.metrics(data["test y"]), **compare(found.mean, of_hmc["test"]),
        "turned": compare(turned.mean, of_hmc["turned"]), "auroc": auroc(found.epistemic, turned.epistemic),
        "width": posterior.width(data["train x"], data["train y"]) if method != "ensemble without prior" else None,
    }  # fmt: skip


def networks(record: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The pieces of the last part; all but the first need the first."""
    yield "network/hmc", lambda: reference(0)
    for seed in range(2):
        for method in NETWORK:
            yield f"network/{method}/{seed}", lambda m=method, s=seed: network(m, s, record["network/hmc"])  # type: ignore[misc]


# --- a network that is trained already --------------------------------------------------------------------------------


def trained_network(seed: int, factorised: bool) -> nn.Module:
    """One perceptron, trained without a prior as most are, with weight decay."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = bt.TensorLinear(196, WIDTH, max_rank=4) if factorised else nn.Linear(196, WIDTH)
        net, data = nn.Sequential(first, nn.ReLU(), nn.Linear(WIDTH, 10)), digits()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.01)
        for _ in range(60):
            for chosen in torch.randperm(1000).split(BATCH):
                nn.functional.cross_entropy(net(data["train x"][chosen]), data["train y"][chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
    return net.eval()


def after_training(seed: int) -> dict[str, Any]:
    """A compact network alone, and with a Gaussian around it that has seen no other data."""
    data, net = digits(), trained_network(seed, factorised=True)
    batches = list(zip(data["train x"].split(100), data["train y"].split(100), strict=True))
    whole, last = laplace(net, batches, include="*"), laplace(net, batches)
    test, turned = data["test x"], data["turned x"]
    alone = ClassPrediction(net(test).double().softmax(1)[None]), ClassPrediction(net(turned).double().softmax(1)[None])
    both = {
        "network": alone,
        "laplace": (whole.predict(test), whole.predict(turned)),
        "laplace, last layer": (last.predict(test), last.predict(turned)),
        "laplace, sampled weights": (whole.sample(50).predict(test), whole.sample(50).predict(turned)),
    }
    found = {
        name: {**own.metrics(data["test y"]), "auroc": auroc(own.total, other.total)}
        for name, (own, other) in both.items()
    }
    return {**found, "parameters": len(whole.values), "precision": whole.precision, "effective": whole.effective}


def beside_laplace_torch() -> dict[str, Any]:
    """The largest relative differences to laplace-torch on the last layer of one dense network."""
    from laplace import Laplace as Theirs
    from torch.utils.data import DataLoader, TensorDataset

    data, net = digits(), trained_network(0, factorised=False)
    net.requires_grad_(False)[2].requires_grad_(True)
    theirs = Theirs(net, "classification", subset_of_weights="all", hessian_structure="full", prior_precision=1.0)
    theirs.fit(DataLoader(TensorDataset(data["train x"], data["train y"]), batch_size=100))
    batches = list(zip(data["train x"].split(100), data["train y"].split(100), strict=True))
    ours = laplace(net, batches, precision=1.0)
    hidden = torch.cat([net[:2](data["test x"]), torch.ones(1000, 1)], 1).double()  # the Jacobian's factor
    covariance = ours.vectors @ (1 / (ours.values + 1)).diag() @ ours.vectors.mT
    eye = torch.eye(10, dtype=torch.float64)
    jacobian = torch.cat([torch.einsum("cd,bi->bcdi", eye, hidden[:, :-1]).flatten(2), eye.expand(1000, 10, 10)], 2)
    own = jacobian @ covariance @ jacobian.mT
    other = theirs._glm_predictive_distribution(data["test x"])[1].double()
    evidence = float(theirs.log_marginal_likelihood())
    return {
        "covariance": float((own - other).abs().max() / other.abs().max()),
        "evidence": abs(ours.log_evidence / evidence - 1), "laplace-torch": version("laplace-torch"),
    }  # fmt: skip


def afterwards() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The pieces of this part; laplace-torch takes part where it is installed."""
    for seed in range(5):
        yield f"laplace/{seed}", functools.partial(after_training, seed)
    if find_spec("laplace") is not None:
        yield "laplace/laplace-torch", beside_laplace_torch


# --- files ------------------------------------------------------------------------------------------------------------


def run(parts: list[str]) -> None:
    """Compute what the file lacks; written after every piece, it can be interrupted at any time."""
    torch.set_num_threads(1)
    for part in parts:
        file = RESULTS / f"posteriors-{part}.json"
        saved = json.loads(file.read_text()) if file.exists() else {"pieces": {}}
        record = saved["pieces"]
        pieces = networks(record) if part == "network" else afterwards() if part == "laplace" else linear(part)
        for name, compute in pieces:
            if name in record:
                continue
            begun = time.perf_counter()
            record[name] = compute()
            print(
                f"{name}: {str(record[name])[:150] if 'hmc' not in name else ''} {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
            saved["environment"] = describe_environment(torch.device("cpu"))
            file.write_text(json.dumps(saved, indent=1) + "\n")


INTRODUCTION = f"""# Posteriors next to the exact answer

`make bench-posterior` writes this page.

## Linear models

Epistemic variance of {PARTICLES} particles that start at draws from the prior, as a share of the exact one: mean over
seeds, with the standard deviation of a single seed and the number of seeds. *gaussian* has inputs whose scales differ
by a factor of 3. All take {STEPS_OF_ALL} steps, but SGLD three times as many, and HMC {STEPS["hmc"]}, of up to 20
leapfrogs.
"""

OF_NETWORK = """
## A network

A perceptron 196-{width}-10 on 1,000 images of MNIST at 14 x 14; {members} particles, starts and prior Normal(0, 2 /
inputs). The reference is the mean of {chains} Hamiltonian Monte Carlo chains: accuracy {accuracy:.3f}, log likelihood
{log_likelihood:.3f}; half of the chains agrees with the other half on {agreement:.3f} of the test images, at a total
variation of {tv:.3f}. *turned*: test images rotated by 90 degrees; AUROC of epistemic uncertainty between the two;
*width*: `Posterior.width`, 1 for exact draws.
"""

OF_LAPLACE = """
## A trained network

The same perceptron with a factorised first layer ({parameters} parameters), trained with AdamW and no posterior in
mind; means over {seeds} seeds. AUROC is that of total uncertainty between test images and turned ones.
"""

BESIDE = """
On the last layer of a dense network, the covariance of the outputs differs from that of laplace-torch {version} by at
most {covariance:.1g} of the largest, and the log evidence by {evidence:.1g} of its size.
"""

COLUMNS = {
    "agreement": ("agreement",), "TV": ("tv",), "turned: agreement": ("turned", "agreement"), "TV ": ("turned", "tv"),
    "log likelihood": ("log_likelihood",), "accuracy": ("accuracy",), "AUROC": ("auroc",), "width": ("width",),
}  # fmt: skip


def read(part: str) -> dict[str, Any]:
    """The pieces of a part."""
    file = RESULTS / f"posteriors-{part}.json"
    return json.loads(file.read_text())["pieces"] if file.exists() else {}  # type: ignore[no-any-return]


def written() -> str:
    """The page beside the files."""
    page = [INTRODUCTION, f"| method | {' | '.join(f'{d} dimensions' for d in DIMENSIONS)} |", "| --- |" + " --: |" * 4]
    for part in ("linear", "gaussian"):
        pieces = read(part)
        for method in METHODS:
            cells = [f"{part}, {method}"]
            for d in DIMENSIONS:
                found = [value for name, value in pieces.items() if name.startswith(f"{part}/{method}/{d}/")]
                spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
                cells.append(f"{statistics.mean(found):.2f}{spread} ({len(found)})" if found else "")
            if any(cells[1:]):
                page.append(f"| {' | '.join(cells)} |")
    if pieces := read("network"):
        hmc = pieces["network/hmc"]
        page.append(OF_NETWORK.format(width=WIDTH, members=MEMBERS, chains=CHAINS, **hmc["halves"], **hmc))
        page += [f"| method | seeds | {' | '.join(COLUMNS)} |", "| --- |" + " --: |" * (1 + len(COLUMNS))]
        for method in NETWORK:
            if rows := [row for name, row in pieces.items() if name.startswith(f"network/{method}/")]:
                values = [[functools.reduce(dict.__getitem__, path, row) for row in rows] for path in COLUMNS.values()]
                cells = ["" if None in own else f"{statistics.mean(own):.3f}" for own in values]
                page.append(f"| {method} | {len(rows)} | {' | '.join(cells)} |")
    if pieces := read("laplace"):
        rows = [row for name, row in pieces.items() if name != "laplace/laplace-torch"]
        page.append(OF_LAPLACE.format(seeds=len(rows), parameters=rows[0]["parameters"]))
        kinds = ("accuracy", "log_likelihood", "ece", "brier", "auroc")
        page += [f"| prediction | {' | '.join(kinds)} |", "| --- |" + " --: |" * len(kinds)]
        for method in ("network", "laplace", "laplace, last layer", "laplace, sampled weights"):
            cells = [f"{statistics.mean(row[method][kind] for row in rows):.3f}" for kind in kinds]
            page.append(f"| {method} | {' | '.join(cells)} |")
        if same := pieces.get("laplace/laplace-torch"):
            page.append(BESIDE.format(**same, version=same["laplace-torch"]))
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["linear", "gaussian", "network", "laplace"])
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not args.page:
        run(args.parts)
    PAGE.write_text(written())
