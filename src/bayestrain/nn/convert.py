"""`tensorize_`: a user's model in, the same model with factorised layers out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from bayestrain.errors import BayesTrainError, ConfigError, ConversionError
from bayestrain.formats import Format, get
from bayestrain.formats.format import check_tol, checked_rank
from bayestrain.nn.conv import TensorConv2d
from bayestrain.nn.factorized import DEFAULT_RANK, FactorizedWeight, check_init
from bayestrain.nn.layer import TensorLayer, is_lazy
from bayestrain.nn.layout import check_layout
from bayestrain.nn.linear import TensorLinear
from bayestrain.tables import text_table, times

FilterFn = Callable[[nn.Module, str], bool]
LayerModes = tuple[tuple[int, ...] | None, tuple[int, ...] | None]

TWINS: dict[type[nn.Module], type[TensorLayer]] = {kind.dense_kind: kind for kind in (TensorLinear, TensorConv2d)}
"""The layers that are converted, and what they become."""

STATE_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and "state_dict" in name)
HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in STATE_HOOKS)
"""Where a module keeps its hooks on passes; those on its ``state_dict`` concern its own tensors."""


@dataclass(frozen=True)
class TensorizeConfig:
    """How layers are converted.

    Attributes:
        max_rank: one number, or one per bond (then every converted layer must have that many bonds).
        format: name of a format in `bayestrain.formats.FORMATS`, or a `Format`.
        layout: "paired" or "split", for linear layers.
        init: "he" or "paper" start at random with that variance; "svd" decomposes the layer's own weights.
        tol: relative error of the decomposition; only with ``init="svd"``.
        modes: ``{layer name: (in_modes, out_modes)}`` for layers whose modes should not be chosen automatically.
    """

    max_rank: int | tuple[int, ...] = DEFAULT_RANK
    format: str | Format = "tt"
    layout: str = "paired"
    init: str = "he"
    tol: float = 0.0
    modes: Mapping[str, LayerModes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_rank", checked_rank(self.max_rank))
        get(self.format)
        check_layout(self.layout)
        check_init(self.init, more=("svd",))
        check_tol(self.tol)
        if self.tol and self.init != "svd":
            raise ConfigError(f"tol={self.tol} only means something with init='svd', got init={self.init!r}.")


class ConvertedLayer(NamedTuple):
    """One row of a `TensorizeReport`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    dense_parameters: int
    parameters: int


