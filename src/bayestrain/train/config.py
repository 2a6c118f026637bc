"""The settings of a run: frozen dataclasses that check their values, and the TOML files that hold them."""

import difflib
import json
import operator
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin

import tomli_w

from bayestrain.errors import ConfigError
from bayestrain.files import check_files

KINDS: dict[Any, tuple[Any, str]] = {  # of every type of setting: what it accepts, and the words for it
    str: (str, "text in quotes"), bool: (bool, "true or false"), int: (Integral, "an integer"),
    float: (Real, "a number"), dict: (Mapping, "a table"),
}  # fmt: skip

LARGEST = {int: 2**63 - 1, float: 1e38}  # what PyTorch and single precision hold

BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def setting(help: str, default: Any = MISSING, *, choices: tuple[str, ...] = (), **bounds: float) -> Any:
    """A dataclass field with its help, and the values it may take: `choices`, or `BOUNDS`."""
    return field(default=default, metadata={"help": help, "choices": choices, "bounds": bounds})


def plain(value: Any) -> Any:
    """A value as JSON and TOML hold it: tuples become lists."""
    return json.loads(json.dumps(value))


def shown(value: object) -> str:
    """A value as a TOML file has it, shortened if long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint at the most similar known name, if there is one."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {shown(near[0])}?" if near else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings. Creating one checks every value; lists become tuples, and NumPy's numbers Python's."""

    title: ClassVar[str]

    def __init_subclass__(cls, title: str) -> None:
        cls.title = title

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, self._checked(each, getattr(self, each.name)))

    def _checked(self, each: Field[Any], value: Any) -> Any:
        choices, bounds = each.metadata["choices"], each.metadata["bounds"]
        many = get_origin(each.type) is tuple
        kind: Any = get_args(each.type)[0] if many else get_origin(each.type) or each.type
        accepted, words = KINDS[kind]

        def fits(one: Any) -> bool:
            right = isinstance(one, accepted) and isinstance(one, bool) == (kind is bool)
            if right and kind in (int, float):
                right = abs(one) <= LARGEST[kind] and all(BOUNDS[word](one, bound) for word, bound in bounds.items())
            return right and (not choices or one in choices)

        if isinstance(value, list | tuple) == many and all(map(fits, value if many else [value])):
            return tuple(map(kind, value)) if many else kind(value)
        limits = " and ".join(f"{word.replace('_', ' ')} {bound:.10g}" for word, bound in bounds.items())
        words = f"one of {', '.join(map(shown, choices))}" if choices else f"{words} {limits}".rstrip()
        words = f"a list, each {words}" if many else words
        raise ConfigError(f"{self.title}.{each.name} must be {words}, got {shown(value)}.{nearest(value, choices)}")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Section, title="run"):
    """What is trained."""

    name: str = setting("name of the run, for its folder and its report", "run")
    model: str = setting('function without arguments that builds the network: "package.module:name" or "file.py:name"')
    data: str = setting("function without arguments that returns (train, validation[, test]), or an object with these")
    likelihood: str = setting('"classification", "regression", or "package.module:name" of your own', "classification")
    seed: int = setting("seed of all random numbers", 0, at_least=0, at_most=2**32 - 1)
    from_run: str = setting("finished run whose network is trained further, or that particles start around", "")


@dataclass(frozen=True, kw_only=True)
class TensorizeSettings(Section, title="tensorize"):
    """How layers are factorised."""

    enabled: bool = setting("factorise the linear and convolution layers; false leaves the network as it is", True)
    format: str = setting('low-rank format, one of bayestrain.formats, or "auto"', "tt")
    layout: str = setting("how a weight folds into modes", "paired", choices=("paired", "split", "auto"))
    max_rank: int = setting("rank of every bond at the start", 20, at_least=1)
    init: str = setting("values at the start: random, or from the dense weights", "he", choices=("he", "paper", "svd"))
    tol: float = setting('relative error of init "svd"', 0.0, at_least=0, below=1)
    keep_dense: tuple[str, ...] = setting("layers to leave dense; their names may contain * ? and [..]", ())
    modes: dict[str, Any] = field(default_factory=dict, metadata={
        "help": "layer = [[in modes], [out modes]]; all others are chosen automatically", "choices": (), "bounds": {},
    })  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PriorConfig(Section, title="prior"):
    """The prior that prunes ranks the data do not support."""

    a: float = setting("shape of the Gamma prior on lambda", 1.0, above=0)
    b: float = setting("rate of the Gamma prior on lambda", 5.0, above=0)
    weight: float = setting("weight of the prior; 1 is Bayes, less keeps more ranks", 1.0, at_least=0)
    warmup_epochs: float = setting("epochs over which it rises from 0; -1: up to a quarter of all", -1.0, at_least=-1)
    update: str = setting("how lambda is updated", "newton", choices=("newton", "gradient"))
    floor: float = setting("smallest lambda of a bond, relative to its largest", 1e-3, above=0, below=1)
    other_variance: float = setting("prior variance of biases and of dense layers", 100.0, above=0)
    hold_scale: bool = setting("hold the scale of weights before a normalisation, which leaves it free", True)
    align_every: int = setting("steps between alignments of the rank indices; 0: never", 100, at_least=0)


