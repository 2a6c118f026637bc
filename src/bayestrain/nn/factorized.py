"""`FactorizedWeight`: a weight held as the cores of a format, and the state of its bonds under the prior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.formats import Format, algebra
from bayestrain.formats.equation import Labels
from bayestrain.nn.layout import Layout

INITS = ("he", "paper")

DEFAULT_RANK = 20

GAMMA_SHAPE, GAMMA_RATE, FLOOR = 1.0, 5.0, 1e-3
"""The paper's Gamma prior on every lambda, and the smallest lambda of a bond relative to its largest."""


class RankState(nn.Module):
    """``log lambda`` of every bond, and the weight norm that is held, if one is (else 0).

    `RankPrior` attaches it to a weight, the model's ``state_dict`` saves it, and `RankPrior.remove_` removes it.
    """

    held_norm: Tensor
    start_ranks: Tensor

    def __init__(self, ranks: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.start = tuple(ranks)
        """The ranks the prior started with; it still counts indices that were cut."""
        self.a, self.b, self.floor = GAMMA_SHAPE, GAMMA_RATE, FLOOR
        self.register_buffer("start_ranks", torch.tensor(ranks, dtype=torch.int64, device=like.device))
        self.register_buffer("held_norm", torch.zeros((), dtype=like.dtype, device=like.device))
        for k, rank in enumerate(ranks):
            self.register_buffer(f"log_lambda_{k}", torch.zeros(rank, dtype=like.dtype, device=like.device))

    @property
    def log_lambdas(self) -> list[Tensor]:
        """One vector per bond, in order."""
        return [self.get_buffer(f"log_lambda_{k}") for k in range(len(self.start))]

    def set_log_lambda(self, bond: int, value: Tensor) -> None:
        """Replace the vector of one bond; its length may change."""
        setattr(self, f"log_lambda_{bond}", value)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.start = tuple(self.start_ranks.tolist())


class Cut(NamedTuple):
    """A network taken apart into the two factors of a matrix product."""

    width: int
    """The product of the ranks of the bonds between them."""
    bonds: Labels
    first: tuple[int, ...]
    """The cores that read the inputs."""
    second: tuple[int, ...]
    """The cores that make the outputs."""


class FactorizedWeight(nn.Module):
    """A weight as the cores of a low-rank format.

    The parameters are `cores`, whose axes are the labels of `equation`. A ``state_dict`` with other ranks loads: the
    cores take the shapes they find, as long as the modes agree, so a compacted model loads into a freshly built one.

    Args:
        format: the family of tensor networks.
        layout: how the weight folds into modes.
        cores: the starting values.
    """

    def __init__(self, format: Format, layout: Layout, cores: Sequence[Tensor]) -> None:
        super().__init__()
        self.format, self.layout = format, layout
        self.equation = format.equation(layout.sizes)
        self._check(cores)
        self.cores = nn.ParameterList([nn.Parameter(core) for core in cores])
        self.rank_state: RankState | None = None
        self.compacted: object = None
        """What the last compaction left here; unchanged cores are not compacted twice."""

    @classmethod
    def random(
        cls,
        format: Format,
        layout: Layout,
        max_rank: int | Sequence[int] = DEFAULT_RANK,
        init: str = "he",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Gaussian cores; the weight's entries have He's variance ``2 / fan_in``, or the paper's ``sqrt(2 / Q)``."""
        check_init(init)
        fan_in, entries = math.prod(layout.shape[1:]), math.prod(layout.shape)
        variance = 2.0 / max(fan_in, 1) if init == "he" else math.sqrt(2.0 / max(entries, 1))
        equation, ranks = format.equation(layout.sizes), format.max_ranks(layout.sizes, max_rank)
        cores = algebra.random_cores(equation, layout.sizes, ranks, variance, dtype=dtype, device=device)
        return cls(format, layout, cores)

    @classmethod
    @torch.no_grad()
    def decomposed(
        cls, weight: Tensor, format: Format, layout: Layout, max_rank: int | Sequence[int] | None, tol: float
    ) -> Self:
        """The cores of a given weight, to relative error `tol` and at most `max_rank`.

        A weight of zeros determines no ranks: it gets `max_rank`, or 20, and a last core of zeros to train with.
        """
        if bool(weight.any()):
            return cls(format, layout, format.decompose(layout.fold(weight.detach()), tol, max_rank))
        ranks = DEFAULT_RANK if max_rank is None else max_rank
        found = cls.random(format, layout, ranks, dtype=weight.dtype, device=weight.device)
        found.cores[-1].zero_()
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.layout.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every bond, in order of appearance in the equation."""
        return self.equation.ranks([core.shape for core in self.cores])

    @property
    def dense_numel(self) -> int:
        """Entries of the whole weight."""
        return math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Entries of all cores."""
        return sum(core.numel() for core in self.cores)

    def dense(self, cores: Sequence[Tensor] | None = None) -> Tensor:
        """The whole weight, in the layer's shape, of these cores or the own ones."""
        return self.layout.unfold(algebra.dense(self.equation, list(self.cores) if cores is None else cores))

    # --- products -----------------------------------------------------------------------------------------------------

    def axes(self, core: int) -> tuple[Labels, tuple[int, ...]]:
        """The labels and sizes of a core's axes after its modes are taken apart into factors ``f0``, ``f1``, .."""
        layout, parts = self.layout, dict(zip(self.equation.modes, self.layout.modes, strict=True))
        found: list[tuple[str, int]] = []
        for label, size in zip(self.equation.cores[core], self.cores[core].shape, strict=True):
            found += [(f"f{n}", layout.factors[n]) for n in parts[label]] if label in parts else [(label, size)]
        return tuple(label for label, _ in found), tuple(size for _, size in found)

    def operands(self, which: Iterable[int], dtype: torch.dtype | None = None) -> list[algebra.Operand]:
        """Some of the cores, with their modes taken apart into factors, as `algebra.contract` takes them."""
        parts = [(self.cores[k], *self.axes(k)) for k in which]
        return [(core.to(dtype or core.dtype).reshape(sizes), labels) for core, labels, sizes in parts]

    def labels(self, axis: int) -> Labels:
        """The labels of the factors of one of the layout's axes."""
        return tuple(f"f{n}" for n, own in enumerate(self.layout.axis_of) if own == axis)

    def multiply(self, x: Tensor) -> Tensor:
        """``(rows, inputs) -> (rows, outputs)`` core by core, without materialising the weight, a matrix."""
        (outputs, inputs), (outs, ins) = self.shape, self.layout.splits
        x = F.pad(x, (0, self.layout.padded[1] - inputs)).reshape(-1, *ins)
        batch = (x, ("batch", *self.labels(1)))
        y = algebra.contract([batch, *self.operands(range(len(self.cores)), x.dtype)], ("batch", *self.labels(0)))
        return y.reshape(-1, math.prod(outs))[:, :outputs]

    def operations(self, rows: int) -> tuple[int, int]:
        """Multiplications of `multiply`, and of a product with the weight, which is materialised first."""
        known = tuple(self.axes(k) for k in range(len(self.cores)))
        batch = (("batch", *self.labels(1)), (rows, *self.layout.splits[1]))
        by_cores = algebra.plan((batch, *known), ("batch", *self.labels(0))).multiplications
        every = tuple(f"f{n}" for n in range(len(self.layout.factors)))
        return by_cores, algebra.plan(known, every).multiplications + rows * self.dense_numel

    def cut(self) -> Cut | None:
        """The narrowest cut between inputs and outputs; None where a core has factors of both."""
        owner = {label: k for k in range(len(self.cores)) for label in self.axes(k)[0]}
        outs = {owner[label] for label in self.labels(0)}
        ins = {owner[f"f{n}"] for n, axis in enumerate(self.layout.axis_of) if axis > 0}
        if outs & ins:
            return None
        every = range(len(self.cores))
        neutral = [k for k in every if k not in outs | ins]
        ranks = dict(zip(self.equation.bonds, self.ranks, strict=True))
        found = []
        for chosen in (some for count in range(len(neutral) + 1) for some in combinations(neutral, count)):
            second = tuple(k for k in every if k in outs or k in chosen)
            first = tuple(k for k in every if k not in second)
            bonds = tuple(b for b in ranks if len({k in second for k in self.equation.owners(b)}) == 2)
            found.append(Cut(math.prod([ranks[bond] for bond in bonds]), bonds, first, second))
        return min(found)

    def halves(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """The two factors, ``(width, inputs, ..)`` with the weight's other axes behind, and ``(outputs, width)``."""
        (outputs, inputs, *rest), layout = self.shape, self.layout
        others = tuple(label for axis in range(1, len(layout.axes)) for label in self.labels(axis))
        first = algebra.contract(self.operands(cut.first), (*cut.bonds, *others))
        second = algebra.contract(self.operands(cut.second), (*self.labels(0), *cut.bonds))
        first = first.reshape(cut.width, layout.padded[1], *rest)[:, :inputs]
        return first, second.reshape(layout.padded[0], cut.width)[:outputs]

    # --- changes ------------------------------------------------------------------------------------------------------

    def attach_rank_state(self) -> RankState:
        """Give the weight its ``lambda``, unless it has one."""
        if self.rank_state is None:
            self.rank_state = RankState(self.ranks, self.cores[0])
        return self.rank_state

    @torch.no_grad()
    def set_cores(self, cores: Sequence[Tensor]) -> None:
        """Put other cores in place, perhaps with other ranks; the parameters keep their identity."""
        self._check(cores)
        for own, new in zip(self.cores, cores, strict=True):
            if own.shape == new.shape:
                own.copy_(new)
            else:
                replace_data(own, new.to(own))

    def _check(self, cores: Sequence[Tensor]) -> None:
        sizes = self.equation.sizes([core.shape for core in cores])
        modes = tuple(sizes[mode] for mode in self.equation.modes)
        if modes != self.layout.sizes:
            raise ShapeError(f"Cores must have modes of sizes {self.layout.sizes}, got {modes}.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found: list[Any] = [state_dict.get(f"{prefix}cores.{k}") for k in range(len(self.cores))]
        with suppress(AttributeError, ShapeError):  # what is missing or does not fit is reported by PyTorch
            self.set_cores([own.new_empty(new.shape) for own, new in zip(self.cores, found, strict=True)])
            if self.rank_state is not None or f"{prefix}rank_state.held_norm" in state_dict:
                before, self.rank_state = self.rank_state, None
                state = self.attach_rank_state()  # with the ranks that come in
                if before is not None:
                    state.a, state.b, state.floor = before.a, before.b, before.floor
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.equation}, ranks={self.ranks}"


def check_init(init: str, more: Sequence[str] = ()) -> None:
    """Raise unless `init` names a way to start."""
    if init not in (*INITS, *more):
        raise ConfigError(f"init must be one of {(*INITS, *more)}, got {init!r}.")


def replace_data(parameter: Tensor, value: Tensor) -> None:
    """Give a leaf tensor data of another shape; its identity, which optimisers and averages rely on, stays.

    While the loss of an earlier step is alive, autograd remembers the old shape in the parameter's gradient accumulator
    and refuses the new one. It forgets when the dtype changes, hence the detour.
    """
    value = value.detach().clone(memory_format=torch.contiguous_format)
    parameter.grad = None
    other = torch.float32 if value.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=value.device)
    parameter.data = value
