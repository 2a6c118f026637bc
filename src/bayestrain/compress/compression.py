"""`compress_`: trained dense layers become factorised ones under one budget for the whole model."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.compress.budget import front, spend
from bayestrain.compress.candidates import SVD, Candidate, candidates, checked_kinds
from bayestrain.compress.curves import Curve, Point, Target, points
from bayestrain.compress.moments import collect
from bayestrain.errors import ConfigError, ConversionError, check_counts
from bayestrain.nn import FactorizedWeight, count_parameters
from bayestrain.nn.convert import STATE_HOOKS, TWINS, find_places, replace_layers
from bayestrain.nn.layer import is_lazy
from bayestrain.tables import text_table, times

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
REFINED = 3  # of a layer's best candidates at its size are fitted again, beside truncated SVD; the best is taken
SAY_EVERY = 2.0  # seconds between lines of progress

Layers = Mapping[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class CompressedLayer:
    """One row of a `CompressReport`: what won, and the relative change of the layer's output, or of its weight."""

    name: str
    shape: tuple[int, ...]
    kind: str
    modes: str
    ranks: tuple[int, ...]
    parameters_before: int
    parameters: int
    error: float


@dataclass(frozen=True)
class CompressReport:
    """What `compress_` did. Prints as a table; `kept` are the layers that stay dense, with the reason."""

    measured: str
    """What errors are relative changes of: "output", on the calibration batches, or "weight"."""
    layers: tuple[CompressedLayer, ...]
    kept: tuple[tuple[str, str], ...]
    parameters_before: int
    parameters: int

    def __str__(self) -> str:
        rows = [
            [row.name, times(row.shape), row.kind, row.modes, " ".join(map(str, row.ranks)),
             f"{row.parameters_before:,}", f"{row.parameters:,}", f"{row.error:.3f}"]
            for row in self.layers
        ]  # fmt: skip
        rows.append(["whole model", "", "", "", "", f"{self.parameters_before:,}", f"{self.parameters:,}", ""])
        header = ["layer", "shape", "became", "modes", "ranks", "before", "after", f"change of {self.measured}"]
        kept = [f"Kept dense: {name} ({why})." for name, why in self.kept]
        ratio = self.parameters_before / max(self.parameters, 1)
        return "\n".join([text_table(header, rows, left_columns=5), *kept, f"{ratio:.3g} times smaller."])


@torch.no_grad()
def compress_(
    model: nn.Module,
    *,
    ratio: float | None = None,
    parameters: int | None = None,
    tolerance: float | None = None,
    calibration: Iterable[Any] | None = None,
    formats: Sequence[str] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    progress: bool = True,
) -> CompressReport:
    """Replace trained linear layers and convolutions by factorised ones under one budget, in place, without training.

    For every layer, plain truncated SVD and all formats compete at every size. The budget is spent where it costs
    least; a layer may stay dense. Afterwards `fit` recovers accuracy. An error leaves the model unchanged.

    Args:
        model: a trained network.
        ratio: how many times fewer parameters the whole model shall have.
        parameters: instead, how many parameters it may have, as `count_parameters` counts.
        tolerance: instead, the largest relative change of each layer's output, or weight.
        calibration: batches of inputs, pairs of which the first are inputs, or dicts of keyword arguments. Some hundred
            inputs are enough. Errors are then changes of every layer's output on them; else changes of its weight.
        formats: what may be used, of "svd" and the names in `bayestrain.formats.FORMATS`. Default: all.
        filter_fn: ``filter_fn(module, name) -> bool`` picks among the layers. Left out: all.
        progress: print a line now and then, with the time left.

    >>> import torch, bayestrain as bt
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
    >>> report = bt.compress_(model, ratio=2, calibration=[torch.randn(256, 64)], progress=False)
    >>> bt.count_parameters(model) == report.parameters <= report.parameters_before / 2
    True
    """
    wanted, goal = checked_kinds(formats), _checked_goal(ratio, parameters, tolerance)
    say = partial(print, flush=True) if progress else lambda _: None
    layers, kept = survey(model, filter_fn)
    moments = dict[str, Tensor]()
    if calibration is not None:
        moments = collect(model, layers, calibration, say)
        for name in [name for name in layers if name not in moments]:
            del layers[name]
            kept[name] = "no calibration batch reached it"
        if not layers:
            raise ConfigError("No calibration batch reached a layer that could be compressed. Leave calibration= out.")
    curves, before = dict[str, LayerCurve](), count_parameters(model)
    for name in _announced(layers, "curve", say):
        weight = layers[name].weight
        read = partial(Target, weight, moments.get(name))
        curves[name] = LayerCurve(read, points(read(), candidates(weight.shape, wanted, name in moments)))
    chosen = choose(layers, curves, before, parameters if ratio is None else int(before / ratio), goal)
    rows = replace_(model, layers, curves, chosen, say)
    for name, point in chosen.items():
        if point.candidate is None:
            smaller = any(each.size < point.size for each in curves[name].points)
            kept[name] = "the budget is better spent elsewhere" if smaller else "no candidate is smaller"
    what = "weight" if calibration is None else "output"
    return CompressReport(what, tuple(rows), tuple(kept.items()), before, count_parameters(model))


