"""`TTConv2d`: a 2-d convolution whose kernel is a tensor train."""

import math
from collections.abc import Sequence
from operator import index
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain import modes as mode_tools
from bayestrain import tt
from bayestrain.errors import ConversionError, ShapeError
from bayestrain.layers.base import TTLayer, autocasts, check_dense, own_precision, product_dtype
from bayestrain.layers.planned import COMPILED_PLACES, machine, traced, transformed
from bayestrain.layers.start import default_bias, start_variance
from bayestrain.plans import ConvShape, Cost, Plan, Task, best_conv, conv_costs, dense_cost

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]

TWO_MODES_FROM = 16
"""Channel counts from this one on are factored into two modes, smaller ones stay whole."""

FILTERS_ON_CUDA = 8
"""A GPU's convolutions want a multiple of so many channels; the two-step form gets filters of zeros up to the next."""


class TTConv2d(TTLayer):
    """Drop-in for `nn.Conv2d` (``groups=1``) with the kernel as a tensor train.

    The kernel, as ``(kh*kw, C, S)``, has one core for ``kh*kw``, one per input mode and one per output mode. The bond
    between the last input core and the first output core cuts it in two, ``A[kh*kw, C, r] B[r, S]``: a convolution
    with r filters, then a 1x1 convolution. That is how it runs when r is small; else the kernel is formed.

    Args:
        in_channels .. padding_mode, device, dtype: as for `nn.Conv2d`; `groups` must be 1.
        in_modes, out_modes: factors of the channel counts, any number each; chosen automatically when left out.
        max_rank: one number or the tuple of inner ranks; cut down to what the unfoldings can have.
        init: "he" (variance ``2 / fan_in``) or "paper" (``sqrt(2 / Q)``, Q the number of entries).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] = 20,
        init: str = "he",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if groups != 1:
            raise ConversionError(
                f"TTConv2d needs groups=1, got groups={groups}. A grouped kernel is already small: leave it dense "
                "(in tensorize_, with a filter_fn that returns False for it)."
            )
        # A kernel-less twin checks the arguments as PyTorch does and carries them.
        template = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, 1, False, padding_mode, device="meta"
        )
        in_channels, out_channels = index(in_channels), index(out_channels)
        kh, kw = _pair(template.kernel_size)
        ins = _channel_modes(in_channels, in_modes, "in_modes")
        outs = _channel_modes(out_channels, out_modes, "out_modes")
        sizes = (kh * kw, *ins, *outs)
        inner = tt.feasible_ranks(sizes, max_rank)
        fan_in = in_channels * kh * kw
        variance = start_variance(init, fan_in=fan_in, entries=fan_in * out_channels)
        cores = tt.random_cores([(size,) for size in sizes], inner, variance, dtype=dtype, device=device)
        super().__init__(cores, default_bias(out_channels, fan_in, cores[0]) if bias else None)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = (kh, kw)
        self.stride = _pair(template.stride)
        self.padding = template.padding if isinstance(template.padding, str) else _pair(template.padding)
        self.dilation = _pair(template.dilation)
        self.groups = 1
        self.padding_mode = padding_mode
        self.in_modes, self.out_modes = ins, outs
        self._edge = list(map(index, template._reversed_padding_repeated_twice))

    @classmethod
    def like(
        cls,
        dense: nn.Conv2d,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] = 20,
        init: str = "he",
    ) -> Self:
        """A layer of the same shape, settings, device and dtype with random cores and the dense layer's bias."""
        layer = cls(
            dense.in_channels, dense.out_channels, _pair(dense.kernel_size), _pair(dense.stride),
            dense.padding if isinstance(dense.padding, str) else _pair(dense.padding), _pair(dense.dilation),
            dense.groups, dense.bias is not None, dense.padding_mode, in_modes=in_modes, out_modes=out_modes,
            max_rank=max_rank, init=init, device=dense.weight.device, dtype=dense.weight.dtype,
        )  # fmt: skip
        return layer._take_over(dense)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Conv2d,
        in_modes: Sequence[int] | None = None,
        out_modes: Sequence[int] | None = None,
        max_rank: int | Sequence[int] | None = None,
        tol: float = 0.0,
    ) -> Self:
        """The layer's own kernel by TT-SVD, to relative error `tol` and at most `max_rank`.

        One that is all zeros has no ranks of its own and gets `max_rank`, or 20, to train with.
        """
        check_dense(dense, nn.Conv2d)
        weight = dense.weight.detach()
        outs_in, ins_in = dense.out_channels, weight.shape[1]
        ins = _channel_modes(ins_in, in_modes, "in_modes")
        outs = _channel_modes(outs_in, out_modes, "out_modes")
        if not bool(weight.any()):  # which says nothing of ranks
            return cls.like(dense, ins, outs, 20 if max_rank is None else max_rank).zero_()
        kernel = weight.flatten(2).permute(2, 1, 0)  # (t, C, S)
        kernel = F.pad(kernel, (0, math.prod(outs) - outs_in, 0, math.prod(ins) - ins_in))
        cores = tt.tt_svd(kernel.reshape(kernel.shape[0], *ins, *outs), tol, max_rank)
        layer = cls.like(dense, ins, outs, tt.ranks(cores)[1:-1])
        layer.set_cores(cores)
        return layer

    @torch.no_grad()
    def to_dense(self) -> nn.Conv2d:
        """A plain `nn.Conv2d` that computes the same."""
        like = self.cores[0]
        dense = nn.Conv2d(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation, 1,
            self.bias is not None, self.padding_mode, device=like.device, dtype=like.dtype,
        )  # fmt: skip
        dense.weight.copy_(self.weight)
        if self.bias is not None and dense.bias is not None:
            dense.bias.copy_(self.bias)
        return dense

    @property
    def middle_bond(self) -> int:
        """The bond between input and output cores: its rank is the number of filters of the two-step form."""
        return 1 + len(self.in_modes)

    def dense_weight(self, cores: Sequence[Tensor]) -> Tensor:
        """The full ``(S, C, kh, kw)`` kernel of these cores, channels last in memory."""
        first, second = self._halves(cores)
        kernel = second.mT @ first.reshape(-1, first.shape[2]).mT  # (S, r) @ (r, t*C)
        return kernel.reshape(self.out_channels, *self.kernel_size, self.in_channels).permute(0, 3, 1, 2)

    @property
    def outputs(self) -> int:
        return self.out_channels

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    def _halves(self, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """``A (t, C, r)`` and ``B (r, S)`` with the padding of the channel modes cut off."""
        bond = self.middle_bond
        first = tt.merge(cores[:bond]).reshape(cores[0].shape[1], -1, cores[bond].shape[0])
        second = tt.merge(cores[bond:]).squeeze(-1)
        return first[:, : self.in_channels], second[:, : self.out_channels]

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ShapeError(
                f"TTConv2d expects (batch, {self.in_channels}, height, width) or the same without batch, "
                f"got {tuple(x.shape)}."
            )
        if self.given is not None:
            self._forget()
            return self._convolve(x, self._in_format(x, self.given), self.bias)
        if self._keeps():
            cores, kind = self.cores._parameters.values(), (x.shape, x.dtype, _channels_last(x))
            plan, kernels = self._kept.run(cores, kind, lambda: self._prepare(x, keep=True))  # type: ignore[arg-type]
        else:
            self._forget()
            plan, kernels = self._prepare(x)
        self._note(plan)
        if len(kernels) == 1:
            return self._convolve(x, kernels[0], self.bias)
        filtered = self._convolve(x, kernels[0], None)
        return F.conv2d(filtered, *_lowered(filtered, kernels[1], self.bias))

    def _prepare(self, x: Tensor, keep: bool = False) -> tuple[Plan, list[Tensor]]:
        """The plan for inputs like this one, and the kernels that it wants."""
        plan = self.plan_for(x)
        if keep:
            return plan, self._kept.formed((plan.kind, _channels_last(x)), lambda: self._kernels(plan, x))
        return plan, self._kernels(plan, x)

    def _kernels(self, plan: Plan, x: Tensor) -> list[Tensor]:
        """The full kernel, or the two of the two-step form."""
        with own_precision(x):
            if plan.kind == "kernel":
                return [self._in_format(x, self.weight)]
            first, second = self._halves(list(self.cores))
            if x.is_cuda and (missing := -len(second) % FILTERS_ON_CUDA):
                first, second = F.pad(first, (0, missing)), F.pad(second, (0, 0, 0, missing))
            filters = first.permute(2, 0, 1).reshape(-1, *self.kernel_size, self.in_channels).permute(0, 3, 1, 2)
            return [self._in_format(x, filters), self._in_format(x, second.mT[:, :, None, None])]

    @staticmethod
    def _in_format(x: Tensor, kernel: Tensor) -> Tensor:
        """The kernel in the memory format of the input, which decides that of the output."""
        # A 1x1 kernel is contiguous in both formats; only its strides tell them apart.
        return kernel if _channels_last(x) else kernel.reshape(len(kernel), -1).view(kernel.shape)

    def plan_costs(self, x: Tensor) -> list[Cost]:
        """Both ways to convolve this input, with their predicted costs, cheapest first."""
        return conv_costs(self._shape(), self._task(x), machine(x.device.type, product_dtype(x)))

    def dense_cost(self, x: Tensor) -> Cost:
        """The predicted cost of `nn.Conv2d` on this input."""
        where = machine(x.device.type, product_dtype(x))
        taps = self.in_channels * math.prod(self.kernel_size)
        return dense_cost(self.out_channels, taps, self._task(x), where, conv=True)

    def plan_for(self, x: Tensor) -> Plan:
        """How this input would be convolved: the cheaper plan, or the forced one."""
        if traced():
            modes = (math.prod(self.kernel_size), self.in_modes, self.out_modes, self.ranks)
            return _compiled_plan(*modes, x.device.type, product_dtype(x), self._trains(x), self._forced)  # type: ignore[no-any-return]
        return best_conv(self._shape(), self._task(x), machine(x.device.type, product_dtype(x)), self._forced)

    def _shape(self) -> ConvShape:
        return ConvShape(math.prod(self.kernel_size), self.in_modes, self.out_modes, self.ranks)

    def _task(self, x: Tensor) -> Task:
        """What is asked of the layer, in positions of the output; inference that may keep kernels finds them formed."""
        places = x.numel() // self.in_channels // math.prod(self.stride)
        return Task(max(1, places), product_dtype(x).itemsize, self._trains(x), self._keeps())

    def _convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve with this layer's stride, padding and dilation."""
        padding: int | tuple[int, ...] | str = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._edge, mode=self.padding_mode), 0
        kernel, bias = _lowered(x, kernel, bias)
        return F.conv2d(x, kernel, bias, self.stride, padding, self.dilation)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding!r}, bias={self.bias is not None}, in_modes={self.in_modes}, "
            f"out_modes={self.out_modes}, {self._saving()}"
        )


