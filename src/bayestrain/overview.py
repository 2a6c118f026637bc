"""`summary`: ranks, sizes and plans of a model's factorised layers in one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayestrain.nn.evaluation import evaluating
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.fast import fast
from bayestrain.nn.layer import TensorLayer
from bayestrain.nn.sizes import count_parameters, dense_parameters, layer_name
from bayestrain.tables import text_table, times

SLOWER = 1.05
"""Predicted times within this factor of the dense layer's count as equal: the prediction is no better."""


@dataclass(frozen=True)
class SummaryRow:
    """One factorised weight; the last five fields are None without an input, or where nothing is known."""

    name: str
    format: str
    layout: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: int
    dense_parameters: int
    input_shape: tuple[int, ...] | None = None
    plan: str | None = None
    operations: float | None = None
    """Multiplications relative to the dense layer's."""
    seconds: float | None = None
    dense_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted time relative to the dense layer's."""
        return None if self.seconds is None or not self.dense_seconds else self.seconds / self.dense_seconds


@dataclass(frozen=True)
class Summary:
    """What a model's factorised layers are. Prints as a table."""

    rows: tuple[SummaryRow, ...]
    parameters: int
    dense_parameters: int
    training: bool

    @property
    def ratio(self) -> float:
        """How many times smaller the model is than with dense layers."""
        return self.dense_parameters / max(self.parameters, 1)

    def verdict(self) -> str:
        """One or two sentences: the size, and where the layers are predicted to be slower than dense ones."""
        size = f"{self.parameters:,} parameters, {self.ratio:.3g} times fewer than the dense {self.dense_parameters:,}."
        if not self.rows:
            return f"No layer is factorised. {self.parameters:,} parameters. Call bayestrain.tensorize_(model)."
        timed = [row for row in self.rows if row.ratio is not None]
        if not timed:
            return size
        what = "training step" if self.training else "forward pass"
        seconds, dense = (
            sum(v or 0.0 for v in vs) for vs in zip(*((r.seconds, r.dense_seconds) for r in timed), strict=True)
        )
        slower = [row.name for row in timed if (row.ratio or 0.0) > SLOWER]
        if not slower:
            return f"{size} Predicted time of these layers in a {what}: {seconds / dense:.2f} of dense."
        few = ", ".join(slower[:3]) + (", .." if len(slower) > 3 else "")
        return (
            f"{size} Predicted to be slower than dense at these ranks: {len(slower)} of {len(timed)} layers ({few}); "
            f"together their {what} takes {seconds / dense:.2f} of dense. Lower ranks make it faster."
        )

    def __str__(self) -> str:
        if not self.rows:
            return self.verdict()
        header = ["layer", "format", "shape", "ranks", "parameters", "dense", "times smaller"]
        planned = any(row.plan is not None for row in self.rows)
        rows = []
        for row in self.rows:
            line = [
                row.name, f"{row.format} {row.layout}", times(row.shape), " ".join(map(str, row.ranks)),
                f"{row.parameters:,}", f"{row.dense_parameters:,}", f"{row.dense_parameters / row.parameters:.3g}",
            ]  # fmt: skip
            if planned:
                work = "" if row.operations is None else f"{row.operations:.2f}"
                line += [row.plan or "", work, "" if row.ratio is None else f"{row.ratio:.2f}"]
            rows.append(line)
        left = 4
        if planned:
            header += ["runs", "multiplications / dense", "time / dense"]
        return text_table(header, rows, left_columns=left) + "\n" + self.verdict()


def summary(model: nn.Module, x: Tensor | None = None, training: bool = False) -> Summary:
    """Ranks and sizes of every factorised layer; with an input also how each one runs and how long it should take.

    Args:
        model: any module.
        x: an input to send through the model once, in evaluation mode.
        training: predict a forward and backward pass instead of a forward pass.
    """
    inputs = {} if x is None else _inputs(model, x)
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, FactorizedWeight):
            owner = model.get_submodule(layer_name(name)) if layer_name(name) != name else None
            layer = owner if isinstance(owner, TensorLayer) else None
            known = (
                layer_name(name), module.format.name, module.layout.name, module.shape,
                module.format.shown_ranks(module.ranks),
                module.numel if layer is None else layer.parameters_left,
                module.dense_numel if layer is None else layer.dense_parameters,
            )  # fmt: skip
            rows.append(
                SummaryRow(
                    *known, *(_plan(layer, inputs[layer], training) if layer is not None and layer in inputs else ())
                )
            )
    return Summary(tuple(rows), count_parameters(model), dense_parameters(model), training)


def _inputs(model: nn.Module, x: Tensor) -> dict[nn.Module | None, Tensor]:
    """The last input of every factorised layer."""
    found: dict[nn.Module | None, Tensor] = {}

    def note(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        (found[layer],) = (*args, *kwargs.values())

    layers = [module for module in model.modules() if isinstance(module, TensorLayer)]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with evaluating(model), torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _plan(
    layer: TensorLayer, x: Tensor, training: bool
) -> tuple[tuple[int, ...], str, float, float | None, float | None]:
    """The input's shape, how the layer runs on it, multiplications relative to dense, and predicted seconds."""
    perf = fast()
    expected = None if perf is None else perf.expect(layer, x, training)
    if expected is not None:
        return (tuple(x.shape), *expected)
    return tuple(x.shape), *layer.plan(x), None, None
