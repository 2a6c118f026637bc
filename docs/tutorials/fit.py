# %% [markdown]
# # Training with `fit`
#
# `fit` runs the loop of [Your own loop](own_loop.md) for any module, any batches and any likelihood, with validation,
# checkpoints, exact resume and a size budget. Here: a regression on a small table of numbers.

# %%
import tempfile

import torch
from torch import nn

import bayestrain as bt

torch.manual_seed(0)
x = torch.randn(1200, 8)
y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(1200, 1)
train, validation, test = (x[:900], y[:900]), (x[900:1000], y[900:1000]), (x[1000:], y[1000:])

model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
bt.tensorize_(model, bt.TensorizeConfig(max_rank=8), lambda _, name: name == "2")

# %% [markdown]
# `data` and `validation` are tensors here; a `DataLoader`, a list of batches or `bayestrain.data` images do as well.
# `likelihood="regression"` learns the noise of the targets along with the network.

# %%
folder = tempfile.mkdtemp()
result = bt.fit(
    model, train, validation, likelihood="regression", epochs=12, finetune_epochs=3, batch_size=32, lr=1e-2,
    folder=folder + "/run", seed=0,
)  # fmt: skip
print({name: round(value, 3) for name, value in result.validation.items()})
print(bt.summary(model))
assert result.validation["rmse"] < 0.5

# %% [markdown]
# A run that was stopped continues from its last checkpoint with `resume=True` and the same settings. On a CPU it ends
# in the same bits as if it had never stopped.
#
# ## A callback
#
# Callbacks have any of three methods: `on_epoch(record)`, `on_cut(report)` and `on_end(result)`.


# %%
class Sizes:
    """Collects the number of parameters after each cut."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_cut(self, report) -> None:
        self.seen.append(report.parameters)


sizes = Sizes()
again = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
bt.tensorize_(again, bt.TensorizeConfig(max_rank=8), lambda _, name: name == "2")
bt.fit(
    again, train, likelihood="regression", epochs=8, finetune_epochs=2, compact_from=2, batch_size=32, lr=1e-2,
    callbacks=[sizes], progress=False,
)  # fmt: skip
print(sizes.seen)
assert sizes.seen == sorted(sizes.seen, reverse=True)
