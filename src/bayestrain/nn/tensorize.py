"""`tensorize_`: a user's model in, the same model with factorised layers out."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn

from bayestrain.errors import BayesTrainError, ConfigError, ConversionError, check_choice
from bayestrain.formats import FORMATS, Format, get
from bayestrain.formats.algebra import nonzero
from bayestrain.formats.fitting import is_quick
from bayestrain.formats.format import check_tol, checked_rank
from bayestrain.nn import parameters
from bayestrain.nn.conv import TensorConv2d
from bayestrain.nn.convert import STATE_HOOKS, Place, find_places, install
from bayestrain.nn.embedding import TensorEmbedding, mean_square
from bayestrain.nn.factorized import DEFAULT_RANK, INITS, MANY_ROWS, FactorizedWeight
from bayestrain.nn.layer import TensorLayer, is_lazy
from bayestrain.nn.layout import LAYOUTS, Layout
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.overview import Kept, Summary, summary

FilterFn = Callable[[nn.Module, str], bool]
LayerModes = tuple[tuple[int, ...] | None, tuple[int, ...] | None]

LEAST_RANK = 2  # by default a layer that would grow starts at a lower rank, at least this one, or stays dense
ALL_LINEAR = "all-linear"
AUTO = "auto"


@dataclass(frozen=True)
class TensorizeConfig:
    """How layers are converted.

    Attributes:
        max_rank: one number, or one per bond (then every converted layer must have that many bonds). Layers that would
            be larger than dense start lower, unless `tensorize_` is told to include them.
        format: name of a format in `bayestrain.formats.FORMATS`, a `Format`, or "auto", which chooses for each layer:
            with ``init="svd"`` the fewest parameters that reach `tol`, or the smallest error where none do; at random
            a train for matrices and tables, Tucker for convolutions and other weights of three axes.
        layout: "paired" or "split", for matrices, or "auto", which chooses for each: paired where that halves the
            multiplications at `max_rank`, or where the layer's weight is made whole in any case; else split, if that
            halves them. Tables and the weights tied to them are always split.
        init: "he" or "paper" start at random with that variance; "svd" decomposes the layer's own weights. Tables,
            attention and recurrent weights start with their own variance in the place of He's.
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
        if self.format != AUTO:
            get(self.format)
        check_choice("layout", self.layout, (*LAYOUTS, AUTO))
        check_choice("init", self.init, (*INITS, "svd"))
        check_tol(self.tol)
        if self.tol and self.init != "svd":
            raise ConfigError(f"tol={self.tol} only means something with init='svd', got init={self.init!r}.")
        for key in ("format", "layout"):
            if getattr(self, key) == AUTO and isinstance(self.max_rank, tuple):
                raise ConfigError(
                    f"{key}='auto' takes one max_rank, got {self.max_rank}: {key}s differ in their bonds."
                )
        if self.format == AUTO and self.init == "svd" and not self.tol:
            raise ConfigError("format='auto' with init='svd' compares sizes at one error. Give it, such as tol=0.1.")


def tensorize_(
    model: nn.Module,
    config: TensorizeConfig | None = None,
    filter_fn: FilterFn | None = None,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
) -> Summary:
    """Replace linear layers, convolutions and embeddings, and the weights of attention and recurrent layers, in place.

    All layers are checked and built before the first one is replaced: an error leaves the model unchanged and names
    every obstacle. Layers that share a weight share the factorised one. Hooks on forward and backward passes move to
    the new layers. By default grouped convolutions, tables of positions, layers too small to become smaller,
    subclasses, and modules that are not PyTorch's stay dense; the summary lists them all.

    Args:
        model: any module; a layer used in several places stays one layer.
        config: format, ranks, start and modes; `TensorizeConfig()` if left out.
        filter_fn: ``filter_fn(module, name) -> bool`` picks among the layers that would be converted.
        include: names or patterns (``"encoder.*.fc?"``) of the only layers to convert; "all-linear" stands for all
            linear ones. A full name converts also what stays dense by default. So does a pattern that fits
            ``"module.parameter"`` and not the module alone, such as ``"*.experts.*"``: any parameter of two axes or
            more can be factorised.
        exclude: names or patterns of layers that stay dense.

    Returns:
        The `summary` of the model, with all that stays dense. It prints as tables.
    """
    config = TensorizeConfig() if config is None else config
    if not isinstance(config, TensorizeConfig):
        raise ConfigError(f"config must be a TensorizeConfig, got {config!r}. A filter goes into filter_fn=.")
    places = list(find_places(model))
    names = None if include is None else [include] if isinstance(include, str) else list(include)
    named = set(places) if names is None else _matched("include", names, places)
    excluded = _matched("exclude", [exclude] if isinstance(exclude, str) else exclude, places)
    chosen = {place for place in places if {place.layer, place.path} & set(names or ())}
    asked = chosen | {
        place for place in places for name in names or ()
        if fnmatchcase(place.path, name) and not fnmatchcase(place.layer, name)
    }  # fmt: skip
    if filter_fn is not None:
        chosen |= {place for place in places if place.kind in (TensorLinear, TensorConv2d)}
    wanted, kept = list[Place](), dict[Place, str]()
    for place in places:
        if place in excluded:
            kept[place] = "excluded"
        elif place not in named:
            kept[place] = "not included"
        elif place.reason and place not in asked:
            kept[place] = place.reason
        elif filter_fn is not None and not filter_fn(place.module, place.layer):
            kept[place] = "filter_fn returned False"
        else:
            wanted.append(place)
    built = _build(model, wanted, kept, chosen, config)
    converted = [place.name for place in built]
    if unknown := config.modes.keys() - set(converted):
        raise ConfigError(f"modes names layers that are not converted: {sorted(unknown)}. Converted are {converted}.")
    if not built:
        why = "; ".join(f"{place.name} stays dense ({reason})" for place, reason in kept.items())
        raise ConversionError(f"tensorize_ found nothing to convert: {why or 'this model has no dense layer'}.")
    dense = tuple(_kept(model, built, kept))
    install(model, built)
    return replace(summary(model), kept=dense)


