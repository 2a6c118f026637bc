"""Networks, formats and particles that the tests of compaction share."""

import copy
from collections.abc import Sequence

import torch
from networks import Written, written
from torch import Tensor, nn

from bayestrain.formats import Format, TensorTrain, algebra
from bayestrain.nn import FactorizedWeight, Layout
from bayestrain.prior.density import conditional_mode

OTHERS = {
    "tucker": "xyz, ax, by, cz -> abc",
    "tucker2": "xyc, ax, by -> abc",  # the last mode has no core of its own
    "ring": "rax, xby, ycr -> abc",
    "cp": "ar, br, cr -> abc",
    "star": "xyzb, ax, y, cz -> abc",
    "apart": "ax, xb, c -> abc",  # one core without bonds
}
NETWORKS: dict[str, Format] = {"tt": TensorTrain(), "twenty": TensorTrain()}  # a train of three modes and one of twenty
NETWORKS |= {kind: Written(written(text)) for kind, text in OTHERS.items()}
FORMATS = ("tt", "tucker", "tucker2", "ring", "cp")
"""The others are for what holds of any equation."""

PLANTED = {"tt": (3, 2), "tucker": (3, 2, 3), "tucker2": (3, 2), "ring": (2, 2, 3), "cp": (3,)}
PLANTED |= {"star": (3, 2, 3), "apart": (3,), "twenty": (2,) * 19}
"""Small ranks for each."""


class Layer(nn.Module):
    """A linear layer without bias, whatever the format."""

    def __init__(self, weight: FactorizedWeight) -> None:
        super().__init__()
        self.factorized = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.factorized.dense().mT


def layout(padded: bool = False, size: int = 1, modes: int = 3) -> Layout:
    """Three modes: a factor of the outputs, one of each fused, and a factor of the inputs; or twenty small ones."""
    if modes == 20:
        halves = ((2, 2, 1, 1, 3, 1, 1, 1, 1, 1), (1, 2, 2, 1, 1, 1, 5, 1, 1, 1))
        return Layout((12, 20), (12, 20), halves, tuple((k,) for k in range(20)))
    out, split = 12 * size, (4 * size, 3)
    shape = (out - 1, 19) if padded else (out, 20)
    return Layout(shape, shape, (split, (4, 5)), ((0,), (1, 2), (3,)))


def weight(
    kind: str, rank: int | Sequence[int] = 6, *, padded: bool = False, size: int = 1, decay: float = 1.0
) -> FactorizedWeight:
    """A weight with random cores in double precision; every index of a bond is `decay` times the one before."""
    format, folding = NETWORKS[kind], layout(padded, size, 20 if kind == "twenty" else 3)
    equation = format.equation(folding.sizes)
    ranks = [rank] * len(equation.bonds) if isinstance(rank, int) else rank
    cores = algebra.random_cores(equation, folding.sizes, ranks, 0.1, dtype=torch.float64)
    for bond in equation.bonds:
        core = equation.owners(bond)[-1]
        moved = cores[core].movedim(equation.axis(core, bond), -1)
        moved *= decay ** torch.arange(moved.shape[-1], dtype=torch.float64)
    return FactorizedWeight(format, folding, cores)


def planted(kind: str, noise: float = 1e-4, rank: int = 6, **options: bool) -> nn.Sequential:
    """A network of one layer with `rank` at every bond, whose weight has the ranks `PLANTED`, plus a little."""
    small, whole = weight(kind, PLANTED[kind], **options), weight(kind, rank, **options)
    with torch.no_grad():
        for core, part in zip(whole.cores, small.cores, strict=True):
            core.mul_(noise)
            core[tuple(slice(n) for n in part.shape)] += part
    return nn.Sequential(Layer(whole))


def with_lambda(model: nn.Module) -> nn.Module:
    """The same with lambda at its mode."""
    for own in model.modules():
        if isinstance(own, FactorizedWeight):
            state = own.attach_rank_state()
            modes = conditional_mode(own.equation, [core.detach() for core in own.cores], state.log_lambdas)
            for bond, u in enumerate(modes):
                state.set_log_lambda(bond, u)
    return model


class Particles:
    """What compaction sees of a posterior."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.template = copy.deepcopy(models[0])
        every = [dict(model.named_parameters()) for model in models]
        self.particles = {
            f"model.{name}": torch.stack([own[name].detach() for own in every]).requires_grad_()
            for name, parameter in models[0].named_parameters()
            if parameter.requires_grad
        }
        buffers = [dict(model.named_buffers()) for model in models]
        self.carried = {f"model.{name}": torch.stack([own[name] for own in buffers]) for name in buffers[0]}

    def __len__(self) -> int:
        return len(next(iter(self.particles.values())))

    def particle(self, i: int) -> nn.Module:
        model = copy.deepcopy(self.template)
        model.load_state_dict(
            {name.removeprefix("model."): t[i].detach() for name, t in {**self.particles, **self.carried}.items()},
            strict=False,
        )
        return model


def dense(model: nn.Module, name: str = "0") -> Tensor:
    return model.get_submodule(name).factorized.dense().detach().double()


def change(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm())
