# %% [markdown]
# # Your own loop
#
# The same small network trained twice: dense, and with factorised layers that find their own ranks. It is ordinary
# PyTorch, apart from the lines marked "BayesTrain". `make demo` runs this page, in about half a minute on one core.

# %%
import time

import torch
import torch.nn.functional as F
from torch import nn

import bayestrain as bt
from bayestrain import data

torch.set_num_threads(1)  # products this small gain nothing from a second thread
digits = data.load("mnist-mini")  # 10,000 training and 2,000 test images, embedded in the package
train, held_out = digits.train.split(0.1, seed=0)
EPOCHS, BATCH = 10, 64
STEPS = -(-len(train) // BATCH)
print(f"{len(train)} images to train on, {len(held_out)} held out, {len(digits.test)} to test on")


# %% [markdown]
# ## The network and the loop
#
# `RankPrior` has two methods. `loss()` is added to your loss, which must be a mean over data. `step()` comes after the
# optimiser's step and moves `lambda`, which says how large each rank index is expected to be.


# %%
def network() -> nn.Sequential:
    """The paper's perceptron, 784-625-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))


def fit(model: nn.Module, lr: float, prior: bt.RankPrior | None = None) -> None:
    """Adam with a cosine schedule, the same for both networks."""
    order = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS)
    model.train()
    started = time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        for x, y in train.batches(BATCH, shuffle=True, generator=order):
            loss = likelihood = F.cross_entropy(model(x), y)
            if prior is not None:
                loss = likelihood + prior.loss()  # BayesTrain
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if prior is not None:
                prior.step()  # BayesTrain
        if prior is not None:
            bt.compact_(model, rule="contribution", optimizer=optimizer)  # BayesTrain: the next epoch is cheaper
        if epoch % 5 == 0:
            left = (time.perf_counter() - started) / epoch * (EPOCHS - epoch)
            size = f"{bt.count_parameters(model):,} parameters"
            print(f"epoch {epoch}: cross entropy {likelihood.item():.3f}, {size}, about {left:.0f} s left")


@torch.no_grad()
def accuracy(model: nn.Module, images: data.Images) -> float:
    """The fraction of right answers."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in images.batches(1000, shuffle=False))
    return right / len(images)


# %%
torch.manual_seed(0)
dense = network()
fit(dense, lr=1e-3)

# %%
torch.manual_seed(0)
model = network()
print(bt.tensorize_(model, bt.TensorizeConfig(max_rank=20)))  # BayesTrain: factorised layers in place
start = bt.ranks(model)
prior = bt.RankPrior(model, num_data=len(train), weight=0.5, warmup_steps=3 * STEPS)  # BayesTrain
fit(model, lr=1e-2, prior=prior)

# %% [markdown]
# ## The last cut
#
# During training, `rule="contribution"` drops single rank indices and slices the optimiser's state along with them. At
# the end, `compact_` without a rule finds the smallest ranks for a relative error of 1 % of each weight.

# %%
print(bt.compact_(model))  # BayesTrain
prior.remove_()  # lambda is no part of what you deploy
print(f"ranks before training {start}, now {bt.ranks(model)}")

# %%
ratio = bt.count_parameters(dense) / bt.count_parameters(model)
small, large = accuracy(model, digits.test), accuracy(dense, digits.test)
print(f"held out: dense {accuracy(dense, held_out):.3f}, factorised {accuracy(model, held_out):.3f}")
print(f"test:     dense {large:.3f}, factorised {small:.3f}, {ratio:.0f} times smaller")
assert ratio > 80
assert small > large - 0.03

# %% [markdown]
# The learning rate of the factorised network is ten times the dense one's: cores like larger steps. See
# [How to choose](../how-to-choose.md) for learning rates, prior weights and ranks.
