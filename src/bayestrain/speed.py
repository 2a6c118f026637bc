"""What every layer of a model will do with an input, and whether it is faster than a dense layer: before it is run."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayestrain.layers import TTLayer
from bayestrain.layers.evaluation import evaluating
from bayestrain.sizes import tt_layers
from bayestrain.tables import text_table, times

SLOWER = 1.05
"""Predicted times within this factor of the dense layer's count as equal: the prediction is no better."""


@dataclass(frozen=True)
class PlannedLayer:
    """One row of a `PlanReport`: predicted seconds and multiply-adds, beside those of the dense layer."""

    name: str
    input_shape: tuple[int, ...]
    plan: str
    seconds: float
    operations: float
    dense_seconds: float
    dense_operations: float

    @property
    def ratio(self) -> float:
        """Predicted time in units of the dense layer's."""
        return self.seconds / self.dense_seconds


@dataclass(frozen=True)
class PlanReport:
    """How a model's tensor-train layers will run. Prints as a table."""

    layers: tuple[PlannedLayer, ...]
    training: bool

    @property
    def slower(self) -> tuple[str, ...]:
        """The layers that are predicted to be slower than dense ones."""
        return tuple(row.name for row in self.layers if row.ratio > SLOWER)

    @property
    def ratio(self) -> float:
        """Predicted time of all these layers in units of the dense ones'."""
        return sum(row.seconds for row in self.layers) / (sum(row.dense_seconds for row in self.layers) or 1.0)

    def verdict(self) -> str:
        """One sentence: where a tensor train cannot win, and why."""
        what = "training step" if self.training else "forward pass"
        if not self.layers:
            return "No tensor-train layer was used."
        if not self.slower:
            return f"No layer's {what} should be slower than the dense layer's; all together {self.ratio:.2f} of dense."
        few = ", ".join(self.slower[:3]) + (", .." if len(self.slower) > 3 else "")
        return (
            f"Slower than dense at these ranks, predicted: {len(self.slower)} of {len(self.layers)} layers ({few}); "
            f"all together a {what} takes {self.ratio:.2f} of dense. Ranks that fall make it faster."
        )

    def __str__(self) -> str:
        if not self.layers:
            return self.verdict()
        rows = [
            [row.name, times(row.input_shape), row.plan, f"{row.operations / row.dense_operations:.2f}",
             f"{row.seconds * 1e6:,.0f}", f"{row.dense_seconds * 1e6:,.0f}", f"{row.ratio:.2f}"]
            for row in self.layers
        ]  # fmt: skip
        header = ["layer", "input", "plan", "multiplications / dense", "us, predicted", "us, dense", "time / dense"]
        return text_table(header, rows, left_columns=3) + "\n" + self.verdict()


def plan_report(model: nn.Module, x: Tensor, training: bool = False) -> PlanReport:
    """Send `x` through the model once, in evaluation mode, and note how every call of a tensor-train layer is run.

    With `training` the plans are those of a forward and backward pass.
    """
    names = {layer: name for name, layer in tt_layers(model).items()}
    rows: list[PlannedLayer] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        assert isinstance(layer, TTLayer)
        (x,) = (*inputs, *named.values())
        costs, chosen, dense = layer.plan_costs(x), layer.plan_for(x), layer.dense_cost(x)
        cost = next(cost for cost in costs if cost.plan == chosen)
        figures = (cost.seconds, cost.operations, dense.seconds, dense.operations)
        rows.append(PlannedLayer(names[layer], tuple(x.shape), chosen.name, *figures))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in names]
    try:
        with evaluating(model), torch.set_grad_enabled(training):
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return PlanReport(tuple(rows), training)
