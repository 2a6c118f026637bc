"""`TTLinear`: a linear layer whose weight is a tensor-train matrix."""

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain import chain, tt
from bayestrain import modes as mode_tools
from bayestrain.errors import ShapeError
from bayestrain.layers.base import TTLayer, autocasts, check_dense, own_precision, product_dtype
from bayestrain.layers.planned import COMPILED_ROWS, machine, traced, transformed
from bayestrain.layers.start import default_bias, start_variance
from bayestrain.plans import Cost, Plan, Task, TrainShape, best_linear, dense_cost, linear_costs

Factors = Tensor | tuple[Tensor, Tensor] | list[chain.Factor]
"""What a plan multiplies by: the weight, its two halves, or the factors of a chain."""


class TTLinear(TTLayer):
    """Drop-in for `nn.Linear` with the weight as a tensor-train matrix.

    Core k has shape ``(R_{k-1}, out_modes[k], in_modes[k], R_k)``. Where the product of the modes is larger than the
    number of features, the surplus rows and columns exist only inside.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`.
        in_modes, out_modes: factors of the two sizes, equally many; chosen automatically when left out.
        max_rank: one number or the tuple of inner ranks; cut down to what the unfoldings can have.
        init: "he" (variance ``2 / in_features``) or "paper" (``sqrt(2 / Q)``, Q the number of entries).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] = 20,
        init: str = "he",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_features, out_features = index(in_features), index(out_features)
        ins, outs = linear_modes(in_features, out_features, in_modes, out_modes)
        inner = tt.feasible_ranks([m * j for m, j in zip(outs, ins, strict=True)], max_rank)
        variance = start_variance(init, fan_in=in_features, entries=in_features * out_features)
        cores = tt.random_cores(list(zip(outs, ins, strict=True)), inner, variance, dtype=dtype, device=device)
        super().__init__(cores, default_bias(out_features, in_features, cores[0]) if bias else None)
        self.in_features, self.out_features = in_features, out_features
        self.in_modes, self.out_modes = ins, outs

    @classmethod
    def like(
        cls,
        dense: nn.Linear,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] = 20,
        init: str = "he",
    ) -> Self:
        """A layer of the same shape, device and dtype with random cores and the dense layer's bias."""
        layer = cls(
            dense.in_features, dense.out_features, dense.bias is not None, in_modes=in_modes, out_modes=out_modes,
            max_rank=max_rank, init=init, device=dense.weight.device, dtype=dense.weight.dtype,
        )  # fmt: skip
        return layer._take_over(dense)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Linear,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] | None = None,
        tol: float = 0.0,
    ) -> Self:
        """The layer's own weight by TT-SVD, to relative error `tol` and at most `max_rank`.

        One that is all zeros has no ranks of its own and gets `max_rank`, or 20, to train with.
        """
        check_dense(dense, nn.Linear)
        weight = dense.weight.detach()
        ins, outs = linear_modes(dense.in_features, dense.out_features, in_modes, out_modes)
        if not bool(weight.any()):  # which says nothing of ranks
            return cls.like(dense, ins, outs, 20 if max_rank is None else max_rank).zero_()
        padded = F.pad(weight, (0, math.prod(ins) - weight.shape[1], 0, math.prod(outs) - weight.shape[0]))
        three_way = tt.tt_svd(tt.matrix_to_tensor(padded, outs, ins), tol, max_rank)
        cores = [
            core.reshape(core.shape[0], m, j, core.shape[-1]) for core, m, j in zip(three_way, outs, ins, strict=True)
        ]
        layer = cls.like(dense, ins, outs, tt.ranks(cores)[1:-1])
        layer.set_cores(cores)
        return layer

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """A plain `nn.Linear` that computes the same."""
        like = self.cores[0]
        dense = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device=like.device, dtype=like.dtype
        )
        dense.weight.copy_(self.weight)
        if self.bias is not None:
            dense.bias.copy_(self.bias)
        return dense

    def dense_weight(self, cores: Sequence[Tensor]) -> Tensor:
        """The full ``(out_features, in_features)`` matrix of these cores."""
        return tt.matrix_to_dense(cores)[: self.out_features, : self.in_features]

    @property
    def outputs(self) -> int:
        return self.out_features

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"TTLinear expects {self.in_features} features in the last dimension, got {tuple(x.shape)}."
            )
        if self.given is not None:
            self._forget()
            return F.linear(x, self.given, self.bias)
        if self._keeps():
            cores, kind = self.cores._parameters.values(), (x.shape[:-1], product_dtype(x), x.dtype)
            return self._kept.run(cores, kind, lambda: self._prepare(x, keep=True))(x)  # type: ignore[arg-type]
        self._forget()
        return self._prepare(x)(x)

    def _prepare(self, x: Tensor, keep: bool = False) -> Callable[[Tensor], Tensor]:
        """How to run inputs like this one, with everything formed that depends on the cores alone."""
        if not x.numel() or not self._fits(x):  # nothing to plan, or an error that PyTorch words best
            return lambda x: F.linear(x, self.weight, self.bias)
        plain, plan, dtype = traced() or transformed(), self.plan_for(x), product_dtype(x)
        if keep:
            factors = self._kept.formed((plan.kind, plan.side, plan.cuts, dtype), lambda: self._factors(plan, x))
        else:
            factors = self._factors(plan, x)
        dense = plan.kind == "dense" and (plain or not plan.recompute)
        whole = (math.prod(self.in_modes), math.prod(self.out_modes)) == (self.in_features, self.out_features)
        rows_first = plan.kind == "chain" and not plan.batch_last and plan.block >= max(1, x.numel() // x.shape[-1])
        if keep and (dense or (rows_first and whole and x.ndim == 2 and x.dtype == dtype and not autocasts(x))):
            return lambda x: self._small(x, plan, factors)

        def run(x: Tensor) -> Tensor:
            self._note(plan)
            return self._dense(x, factors) if dense else self._chained(x, plan, factors, plain)

        return run

    def _small(self, x: Tensor, plan: Plan, factors: Factors) -> Tensor:
        """By the weight, or a few rows through a chain, in as little time as Python allows."""
        self._kept.plan = plan
        if isinstance(factors, Tensor):
            return F.linear(x, factors, self.bias)
        y = chain.multiply(x, factors, False)  # type: ignore[arg-type]
        return y if self.bias is None else y + self.bias

    def _factors(self, plan: Plan, x: Tensor) -> Factors:
        """What the plan multiplies by: the weight, its two halves, or the factors of a chain."""
        cores, dtype = list(self.cores), product_dtype(x)
        with own_precision(x):
            if plan.kind == "chain":
                factors = chain.factors(cores, plan.cuts, plan.side)
                return [chain.Factor(matrix.to(dtype), batch) for matrix, batch in factors]
            if plan.recompute:
                bond = plan.cuts[0]
                return tt.merge_matrix(cores[:bond]).squeeze(0), tt.merge_matrix(cores[bond:]).squeeze(-1)
            return self.weight

    def _dense(self, x: Tensor, weight: Factors) -> Tensor:
        if not isinstance(weight, Tensor):  # two halves, where only plain torch will do
            weight = self.weight
        if x.ndim == 2 and x.device.type == "cpu" and transformed() and weight.numel() >= x.numel():
            # Many networks at once (`torch.vmap`) get the gradient of a large weight in its own order.
            y = (weight @ x.mT).mT.contiguous()
            return y if self.bias is None else y + self.bias.to(y.dtype)
        return F.linear(x, weight, self.bias)

    def _chained(self, x: Tensor, plan: Plan, factors: Factors, plain: bool) -> Tensor:
        batch_shape, dtype = x.shape[:-1], product_dtype(x)
        if x.ndim != 2:
            x = x.reshape(-1, self.in_features)
        if x.dtype != dtype:
            x = x.to(dtype)
        if (inside := math.prod(self.in_modes)) > self.in_features:
            x = F.pad(x, (0, inside - self.in_features))
        with own_precision(x):
            if isinstance(factors, tuple):
                left, right = (factor.to(dtype) for factor in factors)
                y = chain.dense_blocks(x, left, right, self.bias, self.out_features, plan.block)
            elif plain or (plan.block >= len(x) and not plan.batch_last and not plan.recompute):
                y = chain.multiply(x, factors, batch_last=False)  # type: ignore[arg-type]
                if y.shape[1] > self.out_features:
                    y = y[:, : self.out_features]
                if self.bias is not None:
                    y = y + self.bias.to(dtype)
            else:
                options = (self.out_features, plan.batch_last, plan.block, plan.recompute)
                y = chain.multiply_blocks(x, factors, self.bias, *options)  # type: ignore[arg-type]
        return y if len(batch_shape) == 1 else y.reshape(*batch_shape, self.out_features)

    def plan_costs(self, x: Tensor) -> list[Cost]:
        """Every way to multiply this input, with its predicted cost, cheapest first."""
        shape = TrainShape(self.out_modes, self.in_modes, self.ranks)
        return linear_costs(shape, self._task(x), machine(x.device.type, product_dtype(x)))

    def dense_cost(self, x: Tensor) -> Cost:
        """The predicted cost of `nn.Linear` on this input."""
        where = machine(x.device.type, product_dtype(x))
        return dense_cost(self.out_features, self.in_features, self._task(x), where)

    def plan_for(self, x: Tensor) -> Plan:
        """How this input would be multiplied: the cheapest plan, or the forced one."""
        choice = (self.low_memory, self._forced)
        if traced():
            modes = (self.out_modes, self.in_modes, self.ranks)
            return _compiled_plan(*modes, x.device.type, product_dtype(x), self._trains(x), *choice)  # type: ignore[no-any-return]
        shape = TrainShape(self.out_modes, self.in_modes, self.ranks)
        return best_linear(shape, self._task(x), machine(x.device.type, product_dtype(x)), *choice)

    def _task(self, x: Tensor) -> Task:
        """What is asked of the layer; inference that may keep its factors finds them formed."""
        return Task(max(1, math.prod(x.shape[:-1])), product_dtype(x).itemsize, self._trains(x), self._keeps())

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"in_modes={self.in_modes}, out_modes={self.out_modes}, {self._saving()}"
        )