@dataclass(frozen=True)
class LayerCurve:
    """What a layer may become, and how to build it."""

    target: Callable[[], Target]
    """Reads the weight again: models may be larger than memory."""
    points: Sequence[Point]

    def best(self, point: Point) -> tuple[Candidate, list[Tensor], float]:
        """Of the best candidates that are no larger than a point, the one that fits best after a refinement."""
        errors = dict[Candidate, float]()
        for each in self.points:
            if each.candidate is not None and each.size <= point.size:
                errors[each.candidate] = min(each.error, errors.get(each.candidate, math.inf))
        found, target = [], self.target()
        order = sorted(errors, key=errors.__getitem__)
        plain = [candidate for candidate in order if candidate.kind == SVD]
        for candidate in [*plain[:1], *[each for each in order if each not in plain][:REFINED]]:
            curve = Curve(target, candidate)
            cores = curve.refined(curve.cut(curve.largest(point.size)))
            found.append((curve.error(cores), curve, cores))
        error, curve, cores = min(found, key=lambda each: each[0])
        return curve.candidate, curve.plain_cores(cores), math.sqrt(max(error, 0.0))


Curves = Mapping[str, LayerCurve]  # by the name of the layer, as all mappings here are


def survey(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The layers that can be compressed, and the others that have matrices, with the reason; raises on broken ones."""
    places, found, kept = list(find_places(model)), dict[str, Any](), dict[str, str]()
    for place in places:
        name, layer, weight, kind = place.layer, place.module, place.weight, type(place.module).__name__
        if "quantized" in type(layer).__module__ or is_lazy(layer):
            why = "lazy: run one batch through the model first" if is_lazy(layer) else "quantised: compress it before"
            raise ConversionError(f"{name!r} ({kind}) is {why}.")
        for key, parameter in layer.named_parameters(recurse=False):
            if parameter.is_meta or not bool(parameter.isfinite().all()):
                what = "has no values" if parameter.is_meta else "has NaN or infinite entries"
                raise ConversionError(f"The {key} of {name!r} ({kind}) {what}. Load the trained weights first.")
        shared = [other.layer for other in places if other.weight is weight and other is not place]
        if type(layer) not in KINDS:
            kept[name] = f"{kind} is none of {', '.join(each.__name__ for each in KINDS)}"
        elif name == "":
            raise ConversionError(f"The model itself is one {kind} and cannot be replaced. Wrap it in nn.Sequential.")
        elif not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
            kept[name] = "its weight is no plain floating point parameter"
        elif shared:
            kept[name] = f"its weight is shared with {', '.join(shared)}"
        elif getattr(layer, "groups", 1) != 1:
            kept[name] = "it has groups, and so few entries"
        elif any(getattr(layer, hooks) for hooks in STATE_HOOKS):
            kept[name] = "it has hooks on its state_dict"
        elif not bool(weight.any()):
            kept[name] = "its weight is zero"
        elif filter_fn is not None and not filter_fn(layer, name):
            kept[name] = "filter_fn returned False"
        else:
            found[name] = layer
    if not found:
        why = "; ".join(f"{name} stays dense ({reason})" for name, reason in kept.items()) or "it has no weights"
        raise ConversionError(f"compress_ found nothing to compress in this model: {why}.")
    return found, kept


def choose(layers: Layers, curves: Curves, before: int, parameters: int | None, tolerance: float) -> dict[str, Point]:
    """A point for every layer: to a number of parameters of the whole model, of now `before`, or to a tolerance."""
    size = {name: layers[name].weight.numel() for name in curves}
    fronts = {name: front([*own.points, Point(size[name], 0.0)]) for name, own in curves.items()}
    if parameters is None:
        return {name: next(each for each in own if each.error <= tolerance**2) for name, own in fronts.items()}
    others = before - sum(size.values())
    fewest = others + sum(own[0].size for own in fronts.values())
    if parameters < fewest:
        advice = f"Try parameters={fewest} or ratio={math.floor(100 * before / fewest) / 100}."
        raise ConfigError(f"{parameters:,} parameters are too few: the smallest model has {fewest:,}. {advice}")
    return spend(fronts, parameters - others)


def replace_(
    model: nn.Module, layers: Layers, curves: Curves, chosen: Mapping[str, Point], say: Say
) -> list[CompressedLayer]:
    """Build the chosen layers, then put them in place."""
    rows, built = [], dict[nn.Module, nn.Module]()
    for name in _announced(chosen, "decomposing", say):
        if chosen[name].candidate is not None:
            layer, (won, cores, error) = layers[name], curves[name].best(chosen[name])
            weight = FactorizedWeight(won.format, won.layout, [core.to(layer.weight) for core in cores])
            built[layer] = TWINS[type(layer)].of(layer, weight)
            sizes = layer.weight.numel(), weight.numel
            rows.append(CompressedLayer(name, weight.shape, won.kind, won.modes, weight.ranks, *sizes, error))
    replace_layers(model, built)
    return rows


def _checked_goal(ratio: float | None, parameters: int | None, tolerance: float | None) -> float:
    """The tolerance, or 0; raises unless exactly one goal is given, in its range."""
    given = [each for each in (ratio, parameters, tolerance) if each is not None]
    if len(given) != 1:
        raise ConfigError(f"Give one of ratio=, parameters= and tolerance=, got {len(given)} of them. Try ratio=4.")
    check_counts(parameters=parameters)
    if ratio is not None and not 1 <= ratio < math.inf:
        raise ConfigError(f"ratio is how many times smaller the model shall be, 1 or more, got {ratio}. Try ratio=4.")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is a relative change and must lie in (0, 1), got {tolerance}. Try 0.1.")
    return tolerance or 0.0


def _announced(names: Collection[str], what: str, say: Say) -> Iterator[str]:
    """One name after another; says now and then which is next, and the time left."""
    started = last = time.monotonic()
    for done, name in enumerate(names):
        now = time.monotonic()
        if done and now - last >= SAY_EVERY:
            left = timedelta(seconds=round((now - started) / done * (len(names) - done)))
            say(f"{what} {done + 1}/{len(names)}: {name}  {left} left")
            last = now
        yield name
