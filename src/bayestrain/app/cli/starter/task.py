"""A small regression to start from: `table.csv` has one row per example, inputs first and the target last.

Replace the table with your own, or change `loaders` and `build` to any data and any network. Then train it with
`bayestrain train --config run.toml --out first`, or from Python with `python task.py`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

TABLE = Path(__file__).with_name("table.csv")


def loaders() -> list[tuple[Tensor, Tensor]]:
    """Training, validation and test data. DataLoaders, or lists of (inputs, targets) batches, work as well."""
    rows = [line.split(",") for line in TABLE.read_text().splitlines()[1:]]
    table = torch.tensor([[float(cell) for cell in row] for row in rows])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    tenth = len(table) // 10
    parts = table.split([len(table) - 3 * tenth, tenth, 2 * tenth])
    return [(part[:, :-1], part[:, -1:]) for part in parts]


class Scaled(nn.Module):
    """A network between standardised inputs and targets, so that raw rows of the table go in and come out."""

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.network = network
        self.x_scale = nn.Buffer(torch.stack([x.mean(0), x.std(0)]))
        self.y_scale = nn.Buffer(torch.stack([y.mean(0), y.std(0)]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network((x - self.x_scale[0]) / self.x_scale[1])
        return y * self.y_scale[1] + self.y_scale[0]


def build() -> nn.Module:
    """The network as you would write it without BayesTrain, which factorises its linear and convolution layers."""
    x, y = loaders()[0]
    layers = [nn.Linear(x.shape[1], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, y.shape[1])]
    return Scaled(nn.Sequential(*layers), x, y)


if __name__ == "__main__":
    import bayestrain as bt

    train, validation, test = loaders()
    model = build()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=16))
    result = bt.fit(model, train, validation, likelihood="regression", epochs=40, batch_size=32, lr=5e-3)
    print(bt.summary(model))
    print("validation:", result.validation)
