"""What `compact_` reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bayestrain.compact.rules import Cut
from bayestrain.compact.weights import Weight
from bayestrain.tables import text_table


@dataclass(frozen=True)
class CompactedLayer:
    """One row of a `CompactReport`; `error` is the relative change of the weight (root mean square over particles)."""

    name: str
    ranks_before: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters_before: int
    parameters: int
    error: float
    spectra: tuple[tuple[float, ...], ...] = ()
    """Per bond what the rule compared, largest first, relative to the weight's norm: singular values, or what each
    index contributes. Of particles, the root mean square."""

    @property
    def changed(self) -> bool:
        """Whether any rank fell."""
        return self.ranks != self.ranks_before


@dataclass(frozen=True)
class CompactReport:
    """What `compact_` did. Prints as a table, with advice where something looks wrong."""

    rule: str
    tol: float
    layers: tuple[CompactedLayer, ...]
    parameters_before: int
    parameters: int
    notes: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether any rank fell."""
        return any(layer.changed for layer in self.layers)

    @property
    def change(self) -> float:
        """The largest relative change of a layer's weight."""
        return max(layer.error for layer in self.layers)

    def then(self, later: CompactReport) -> CompactReport:
        """This report merged with a later one; of two changes of a weight it keeps the larger."""
        rows = [
            replace(after, ranks_before=row.ranks_before, parameters_before=row.parameters_before,
                    error=max(row.error, after.error), spectra=row.spectra or after.spectra)
            for row, after in zip(self.layers, later.layers, strict=True)
        ]  # fmt: skip
        notes = tuple(dict.fromkeys((*self.notes, *later.notes)))
        return replace(later, layers=tuple(rows), parameters_before=self.parameters_before, notes=notes)

    def __str__(self) -> str:
        rows = [
            [row.name, " ".join(map(str, row.ranks_before)), " ".join(map(str, row.ranks)),
             f"{row.parameters_before:,}", f"{row.parameters:,}", f"{row.error:.1e}"]
            for row in self.layers
        ]  # fmt: skip
        rows.append(["whole model", "", "", f"{self.parameters_before:,}", f"{self.parameters:,}", ""])
        header = ["layer", "ranks before", "ranks", "parameters before", "parameters", "error"]
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return text_table(header, rows, left_columns=3) + notes


def notes_on(
    weights: Sequence[Weight], cuts: Sequence[Cut | None], rows: Sequence[CompactedLayer], tol: float, budget: bool
) -> tuple[str, ...]:
    """What looks wrong after these cuts, and what to try."""
    notes = [
        f"bond {bond} of {weight.name!r} collapsed: no lambda is above {tol}, so rank 1 was kept. An absolute "
        "threshold depends on the gauge; leave out rule='lambda'."
        for weight, cut in zip(weights, cuts, strict=True)
        for bond in (cut.emptied if cut else ())
    ]
    emptied, vanished = bool(notes), {weight.name: which for weight in weights if (which := weight.vanished)}
    for name, which in vanished.items():
        where = f" in {len(which)} of {weights[0].number} particles" if weights[0].number > 1 else ""
        notes.append(
            f"the weight of {name!r} has shrunk to almost nothing{where}. The prior probably outweighed the data "
            "before they had an effect: raise warmup_steps of RankPrior (warmup_epochs of a run), or lower the prior's "
            "weight."
        )
    if emptied:
        return tuple(notes)
    moved = budget or any(weight.has_been_cut for weight in weights) or any(row.changed for row in rows)
    if not moved and any(max(row.ranks, default=1) > 1 for row in rows):
        larger = "" if vanished else " or with a larger prior weight"
        steps = "check that prior.loss() is in the loss and prior.step() is called after each optimiser step, "
        own_loop = steps if weights[0].posterior is None else ""
        notes.append(f"no rank moved. Train longer{larger}, {own_loop}or raise tol.")
    remedy = "allow more parameters" if budget else "lower the prior weight"
    return (
        *notes,
        *(
            f"layer {row.name!r} collapsed to rank 1 at every bond. If accuracy fell, {remedy}."
            for row in rows
            if row.changed and max(row.ranks) == 1 and row.name not in vanished
        ),
    )
