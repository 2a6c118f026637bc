# %% [markdown]
# # A new format
#
# A low-rank format is an einsum. Everything else follows from its equation: decomposition, the prior, compaction,
# layers, posteriors, saved files, reports. This page writes a Tucker format in one class; the package has one, too.
#
# ## The equation
#
# A Tucker tensor of three modes is ``xyz, ax, by, cz -> abc``: a small core ``xyz`` with a matrix at each side. The
# letters of the output are modes, the letters that are summed over are bonds; each bond has a rank. Every core has
# exactly the axes that the equation gives it, in that order.
#
# ## The class
#
# `equation` gets the sizes of the modes; there may be any number of them, even one. It may look at the sizes: here a
# small mode, such as the nine taps of a 3x3 convolution, has no matrix of its own and stays in the core.

# %%
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

import bayestrain as bt
from bayestrain.formats import Equation, Format, algebra

SMALL = 10


class Tucker(Format):
    """``xyz, ax, by, cz -> abc``: a core with a factor matrix at each large mode."""

    name: ClassVar[str] = "my tucker"

    def equation(self, modes: Sequence[int]) -> Equation:
        mode = tuple(f"m{k}" for k in range(len(modes)))
        bond = {k: f"r{k}" for k, size in enumerate(modes) if size > SMALL and len(modes) > 1}
        core = tuple(bond.get(k, label) for k, label in enumerate(mode))
        return Equation((core, *((mode[k], bond[k]) for k in bond)), mode)


# %% [markdown]
# ## It works everywhere
#
# A network without loops is decomposed and rounded by singular values. (One with loops, or with a bond that more than
# two cores share, is decomposed by alternating least squares and cut by what its indices contribute.)

# %%
torch.manual_seed(0)
tucker = Tucker()
equation = tucker.equation((16, 17, 9))
print(equation, "bonds:", equation.bonds)
planted = algebra.random_cores(equation, (16, 17, 9), (2, 3), variance=1.0, dtype=torch.float64)
tensor = algebra.dense(equation, planted)
cores = tucker.decompose(tensor + 1e-4 * torch.randn_like(tensor), tol=1e-2)
print("ranks:", equation.ranks([core.shape for core in cores]))
assert equation.ranks([core.shape for core in cores]) == (2, 3)

# %% [markdown]
# Layers, the prior and compaction take the format as it is. A convolution runs as two thin ones where that is cheaper:
# the bonds between its input and output channels are read off the equation.

# %%
model = nn.Sequential(nn.Conv2d(12, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 12))
print(bt.tensorize_(model, bt.TensorizeConfig(max_rank=6, format=tucker)))
prior = bt.RankPrior(model, num_data=256, align_every=10)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x, y = torch.randn(256, 12, 8, 8), torch.randint(12, (256,))
for _ in range(30):
    loss = nn.functional.cross_entropy(model(x), y) + prior.loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    prior.step()
print(bt.compact_(model, tol=0.2))
print(bt.summary(model))

# %% [markdown]
# ## Make it a part of the package
#
# 1. Put the class into a file of its own in `src/bayestrain/formats/`.
# 2. Name it in `FORMATS` in `src/bayestrain/formats/__init__.py`. From then on ``format="my tucker"`` works by name, in
#    saved files too.
# 3. Run ``.venv/bin/pytest tests/formats tests/nn tests/prior tests/compact tests/io``. The kits are parametrised over
#    `FORMATS`: they check decomposition, every layer and layout against its dense twin, the prior against finite
#    differences, compaction with an optimiser's state, and files.
#
# ## When the generic way is not enough
#
# Override a method of `Format` only where the format can do better. Its docstring says what it must return.
#
# - `align(equation, cores)`: other cores of the same tensor and the same shapes, whose rank indices are as independent
#   as can be. The prior sees single indices, so this decides which ranks it finds. `RankPrior.step` calls it every
#   `align_every` steps, then solves lambda again. The generic way turns bonds between two cores to singular directions
#   and balances bonds that more cores share. If two indices of a bond say the same, merge them: leave their sum in one
#   and set the other to zero in every core; the next cut removes it. `formats.align` has `balance` and
#   `change_gauge`.
# - `approximate(equation, tensor, tol, caps)`: what `decompose` does for a finite tensor of moderate scale, perhaps all
#   zeros. The generic way suits trees; for other networks it is a local search from several starts, and a direct one is
#   faster. It may start from ``super().approximate(..)``.
# - `round(equation, cores, tol, max_rank)` and `rounds(equation)`: the smallest ranks for a tolerance. Generic for
#   trees; without it ranks are cut by contribution and the cores are fitted again (`algebra.refit`).
# - `spectra(equation, cores)`: the values by which `round` cuts. `max_ranks(modes, max_rank)`: the largest useful rank
#   of each bond. `shown_ranks(ranks)`: how people write them.
# - `splits`: whether layers split their sizes into several modes by default, as trains and rings do. Others leave each
#   axis whole.