def _matched(what: str, patterns: Iterable[str], places: Sequence[Place]) -> set[Place]:
    """The places that these names and patterns mean; each must mean some."""
    found: set[Place] = set()
    for pattern in patterns:
        own = {
            place for place in places
            if fnmatchcase(place.layer, pattern) or fnmatchcase(place.path, pattern)
            or (pattern == ALL_LINEAR and place.kind is TensorLinear)
        }  # fmt: skip
        if not own:
            names = ", ".join(place.name for place in places[:20]) + (", .." if len(places) > 20 else "")
            raise ConfigError(f"{what} has {pattern!r}, which matches none of the layers: {names or 'there are none'}.")
        found |= own
    return found


def _build(
    model: nn.Module, wanted: Sequence[Place], kept: dict[Place, str], chosen: set[Place], config: TensorizeConfig
) -> dict[Place, FactorizedWeight]:
    """The factorised weights; what the defaults leave dense goes to `kept`. Raises an error about every obstacle."""
    owners: dict[object, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners[parameter].append(f"{name}.{key}".removeprefix("."))
    made, built = dict[int, FactorizedWeight | str](), dict[Place, FactorizedWeight]()
    errors: dict[Place, BayesTrainError] = {}
    for place in wanted:
        tied = [other for other in wanted if other.weight is place.weight]
        try:
            _check(place, model)
            if missing := set(owners[place.weight]) - {other.path for other in tied}:
                why = f"its weight is shared with {', '.join(sorted(missing))}, not converted"
                if place in chosen:
                    raise ConversionError(f"{why}. Convert all of them, or none. {_leave_out(place)}")
                kept[place] = why
                continue
            if id(place.weight) not in made:
                made[id(place.weight)] = _weight(tied, config, not chosen.isdisjoint(tied))
            found = made[id(place.weight)]
            if isinstance(found, str):
                kept[place] = found
            else:
                built[place] = found
        except BayesTrainError as error:
            errors[place] = error
    if errors:
        _raise(errors)
    return built


def _check(place: Place, model: nn.Module) -> None:
    """Raise if a weight cannot be factorised in this model, saying what to do about it."""
    module, weight = place.module, place.weight
    if is_lazy(module):
        raise ConversionError("it is lazy and has no weights yet. Run one batch through the model first.")
    instead = _leave_out(place)
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise ConversionError(f"it is quantised or its weight is not a plain floating point parameter. {instead}")
    if place.kind and module is model:
        what = "the model itself cannot be replaced in place"
        raise ConversionError(f"{what}. Wrap it in nn.Sequential, or use the layer's from_dense.")
    if place.kind and any(getattr(module, kind) for kind in STATE_HOOKS):
        raise ConversionError(f"it has hooks on its state_dict, which a factorised layer would not have. {instead}")
    for key, parameter in module.named_parameters(recurse=False):
        if not parameter.is_meta and not bool(parameter.isfinite().all()):
            raise ConversionError(f"its {key} has NaN or infinite entries. Repair or re-initialise the model first.")


def _leave_out(place: Place) -> str:
    return f"Leave it dense with exclude={place.name!r}."


def _raise(errors: Mapping[Place, BayesTrainError]) -> None:
    """Raise the only error as it is, or one that lists them all."""
    told = [f"{place.name!r} ({type(place.module).__name__}): {error}" for place, error in errors.items()]
    (place, error), *others = errors.items()
    if others:
        raise ConversionError("\n".join([f"{len(told)} layers cannot be converted, so nothing was:", *told]))
    if type(error) is ConversionError:
        raise ConversionError(f"Cannot convert {told[0]}")
    error.add_note(f"This happened at layer {place.name!r} of the model; nothing was converted.")
    raise error


def _weight(tied: Sequence[Place], config: TensorizeConfig, chosen: bool) -> FactorizedWeight | str:
    """The factorised weight that these places share, or why they stay dense; what is `chosen` does not."""
    tables = [p for p in tied if p.kind and issubclass(p.kind, TensorEmbedding)]
    place, *_ = *tables, *tied
    if other := next((p for p in tied if p.oriented().shape != place.weight.shape and len(tied) > 1), None):
        shared = f"it shares a weight with {other.name!r} that one of them transposes"
        raise ConversionError(f"{shared}. {_leave_out(place)}")
    modes = dict(zip(("in_modes", "out_modes"), config.modes.get(place.name, (None, None)), strict=True))
    plain, weight, start = place.plain(), place.oriented(), cast(str | float, config.init)
    if place.kind:
        start = place.kind.start(plain, config.init)
    elif start == "he" and not weight.is_meta:
        start = mean_square(weight)
    if tables or config.layout != AUTO:
        layouts = ["split" if tables else config.layout]
    elif weight.ndim > 2 or not (place.kind or place.parameter == "in_proj_weight"):
        layouts = ["paired"]  # the weight is made whole in any case
    else:
        layouts = ["paired", "split"]

    def how(format: str | Format) -> tuple[Format, Layout]:
        if place.kind:
            found = [place.kind.how(plain, format, layout, **modes) for layout in layouts]
        else:
            found = [(get(format), parameters.fold(weight.shape, get(format), layout, **modes)) for layout in layouts]
        return next((own for own in found if len(found) > 1 and halves(*own, config.max_rank)), found[0])

    chosen |= any(p.name in config.modes for p in tied)
    outputs, inputs, *taps = weight.shape
    suited = "tt" if 1 in (outputs, inputs, math.prod(taps)) else "tucker"
    own = how(suited if config.format == AUTO else config.format)
    if config.init == "svd" and config.format == AUTO:
        found = smallest(weight, [how(format) for format in FORMATS], config)
    elif config.init == "svd":
        found = FactorizedWeight.decomposed(weight, *own, config.max_rank, config.tol)
    elif rank := config.max_rank if chosen else largest_rank(*own, config.max_rank):
        found = FactorizedWeight.random(*own, rank, start, dtype=weight.dtype, device=weight.device)
    else:
        return "too small to become smaller"
    return found if chosen or found.numel < weight.numel() else f"would grow to {found.numel:,} parameters"


def halves(format: Format, layout: Layout, max_rank: int | tuple[int, ...]) -> bool:
    """Whether a batch goes through the cores of a matrix with at most half of the dense layer's multiplications."""
    weight = FactorizedWeight.random(format, layout, max_rank, device="meta")
    return 2 * weight.operations(MANY_ROWS)[0] <= MANY_ROWS * weight.dense_numel


@torch.no_grad()
def smallest(weight: Tensor, hows: Iterable[tuple[Format, Layout]], config: TensorizeConfig) -> FactorizedWeight:
    """Of decompositions that reach the tolerance the one with fewest parameters, or that of least error."""
    found = list[tuple[float, int, FactorizedWeight]]()
    for format, layout in hows:
        equation, rank, sizes = format.equation(layout.sizes), config.max_rank, layout.sizes
        if isinstance(rank, int) and not equation.is_tree:  # least squares: only what is smaller, in seconds
            rank = cast(int, largest_rank(format, layout, rank) or 1)
            while rank > 1 and not is_quick(equation, sizes, format.max_ranks(sizes, rank)):
                rank = rank * 3 // 4
        own = FactorizedWeight.decomposed(weight, format, layout, rank, config.tol)
        lost = torch.linalg.vector_norm(own.dense() - weight) / nonzero(torch.linalg.vector_norm(weight))
        found.append((max(float(lost), 1.001 * config.tol), own.numel, own))
    return min(found, key=lambda each: each[:2])[2]


def largest_rank(format: Format, layout: Layout, max_rank: int | tuple[int, ...]) -> int | tuple[int, ...] | None:
    """`max_rank`, or the largest below it at which the cores are smaller than the weight; None if that is too low."""
    if isinstance(max_rank, tuple):
        return max_rank
    equation, dense = format.equation(layout.sizes), math.prod(layout.shape)

    def entries(rank: int) -> int:
        return sum(map(math.prod, equation.shapes(layout.sizes, format.max_ranks(layout.sizes, rank))))

    rank = bisect_left(range(1, max_rank + 1), dense, key=entries)
    return rank if rank >= min(max_rank, LEAST_RANK) else None


def _kept(model: nn.Module, built: Mapping[Place, object], kept: Mapping[Place, str]) -> Iterator[Kept]:
    """A row for all parameters that stay as they are, each counted once."""
    seen, converted = {place.weight for place in built}, {place.module for place in built}
    inside = {
        m for module in model.modules() if isinstance(module, TensorLayer | FactorizedWeight) for m in module.modules()
    }
    known = converted | inside | {place.module for place in kept}
    rows = [(p.name, p.module, why, [p.weight] if p.kind is None else None) for p, why in kept.items()]
    rows += [(name, module, "only vectors", None) for name, module in model.named_modules() if module not in known]
    for name, module, why, own in rows:
        fresh = [p for p in own or module.parameters(recurse=False) if p not in seen]
        seen.update(fresh)
        if fresh:
            numel = sum(p.numel() for p in fresh if not nn.parameter.is_lazy(p))
            yield Kept(name, type(module).__name__, why, numel)
