"""`TTLinear`: a linear layer whose weight is a tensor-train matrix."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain import modes as mode_tools
from bayestrain import tt
from bayestrain.errors import ShapeError
from bayestrain.layers.base import TTLayer, check_dense, own_precision
from bayestrain.layers.start import default_bias, start_variance

Path = tuple[str, int]
"""How to multiply: ("dense", 0) forms the weight; ("left" | "right", bond) multiplies by one merged side first."""

SPLIT_GAIN = 2.0
"""Two smaller products are only taken when they save at least this factor of multiplications."""


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
        """The layer's own weight by TT-SVD, to relative error `tol` and at most `max_rank`."""
        check_dense(dense, nn.Linear)
        weight = dense.weight.detach()
        ins, outs = linear_modes(dense.in_features, dense.out_features, in_modes, out_modes)
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
    def dense_parameters(self) -> int:
        return self.out_features * (self.in_features + (self.bias is not None))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"TTLinear expects {self.in_features} features in the last dimension, got {tuple(x.shape)}."
            )
        batch_shape = x.shape[:-1]
        choose = _path.__wrapped__ if torch.compiler.is_compiling() else _path  # the compiler warns of a cache
        side, bond = choose(self.out_modes, self.in_modes, self.ranks, math.prod(batch_shape))
        if side == "dense":
            with own_precision(x):
                weight = self.weight
            if x.ndim != 2 or x.device.type != "cpu" or weight.numel() < x.numel():
                return F.linear(x, weight, self.bias)
            # As fast, and many networks at once (`torch.vmap`) get the gradient of a large weight in its own order.
            y = (weight @ x.mT).mT.contiguous()
            return y if self.bias is None else y + self.bias.to(y.dtype)
        with own_precision(x):
            cores = list(self.cores)
            left = tt.merge_matrix(cores[:bond]).squeeze(0)  # (ML, JL, r)
            right = tt.merge_matrix(cores[bond:]).squeeze(-1)  # (r, MR, JR)
        out_left, in_left, rank = left.shape
        _, out_right, in_right = right.shape
        x = F.pad(x.reshape(-1, self.in_features), (0, in_left * in_right - self.in_features))
        x = x.reshape(-1, in_left, in_right)  # (B, JL, JR)
        if side == "right":
            x = x @ right.reshape(rank * out_right, in_right).mT  # (B, JL, r*MR)
            y = left.reshape(out_left, in_left * rank) @ x.reshape(-1, in_left * rank, out_right)  # (B, ML, MR)
        else:
            x = left.mT.reshape(out_left * rank, in_left) @ x  # (B, ML*r, JR)
            y = x.reshape(-1, out_left, rank * in_right) @ right.mT.reshape(rank * in_right, out_right)
        y = y.reshape(-1, out_left * out_right)[:, : self.out_features]
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.reshape(*batch_shape, self.out_features)

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


@lru_cache(maxsize=4096)
def _path(outs: tuple[int, ...], ins: tuple[int, ...], ranks: tuple[int, ...], batch: int) -> Path:
    """The way with the fewest multiplications for this batch size, forming the factors included."""

    def forming(first: int, last: int) -> int:
        """Multiplications to merge cores first..last-1, in halves as `tt.merge_matrix` does."""
        if last - first == 1:
            return 0
        half = first + (last - first + 1) // 2
        size = math.prod(outs[first:last]) * math.prod(ins[first:last])
        return forming(first, half) + forming(half, last) + ranks[first] * size * ranks[half] * ranks[last]

    best: Path = ("dense", 0)
    cheapest = batch * math.prod(outs) * math.prod(ins) / SPLIT_GAIN + forming(0, len(outs))
    for bond in range(1, len(outs)):
        form = forming(0, bond) + forming(bond, len(outs))
        out_left, in_left = math.prod(outs[:bond]), math.prod(ins[:bond])
        out_right, in_right = math.prod(outs[bond:]), math.prod(ins[bond:])
        rank = ranks[bond]
        right_first = form + batch * rank * in_left * out_right * (in_right + out_left)
        left_first = form + batch * rank * out_left * in_right * (in_left + out_right)
        if right_first < cheapest:
            best, cheapest = ("right", bond), right_first
        if left_first < cheapest:
            best, cheapest = ("left", bond), left_first
    return best
