"""`FactorizedWeight`: a weight held as the cores of a format, and the state of its bonds under the prior."""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.errors import ShapeError, check_choice
from bayestrain.formats import Format, algebra
from bayestrain.nn.layout import Layout

INITS = ("he", "paper")
DEFAULT_RANK = 20
MANY_ROWS = 1024  # a look-up is planned for so many, whatever their number

GAMMA_SHAPE, GAMMA_RATE, FLOOR = 1.0, 5.0, 1e-3
"""The paper's Gamma prior on every lambda, and the smallest lambda of a bond relative to its largest."""


class RankState(nn.Module):
    """``log lambda`` of every bond, and the weight norm that is held, if one is (else 0).

    `RankPrior` attaches it to a weight, the model's ``state_dict`` saves it, and `RankPrior.remove_` removes it.
    """

    def __init__(
        self, ranks: Sequence[int], like: Tensor, a: float = GAMMA_SHAPE, b: float = GAMMA_RATE, floor: float = FLOOR
    ) -> None:
        super().__init__()
        self.start = tuple(ranks)
        """The ranks the prior started with; it still counts indices that were cut."""
        self.a, self.b, self.floor = a, b, floor
        self.start_ranks = nn.Buffer(torch.tensor(ranks, dtype=torch.int64, device=like.device))
        self.held_norm = nn.Buffer(torch.zeros((), dtype=like.dtype, device=like.device))
        for k, rank in enumerate(ranks):
            setattr(self, f"log_lambda_{k}", nn.Buffer(torch.zeros(rank, dtype=like.dtype, device=like.device)))

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


class FactorizedWeight(nn.Module):
    """A weight as the cores of a low-rank format, which a layout folds into modes.

    The parameters are `cores`, whose axes are the labels of `equation`. A ``state_dict`` with other ranks loads: the
    cores take the shapes they find, as long as the modes agree, so a compacted model loads into a freshly built one.
    """

    def __init__(self, format: Format, layout: Layout, cores: Sequence[Tensor]) -> None:
        super().__init__()
        self.format, self.layout, self.shape = format, layout, layout.shape
        self.dense_numel = math.prod(layout.shape)
        self.equation = format.equation(layout.sizes)
        self._check(cores)
        self.cores = nn.ParameterList([nn.Parameter(core) for core in cores])
        self.rank_state: RankState | None = None
        self.compacted: object = None
        """What the last compaction left here; unchanged cores are not compacted twice."""

    @classmethod
    def random(
        cls, format: Format, layout: Layout, max_rank: int | Sequence[int], init: str | float = "he", **factory: Any
    ) -> Self:
        """Gaussian cores; variances of the weight are ``2 / fan_in`` ("he"), ``sqrt(2 / Q)`` ("paper") or `init`."""
        if isinstance(init, str):
            check_choice("init", init, INITS)
            init = 2 / math.prod(layout.shape[1:]) if init == "he" else math.sqrt(2 / math.prod(layout.shape))
        equation, ranks = format.equation(layout.sizes), format.max_ranks(layout.sizes, max_rank)
        return cls(format, layout, algebra.random_cores(equation, layout.sizes, ranks, init, **factory))

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
    def ranks(self) -> tuple[int, ...]:
        """The rank of every bond, in order of appearance in the equation."""
        return self.equation.ranks([core.shape for core in self.cores])

    @property
    def numel(self) -> int:
        """Entries of all cores."""
        return sum(core.numel() for core in self.cores)

    def dense(self, cores: Sequence[Tensor] | None = None) -> Tensor:
        """The whole weight, in the layer's shape, of these cores or the own ones."""
        return self.layout.unfold(algebra.dense(self.equation, list(self.cores) if cores is None else cores))

    def operands(self, dtype: torch.dtype | None = None) -> list[algebra.Operand]:
        """The cores as `algebra.contract` takes them, with their modes taken apart into the factors of the layout."""
        layout, shapes = self.layout, [core.shape for core in self.cores]
        factors = [label for labels in layout.labels for label in labels]
        size = self.equation.sizes(shapes) | dict(zip(factors, layout.factors, strict=True))
        parts = {mode: [factors[n] for n in own] for mode, own in zip(self.equation.modes, layout.modes, strict=True)}
        found = []
        for core, own in zip(self.cores, self.equation.cores, strict=True):
            labels = tuple(part for label in own for part in parts.get(label, [label]))
            found.append((core.to(dtype or core.dtype).reshape([size[label] for label in labels]), labels))
        return found

    def multiply(self, x: Tensor) -> Tensor:
        """``(.., inputs) -> (.., outputs)`` core by core, without materialising the weight, a matrix."""
        (outputs, inputs), layout, (outs, ins) = self.shape, self.layout, self.layout.labels
        rows = F.pad(x.reshape(-1, inputs), (0, layout.padded[1] - inputs)).reshape(-1, *layout.splits[1])
        y = algebra.contract([(rows, ("batch", *ins)), *self.operands(x.dtype)], ("batch", *outs))
        return y.reshape(-1, layout.padded[0])[:, :outputs].reshape(*x.shape[:-1], outputs)

    def operations(self, rows: int) -> tuple[int, int]:
        """Multiplications of `multiply`, and of a product with the weight, which is materialised first."""
        (outs, ins), known = self.layout.labels, tuple((labels, tuple(core.shape)) for core, labels in self.operands())
        batch = ("batch", *ins), (rows, *self.layout.splits[1])
        by_cores = algebra.plan((batch, *known), ("batch", *outs)).multiplications
        return by_cores, algebra.plan(known, outs + ins).multiplications + rows * self.dense_numel

    def rows(self, index: Tensor) -> Tensor:
        """``(n,) -> (n, ..)``: the rows of the weight at these indices of its first axis, without making any other."""
        (outs, *others), layout, rest = self.layout.labels, self.layout, index
        digits: dict[str, Tensor] = {}
        for label, size in zip(outs[::-1], layout.splits[0][::-1], strict=True):
            digits[label], rest = rest % size, rest // size
        found = []
        for core, labels in self.operands():
            if own := [label for label in labels if label in digits]:
                axes = [labels.index(label) for label in own]  # several where a mode fuses factors
                first, digit = axes[0], digits[own[0]]
                for axis, label in zip(axes[1:], own[1:], strict=True):
                    digit = digit * core.shape[axis] + digits[label]
                core = core.movedim(axes, list(range(first, first + len(axes)))).flatten(first, first + len(axes) - 1)
                core = core.index_select(first, digit)
                labels = tuple("batch" if label == own[0] else label for label in labels if label not in own[1:])
            found.append((core, labels))
        y = algebra.contract(found, ("batch", *chain(*others)), {"batch": MANY_ROWS}).reshape(-1, *layout.padded[1:])
        return y[(slice(None), *map(slice, layout.axes[1:]))].reshape(-1, *self.shape[1:])

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
                old = self.attach_rank_state()
                self.rank_state = RankState(self.ranks, self.cores[0], old.a, old.b, old.floor)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.equation}, ranks={self.ranks}"


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
