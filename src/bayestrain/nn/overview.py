"""`summary`: ranks, sizes and plans of a model's factorised layers in one table."""

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayestrain.nn.evaluation import evaluating
from bayestrain.nn.fast import fast
from bayestrain.nn.layer import TensorLayer
from bayestrain.nn.sizes import count_parameters, dense_parameters, factorized_weights
from bayestrain.tables import text_table, times

NAMES = 2  # so many names of layers that stay dense for one reason are printed
SLOWER = 1.05  # predicted times within this factor of the dense layer's count as equal: the prediction is no better


@dataclass(frozen=True)
class SummaryRow:
    """One factorised weight with its layer's sizes; the last four fields are empty without an input or a prediction."""

    name: str
    format: str
    layout: str
    shape: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    """The modes of the outputs, of the inputs and, in a convolution, of the taps."""
    ranks: tuple[int, ...]
    parameters: int
    dense_parameters: int
    plan: str = ""
    operations: float = 0.0
    """Multiplications relative to the dense layer's."""
    seconds: float = 0.0
    dense_seconds: float = 0.0


class Kept(NamedTuple):
    """Parameters that `tensorize_` left dense, and why."""

    name: str
    kind: str
    reason: str
    parameters: int


@dataclass(frozen=True)
class Summary:
    """What a model's factorised layers are. Prints as a table, with a verdict below it."""

    rows: tuple[SummaryRow, ...]
    parameters: int
    dense_parameters: int
    kept: tuple[Kept, ...] = ()
    """What `tensorize_` left dense."""

    def verdict(self) -> str:
        """The size, and which layers are larger than dense ones, or predicted to be slower."""
        if not self.rows:
            return f"No layer is factorised. {self.parameters:,} parameters. Call bayestrain.tensorize_(model)."
        ratio = self.dense_parameters / max(self.parameters, 1)
        said = f"{self.parameters:,} parameters, {ratio:.3g} times fewer than the dense {self.dense_parameters:,}."
        if ratio < 1:
            said = f"The model has grown, from {self.dense_parameters:,} parameters to {self.parameters:,}."
        if seconds := sum(row.seconds for row in self.rows):
            relative = seconds / sum(row.dense_seconds for row in self.rows)
            said += f" Predicted time of these layers: {relative:.2f} of dense."
        larger = [row.name for row in self.rows if row.parameters > row.dense_parameters]
        slower = [row.name for row in self.rows if row.seconds > SLOWER * row.dense_seconds]
        for what, names in (("Larger", larger), ("Slower", slower)):
            if names:
                said += f" {what} than dense at these ranks: {', '.join(names)}. Lower ranks help."
        return said

    def __str__(self) -> str:
        header = ["layer", "format", "shape", "modes", "ranks", "parameters", "dense", "times smaller"]
        header += ["runs", "multiplications / dense", "time / dense"]
        rows = [
            [
                row.name, f"{row.format} {row.layout}", times(row.shape), ", ".join(map(times, row.splits)),
                " ".join(map(str, row.ranks)), f"{row.parameters:,}", f"{row.dense_parameters:,}",
                f"{row.dense_parameters / row.parameters:.3g}", row.plan,
                f"{row.operations:.2f}" if row.plan else "",
                f"{row.seconds / row.dense_seconds:.2f}" if row.seconds else "",
            ] for row in self.rows
        ]  # fmt: skip
        if not any(row.plan for row in self.rows):
            header, rows = header[:8], [cells[:8] for cells in rows]
        table = [text_table(header, rows, left_columns=5)] if rows else []
        return "\n".join([*table, *self._dense(), self.verdict()])

    def _dense(self) -> list[str]:
        """A table of what stayed dense, by type and reason, the most parameters first."""
        groups: dict[tuple[str, str], list[Kept]] = defaultdict(list)
        for own in self.kept:
            groups[own.kind, own.reason].append(own)
        size, rows = {key: sum(own.parameters for own in found) for key, found in groups.items()}, []
        for key, n in sorted(size.items(), key=lambda item: -item[1]):
            names = [own.name for own in groups[key]]
            shown = ", ".join(names[:NAMES] + [".."] * (len(names) > NAMES))
            rows.append([*key, shown, str(len(names)), f"{n:,}", f"{n / max(self.dense_parameters, 1):.1%}"])
        header = ["stays dense", "why", "names", "number", "parameters", "share"]
        return ["", text_table(header, rows, left_columns=3), ""] if rows else []


def summary(model: nn.Module, x: Tensor | None = None, training: bool = False) -> Summary:
    """Ranks and sizes of every factorised layer; with an input also how each one runs and how long it should take.

    Args:
        model: any module.
        x: an input to send through the model once, in evaluation mode.
        training: predict a forward and backward pass instead of a forward pass.
    """
    plans, rows = {} if x is None else _plans(model, x, training), []
    for name, weight in factorized_weights(model).items():
        layout, layer = weight.layout, model.get_submodule(name)
        sizes = layout.shape, layout.splits, weight.format.shown_ranks(weight.ranks)
        numbers = count_parameters(layer), dense_parameters(layer)
        rows.append(SummaryRow(name, weight.format.name, layout.name, *sizes, *numbers, *plans.get(layer, ())))
    return Summary(tuple(rows), count_parameters(model), dense_parameters(model))


def _plans(model: nn.Module, x: Tensor, training: bool) -> dict[nn.Module, tuple[Any, ...]]:
    """How every factorised layer runs its last input."""
    found: dict[nn.Module, tuple[Any, ...]] = {}

    def note(layer: TensorLayer, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        (given, *_), perf = (*args, *kwargs.values()), fast()
        found[layer] = (perf and perf.expect(layer, given, training)) or layer.plan(given)

    with ExitStack() as hooks, evaluating(model), torch.no_grad():
        for module in model.modules():
            if isinstance(module, TensorLayer):
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        model(x)
    return found
