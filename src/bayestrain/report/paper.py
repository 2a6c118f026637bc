"""What the paper reports (Hawkins & Zhang 2019, tables 1 and 2), for the rows of the report that compare with it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PaperRow:
    """One experiment of the paper; `accuracy` as a fraction, `ranks` the inner ones where it prints them."""

    dense_params: int
    params: int
    accuracy: float
    log_likelihood: float
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times smaller than the dense network."""
        return self.dense_params / self.params


PAPER = {
    "mnist": PaperRow(496_885, 3_625, 0.978, -0.106, {"1": (8, 1, 5), "3": (13,)}),
    "cifar10-cnn": PaperRow(1_569_418, 99_376, 0.874, -0.471),
    "cifar10-resnet110": PaperRow(1_742_762, 236_651, 0.904, -0.515),
}
