"""The layer kit: every layer in every format and layout against its dense twin.

The reference is slow and obvious: numpy's einsum makes the tensor, loops over the layout's definition make the weight.
"""

import copy
import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import MINIMAL
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

import bayestrain as bt
from bayestrain.errors import ConfigError, ConversionError, ShapeError
from bayestrain.formats import FORMATS, Format
from bayestrain.nn import TensorConvTranspose2d, TensorEmbeddingBag, TensorLayer, chains
from bayestrain.nn.conv import TensorConv
from bayestrain.nn.layout import LAYOUTS

LINEAR = {
    "two modes": {"in_features": 12, "out_features": 10, "in_modes": (4, 3), "out_modes": (5, 2)},
    "padded": {"in_features": 11, "out_features": 7, "in_modes": (4, 3), "out_modes": (4, 2)},
    "automatic": {"in_features": 30, "out_features": 42},
    "three modes": {
        "in_features": 24,
        "out_features": 27,
        "in_modes": (2, 4, 3),
        "out_modes": (3, 3, 3),
        "bias": False,
    },
}
CONV = {
    "same padding": {"in_channels": 6, "out_channels": 8, "kernel_size": 3, "padding": "same"},
    "strided": {"in_channels": 16, "out_channels": 18, "kernel_size": (3, 2), "stride": 2, "padding": 1},
    "padded modes": {"in_channels": 5, "out_channels": 7, "kernel_size": 3, "in_modes": (3, 2), "out_modes": (4, 2)},
    "dilated, reflected": {
        "in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 2, "dilation": 2, "padding_mode": "reflect",
        "bias": False,
    },
    "1x1": {"in_channels": 9, "out_channels": 4, "kernel_size": 1},
}  # fmt: skip

TRANSPOSED = {
    "transposed, strided": {"in_channels": 6, "out_channels": 4, "kernel_size": (3, 2), "stride": 2, "padding": 1,
                            "output_padding": 1},
    "transposed, padded modes": {"in_channels": 17, "out_channels": 5, "kernel_size": 3, "dilation": 2, "bias": False},
}  # fmt: skip
TABLES = {
    "two modes": {"num_embeddings": 20, "embedding_dim": 6, "out_modes": (5, 4), "in_modes": (3, 2)},
    "padded": {"num_embeddings": 97, "embedding_dim": 7, "padding_idx": 3},
    "more indices than rows": {"num_embeddings": 4, "embedding_dim": 12},
}

Case = tuple[type[TensorLayer], dict[str, Any], tuple[int, ...]]
CASES: dict[str, Case] = {
    **{f"linear, {name}": (bt.TensorLinear, settings, (settings["in_features"],)) for name, settings in LINEAR.items()},
    **{f"conv, {name}": (bt.TensorConv2d, own, (own["in_channels"], 7, 6)) for name, own in CONV.items()},
    **{name: (TensorConvTranspose2d, own, (own["in_channels"], 4, 5)) for name, own in TRANSPOSED.items()},
    **{f"table, {name}": (bt.TensorEmbedding, settings, (2,)) for name, settings in TABLES.items()},
    "bag, padded": (TensorEmbeddingBag, {**TABLES["padded"], "mode": "mean"}, (4,)),
    "conv 1d, strided": (bt.TensorConv1d, {"in_channels": 6, "out_channels": 8, "kernel_size": 3, "stride": 2}, (6, 9)),
    "conv 3d": (bt.TensorConv3d, {"in_channels": 4, "out_channels": 17, "kernel_size": (2, 1, 3), "padding": (1, 0, 2),
                               "padding_mode": "circular"}, (4, 3, 4, 5)),
}  # fmt: skip
EVERY = [
    pytest.param(case, format, layout, id=f"{format.name}, {layout}, {name}")
    for (name, case), format, layout in itertools.product(CASES.items(), (*FORMATS, *MINIMAL), LAYOUTS)
    if layout == "split" or not issubclass(case[0], TensorConv)  # of which both layouts are the same
]
FEW = [param for param in EVERY
       if param.values[1] in FORMATS and any(x in str(param.id) for x in ("two modes", "strided", "bag"))]  # fmt: skip
NO_BAGS = [param for param in FEW if "bag" not in str(param.id)]
"""PyTorch's own bags neither run in vmap, nor export with a dynamic batch and padding."""


