"""`tensorize_`: a user's model in, the same model with factorised layers out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from bayestrain.errors import BayesTrainError, ConfigError, ConversionError, check_choice
from bayestrain.formats import Format, get
from bayestrain.formats.format import check_tol, checked_rank
from bayestrain.nn.conv import TensorConv2d
from bayestrain.nn.factorized import DEFAULT_RANK, INITS, FactorizedWeight
from bayestrain.nn.layer import TensorLayer, is_lazy
from bayestrain.nn.layout import LAYOUTS
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.overview import Summary, summary

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
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("init", self.init, (*INITS, "svd"))
        check_tol(self.tol)
        if self.tol and self.init != "svd":
            raise ConfigError(f"tol={self.tol} only means something with init='svd', got init={self.init!r}.")


def tensorize_(model: nn.Module, config: TensorizeConfig | None = None, filter_fn: FilterFn | None = None) -> Summary:
    """Replace every `nn.Linear` and `nn.Conv2d` of `model` by a factorised layer, in place.

    All layers are checked and built before the first one is replaced: an error leaves the model unchanged. Hooks on
    forward and backward passes move to the new layers.

    Args:
        model: any module; a layer used in several places stays one layer.
        config: format, ranks, start and modes; `TensorizeConfig()` if left out.
        filter_fn: ``filter_fn(module, name) -> bool`` picks among the linear and convolution layers. Left out: all.

    Returns:
        The `summary` of the model, with the layers that stay dense. It prints as a table.
    """
    config = TensorizeConfig() if config is None else config
    if not isinstance(config, TensorizeConfig):
        raise ConfigError(f"config must be a TensorizeConfig, got {config!r}. A filter goes into filter_fn=.")
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(name)

    built: dict[str, tuple[nn.Module, TensorLayer]] = {}
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        kind, convertible = type(module), isinstance(module, tuple(TWINS))
        if not convertible and not ("quantized" in kind.__module__ and kind.__name__ in ("Linear", "Conv2d")):
            continue
        if filter_fn is not None and not filter_fn(module, name):
            kept[name] = "filter_fn returned False"
        elif convertible and kind not in TWINS and not is_lazy(module):
            kept[name] = f"{kind.__name__} is a subclass whose users may rely on .weight"
        elif obstacle := _obstacle(module, name, owners):
            raise ConversionError(f"Cannot convert {name!r} ({kind.__name__}): {obstacle}")
        else:
            built[name] = module, _convert(module, name, config)
    if unknown := config.modes.keys() - built.keys():
        raise ConfigError(f"modes names layers that are not converted: {sorted(unknown)}. Converted are {list(built)}.")
    if not built:
        why = "; ".join(f"{name} stays dense ({reason})" for name, reason in kept.items()) or "this model has none"
        raise ConversionError(f"tensorize_ looks for nn.Linear and nn.Conv2d and found nothing to convert: {why}.")
    replace_layers(model, dict(built.values()))
    return replace(summary(model), kept=tuple(kept.items()))


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


def _obstacle(module: nn.Module, name: str, owners: Mapping[nn.Parameter, list[str]]) -> str | None:
    """Why a layer cannot be replaced in this model, and what to do about it."""
    leave_out = f"Leave it dense with filter_fn=lambda module, name: name != {name!r}."
    if name == "":
        return "the model itself cannot be replaced in place. Wrap it in nn.Sequential, or use the layer's from_dense."
    if is_lazy(module):
        return "it is lazy and has no weights yet. Run one batch through the model first."
    weight = getattr(module, "weight", None)
    if not isinstance(module, tuple(TWINS)) or type(weight) is not nn.Parameter or not weight.is_floating_point():
        return f"it is quantised or its weight is not a plain floating point parameter. {leave_out}"
    if any(getattr(module, kind) for kind in STATE_HOOKS):
        return f"it has hooks on its state_dict, which a factorised layer would not have. {leave_out}"
    for key, parameter in module.named_parameters(recurse=False):
        if others := [owner for owner in owners[parameter] if owner != name]:
            return f"its {key} is shared with {others}. {leave_out}"
        if not parameter.is_meta and not bool(parameter.isfinite().all()):
            return f"its {key} has NaN or infinite entries. Repair or re-initialise the model first."
    return None


def _convert(module: Any, name: str, config: TensorizeConfig) -> TensorLayer:
    kind, weight, rank = TWINS[type(module)], module.weight, config.max_rank
    in_modes, out_modes = config.modes.get(name, (None, None))
    try:
        how = kind.how(module, config.format, config.layout, in_modes=in_modes, out_modes=out_modes)
        if config.init == "svd":
            return kind.of(module, FactorizedWeight.decomposed(weight, *how, rank, config.tol))
        factory = {"dtype": weight.dtype, "device": weight.device}
        return kind.of(module, FactorizedWeight.random(*how, rank, config.init, **factory))
    except BayesTrainError as error:
        error.add_note(f"This happened at layer {name!r} of the model; nothing was converted.")
        raise
