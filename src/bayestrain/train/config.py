"""What a training run is made of: frozen dataclasses, each setting with its meaning and its allowed values.

A TOML file has the same sections and names (`bayestrain.train.toml` reads and writes it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from bayestrain.errors import ConfigError
from bayestrain.tables import times
from bayestrain.train.settings import LayerModes, Rule, checked, setting, shown, suggestion

PRESETS = ("default", "paper")

KINDS = ("low-rank", "tensorized", "dense")
"""The paper's three models: ranks are sought; all ranks stay; no tensor trains at all."""

INPUTS = {
    "mnist_mlp": (1, 28, 28),
    "cifar10_cnn": (3, 32, 32),
    "resnet110": (3, 32, 32),
    "resnet110_keras": (3, 32, 32),
}
"""The networks of `bayestrain.models`, and the images they take."""

IMAGES = {"mnist-mini": (1, 28, 28), "mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
"""The data sets of `bayestrain.data`, and their images."""

RULES = ("rounding", "lambda")

STARTS = ("independent", "jitter")

OUTSIDE = ("none", "patches", *IMAGES)
"""Images from outside of the training data: none, the test images with their patches shuffled, or a data set."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings. Making one checks every value."""

    title: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = check(type(self), field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(Section):
    """Which network is trained, and how."""

    title: ClassVar[str] = "experiment"

    name: str = setting("what the run is called")
    preset: str = setting("whose modes, ranks, prior and training", "default", choices=PRESETS)
    kind: str = setting(
        "tensor trains that seek ranks, that keep all of them, or none; only the first is ever cut",
        "low-rank",
        choices=KINDS,
    )
    model: str = setting("the network", choices=tuple(INPUTS))
    from_run: str = setting("folder of a finished run whose network is trained further; empty: a new network", "")
    seed: int = setting("seed of every random choice", 0, at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Images and their augmentation."""

    title: ClassVar[str] = "data"

    name: str = setting("the data set", choices=tuple(IMAGES))
    folder: str = setting("where its files are; empty: the cache, then the mirrors", "")
    normalize: bool = setting("shift and scale pixels to mean 0 and variance 1; else they stay in [0, 1]", True)
    validation_fraction: float = setting("part of the training images held out to watch", 0.1, at_least=0, below=1)
    pad_crop: int = setting("pad by so many pixels, then crop at random; 0: off", 0, at_least=0, at_most=27)
    flip: bool = setting("mirror half of the images left to right", False)
    cutout: int = setting("blank a square of so many pixels at a random place; 0: off", 0, at_least=0, at_most=27)
    shift: int = setting("move by up to so many pixels at random; 0: off", 0, at_least=0, at_most=27)


@dataclass(frozen=True, kw_only=True)
class TensorizeSettings(Section):
    """How the network becomes tensor trains."""

    title: ClassVar[str] = "tensorize"

    max_rank: int = setting("rank every bond starts with", 20, at_least=1)
    init: str = setting("variance of the weights at the start", "he", choices=("he", "paper"))
    keep_dense: tuple[str, ...] = setting("layers left dense, * ? and [..] allowed in their names", ())
    modes: Mapping[str, LayerModes] = setting("modes per layer; those not named are factored automatically", {})


@dataclass(frozen=True, kw_only=True)
class PriorConfig(Section):
    """The prior that drives ranks to zero."""

    title: ClassVar[str] = "prior"

    a: float = setting("shape of the Gamma prior on lambda", 1.0, above=0)
    b: float = setting("rate of the Gamma prior on lambda", 5.0, above=0)
    hold_scale: bool = setting("hold the size of weights that a batch norm makes free", True)
    weight: float = setting("weight of the prior; 1 is Bayes, less keeps more ranks", 1.0, at_least=0)
    warmup_epochs: float = setting("epochs over which the weight rises from 0", 5.0, at_least=0, at_most=1e6)
    update: str = setting("how lambda moves", "newton", choices=("newton", "gradient"))
    floor: float = setting("smallest lambda of a bond, relative to its largest", 1e-3, above=0, below=1)
    other_variance: float = setting("prior variance of biases and dense layers", 100.0, above=0)
    align_every: int = setting("steps between alignments of the rank indices; 0: never", 100, at_least=0)


@dataclass(frozen=True, kw_only=True)
class FitConfig(Section):
    """The training loop."""

    title: ClassVar[str] = "fit"

    epochs: int = setting("passes over the training images while ranks are sought", at_least=1)
    batch_size: int = setting("images per step", at_least=1)
    optimizer: str = setting(
        "the optimiser; not for posterior.method sgld, which is one", "adam", choices=("adam", "adamw", "sgd", "muon")
    )
    lr: float = setting("learning rate at its highest", above=0)
    weight_decay: float = setting("weight decay of the optimiser, beside the prior", 0.0, at_least=0)
    momentum: float = setting("momentum; sgd only", 0.9, at_least=0, below=1)
    schedule: str = setting("how the learning rate falls", "cosine", choices=("cosine", "step", "constant"))
    milestones: tuple[float, ...] = setting(
        "when the rate falls, as parts of the schedule; step only", (), above=0, below=1
    )
    gamma: float = setting("what the rate is multiplied by at a milestone; step only", 0.1, above=0, at_most=1)
    lr_warmup_epochs: float = setting("epochs over which the learning rate rises from 0", 0.0, at_least=0)
    precision: str = setting(
        "arithmetic of the forward pass; tf32 only on a GPU", "float32", choices=("float32", "tf32", "bf16")
    )
    clip_norm: float = setting("largest gradient norm; 0: no clipping", 0.0, at_least=0)
    compact_every: int = setting("epochs between cuts of the ranks during training; 0: only at the end", 2, at_least=0)
    compact_from: float = setting("epoch of the first cut", 5.0, at_least=0)
    compact_tol: float = setting("relative change of a layer that a cut may make", 1e-2, at_least=0, below=1)
    rule: str = setting(
        "how the final ranks are found: rounding, or the paper's threshold on lambda", "rounding", choices=RULES
    )
    round_tol: float = setting(
        "relative change of a layer that the final rounding may make, if no size is asked for or no epoch is left; "
        "the threshold of rule lambda",
        1e-2,
        at_least=0,
        below=1,
    )
    target_ratio: float = setting(
        "cut until the network is so many times smaller than dense, and search no longer; 0: as tolerances have it",
        0.0,
        at_least=0,
    )
    finetune_epochs: int = setting(
        "epochs without prior after the final rounding; more, if a target ends the search early", 3, at_least=0
    )
    finetune_lr: float = setting(
        "learning rate of those epochs; 0: the schedule goes on through them", 1e-3, at_least=0
    )
    tensorboard: bool = setting("write TensorBoard logs as well", False)
    checkpoint_every: int = setting("epochs between checkpoints", 1, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.target_ratio <= 1:
            raise ConfigError(f"fit.target_ratio must be above 1, or 0 for none, got {self.target_ratio:g}.")
        if self.schedule == "step" and not self.milestones:
            raise ConfigError('fit.schedule "step" needs fit.milestones, for example [0.5, 0.75].')
        if any(a >= b for a, b in pairwise(self.milestones)):
            raise ConfigError(f"fit.milestones must rise, got {shown(self.milestones)}.")


@dataclass(frozen=True, kw_only=True)
class PosteriorConfig(Section):
    """Particles instead of a point, for predictions that say how sure they are."""

    title: ClassVar[str] = "posterior"

    particles: int = setting("networks that make up the posterior, 2 or more; 0: a single point (MAP)", 0, at_least=0)
    method: str = setting("how they move", "svgd", choices=("svgd", "ensemble", "sgld"))
    start: str = setting("where they start: apart, or around a MAP point", "independent", choices=STARTS)
    kernel: str = setting("the kernel; svgd only", "rbf", choices=("rbf", "imq"))
    temperature: float = setting("1 samples the posterior, less a sharper one; sgld only", 1.0, at_least=0)
    jitter: float = setting("distance from the MAP point, relative to each tensor's size; jitter only", 1e-2, above=0)
    jitter_epochs: int = setting("epochs around the MAP point; jitter only", 12, at_least=1)
    chunk: int = setting("particles that go through the network at once; 0: by the memory there is", 0, at_least=0)
    calibrate: bool = setting("find the particles' common temperature on the held-out images", True)
    compare_map: bool = setting("train the MAP point of the same settings too, or take --map; jitter always does", True)
    outside: str = setting("images unlike the training data, to test the uncertainty on", "none", choices=OUTSIDE)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides a run's outcome. Complete, comparable, hashable."""

    experiment: ExperimentConfig
    data: DataConfig
    tensorize: TensorizeSettings
    prior: PriorConfig
    fit: FitConfig
    posterior: PosteriorConfig

    def __post_init__(self) -> None:
        takes, gets = INPUTS[self.experiment.model], IMAGES[self.data.name]
        if takes != gets:
            fitting = " or ".join(shown(name) for name, shape in IMAGES.items() if shape == takes)
            raise ConfigError(
                f"experiment.model {shown(self.experiment.model)} takes {times(takes)} images, but those of data.name "
                f"{shown(self.data.name)} are {times(gets)}. Use {fitting}."
            )
        if self.fit.target_ratio and (self.experiment.kind != "low-rank" or self.fit.rule != "rounding"):
            raise ConfigError(
                'fit.target_ratio needs experiment.kind "low-rank" and fit.rule "rounding", got '
                f"{shown(self.experiment.kind)} and {shown(self.fit.rule)}: nothing else is rounded to a size."
            )
        if self.posterior.particles == 1:
            raise ConfigError(
                "posterior.particles is 1, but a posterior needs at least 2 particles. Use 0 for a single point (MAP)."
            )
        if self.posterior.particles and self.experiment.from_run:
            raise ConfigError(
                "experiment.from_run is for a single network. A posterior around that of a finished run: --map, with "
                'posterior.start="jitter".'
            )
        method = self.posterior.method
        if self.posterior.kernel != "rbf" and method != "svgd":
            raise ConfigError(f"posterior.kernel is for method svgd only, not for {method}. Leave it out.")
        if self.posterior.temperature != 1 and method != "sgld":
            raise ConfigError(f"posterior.temperature is for method sgld only, not for {method}. Leave it out.")
        if self.posterior.particles and self.posterior.calibrate and not self.data.validation_fraction:
            raise ConfigError(
                "posterior.calibrate needs images held out from training, but data.validation_fraction is 0. "
                "Hold some out, for example 0.05, or set posterior.calibrate=false."
            )
        outside = self.posterior.outside
        if outside.removesuffix("-mini") == self.data.name.removesuffix("-mini"):
            raise ConfigError(
                f"posterior.outside {shown(outside)} is no other data than data.name {shown(self.data.name)}: nothing "
                'could be told apart. Use "patches", which are made from the test images, or another data set.'
            )
        if outside in IMAGES and IMAGES[outside] != takes:
            raise ConfigError(
                f"posterior.outside {shown(outside)} has {times(IMAGES[outside])} images, but the network takes "
                f'{times(takes)}. Use "patches", which are made from the test images, or "none".'
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections of plain values, as TOML or JSON hold them."""
        return {
            section: {key: _plain(value) for key, value in vars(getattr(self, section)).items()} for section in SECTIONS
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """The config with these settings and the defaults of all others."""
        given = check_settings(settings)
        lacking = [
            f"{section}.{field.name}"
            for section, field, _ in all_settings()
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in given.get(section, {})
        ]
        if lacking:
            raise ConfigError(f"There is no value for {', '.join(lacking)}.")
        sections: dict[str, Any] = {title: make(**given.get(title, {})) for title, make in SECTIONS.items()}
        return cls(**sections)

    def replace(self, section: str, **settings: object) -> Self:
        """The same config with other values in one section: ``config.replace("fit", epochs=3)``."""
        changed = dataclasses.replace(getattr(self, section), **settings)
        return dataclasses.replace(self, **{section: changed})


SECTIONS: dict[str, type[Section]] = {
    section.title: section
    for section in (ExperimentConfig, DataConfig, TensorizeSettings, PriorConfig, FitConfig, PosteriorConfig)
}


def all_settings() -> Iterator[tuple[str, dataclasses.Field[Any], Rule]]:
    """(section, field, rule) of every setting there is, in order."""
    for section, make in SECTIONS.items():
        for field in dataclasses.fields(make):
            yield section, field, field.metadata["rule"]


def check(section: type[Section], key: str, value: object) -> Any:
    """The value of one setting in its own type, or a `ConfigError` that says what is allowed."""
    field = {field.name: field for field in dataclasses.fields(section)}[key]
    return checked(f"{section.title}.{key}", value, str(field.type), field.metadata["rule"])


def check_settings(
    settings: Mapping[str, object], place: Callable[[tuple[str, ...]], str] = lambda _: ""
) -> dict[str, dict[str, Any]]:
    """Check some settings, not necessarily all, by section; `place(keys)` says where a setting was written."""
    given: dict[str, dict[str, Any]] = {}
    for title, table in settings.items():
        section = SECTIONS.get(title)
        if section is None:
            raise ConfigError(f"{place((title,))}{unknown((title,))}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{place((title,))}{title} must be a section of settings, [{title}], got {shown(table)}.")
        given[title] = {}
        names = [field.name for field in dataclasses.fields(section)]
        for key, value in table.items():
            if key not in names:
                raise ConfigError(f"{place((title, key))}{unknown((title, key))}")
            entries = [{name: entry} for name, entry in value.items()] if isinstance(value, Mapping) else [value]
            for entry in entries:  # a table entry by entry, to name the place of the wrong one
                try:
                    check(section, key, entry)
                except ConfigError as error:
                    keys = (title, key, *(entry if isinstance(entry, dict) else ()))
                    raise ConfigError(f"{place(keys)}{error}") from None
            given[title][key] = check(section, key, value)
    return given


def unknown(keys: tuple[str, ...]) -> str:
    """The message for a setting that does not exist: the nearest one, or all there are."""
    written = ".".join(keys)
    everything = [f"{section}.{field.name}" for section, field, _ in all_settings()]
    same = [name for name in everything if name.endswith(f".{keys[-1]}")]  # right name, wrong or no section
    there = [name for name in everything if name.startswith(f"{keys[0]}.")]
    near = there or [name for name in (*SECTIONS, "base", *everything) if name != written]
    hint = f" Did you mean {shown(same[0])}?" if same else suggestion(written, near)
    listed = f"[{keys[0]}] has {', '.join(name.split('.')[1] for name in there)}" if there else (
        f"The sections are {', '.join(SECTIONS)}"
    )  # fmt: skip
    if len(keys) == 1 and there:
        return f"{shown(written)} is a section, not a setting. {listed}."
    return f"There is no setting {shown(written)}.{hint} {listed}."


IMMATERIAL = ("data.folder", "fit.checkpoint_every", "fit.tensorboard")
"""Settings that do not change what is trained: a run may go on with others."""


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Every setting that matters in which two configs differ: ``["fit.lr: 0.01, now 0.02"]``."""
    before, after = old.to_dict(), new.to_dict()
    return [
        f"{section}.{key}: {shown(value)}, now {shown(after[section][key])}"
        for section, table in before.items()
        for key, value in table.items()
        if value != after[section][key] and f"{section}.{key}" not in IMMATERIAL
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