def _channel_modes(size: int, modes: Sequence[int] | None, what: str) -> tuple[int, ...]:
    if modes is None:
        return mode_tools.factor(size, 2 if size >= TWO_MODES_FROM else 1)
    return mode_tools.check_modes(size, tuple(modes), what)


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    return index(value[0]), index(value[1])


def _lowered(x: Tensor, kernel: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Kernel and bias in the type of an input that autocast has lowered before: within vmap it forgets to."""
    if x.dtype == kernel.dtype or not autocasts(x):
        return kernel, bias
    return kernel.to(x.dtype), None if bias is None else bias.to(x.dtype)


def _channels_last(x: Tensor) -> bool:
    if x.ndim != 4 or transformed():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled_plan(
    taps: int, ins: tuple[int, ...], outs: tuple[int, ...], ranks: tuple[int, ...], device: str, dtype: torch.dtype,
    training: bool, forced: str | None,
) -> Plan:  # fmt: skip
    """The plan of a compiled layer, which the compiler need not look into."""
    chain_ranks = tuple(map(int, ranks))  # tensors while `torch.jit.trace` looks on
    task = Task(COMPILED_PLACES, dtype.itemsize, training)
    return best_conv(ConvShape(taps, ins, outs, chain_ranks), task, machine(device, dtype), forced)
