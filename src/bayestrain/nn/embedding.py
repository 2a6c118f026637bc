"""Embeddings with a factorised table, of which only the rows that are looked up are ever made."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from bayestrain.errors import ConversionError, ShapeError
from bayestrain.formats import Format
from bayestrain.formats.modes import check_modes
from bayestrain.nn.fast import fast
from bayestrain.nn.layer import Modes, TensorLayer
from bayestrain.nn.layout import Layout
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.precision import own_precision, traced, transformed

TABLE_MODES = 2  # that the rows of a table are split into: a look-up takes one slice of a core for each
OFTEN = 16  # with fewer rows in the table than this for every index, indices that occur again are looked up once


class TensorEmbedding(TensorLayer):
    """Drop-in for `nn.Embedding`: ``TensorEmbedding(num_embeddings, embedding_dim, padding_idx=None, ..)``.

    Rows are looked up core by core. The row `padding_idx` is zero and stays so. `max_norm`, `scale_grad_by_freq` and
    `sparse` need a table and are refused. Further keywords are those of `TensorLayer`, with ``layout="split"`` unless
    stated: the table is two thin factors then, of which the first is factorised further. A random start has the
    variance of `nn.Embedding`, which is 1.
    """

    dense_kind: ClassVar[type[nn.Module]] = nn.Embedding
    settings: ClassVar[tuple[str, ...]] = ("num_embeddings", "embedding_dim", "padding_idx")
    refused: ClassVar[tuple[str, ...]] = ("max_norm", "scale_grad_by_freq", "sparse")
    input_axis = -1
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def __init__(self, *args: Any, layout: str = "split", **kwargs: Any) -> None:
        super().__init__(*args, layout=layout, **kwargs)

    @staticmethod
    def fold(shape: Size, format: Format, layout: str, in_modes: Modes = None, out_modes: Modes = None) -> Layout:
        """The layout of a ``(rows, dim)`` table; `out_modes` are those of the rows, `in_modes` those of the dim."""
        rows, dim = shape
        if in_modes is None and out_modes is None and not format.splits:
            layout, out_modes = "split", (rows,)
        if out_modes is None and (in_modes is None or layout == "split"):
            out_modes = check_modes(rows, None, TABLE_MODES if format.splits else 1, "out_modes")
        if in_modes is None and layout == "split":
            in_modes = (dim,)
        return TensorLinear.fold(shape, format, layout, in_modes, out_modes)

    @classmethod
    def how(
        cls, dense: Any, format: str | Format = "tt", layout: str = "split", **modes: Modes
    ) -> tuple[Format, Layout]:
        for name in cls.refused:
            if value := getattr(dense, name, None):
                raise ConversionError(
                    f"{name}={value} changes or reads a whole table, which a factorised one is not. Build the "
                    f"{type(dense).__name__} without it, or leave it dense."
                )
        return super().how(dense, format, layout, **modes)

    @classmethod
    def start(cls, dense: Any, init: str) -> str | float:
        return (1.0 if dense.weight.is_meta else mean_square(dense.weight)) if init == "he" else init

    @property
    def weight(self) -> Tensor:
        """The whole table, materialised at each access; the row `padding_idx` is zero."""
        table = super().weight
        if self.padding_idx is None:
            return table
        number = torch.arange(len(table), device=table.device)
        return table.masked_fill((number == self.padding_idx)[:, None], 0.0)

    def forward(self, index: Tensor) -> Tensor:
        y = self.rows(index.reshape(-1)).reshape(*index.shape, self.embedding_dim)
        return y if self.padding_idx is None else y.masked_fill((index == self.padding_idx)[..., None], 0.0)

    def rows(self, index: Tensor) -> Tensor:
        """``(n,) -> (n, dim)``: one row of the table for each index; those looked up are no more than the indices."""
        if index.is_floating_point() or index.dtype == torch.bool:
            raise ShapeError(f"{type(self).__name__} expects a tensor of indices, got one of {index.dtype}.")
        with own_precision(self.cores[0]):
            if traced():
                return self.factorized.rows(index)
            if self.num_embeddings <= len(index):  # the table is no larger than the result
                return F.embedding(index, self._look_up(torch.arange(self.num_embeddings, device=index.device)))
            if transformed() or index.device.type != "cpu":  # nothing may depend on a value
                return self._look_up(index)
            if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.num_embeddings:
                raise IndexError(f"Indices must lie in [0, {self.num_embeddings}), got {index.min()} to {index.max()}.")
            if self.num_embeddings < OFTEN * len(index):
                once, place = index.unique(return_inverse=True)
                return F.embedding(place, self._look_up(once))
            return self._look_up(index)

    def _look_up(self, index: Tensor) -> Tensor:
        found = None if (perf := fast()) is None else perf.rows(self.factorized, index)
        return self.factorized.rows(index) if found is None else found

    def multiply(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def plan(self, x: Tensor) -> tuple[str, float]:  # noqa: ARG002
        return "rows looked up", 0.0  # a dense table multiplies nothing


class TensorEmbeddingBag(TensorEmbedding):
    """Drop-in for `nn.EmbeddingBag` in all its modes; further keywords as of `TensorEmbedding`."""

    dense_kind = nn.EmbeddingBag
    settings = ("num_embeddings", "embedding_dim", "padding_idx", "mode", "include_last_offset")
    mode: str
    include_last_offset: bool

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        index, rows = input.reshape(-1), self.rows(input.reshape(-1))
        if traced() and input.ndim == 2:  # PyTorch's own bags would fix the size of the batch
            return self._reduced(rows.unflatten(0, input.shape), input, per_sample_weights)
        place = torch.arange(index.shape[0], device=index.device)
        if self.padding_idx is not None:  # row 0 of those that are reduced is left out
            rows, place = F.pad(rows, (0, 0, 1, 0)), (place + 1).masked_fill(index == self.padding_idx, 0)
        weights = None if per_sample_weights is None else per_sample_weights.to(rows.dtype)
        return F.embedding_bag(
            place.reshape(input.shape), rows, offsets, mode=self.mode, per_sample_weights=weights,
            include_last_offset=self.include_last_offset, padding_idx=None if self.padding_idx is None else 0,
        )  # fmt: skip

    def _reduced(self, rows: Tensor, input: Tensor, weights: Tensor | None) -> Tensor:
        """``(B, L, dim) -> (B, dim)``, by plain operations."""
        used = torch.ones_like(input) if self.padding_idx is None else input != self.padding_idx
        some = used.sum(1, keepdim=True)
        if self.mode == "max":
            return rows.masked_fill(used[..., None] == 0, -torch.inf).amax(1).masked_fill(some == 0, 0.0)
        rows = (rows if weights is None else rows * weights[..., None]) * used[..., None]
        return rows.sum(1) / (some.clamp_min(1) if self.mode == "mean" else 1)


def mean_square(weight: Tensor) -> float | str:
    """What a random start takes for the variance of a weight that replaces this one; He's if it is all zeros."""
    return float(weight.detach().float().square().mean()) or "he"
