"""`to_plain`: ordinary PyTorch modules in the place of factorised ones."""

import copy
import dis
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from string import ascii_letters
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from bayestrain.errors import ConfigError, ConversionError
from bayestrain.formats import algebra
from bayestrain.nn import chains
from bayestrain.nn.conv import TensorConv
from bayestrain.nn.convert import replace_layers
from bayestrain.nn.embedding import TensorEmbedding, TensorEmbeddingBag
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer, is_lazy
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.parameters import is_parametrised, take_

SLACK = 1.1  # how much larger than the cores the smallest form may be
ROWS = 64  # the batch that products core by core are planned for
SMALL = 0.4  # thin products with at most this share of the dense multiplications are faster in onnxruntime, as measured
PLAIN = "made_plain"  # attribute of models of `transformers` that `to_plain` made, which they themselves cannot save

POINTWISE: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def to_plain(model: nn.Module) -> nn.Module:
    """Return a new model of ordinary PyTorch modules with the same outputs; `model` stays as it is.

    A layer becomes an `nn.Sequential` of thin ones, or the dense one where that is smaller or multiplies less, and one
    with a paired weight a `torch.fx.GraphModule` of reshapes and products. Other modules have their parameters whole.
    Shared weights, hooks and frozen parameters stay; lambda is left out.
    """
    return plain(model)


@torch.no_grad()
def plain(model: nn.Module, smallest: bool = False, folds: bool = False) -> nn.Module:
    """`to_plain`; for `export` what stores the fewest numbers, in which some layers stay as they are.

    For a runtime that `folds`, which multiplies weights by weights when it loads them, cores act as two halves at most.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Expected an nn.Module, got a {type(model).__name__}. Of a posterior, take particle(i).")
    if lazy := next((name for name, layer in model.named_modules() if is_lazy(layer)), None):
        raise ConfigError(f"Layer {lazy!r} is lazy and has no weights yet. Run one batch through the model first.")
    root = nn.Module()
    root.model = copy.deepcopy(model)
    for module in list(root.modules()):
        if isinstance(module, FactorizedWeight):
            module.rank_state = None
        elif is_parametrised(module) and not smallest:
            take_(module)
    users: dict[FactorizedWeight, list[TensorLayer]] = {}
    for module in root.modules():
        if isinstance(module, TensorLayer):
            users.setdefault(module.factorized, []).append(module)
    direct, replacements = _read_directly(root), dict[nn.Module, nn.Module]()
    for layers in users.values():
        if (make := _replacement(layers, not direct.isdisjoint(layers), smallest, folds)) is None:
            continue
        for layer in layers:
            replacements[layer] = made = make(layer).train(layer.training)
            known = {name: getattr(layer, name) for name in layer.settings if not hasattr(made, name)}
            for name, value in known.items():  # which modules around it may read
                setattr(made, name, value)
            if isinstance(made, fx.GraphModule):
                made.meta["_user_preserved_attributes"] = known  # in copies, too
    replace_layers(root, replacements)
    for module in root.modules():
        if hasattr(module, "save_pretrained") and not set(module.modules()).isdisjoint(replacements.values()):
            setattr(module, PLAIN, True)
    for name, module in root.model.named_modules():
        if not smallest and isinstance(module, FactorizedWeight):
            raise ConversionError(f"No layer of BayesTrain's uses the weight {name!r}. Store its dense() instead.")
    return root.model


def _read_directly(root: nn.Module) -> set[nn.Module]:
    """The layers whose parameters the code of a module around them reads, as that of attention does, or may read."""
    found: set[nn.Module] = set()
    for parent in root.modules():
        kind = getattr(type(parent), "dense_kind", type(parent))
        if issubclass(kind, nn.TransformerEncoderLayer | nn.TransformerEncoder):  # which only do on their fast path
            continue
        for known, path in _reads(kind):  # type: ignore[arg-type]
            if known:
                with suppress(AttributeError):  # it is not of a module
                    found.add(parent.get_submodule(".".join(path)))
            elif path:
                below, end = parent.named_modules(remove_duplicate=False), ".".join(("", *path))
                found |= {module for name, module in below if f".{name}".endswith(end)}
            else:
                found |= set(parent.modules())
    return found


@cache
def _reads(kind: type[nn.Module]) -> set[tuple[bool, tuple[str, ...]]]:
    """What ``forward`` and the methods that it calls read a weight or bias of: whether ``self``'s, and the path."""
    methods, found = ["forward"], set()
    for method in methods:  # which grows
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            function: Any = vars(base).get(method)
            code = getattr(inspect.unwrap(getattr(function, "fget", function)), "__code__", None)
            codes, first = ([code], code.co_varnames[:1]) if code else ([], ())
            for part in codes:
                codes += [own for own in part.co_consts if isinstance(own, CodeType)]
                own, path = False, tuple[str, ...]()
                for step in dis.get_instructions(part):
                    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                        if step.argval in ("weight", "bias") and (path or not own):
                            found.add((own, path))
                        if own and not path and step.argval not in methods:
                            methods.append(step.argval)
                        path += (step.argval,)
                    elif step.opname != "EXTENDED_ARG":  # newer interpreters load two variables at once
                        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
                        own, path = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and names[-1:] == first, ()
    return found