def linear_modes(
    in_features: int,
    out_features: int,
    in_modes: Sequence[int] | None,
    out_modes: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Modes for both sides, equally many; the side not given is factored to match."""
    given = in_modes if in_modes is not None else out_modes
    count = len(given) if given is not None else mode_tools.choose_count(in_features, out_features)
    ins = mode_tools.factor(in_features, count) if in_modes is None else tuple(in_modes)
    outs = mode_tools.factor(out_features, count) if out_modes is None else tuple(out_modes)
    if len(ins) != len(outs) or len(ins) < 2:
        raise ShapeError(
            f"in_modes and out_modes must be equally many and at least 2, got {ins} and {outs}. "
            "Leave one of them out and it is chosen to match the other."
        )
    return (
        mode_tools.check_modes(in_features, ins, "in_modes"),
        mode_tools.check_modes(out_features, outs, "out_modes"),
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled_plan(
    outs: tuple[int, ...], ins: tuple[int, ...], ranks: tuple[int, ...], device: str, dtype: torch.dtype,
    training: bool, low_memory: bool, forced: str | None,
) -> Plan:  # fmt: skip
    """The plan of a compiled layer, which the compiler need not look into."""
    chain_ranks = tuple(map(int, ranks))  # tensors while `torch.jit.trace` looks on
    task = Task(COMPILED_ROWS, dtype.itemsize, training)
    return best_linear(TrainShape(outs, ins, chain_ranks), task, machine(device, dtype), low_memory, forced)
