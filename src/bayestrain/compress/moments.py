"""Second moments C of what layers multiply, inputs or patches: ``W C W^t`` is that of the outputs without bias."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bayestrain.errors import ConfigError
from bayestrain.nn.evaluation import evaluating

LARGEST = 2_304  # larger patches are described by the moment of their channels alone: memory grows as the square
BYTES = 1 << 30  # of moments at a time; the layers of a model that need more take several passes over the batches
ROWS = 4_096  # of a batch that are used: positions of images and of sequences are many and alike


def features(layer: Any) -> int:
    """Entries of a row: inputs times taps, or inputs alone where these are too many."""
    inputs, *taps = layer.weight.shape[1:]
    patch = inputs * math.prod(taps)
    return int(patch if patch <= LARGEST else inputs)


def collect(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any], say: Callable[[str], None]
) -> dict[str, Tensor]:
    """The second moments of what these layers multiply, without those that no batch reaches."""
    groups, filled = list[list[str]]([[]]), 0
    for name, layer in layers.items():
        if filled and filled + 8 * features(layer) ** 2 > BYTES:
            groups, filled = [*groups, []], 0
        groups[-1].append(name)
        filled += 8 * features(layer) ** 2
    if len(groups) > 1 and isinstance(batches, Iterator):
        raise ConfigError(f"This model needs {len(groups)} passes over calibration=, got an iterator. Pass a list.")
    sums, rows = dict[str, Tensor](), Counter[str]()

    def add(name: str, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        (x,) = (*args, *kwargs.values())
        own = rows_of(layer, x.detach())
        sums[name] = own.mT @ own + sums.get(name, 0.0)
        rows[name] += len(own)

    for number, group in enumerate(groups, start=1):
        say(f"calibration, pass {number} of {len(groups)}: {len(group)} layers")
        with ExitStack() as hooks, evaluating(model), torch.no_grad():
            for name in group:
                hooks.enter_context(layers[name].register_forward_pre_hook(partial(add, name), with_kwargs=True))
            run(model, batches)
    if broken := [name for name, own in sums.items() if not bool(own.isfinite().all())]:
        raise ConfigError(f"Calibration batches make NaN or infinite inputs of layer {broken[0]!r}. Check the data.")
    return {name: own / rows[name] for name, own in sums.items()}


def run(model: nn.Module, batches: Iterable[Any]) -> None:
    """Send calibration batches through a model: inputs, pairs of which the first are inputs, or dicts of arguments."""
    first, count = next(iter(model.parameters()), torch.empty(0)), 0
    for count, batch in enumerate(batches, start=1):
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(x, Tensor | Mapping):
            raise ConfigError(f"Calibration batch {count} is a {type(x).__name__}. Give tensors, (x, y) or dicts.")
        try:
            x = tree_map_only(Tensor, lambda own: own.to(first.device), dict(x) if isinstance(x, Mapping) else x)
            model(**x) if isinstance(x, dict) else model(x)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shape = tuple(x.shape) if isinstance(x, Tensor) else sorted(x)
            raise ConfigError(f"The model refuses calibration batch {count} of shape {shape}: {error}.") from error
    if not count:
        raise ConfigError("calibration= has no batches. Pass a list of inputs, or leave it out to compare weights.")


def rows_of(layer: Any, x: Tensor) -> Tensor:
    """What a layer multiplies for an input, ``(rows, features)`` in double precision, at most `ROWS` of them."""
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        rows = x.reshape(-1, x.shape[-1])
        return rows[_chosen(len(rows), x.device)].double()
    d = len(layer.kernel_size)
    x = x if x.ndim == d + 2 else x[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    if math.prod(layer.kernel_size) * layer.in_channels > LARGEST:
        rows = x.movedim(1, -1).flatten(0, -2)
        return rows[_chosen(len(rows), x.device)].double()
    for axis, (size, stride, gap) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + axis, gap * (size - 1) + 1, stride)[..., ::gap]  # a new last axis: the taps
    x = x.movedim(1, d + 1)  # (batch, positions, inputs, taps)
    places = torch.unravel_index(_chosen(math.prod(x.shape[: d + 1]), x.device), x.shape[: d + 1])
    return x[places].flatten(1).double()


def _chosen(count: int, device: torch.device) -> Tensor:
    """Numbers of the rows that are used: all, or `ROWS` at random, the same ones every time."""
    if count <= ROWS:
        return torch.arange(count, device=device)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:ROWS].to(device)