@dataclass(frozen=True, kw_only=True)
class FitConfig(Section, title="fit"):
    """The training loop."""

    epochs: int = setting("passes over the training data before the final cut", 20, at_least=1)
    batch_size: int = setting("data per step, unless the data come in batches already", 128, at_least=1)
    optimizer: str = setting("the optimiser", "adam", choices=("adam", "adamw", "sgd", "muon"))
    lr: float = setting("highest learning rate", 5e-3, above=0)
    weight_decay: float = setting("weight decay; the prior regularises the cores already", 0.0, at_least=0)
    decay_cores: bool = setting("apply the weight decay to cores, too", False)
    momentum: float = setting("momentum of sgd", 0.9, at_least=0, below=1)
    schedule: str = setting("how the learning rate falls", "cosine", choices=("cosine", "step", "constant"))
    milestones: tuple[float, ...] = setting("parts of the epochs after which schedule step falls", (), above=0, below=1)
    gamma: float = setting("factor of schedule step at a milestone", 0.1, above=0, at_most=1)
    lr_warmup_epochs: float = setting("epochs over which the learning rate rises from 0", 0.0, at_least=0)
    precision: str = setting("arithmetic; tf32 is for GPUs", "float32", choices=("float32", "tf32", "bf16", "fp16"))
    sharded: bool = setting("with torchrun, shard the dense parameters over the processes (fully_shard)", False)
    accumulate: int = setting("batches whose gradients are averaged for one step", 1, at_least=1)
    clip_norm: float = setting("largest norm of the gradient; 0: no clipping", 0.0, at_least=0)
    search: bool = setting("prune ranks; false keeps the ranks that the network has", True)
    compact_every: int = setting("epochs between cuts during training; 0: only the final cut", 2, at_least=0)
    compact_from: float = setting("epoch of the first cut; -1: after a quarter of fit.epochs", -1.0, at_least=-1)
    compact_tol: float = setting("relative change of a weight that a cut may make", 1e-2, at_least=0, below=1)
    rule: str = setting("how ranks are chosen; auto rounds where the format can", "auto",
                        choices=("auto", "rounding", "contribution", "lambda"))  # fmt: skip
    round_tol: float = setting("as compact_tol, for the final cut; threshold of rule lambda", 1e-2, at_least=0, below=1)
    target_ratio: float = setting("cut until so many times smaller than dense; 0: off", 0.0, at_least=0)
    target_parameters: int = setting("cut to at most so many parameters; 0: off", 0, at_least=0)
    target_accuracy: float = setting("cut while validation accuracy is at least this; 0: off", 0.0, at_least=0, below=1)
    finetune_epochs: int = setting("epochs at fixed ranks after the final cut", 3, at_least=0)
    finetune_lr: float = setting("learning rate of these; 0: the schedule continues through them", 1e-3, at_least=0)
    checkpoint_every: int = setting("epochs between checkpoints", 1, at_least=1)
    threads: int = setting("CPU threads; 0: one for small networks, else all", 0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.target_ratio <= 1:
            raise ConfigError(f"fit.target_ratio must be above 1, or 0 for none, got {self.target_ratio:g}.")
        if len(self.targets) > 1:
            raise ConfigError(f"A run has one target, got fit.{' and fit.'.join(self.targets)}. Keep one.")
        if self.targets and self.rule == "lambda":
            raise ConfigError(f'fit.rule "lambda" cannot cut to fit.{self.targets[0]}. Leave one of them out.')
        if self.schedule == "step" and not self.milestones:
            raise ConfigError('fit.schedule "step" needs fit.milestones, for example [0.5, 0.75].')

    @property
    def targets(self) -> list[str]:
        return [name for name in ("target_ratio", "target_parameters", "target_accuracy") if getattr(self, name)]

    @property
    def first_cut(self) -> float:
        return self.epochs / 4 if self.compact_from < 0 else self.compact_from


@dataclass(frozen=True, kw_only=True)
class PosteriorConfig(Section, title="posterior"):
    """Several networks instead of one, for predictions with their uncertainty."""

    particles: int = setting("networks that make up the posterior; 1 trains a single one", 1, at_least=1)
    method: str = setting("how they move", "svgd", choices=("svgd", "anchored", "ensemble", "sgld"))
    kernel: str = setting("kernel of svgd", "rbf", choices=("rbf", "imq"))
    temperature: float = setting("temperature of sgld; 1 samples the posterior", 1.0, at_least=0)
    jitter: float = setting("relative distance at which they start around the network of run.from_run", 1e-2, above=0)
    chunk: int = setting("particles that pass through the network together; 0: what fits into memory", 0, at_least=0)
    replicas: int = setting("processes of torchrun that have the same particles and share each batch", 1, at_least=1)
    calibrate: bool = setting("fit the temperature of the predictions on the validation data", True)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that `bayestrain train` needs to know."""

    run: RunSettings
    tensorize: TensorizeSettings = TensorizeSettings()
    prior: PriorConfig = PriorConfig()
    fit: FitConfig = FitConfig()
    posterior: PosteriorConfig = PosteriorConfig()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return {title: plain(vars(getattr(self, title))) for title in SECTIONS}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The config with these settings and the defaults of all others."""
        for title, table in settings.items():
            if title not in SECTIONS:
                raise unknown_setting(title)
            if not isinstance(table, Mapping):
                raise ConfigError(f"{title} must be a section of settings, [{title}], got {shown(table)}.")
            if unknown := set(table) - {each.name for each in fields(SECTIONS[title])}:
                raise unknown_setting(f"{title}.{min(unknown)}")
        if missing := [name for name in ("model", "data") if name not in settings.get("run", {})]:
            raise ConfigError(f'run.{missing[0]} has no default. Give it, for example {missing[0]} = "module:name".')
        sections: dict[str, Any] = {title: section(**settings.get(title, {})) for title, section in SECTIONS.items()}
        return cls(**sections)

    def override(self, overrides: Iterable[str]) -> Self:
        """The same config with single settings changed: ``config.override(["fit.epochs=3", "fit.optimizer=sgd"])``."""
        settings = self.to_dict()
        for text in overrides:
            name, equals, value = text.partition("=")
            title, _, key = name.strip().partition(".")
            if not (key and equals):
                raise ConfigError(f"{text}: write section.key=value, for example fit.epochs=3.")
            try:
                parsed = tomllib.loads(f"value = {value}")["value"]
            except (ValueError, RecursionError):  # text, or too long or too deep for the parser
                parsed = value.strip()
            settings.setdefault(title, {})[key] = parsed
        return self.from_dict(settings)


SECTIONS: dict[str, type[Section]] = {section.title: section for section in Section.__subclasses__()}

IMMATERIAL = ("fit.checkpoint_every", "fit.threads", "posterior.replicas", "run.name")  # for what is trained


def unknown_setting(name: str) -> ConfigError:
    """The error for a setting that does not exist, with the nearest one."""
    known = [f"{title}.{each.name}" for title in SECTIONS for each in fields(SECTIONS[title])]
    hint = nearest(name, [*known, *SECTIONS])
    return ConfigError(f"There is no setting {shown(name)}.{hint} The sections are {', '.join(SECTIONS)}.")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings that matter in which two flat tables differ: ``["fit.lr was 0.01, now 0.02"]``."""
    changed = [key for key in {**old, **new} if key not in IMMATERIAL and old.get(key) != new.get(key)]
    return [f"{key} was {shown(old.get(key))}, now {shown(new.get(key))}" for key in changed]


def flat(*sections: Section) -> dict[str, Any]:
    """``{"section.key": plain value}``."""
    return {f"{section.title}.{key}": plain(value) for section in sections for key, value in vars(section).items()}


def load(path: Path | str) -> RunConfig:
    """The config in a TOML file; every error names the file. One of a finished run must not have changed."""
    try:
        check_files(Path(path).parent)
        return RunConfig.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def dumps(config: RunConfig) -> str:
    """The complete config as TOML, with the help of every setting as a comment above it."""
    text = ""
    for title, table in config.to_dict().items():
        text += f"\n[{title}]\n"
        for each in fields(SECTIONS[title]):
            choices, entry = ", ".join(each.metadata["choices"]), {each.name: table[each.name]}
            entry = {title: entry} if get_origin(each.type) is dict else entry  # a table, which comes last
            text += f"# {each.metadata['help']}{choices and f' ({choices})'}\n{tomli_w.dumps(entry)}"
    return text.lstrip()
