"""What the processes that `test_distributed` starts with torchrun do: one scenario, whose result process 0 writes."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.nn import TensorizeConfig, tensorize_
from bayestrain.posterior.likelihoods import one_tensor
from bayestrain.train import PriorConfig, fit

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


SHORT: dict[str, Any] = {
    "epochs": 4, "finetune_epochs": 1, "batch_size": 32, "lr": 1e-2, "compact_from": 1, "compact_every": 1,
    "compact_tol": 0.3, "round_tol": 0.3, "prior": PriorConfig(warmup_epochs=1, align_every=4), "progress": False,
}  # fmt: skip
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
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32, shuffle=True)
    elif kind == "function":
        data = lambda: iter([(x[:40], y[:40]), (x[40:43], y[40:43]), (x[43:], y[43:])])  # noqa: E731
    return summary(fit(network(), data, classes(50), **{**SHORT, **changes}))


def particles(number: int, **changes: Any) -> dict[str, Any]:
    result = fit(network, classes(97), classes(50), particles=number, **{**SHORT, **changes})
    assert result.posterior is not None
    whole = result.posterior.gathered()
    return {
        **summary(result), "outputs": whole.outputs(classes(20)[0]).tolist(),
        "diagnostics": [row["diagnostics"] for row in result.history],
    }  # fmt: skip


SCENARIOS = {
    "tensors": lambda: map_of("tensors"),
    "loader": lambda: map_of("loader"),
    "function": lambda: map_of("function", accumulate=2),
    "sharded": lambda: map_of("tensors", sharded=True, clip_norm=0.5),
    "svgd": lambda: particles(5),
    "mesh": lambda: particles(3, replicas=2),
    "sgld": lambda: particles(4, method="sgld"),
}

if __name__ == "__main__":
    name, out = sys.argv[1:]
    found = {each: SCENARIOS[each]() for each in name.split(",")}
    if bt.train.distributed.rank() == 0:
        Path(out).write_text(json.dumps(found))
