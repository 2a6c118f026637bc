"""What the processes that `test_distributed` starts with torchrun do: one scenario, whose result process 0 writes."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fit_kit
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bayestrain as bt
from bayestrain.errors import BayesTrainError, Interrupted
from bayestrain.nn import TensorizeConfig, factorized_weights, tensorize_
from bayestrain.posterior.likelihoods import one_tensor
from bayestrain.train import fit
from bayestrain.train.distributed import join, rank

torch.set_num_threads(1)


def classes(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (number,), generator=generator)
    points = 0.7 * torch.randn(3, 24, generator=generator)
    return (points[y] + torch.randn(number, 24, generator=generator)).double(), y


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    tensorize_(model, TensorizeConfig(max_rank=8), lambda _, name: name != "2")
    return model


SHORT: dict[str, Any] = {**fit_kit.SHORT, "finetune_epochs": 1, "batch_size": 32}
"""97 data make batches of 32, 32, 32 and 1: four processes do not divide the last one."""


def summary(result: Any) -> dict[str, Any]:
    curve = [row["train_loss"] for row in result.history[1:]]
    prior = [row["prior_loss"] for row in result.history[1:]]
    return {
        "curve": curve, "prior": prior, "ranks": [row["ranks"] for row in result.history],
        "validation": [row["validation"] for row in result.history],
        "outputs": one_tensor(result.model(classes(20)[0])).tolist(),
    }  # fmt: skip


def map_of(kind: str, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = classes(97)
    data: Any = (x, y)
    if kind == "loader":
        data = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    elif kind == "function":
        data = lambda: iter([(x[:40], y[:40]), (x[40:43], y[40:43]), (x[43:], y[43:])])  # noqa: E731
    return summary(fit(network(), data, classes(50), **{**SHORT, **changes}))


def particles(number: int, **changes: Any) -> dict[str, Any]:
    return of_particles(fit(network, classes(97), classes(50), particles=number, **{**SHORT, **changes}))


def of_particles(result: Any) -> dict[str, Any]:
    whole = result.posterior.gathered()
    return {
        **summary(result), "outputs": whole.outputs(classes(20)[0]).tolist(),
        "diagnostics": [row["diagnostics"] for row in result.history],
    }  # fmt: skip


class Passes:
    """Batches of a function; in the first attempt, the pass `stop` kills process 1 or stops all processes."""

    def __init__(self, stop: int, *, kill: bool) -> None:
        self.stop, self.kill, self.number, self.data = stop, kill, 0, classes(97)

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.number += 1
        if self.number == self.stop and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if not self.kill:
                raise KeyboardInterrupt
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        order = torch.randperm(97)
        return iter([(self.data[0][chosen], self.data[1][chosen]) for chosen in order.split(32)])


def interrupted(folder: str, kind: str, what: str) -> dict[str, Any]:
    """A run that is stopped or whose process 1 is killed in epoch 3 of 5, or that resumes."""
    data = Passes(5 if what in ("stop", "kill") else 0, kill=what == "kill")
    own: dict[str, Any] = {**SHORT, "folder": folder, "resume": what == "resume"}
    if kind == "particles":
        return of_particles(fit(network, data, classes(50), particles=5, **own))
    torch.manual_seed(0)
    return summary(fit(network(), data, classes(50), sharded=kind == "sharded", **own))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Files of different lengths, of which every process reads its own."""

    sharded = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = classes(97)
        size = dist.get_world_size() if dist.is_initialized() else 1
        files = [slice(0, 40), slice(40, 97)]
        for file in files[rank() :: size]:
            yield from zip(x[file], y[file], strict=True)


def stream() -> dict[str, Any]:
    """Two uneven shards in batches of 20: 2 and 3 batches; the curve of one process has other batches."""
    torch.manual_seed(0)
    found = summary(fit(network(), DataLoader(Stream(), 20), **SHORT, callbacks=[heard := fit_kit.Listener()]))
    started = [heard.plan.num_data, heard.plan.steps_per_epoch] if heard.calls else []  # only process 0 is called back
    return {**found, "plan": started}


def own_loop() -> dict[str, Any]:
    """The README's own loop with `fully_shard`: the prior and cuts on a model with sharded parameters."""
    torch.manual_seed(0)
    model, (x, y) = network(), classes(96)
    whole = [core for weight in factorized_weights(model).values() for core in weight.cores]
    whole += [p for p in model[4].parameters() if p not in set(whole)]  # three outputs: too small for four processes
    if dist.is_initialized():
        fully_shard(model, ignored_params=set(whole))
    prior = bt.RankPrior(model, num_data=96, warmup_steps=5, align_every=4)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    n, r = (dist.get_world_size(), rank()) if dist.is_initialized() else (1, 0)
    for step in range(12):
        loss = nn.functional.cross_entropy(model(x[r::n]), y[r::n]) + prior.loss()
        loss.backward()
        for p in whole if n > 1 else ():
            dist.all_reduce(p.grad)
            p.grad /= n
        optimizer.step()
        optimizer.zero_grad()
        prior.step()
        losses.append(loss.detach())
        if step == 7:
            bt.compact_(model, 0.3, rule="contribution", optimizer=optimizer)
    curve = torch.stack(losses)
    if n > 1:
        dist.all_reduce(curve)
    return {"curve": (curve / n).tolist(), "ranks": bt.nn.ranks(model)}


def too_large(*_: Tensor) -> Tensor:
    return torch.empty(10**14)


def wrong(what: str) -> None:
    """Processes that do not fit together."""
    own = dict(SHORT)
    if rank() == 1 and what == "config":
        own["lr"] = 0.5
    if rank() == 1 and what == "code":
        bt.__version__ = "of another day"
    if rank() == 1 and what == "memory":
        own["likelihood"] = too_large
    if what == "particles":
        fit(network, classes(97), particles=2, replicas=2, method="ensemble", **own)
    fit(network(), classes(97), **own)


SCENARIOS: dict[str, Any] = {
    "tensors": lambda: map_of("tensors"), "loader": lambda: map_of("loader"),
    "function": lambda: map_of("function", accumulate=2),
    "sharded": lambda: map_of("tensors", sharded=True, clip_norm=0.5),
    "svgd": lambda: particles(5), "mesh": lambda: particles(3, replicas=2),
    "anchored": lambda: particles(4, method="anchored"), "sgld": lambda: particles(4, method="sgld"),
    "stream": stream, "own_loop": own_loop,
}  # fmt: skip

if __name__ == "__main__":
    out, *names = sys.argv[1:]
    join(torch.device("cpu"))
    try:
        if names[0] == "wrong":
            wrong(names[1])
        found = interrupted(*names[1:]) if names[0] == "run" else {name: SCENARIOS[name]() for name in names}
    except BayesTrainError as error:
        print(f"process {rank()}: {error}", flush=True)
        sys.exit(0 if isinstance(error, Interrupted) else 2)
    if rank() == 0:
        Path(out).write_text(json.dumps(found))