@dataclass(frozen=True)
class TensorizeReport:
    """What `tensorize_` did. Prints as a table."""

    layers: tuple[ConvertedLayer, ...]
    kept: tuple[tuple[str, str], ...]
    """Layers that look convertible and stay dense, with the reason."""

    @property
    def dense_parameters(self) -> int:
        """Parameters of the converted layers before."""
        return sum(layer.dense_parameters for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Parameters of the converted layers now, at their starting ranks."""
        return sum(layer.parameters for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            [name, kind, times(shape), times(ins), times(outs), " ".join(map(str, ranks)), f"{dense:,}", f"{now:,}"]
            for name, kind, shape, ins, outs, ranks, dense, now in self.layers
        ]
        rows.append(["total", "", "", "", "", "", f"{self.dense_parameters:,}", f"{self.parameters:,}"])
        header = ["layer", "kind", "shape", "in modes", "out modes", "ranks", "dense", "factorised"]
        kept = "".join(f"\nkept dense: {name} ({reason})" for name, reason in self.kept)
        larger = [row.name for row in self.layers if row.parameters > row.dense_parameters]
        note = f"\nlarger than dense at these ranks: {', '.join(larger)}" if larger else ""
        return text_table(header, rows, left_columns=6) + kept + note


def tensorize_(
    model: nn.Module, config: TensorizeConfig | None = None, filter_fn: FilterFn | None = None
) -> TensorizeReport:
    """Replace every `nn.Linear` and `nn.Conv2d` of `model` by a factorised layer, in place.

    All layers are checked and built before the first one is replaced: an error leaves the model unchanged. Hooks on
    forward and backward passes move to the new layers.

    Args:
        model: any module; a layer used in several places stays one layer.
        config: format, ranks, start and modes; `TensorizeConfig()` if left out.
        filter_fn: ``filter_fn(module, name) -> bool`` picks among the linear and convolution layers. Left out: all.

    Returns:
        A report that prints as a table.
    """
    config = TensorizeConfig() if config is None else config
    if not isinstance(config, TensorizeConfig):
        raise ConfigError(f"config must be a TensorizeConfig, got {config!r}. A filter goes into filter_fn=.")
    names: dict[nn.Module, str] = {}
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        names[module] = name
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(name)

    built: dict[nn.Module, TensorLayer] = {}
    rows: list[ConvertedLayer] = []
    kept: list[tuple[str, str]] = []
    for module, name in names.items():
        quantised = "quantized" in type(module).__module__ and type(module).__name__ in ("Linear", "Conv2d")
        if not isinstance(module, tuple(TWINS)) and not quantised:
            continue
        if filter_fn is not None and not filter_fn(module, name):
            kept.append((name, "filter_fn returned False"))
        elif isinstance(module, tuple(TWINS)) and type(module) not in TWINS and not is_lazy(module):
            kept.append((name, f"{type(module).__name__} is a subclass whose users may rely on .weight"))
        else:
            for why, advice in _obstacles(module, name, owners):
                raise ConversionError(f"Cannot convert {name!r} ({type(module).__name__}): {why}. {advice}")
            built[module] = new = _convert(module, name, config)
            sizes = new.factorized.shape, new.in_modes, new.out_modes, new.ranks
            rows.append(ConvertedLayer(name, type(module).__name__, *sizes, new.dense_parameters, new.parameters_left))
    if unknown := set(config.modes) - {row.name for row in rows}:
        raise ConfigError(
            f"modes names layers that are not converted: {sorted(unknown)}. Converted are {[row.name for row in rows]}."
        )
    if not built:
        why = "these stay dense: " + "; ".join(f"{n} ({r})" for n, r in kept) if kept else "this model has none"
        raise ConversionError(
            f"No layer matched, so nothing was converted. tensorize_ looks for nn.Linear and nn.Conv2d; {why}."
        )
    replace_layers(model, built)
    return TensorizeReport(tuple(rows), tuple(kept))


def replace_layers(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement wherever its original is used, with the original's hooks."""
    for original, replacement in replacements.items():
        bare = nn.Module()
        for kind in HOOKS:  # the very dictionaries, so that the handles of hooks still remove them
            setattr(replacement, kind, getattr(original, kind))
            setattr(original, kind, getattr(bare, kind))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacements[module])


def _obstacles(module: nn.Module, name: str, owners: Mapping[nn.Parameter, list[str]]) -> Iterator[tuple[str, str]]:
    """Why a layer cannot be replaced in this model, and what to do about it."""
    leave_out = f"Leave it dense with filter_fn=lambda module, name: name != {name!r}."
    if name == "":
        yield (
            "the model itself is the layer and cannot be replaced in place",
            "Wrap it in nn.Sequential, or use TensorLinear.from_dense / TensorConv2d.from_dense.",
        )
    if is_lazy(module):
        yield "it is lazy and has no weights yet", "Run one batch through the model first."
    weight = getattr(module, "weight", None)
    if not isinstance(module, tuple(TWINS)) or type(weight) is not nn.Parameter or not weight.is_floating_point():
        yield "it is quantised or its weight is not a plain floating point parameter", leave_out
    if any(getattr(module, kind) for kind in STATE_HOOKS):
        yield "it has hooks on its state_dict, which a factorised layer would not have", leave_out
    for key, parameter in module.named_parameters(recurse=False):
        if others := [owner for owner in owners[parameter] if owner != name]:
            yield f"its {key} is shared with {others}", leave_out
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            yield f"its {key} has NaN or infinite entries", "Repair or re-initialise the model first."


def _convert(module: Any, name: str, config: TensorizeConfig) -> TensorLayer:
    kind, rank = TWINS[type(module)], config.max_rank
    try:
        how = kind.how(module, config.format, config.layout, *config.modes.get(name, (None, None)))
        if config.init == "svd":
            return kind.of(module, FactorizedWeight.decomposed(module.weight, *how, rank, config.tol))
        like = module.weight
        return kind.of(module, FactorizedWeight.random(*how, rank, config.init, like.dtype, like.device))
    except BayesTrainError as error:
        error.add_note(f"This happened at layer {name!r} of the model; nothing was converted.")
        raise
