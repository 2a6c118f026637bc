# %% [markdown]
# # A posterior
#
# One network says what it predicts, a posterior also says how sure it is. Its *particles* are networks of one shape
# that train in one batched computation, share one set of ranks, and predict together.

# %%
import torch
from torch import nn

import bayestrain as bt
from bayestrain import data
from bayestrain.posterior import independent

torch.set_num_threads(1)
digits = data.load("mnist-mini")
train, held_out = digits.train.split(0.1, seed=0)


def network() -> nn.Sequential:
    """A small factorised perceptron; `independent` calls this once per particle, with other random numbers."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    bt.tensorize_(net, bt.TensorizeConfig(max_rank=8))
    return net


# %%
posterior = bt.Posterior(
    independent(network, 5), num_data=len(train), likelihood="classification", method="svgd",
    optimizer=lambda named: torch.optim.Adam(named, 5e-3),
)  # fmt: skip
order = torch.Generator().manual_seed(0)
for epoch in range(4):
    for x, y in train.batches(128, shuffle=True, generator=order):
        seen = posterior.step(x, y)
    print(f"epoch {epoch + 1}: log likelihood {seen.log_likelihood.mean().item():.3f}")

# %% [markdown]
# ## One set of ranks
#
# The error of a cut is the root mean square over particles. Every particle is cut by its own singular directions. After
# four epochs the prior has hardly begun to prune, so this cut has a large tolerance.

# %%
print(posterior.compact_(tol=0.2))

# %% [markdown]
# ## Predictions
#
# `calibrate_` finds one temperature for the mean of all particles, on held-out data. *Total* uncertainty is the entropy
# of the mean prediction, *aleatoric* the part that all particles agree on, *epistemic* the rest: what more data could
# resolve.

# %%
x, y = next(held_out.batches(len(held_out), shuffle=False))
print(f"temperature {posterior.calibrate_(x, y):.2f}")
x, y = next(digits.test.batches(len(digits.test), shuffle=False))
prediction = posterior.predict(x)
metrics = prediction.metrics(y)
print({name: round(value, 3) for name, value in metrics.items()})
assert metrics["accuracy"] > 0.85

# %%
noise = torch.rand(200, *x.shape[1:])  # no digits at all
known, unknown = prediction.epistemic.mean(), posterior.predict(noise).epistemic.mean()
print(f"epistemic uncertainty on digits {known.item():.3f}, on noise {unknown.item():.3f} nats")
assert unknown > known
