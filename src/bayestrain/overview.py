"""`summary`: ranks, sizes and plans of a model's factorised layers in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """One factorised weight with its layer's sizes; the last four fields are None without an input or a prediction."""

    name: str
    format: str
    layout: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters: int
    dense_parameters: int
    plan: str | None = None
    operations: float | None = None
    """Multiplications relative to the dense layer's."""
    seconds: float | None = None
    dense_seconds: float | None = None


@dataclass(frozen=True)
class Summary:
    """What a model's factorised layers are. Prints as a table, with a verdict below it."""

    rows: tuple[SummaryRow, ...]
    parameters: int
    dense_parameters: int

    def verdict(self) -> str:
        """The size, and which layers are predicted to be slower than dense ones."""
        if not self.rows:
            return f"No layer is factorised. {self.parameters:,} parameters. Call bayestrain.tensorize_(model)."
        ratio = self.dense_parameters / max(self.parameters, 1)
        said = f"{self.parameters:,} parameters, {ratio:.3g} times fewer than the dense {self.dense_parameters:,}."
        timed = [(row.name, row.seconds, row.dense_seconds) for row in self.rows if row.seconds and row.dense_seconds]
        if timed:
            relative = sum(seconds for _, seconds, _ in timed) / sum(dense for _, _, dense in timed)
            said += f" Predicted time of these layers: {relative:.2f} of dense."
        if slower := [name for name, seconds, dense in timed if seconds > SLOWER * dense]:
            few = ", ".join(slower[:3]) + (", .." if len(slower) > 3 else "")
            said += f" Slower than dense at these ranks: {len(slower)} of {len(timed)} ({few}). Lower ranks are faster."
        return said

    def __str__(self) -> str:
        if not self.rows:
            return self.verdict()
        header = ["layer", "format", "shape", "ranks", "parameters", "dense", "times smaller"]
        if any(row.plan is not None for row in self.rows):
            header += ["runs", "multiplications / dense", "time / dense"]
        rows = []
        for row in self.rows:
            ratio = row.seconds / row.dense_seconds if row.seconds and row.dense_seconds else None
            cells = [
                row.name, f"{row.format} {row.layout}", times(row.shape), " ".join(map(str, row.ranks)),
                f"{row.parameters:,}", f"{row.dense_parameters:,}", f"{row.dense_parameters / row.parameters:.3g}",
                row.plan or "", *("" if value is None else f"{value:.2f}" for value in (row.operations, ratio)),
            ]  # fmt: skip
            rows.append(cells[: len(header)])
        return text_table(header, rows, left_columns=4) + "\n" + self.verdict()


def summary(model: nn.Module, x: Tensor | None = None, training: bool = False) -> Summary:
    """Ranks and sizes of every factorised layer; with an input also how each one runs and how long it should take.

    Args:
        model: any module.
        x: an input to send through the model once, in evaluation mode.
        training: predict a forward and backward pass instead of a forward pass.
    """
    inputs = {} if x is None else _inputs(model, x)
    rows = []
    for name, weight in model.named_modules():
        if isinstance(weight, FactorizedWeight):
            layer = model.get_submodule(layer_name(name))
            known = layer_name(name), weight.format.name, weight.layout.name, weight.shape
            ranks = weight.format.shown_ranks(weight.ranks)
            left, dense = count_parameters(layer), dense_parameters(layer)
            plan: tuple[Any, ...] = ()
            if isinstance(layer, TensorLayer) and layer in inputs:
                perf, given = fast(), inputs[layer]
                plan = (perf and perf.expect(layer, given, training)) or layer.plan(given)
            rows.append(SummaryRow(*known, ranks, left, dense, *plan))
    return Summary(tuple(rows), count_parameters(model), dense_parameters(model))


def _inputs(model: nn.Module, x: Tensor) -> dict[nn.Module, Tensor]:
    """The last input of every factorised layer."""
    found: dict[nn.Module, Tensor] = {}

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
