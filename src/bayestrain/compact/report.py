"""What `compact_` reports."""

from dataclasses import dataclass, replace
from typing import Self

from bayestrain.tables import text_table


@dataclass(frozen=True)
class CompactedLayer:
    """One row of a `CompactReport`; `error` is the relative change of the weight (root mean square over particles)."""

    name: str
    ranks_before: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters_before: int
    parameters: int
    error: float = 0.0
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

    def then(self, later: Self) -> Self:
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
