# %% [markdown]
# # A new format
#
# A low-rank format is an einsum and a way to decompose a tensor. Everything else follows from the equation: the prior,
# compaction, layers, posteriors, saved files. This page adds the Tucker format in one class.
#
# ## The equation
#
# A Tucker tensor of three modes is ``xyz, ax, by, cz -> abc``: a small core ``xyz`` with a matrix at each side. The
# letters of the output are modes, the letters that are summed over are bonds; each bond has a rank.
#
# ## The class
#
# `equation` gets the sizes of the modes; there may be any number of them, even one. `decompose` gets a tensor, a
# relative error, and ranks that it must not exceed (one number, or one per bond). It keeps the dtype, computes half
# precision in single, and refuses NaN: `checked_finite` does both.

# %%
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.formats import Equation, Format, algebra
from bayestrain.formats.format import bond_budget, checked_finite, kept


class Tucker(Format):
    """``xyz, ax, by, cz -> abc``: a core with a factor matrix at each mode."""

    name: ClassVar[str] = "tucker"

    def equation(self, modes: Sequence[int]) -> Equation:
        mode = [f"m{k}" for k in range(len(modes))]
        if len(modes) == 1:
            return Equation((tuple(mode),), tuple(mode))  # a vector has no bonds
        bond = [f"r{k}" for k in range(len(modes))]
        return Equation((tuple(bond), *zip(mode, bond, strict=True)), tuple(mode))

    def decompose(self, tensor: Tensor, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
        """The higher-order SVD: each factor holds the leading left singular vectors of its unfolding."""
        exact, count = checked_finite(tensor), tensor.ndim
        caps = self.max_ranks(tensor.shape, max_rank)
        scale = exact.abs().amax().clamp_min(torch.finfo(exact.dtype).tiny)  # squares of the entries stay in range
        core, factors = exact / scale, []
        budget = bond_budget(torch.linalg.vector_norm(core), tol, len(caps))
        for k, cap in enumerate(caps):
            u, s, _ = torch.linalg.svd(core.movedim(k, 0).flatten(1), full_matrices=False)
            factors.append(u[:, : kept(s, budget, cap)])
            core = torch.tensordot(core, factors[-1], ([k], [0])).movedim(-1, k)
        cores = [core * scale, *factors] if count > 1 else [exact]
        return [own.to(tensor.dtype).contiguous() for own in cores]


# %% [markdown]
# The budget of the error is shared by the bonds, and `kept` turns singular values, a budget and a cap into a rank.
#
# ## It works everywhere
#
# The algebra of equations multiplies the cores, and rounding works because this network is a tree.

# %%
torch.manual_seed(0)
tucker = Tucker()
equation = tucker.equation((6, 7, 8))
print(equation, "bonds:", equation.bonds)
planted = algebra.random_cores(equation, (6, 7, 8), (2, 3, 2), variance=1.0, dtype=torch.float64)
tensor = algebra.dense(equation, planted)
noisy = tensor + 1e-4 * torch.randn_like(tensor)
cores = tucker.round(equation, tucker.decompose(noisy), tol=1e-2)
print("ranks:", equation.ranks([core.shape for core in cores]))
assert equation.ranks([core.shape for core in cores]) == (2, 3, 2)

# %% [markdown]
# Layers, the prior and compaction take the format as it is. A convolution runs as two thin ones where that is cheaper:
# the bonds between its input and output channels are read off the equation.

# %%
model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
print(bt.tensorize_(model, bt.TensorizeConfig(max_rank=6, format=tucker)))
prior = bt.RankPrior(model, num_data=256)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x, y = torch.randn(256, 8, 8, 8), torch.randint(10, (256,))
for _ in range(30):
    loss = nn.functional.cross_entropy(model(x), y) + prior.loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    prior.step()
print(bt.compact_(model, tol=0.2))

# %% [markdown]
# ## Make it a part of the package
#
# 1. Put the class into a file of its own in `src/bayestrain/formats/`.
# 2. Name it in `FORMATS` in `src/bayestrain/formats/__init__.py`. From then on ``format="tucker"`` works by name, in
#    saved files too.
# 3. Run ``.venv/bin/pytest tests/formats tests/nn tests/prior tests/compact``. The kits are parametrised over
#    `FORMATS`: they check decomposition, every layer and layout against its dense twin, the prior against finite
#    differences, compaction with an optimiser's state, and files.
#
# ## When the generic way is not enough
#
# Override a method of `Format` only where the format can do better:
#
# - `align(equation, cores)`: another gauge of the same tensor in which rank indices are as independent as they can be.
#   The prior sees single indices, so this decides which ranks it finds. The generic way turns bonds between two cores
#   to singular directions, and balances bonds that more cores share.
# - `round(equation, cores, tol, max_rank)` and `rounds(equation)`: the smallest ranks for a tolerance. Generic for
#   trees; without it ranks are cut by contribution and the cores are fitted again.
# - `spectra(equation, cores)`: what a budget is spent by.
# - `max_ranks(modes, max_rank)`: the largest useful rank of each bond.
# - `splits`: whether layers split their sizes into several modes by default, as trains and rings do.