def build(case: Case, format: Format, layout: str, seed: int = 0, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(seed)
    kind, settings, event = case
    options = {"max_rank": 2, "dtype": torch.float64, **options}
    layer = kind(**settings, format=format, layout=layout, **options)
    return layer, inputs(layer, (3, *event), options["dtype"])


def inputs(layer: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Random inputs: indices for a table, numbers for other layers."""
    if isinstance(layer, bt.TensorEmbedding):
        return torch.randint(0, layer.num_embeddings, shape)
    return torch.randn(shape, dtype=dtype)


def slow_weight(layer: TensorLayer, cores: list[np.ndarray]) -> np.ndarray:
    """The weight from the definitions of equation and layout, entry by entry of the modes."""
    equation, layout = layer.factorized.equation, layer.factorized.layout
    number = {label: n for n, label in enumerate(dict.fromkeys(x for core in equation.cores for x in core))}
    args: list[object] = []
    for core, labels in zip(cores, equation.cores, strict=True):
        args += [core, [number[x] for x in labels]]
    tensor = np.einsum(*args, [number[x] for x in equation.modes])
    weight = np.zeros(layout.padded)
    for factors in itertools.product(*map(range, layout.factors)):
        modes = []
        for mode in layout.modes:
            position = 0
            for n in mode:
                position = position * layout.factors[n] + factors[n]
            modes.append(position)
        place, first = [], 0
        for split in layout.splits:
            position = 0
            for n, size in enumerate(split):
                position = position * size + factors[first + n]
            place.append(position)
            first += len(split)
        weight[tuple(place)] = tensor[tuple(modes)]
    return weight[tuple(slice(size) for size in layout.axes)].reshape(layout.shape)


@pytest.mark.parametrize(("case", "format", "layout"), EVERY)
def test_the_weight_follows_the_definitions_however_the_cores_are_used(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout)
    expected = slow_weight(layer, [core.detach().numpy() for core in layer.cores])
    found = layer.factorized.dense().detach()
    assert_close(found.numpy(), expected)
    if (row := getattr(layer, "padding_idx", None)) is not None:
        found[row] = 0.0
    assert_close(layer.oriented(found), layer.weight.detach())
    assert layer.weight.shape == layer.to_dense().weight.shape
    expected = layer.to_dense()(x)
    if isinstance(layer, bt.TensorLinear):
        assert_close(layer.factorized.multiply(x), expected - (0 if layer.bias is None else layer.bias))
        assert_close(F.linear(x, layer.weight, layer.bias), expected)
    elif isinstance(layer, TensorConv):
        assert_close(layer.run(x, [layer.factorized.dense()]), expected)
        for chain in chains.chains(chains.network(layer.factorized), layer.factorized.layout.labels):
            kernels = chains.kernels(layer.factorized, chain)
            assert_close(layer.run(x, kernels, 0 in chain.stages, chain.groups), expected)
    else:
        index = torch.randint(0, layer.factorized.shape[0], (9,))
        assert_close(layer.factorized.rows(index), layer.factorized.dense()[index])


@pytest.mark.parametrize(("case", "format", "layout"), EVERY)
def test_values_and_gradients_are_those_of_the_dense_twin(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout)
    twin = layer.to_dense()
    cotangent = torch.randn_like(twin(x))
    leaves = {"x": x.clone().requires_grad_()} if x.is_floating_point() else {}
    leaves |= dict(layer.named_parameters())
    y = layer(leaves.get("x", x))
    assert_close(y, twin(x))
    with torch.no_grad():
        assert_close(layer(x), y)
    found = torch.autograd.grad(y, list(leaves.values()), cotangent)
    dense = {"weight": layer.weight} | ({"bias": layer.bias} if layer.bias is not None else {})
    expected = torch.autograd.grad(functional_call(twin, dense, leaves.get("x", x)), list(leaves.values()), cotangent)
    for name, one, other in zip(leaves, found, expected, strict=True):
        assert_close(one, other, msg=lambda m, n=name: f"gradient of {n}: {m}")


@pytest.mark.parametrize(("case", "format", "layout"), EVERY)
def test_a_dense_layer_is_taken_over(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout)
    dense = layer.to_dense().eval()
    dense.weight.requires_grad_(False)
    if (row := getattr(layer, "padding_idx", None)) is not None:
        dense.weight[row] = layer.factorized.dense()[row].detach()  # zeros there would cost ranks
    folding = layer.factorized.layout
    modes = {"in_modes": layer.in_modes, "out_modes": layer.out_modes} if folding.name == layout else {}
    again = type(layer).from_dense(dense, format=format, layout=layout, max_rank=2, **modes)
    if folding.padded == folding.axes:  # a weight cut out of a tensor of rank 2 has a higher one
        assert_close(again(x), layer(x), rtol=1e-3, atol=1e-3)
    assert not again.training
    assert not any(core.requires_grad for core in again.cores)
    assert (again.bias is None) == (layer.bias is None)


@pytest.mark.parametrize(("case", "format", "layout"), FEW)
def test_batch_shapes(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout)
    twin = layer.to_dense()
    many = isinstance(layer, bt.TensorLinear) or type(layer) is bt.TensorEmbedding
    one = [] if isinstance(layer, TensorEmbeddingBag) else [()]  # a single bag needs offsets
    for shape in [*one, (1,), *([(0,), (2, 3), (5, 1, 2)] if many else [(5,)])]:
        own = inputs(layer, (*shape, *x.shape[1:]))
        assert_close(layer(own), twin(own))
    if isinstance(layer, bt.TensorEmbedding):
        return
    with pytest.raises(ShapeError, match="expects"):
        layer(torch.randn(3, x.shape[1] + 1, *x.shape[2:], dtype=x.dtype))


@pytest.mark.parametrize(("case", "format", "layout"), FEW)
def test_copies_files_and_state_dicts_with_other_ranks(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert_close(twin(x), layer(x))
        assert repr(twin) == repr(layer)
    assert format.name in repr(layer)
    assert str(layer.ranks) in repr(layer)
    assert bt.count_parameters(layer) == sum(p.numel() for p in layer.parameters())
    large, _ = build(case, format, layout, seed=1, max_rank=3)
    optimiser_sees = list(large.parameters())
    large.load_state_dict(layer.state_dict())
    assert_close(large(x), layer(x))
    assert large.ranks == layer.ranks
    assert all(one is other for one, other in zip(optimiser_sees, large.parameters(), strict=True))
    large(x).sum().backward()  # autograd has forgotten the old shapes


@pytest.mark.parametrize(("case", "format", "layout"), FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_autocast(case: Case, format: Format, layout: str, dtype: torch.dtype) -> None:
    layer, x = build(case, format, layout)
    expected = layer(x)
    tol = 1e-4 if dtype == torch.float32 else 0.1
    own = copy.deepcopy(layer).to(dtype)
    given = x.to(dtype) if x.is_floating_point() else x
    assert own(given).dtype == dtype
    assert_close(own(given).double(), expected, rtol=tol, atol=tol)
    single = copy.deepcopy(layer).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = single(x.float() if x.is_floating_point() else x)
        assert y.dtype == (torch.bfloat16 if x.is_floating_point() else torch.float32)  # as PyTorch's layers do
        assert single.weight.dtype == torch.float32  # materialised in the precision of the cores
    assert_close(y.double(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("case", "format", "layout"), NO_BAGS)
def test_many_networks_at_once(case: Case, format: Format, layout: str) -> None:
    layers = [build(case, format, layout, seed=seed)[0] for seed in range(3)]
    _, x = build(case, format, layout)
    stacked, _ = stack_module_state(layers)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layers[0], parameters, (x,)).square().sum()

    found = vmap(grad(loss), (0, None))(stacked, x)
    for i, layer in enumerate(layers):
        gradients = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
        for (name, _), gradient in zip(layer.named_parameters(), gradients, strict=True):
            assert_close(found[name][i], gradient)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("case", "format", "layout"), NO_BAGS)
def test_it_is_exported_with_a_dynamic_batch(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout, dtype=torch.float32)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer.eval(), (x,), dynamic_shapes=({0: batch},))
    other = inputs(layer, (7, *x.shape[1:]), torch.float32)
    assert_close(program.module()(other), layer(other))
    traced = torch.jit.trace(layer, x, check_trace=False)
    assert_close(traced(other), layer(other))


@pytest.mark.parametrize(("case", "format", "layout"), FEW)
def test_it_compiles_without_a_graph_break(case: Case, format: Format, layout: str) -> None:
    layer, x = build(case, format, layout)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert_close(y, layer(x))
    gradient = torch.autograd.grad(y.sum(), list(layer.parameters()))
    assert_close(list(gradient), list(torch.autograd.grad(layer(x).sum(), list(layer.parameters()))))


def test_a_train_shows_ranks_of_one_at_both_ends() -> None:
    layer = bt.TensorLinear(784, 625, max_rank=(3, 2, 3), in_modes=(7, 4, 7, 4), out_modes=(5, 5, 5, 5))
    assert layer.ranks == (1, 3, 2, 3, 1)
    assert layer.factorized.ranks == (3, 2, 3)
    assert [tuple(core.shape) for core in layer.cores] == [(35, 3), (3, 20, 2), (2, 35, 3), (3, 20)]


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: bt.TensorLinear(12, 10, max_rank=0), ConfigError, "at least 1"),
    (lambda: bt.TensorLinear(12, 10, in_modes=(3, 3)), ShapeError, "in_modes"),
    (lambda: bt.TensorLinear(12, 10, in_modes=(4, 3), out_modes=(10,)), ShapeError, "equally many"),
    (lambda: bt.TensorLinear(12, 10, layout="sideways"), ConfigError, "layout must be one of"),
    (lambda: bt.TensorLinear(12, 10, format="svd"), ConfigError, "format must be one of"),
    (lambda: bt.TensorLinear(12, 10, init="zero"), ConfigError, "init must be one of"),
    (lambda: bt.TensorConv2d(4, 4, 3, groups=2), ConversionError, "groups must be 1"),
    (lambda: bt.TensorLinear.from_dense(nn.Conv2d(3, 4, 3)), ConversionError, "Expected an nn.Linear"),
    (lambda: bt.TensorConv2d.from_dense(nn.LazyConv2d(4, 3)), ConversionError, "lazy"),
    (lambda: bt.TensorLinear.from_dense(nn.Linear(12, 10), tol=2.0), ConfigError, "tol"),
])  # fmt: skip
def test_what_cannot_be_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
