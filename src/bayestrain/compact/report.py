"""What `compact_` reports."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

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
    """Per bond what the rule looked at, largest first, relative to the weight's norm: singular values, or what each
    index contributes. Of particles, the root mean square."""


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
        return any(layer.ranks != layer.ranks_before for layer in self.layers)

    @property
    def change(self) -> float:
        """The largest relative change of a layer's weight."""
        return max(layer.error for layer in self.layers)

    def then(self, later: CompactReport) -> CompactReport:
        """This report and a later one as one; of two changes of a weight it has the larger."""
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


def emptied_note(name: str, bond: str, threshold: float) -> str:
    """The note on a bond that a threshold on lambda would have emptied."""
    return (
        f"bond {bond} of {name!r} collapsed: no lambda is above {threshold}, so rank 1 was kept. An absolute threshold "
        "depends on the gauge; leave out rule='lambda'."
    )


def vanished_note(name: str, which: Sequence[int], particles: int) -> str:
    """The note on a layer whose weight is almost zero in these of its particles."""
    where = "" if particles == 1 else f" in {len(which)} of {particles} particles"
    return (
        f"the weight of {name!r} has shrunk to almost nothing{where}. The prior probably outweighed the data before "
        "they had an effect: raise warmup_steps of RankPrior (warmup_epochs of a run), or lower the prior's weight."
    )


def advice(
    rows: Sequence[CompactedLayer], gone: Container[str], *, moved: bool, own_loop: bool, budget: bool
) -> list[str]:
    """What to try where no rank `moved`, or all fell to 1.

    `gone` are layers that have vanished: for them, a larger prior weight would be bad advice. In an `own_loop`, a call
    may be missing.
    """
    notes = []
    if not moved and any(max(row.ranks, default=1) > 1 for row in rows):
        weight = "" if any(row.name in gone for row in rows) else " or with a larger prior weight"
        steps = "check that prior.loss() is in the loss and prior.step() is called after each optimiser step, "
        notes.append(f"no rank moved. Train longer{weight}, {steps if own_loop else ''}or raise tol.")
    remedy = "allow more parameters" if budget else "lower the prior weight"
    return notes + [
        f"layer {row.name!r} collapsed to rank 1 at every bond. If accuracy fell, {remedy}."
        for row in rows
        if max(row.ranks, default=1) == 1 < max(row.ranks_before, default=1) and row.name not in gone
    ]
