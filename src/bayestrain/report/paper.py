"""What the paper reports (Hawkins & Zhang 2019, tables 1 and 2), for the rows of the report that compare with it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Published:
    """The paper's figures of one kind of network; None where it prints none or we have not recorded it."""

    params: int
    ratio: float
    accuracy: float | None = None
    log_likelihood: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """One experiment of the paper; accuracies as fractions, `ranks` the inner ones where it prints them.

    `params`, `accuracy` and `log_likelihood` are those of the network that found its ranks, `dense_...` those of the
    ordinary one, and `tensorized_params` is the size at full ranks. `note` says what to know when comparing. `epochs`
    are those that our presets of the experiment have, of which a run may have had fewer.
    """

    dense_params: int
    params: int
    accuracy: float
    log_likelihood: float
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensorized_params: int | None = None
    dense_accuracy: float | None = None
    note: str = ""
    epochs: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times smaller than the dense network."""
        return self.dense_params / self.params

    def of(self, kind: str) -> Published | None:
        """Its network of this kind: "dense", "tensorized", else the one that found its ranks."""
        if kind == "dense":
            return Published(self.dense_params, 1.0, self.dense_accuracy)
        if kind != "tensorized":
            return Published(self.params, self.ratio, self.accuracy, self.log_likelihood)
        params = self.tensorized_params
        return Published(params, self.dense_params / params) if params else None


PAPER = {
    "mnist": PaperRow(
        496_885, 3_625, 0.978, -0.106, {"1": (8, 1, 5), "3": (13,)}, tensorized_params=27_235, dense_accuracy=0.921,
        note="The paper’s dense network for MNIST has no ReLU between its two layers; ours has one.",
        epochs={"default": 95, "paper": 100},
    ),
    "cifar10-cnn": PaperRow(
        1_569_418, 99_376, 0.874, -0.471, tensorized_params=686_868, dense_accuracy=0.890,
        note="The paper’s BTNN has the shapes of its code, not of its text; ours has modes of its own and rank 60.",
        epochs={"default": 180, "paper": 100},
    ),
    "cifar10-resnet110": PaperRow(
        1_742_762, 236_651, 0.904, -0.515, tensorized_params=644_790, dense_accuracy=0.926,
        note="The paper leaves the first 36 layers dense, ours only the first, but for the preset `paper`. It does not "
        "give the shapes of its BTNN; with ours, full ranks of 20 take fewer parameters.",
        epochs={"default": 180, "paper": 200},
    ),
}  # fmt: skip