class _Whole(nn.Module):
    """A factorised layer that runs as the dense one, with the weight of its cores."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.run = layer, (layer.blank(),)  # no module of its own, as it has no values

    def forward(self, x: Tensor) -> Tensor:
        tensors = {"weight": self.layer.weight} | ({} if self.layer.bias is None else {"bias": self.layer.bias})
        return functional_call(self.run[0], tensors, (x,))  # type: ignore[no-any-return]


def _replacement(layers: Sequence[Any], whole: bool, smallest: bool, folds: bool) -> Callable[..., nn.Module] | None:
    """What makes the modules for the layers of one weight; None if they stay. `whole`: the dense weight is read."""
    layer, kinds, like = layers[0], {type(own) for own in layers}, layers[0].cores[0]
    weight = copy.deepcopy(layer.factorized).cpu().double()

    def parameters(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
        return [nn.Parameter(own.to(like).contiguous(), like.requires_grad) for own in tensors]

    axes, dense, limit = weight.layout.labels, math.prod(weight.shape), SLACK * weight.numel if smallest else math.inf
    if not whole and (isinstance(layer, TensorConv) or kinds <= {TensorLinear, TensorEmbedding}):
        positions = layer._positions() if len(axes) > 2 else (1, 1)
        chain, share = chains.cheapest(chains.network(weight), axes, weight.shape, positions)
        if folds and len(axes) > 2 and share > SMALL and dense > limit:
            return _Whole
        if chain is not None and (len(axes) > 2 or chain.groups == 1):
            kernels = chains.kernels(weight, chain)
            if sum(own.numel() for own in kernels) <= limit:
                return partial(_thin, kernels=parameters(kernels), chain=chain, alone=len(layers) == 1)
        if kinds == {TensorLinear} and weight.numel < dense:
            stages, cut = (chain.stages, 0) if chain is not None else _halves(weight) if folds else ((), 0)
            fewer = dense > limit if smallest else weight.operations(ROWS)[0] < ROWS * dense
            if fewer and (stages or not folds):
                cores, labels = zip(*weight.operands(), strict=True)
                used = stages if folds else ()
                return partial(_core_by_core, cores=parameters(cores), labels=labels, stages=used, cut=cut)
    if dense > limit or (smallest and TensorEmbeddingBag in kinds):  # PyTorch's own bags do not export
        return None
    return partial(_dense, weight=parameters([weight.dense()])[0], alone=len(layers) == 1)


def _halves(weight: FactorizedWeight) -> tuple[tuple[int, ...], int]:
    """The half that each core is part of, and how many factors of either side the first has; empty if that is slow."""
    (outs, ins), (rows, columns), network = weight.layout.labels, weight.layout.splits, chains.network(weight)
    best: tuple[tuple[int, ...], int] = (), 0
    fewest = SMALL * math.prod(weight.shape)
    for cut in range(1, min(len(outs), len(ins))):
        early, late, sizes = {*outs[:cut], *ins[:cut]}, {*outs[cut:], *ins[cut:]}, (dict[str, int](), dict[str, int]())
        stages = tuple(int(not late.isdisjoint(labels)) for labels, _ in network)
        for stage, (labels, shape) in zip(stages, network, strict=True):
            sizes[stage].update(zip(labels, shape, strict=True))
        rank = math.prod(size for label, size in sizes[0].items() if label in sizes[1])
        work = rank * math.prod(rows[cut:]) * (math.prod(columns) + math.prod((*rows[:cut], *columns[:cut])))
        if early.isdisjoint(sizes[1]) and work < fewest:
            best, fewest = (stages, cut), work
    return best


def _dense(layer: Any, weight: nn.Parameter, alone: bool) -> nn.Module:
    if type(layer) is TensorEmbedding:
        return _embedding(layer, [weight], alone)
    made = layer.to_dense()
    if layer.oriented(weight) is weight and not isinstance(layer, TensorEmbedding):
        made.weight = weight  # which other layers may share
    made.weight.requires_grad_(weight.requires_grad)
    if layer.bias is not None:
        made.bias = layer.bias
    return made  # type: ignore[no-any-return]


def _thin(layer: Any, kernels: Sequence[nn.Parameter], chain: chains.Chain, alone: bool) -> nn.Module:
    """Thin layers with these kernels, one after the other."""
    if type(layer) is TensorEmbedding:
        return _embedding(layer, kernels, alone)
    found = []
    for place, kernel in enumerate(kernels):
        kind, groups, settings = POINTWISE[kernel.ndim - 2], 1, {"kernel_size": 1} if kernel.ndim > 2 else {}
        bias, weight = layer.bias if place == len(kernels) - 1 else None, kernel
        if kernel.ndim > 2 and place == (0 in chain.stages):
            kind, groups = layer.dense_kind, chain.groups
            settings = {key: getattr(layer, key) for key in layer.settings if "channels" not in key}
            settings["groups"] = groups
            if layer.oriented(kernel) is not kernel:
                turned = kernel.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
                weight = nn.Parameter(turned, kernel.requires_grad)
        made = kind(kernel.shape[1] * groups, len(kernel), **settings, bias=bias is not None, device="meta")
        made.weight, made.bias = weight, bias
        found.append(made)
    return nn.Sequential(*found)


def _embedding(layer: TensorEmbedding, kernels: Sequence[nn.Parameter], alone: bool) -> nn.Module:
    """A table, and what its rows are multiplied with. Kernels that a linear layer shares stay as it needs them."""
    *others, table = kernels
    row, made = layer.padding_idx, nn.Embedding(len(table), table.shape[1], layer.padding_idx, device="meta")
    made.weight, found = table, list[nn.Module]([made])
    if row is not None and bool(table[row].any()):
        if alone:
            table[row] = 0.0
        else:
            looked_up = lambda x, table: F.embedding(x, table).masked_fill((x == row).unsqueeze(-1), 0.0)  # noqa: E731
            found = [_generated(looked_up, table=table)]
    for kernel in reversed(others):
        if alone:
            factor = nn.Linear(kernel.shape[0], kernel.shape[1], bias=False, device="meta")
            factor.weight = nn.Parameter(kernel.mT.contiguous(), kernel.requires_grad)
        found.append(factor if alone else _generated(lambda x, weight: x @ weight, weight=kernel))
    return nn.Sequential(*found) if others else found[0]


def _generated(function: Callable[..., Tensor], **parameters: nn.Parameter | None) -> fx.GraphModule:
    """A module of PyTorch operations and these parameters: what a function of an input and of them does."""

    class Generated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x, *(getattr(self, name) for name in parameters))

    root = Generated()
    for name, parameter in parameters.items():
        root.register_parameter(name, parameter)
    return fx.symbolic_trace(root)


def _core_by_core(
    layer: Any, cores: Sequence[nn.Parameter], labels: Sequence[tuple[str, ...]], stages: Sequence[int], cut: int
) -> fx.GraphModule:
    """A module that multiplies by cores along a fixed path, or by one kernel for each stage or half that they form."""
    layout = layer.factorized.layout
    (outs, ins), sizes = layout.labels, dict(zip(layout.labels[1], layout.splits[1], strict=True)) | {"batch": ROWS}
    for names, core in zip(labels, cores, strict=True):
        sizes |= dict(zip(names, core.shape, strict=True))
    stages = stages or range(len(labels))
    merged = list[tuple[list[int], tuple[str, ...]]]()
    for stage in sorted(set(stages)):
        own = [k for k, other in enumerate(stages) if other == stage]
        used = {*outs, *ins, *(label for k, names in enumerate(labels) if k not in own for label in names)}
        kept = dict.fromkeys(label for k in own for label in labels[k] if label in used)
        merged.append((own, tuple(kept)))
    if cut:
        bonds = tuple(label for label in merged[0][1] if label in merged[1][1])
        orders = (*outs[:cut], *ins[:cut], *bonds), (*ins[cut:], *bonds, *outs[cut:])
        merged = [(own, order) for (own, _), order in zip(merged, orders, strict=True)]

    def contracted(work: list[Any], output: tuple[str, ...]) -> Any:
        shaped = tuple((labels, tuple(sizes[x] for x in labels)) for _, labels in work)
        for i, j, kept in algebra.plan(shaped, output).steps:
            (b, right), (a, left) = work.pop(j), work.pop(i)
            kept = tuple(sorted(kept if work else output, key="batch".__ne__))
            name = dict(zip(dict.fromkeys(left + right), ascii_letters, strict=False)) | {"batch": "..."}
            parts = ["".join(sorted((name[x] for x in own), key="...".__ne__)) for own in (left, right, kept)]
            work.append((torch.einsum("{},{}->{}".format(*parts), a, b), kept))
        value, found = work[0]
        return value if found == output else value.permute([found.index(label) for label in output])

    def multiply(x: Any, *tensors: Any) -> Any:
        x = F.pad(x, (0, layout.padded[1] - layout.axes[1])) if layout.padded[1] > layout.axes[1] else x
        kernels = [contracted([(tensors[k], labels[k]) for k in own], kept) for own, kept in merged]
        if cut:  # the shapes are such that no large tensor is transposed
            (a, b), (c, d) = ([math.prod(own[s]) for own in layout.splits] for s in (slice(cut), slice(cut, None)))
            y = x.unflatten(-1, (b, d)) @ kernels[1].reshape(d, -1)
            y = (kernels[0].reshape(a, -1) @ y.unflatten(-1, (-1, c)).flatten(-3, -2)).flatten(-2)
        else:
            work = [(x.unflatten(-1, layout.splits[1]), ("batch", *ins))]
            work += [(kernel, kept) for kernel, (_, kept) in zip(kernels, merged, strict=True)]
            y = contracted(work, ("batch", *outs)).flatten(-len(outs))
        y = y.narrow(-1, 0, layout.axes[0]) if layout.padded[0] > layout.axes[0] else y
        return y if tensors[-1] is None else y + tensors[-1]  # the bias

    return _generated(multiply, **{f"core_{k}": core for k, core in enumerate(cores)}, bias=layer.bias)
