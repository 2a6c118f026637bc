"""The Triton kernels: step by step on a CPU by Triton's interpreter, compiled on a GPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bayestrain.nn import TensorLinear
from bayestrain.nn.fast import fast
from bayestrain.perf import layers, planner

pytest.importorskip("triton")
from bayestrain.perf import kernels

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
KINDS = list(TOLERANCE)[: 3 if CUDA else 2]  # the interpreter multiplies bfloat16 as if it were integers
SIZE = st.sampled_from([1, 7, 16, 20, 33, 64]) if CUDA else st.integers(1, 20)


def plain(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
    """The product by its definition."""
    o1, i1, o2, i2 = sizes
    left, right = a.unflatten(-1, (o1, i1)), b.unflatten(-1, (o2, i2))
    y = torch.einsum("nroi,nbij,nrqj->nboq", left, x.unflatten(-1, (i1, i2)), right).flatten(-2)
    return y if bias is None else y + bias[..., None, :]


def product(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
    return kernels.product(x, a, b, bias, sizes, False)


def example(
    nets: int, count: int, rank: int, sizes: list[int], dtype: torch.dtype, factors: torch.dtype
) -> list[Tensor]:
    o1, i1, o2, i2 = sizes
    shapes = (nets, count, i1 * i2), (nets, o1 * i1, rank), (nets, rank, o2 * i2), (nets, o1 * o2)
    x, a, b, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    kinds = dtype, factors, factors, factors
    found = [own.to(DEVICE, kind) for own, kind in zip((x, a.mT, b, bias), kinds, strict=True)]
    return [own.detach().requires_grad_() for own in found]


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative to what it should be; NaN, which memory is filled with first, never passes."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm()) / max(float(wanted.norm()), 1e-30) if wanted.numel() else 0.0


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if CUDA:
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
        for size in (1 << 16, 1 << 20, 1 << 24):
            torch.full((size,), math.nan, device="cuda")


@settings(max_examples=60 if CUDA else 12, deadline=None, derandomize=True)
@given(
    sizes=st.lists(SIZE, min_size=4, max_size=4), nets=st.integers(1, 3), count=st.integers(0, 9),
    rank=st.integers(1, 5), kind=st.sampled_from(KINDS), precise=st.booleans(), biased=st.booleans(),
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_the_definition(
    sizes: list[int], nets: int, count: int, rank: int, kind: torch.dtype, precise: bool, biased: bool
) -> None:
    tensors: list[Any] = example(nets, count, rank, sizes, kind, torch.float32 if precise else kind)
    exact: list[Any] = [own.detach().double().requires_grad_() for own in tensors]
    if not biased:
        tensors[3] = exact[3] = None
    y, wanted = product(*tensors, sizes), plain(*exact, sizes)
    assert (y.shape, y.dtype) == (wanted.shape, kind)
    g = torch.randn_like(y)
    ours = torch.autograd.grad(y, [own for own in tensors if own is not None], g)
    theirs = torch.autograd.grad(wanted, [own for own in exact if own is not None], g.double())
    for found, right in zip((y, *ours), (wanted, *theirs), strict=True):
        assert error(found, right) <= TOLERANCE[kind]


@pytest.mark.parametrize("sizes", [[64, 33, 16, 40], [3, 2, 5, 4]])
def test_tiles_hold_several_samples(sizes: list[int]) -> None:
    tensors = example(1, 3, 2, sizes, torch.float32, torch.float32)
    assert kernels.options(tuple(sizes), torch.float32, "tf32", kernels.WIDE)["P"] > 1
    y, wanted = product(*tensors, sizes), plain(*tensors, sizes)
    g = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(own, tensors, g) for own in (y, wanted))
    for found, right in zip((y, *ours), (wanted, *theirs), strict=True):
        assert error(found, right) < 2e-5


def test_compiled_without_a_graph_break() -> None:
    sizes = [3, 4, 5, 2]
    tensors = example(1, 4, 2, sizes, torch.float32, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *own: product(*own, sizes), fullgraph=True, backend="aot_eager")
    y, wanted = compiled(*tensors), plain(*tensors, sizes)
    g = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(own, tensors, g) for own in (y, wanted))
    for found, right in zip((y, *ours), (wanted, *theirs), strict=True):
        assert error(found, right) < 2e-5


def test_second_derivatives() -> None:
    sizes = [3, 4, 5, 2]
    tensors = example(1, 4, 2, sizes, torch.float32, torch.float32)

    def second(run: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(*tensors, sizes).pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(own.square().sum() for own in first), tensors)

    for found, wanted in zip(second(product), second(plain), strict=True):
        assert error(found, wanted) < 1e-5


def test_particles_are_an_axis_of_the_grid() -> None:
    sizes = [3, 4, 5, 2]
    tensors = [own.detach() for own in example(4, 6, 2, sizes, torch.float32, torch.float32)]

    def loss(run: Any, *own: Tensor) -> Tensor:
        return run(*(tensor[None] for tensor in own), sizes).square().sum()

    gradient = torch.func.grad(lambda *own: loss(product, *own), (0, 1, 2, 3))
    shared = torch.vmap(gradient, (None, 0, 0, 0))(tensors[0][0], *tensors[1:])
    for k in range(4):
        own = torch.func.grad(lambda *own: loss(plain, *own), (0, 1, 2, 3))(
            tensors[0][0], *(tensor[k] for tensor in tensors[1:])
        )
        assert all(error(found[k], wanted) < 1e-5 for found, wanted in zip(shared, own, strict=True))


@pytest.mark.parametrize("op", ["product", "gradients"])
def test_the_operators_are_what_compilers_expect(op: str) -> None:
    sizes = [3, 4, 5, 2]
    x, a, b, bias = (own.detach() for own in example(2, 3, 2, sizes, torch.float32, torch.float32))
    if op == "product":
        torch.library.opcheck(kernels.two_factors, (x, a, b, bias, sizes, False))
    else:
        g = torch.randn(2, 3, 15, device=DEVICE)
        torch.library.opcheck(kernels.gradients, (x, g, a, b, sizes))


@pytest.mark.skipif(fast() is None, reason="perf is switched off")
def test_a_layer_multiplies_by_them_with_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the planner chooses on a GPU: here it is asked on a CPU, where the interpreter runs the kernels."""
    x = torch.randn(3, 5, 250, requires_grad=True, device=DEVICE)
    # 256 inputs and 132 outputs inside
    layer = TensorLinear(250, 130, in_modes=(16, 16), out_modes=(12, 11), max_rank=2).to(DEVICE)
    weight, bias = nn.Parameter(layer.weight.detach()), layer.bias
    train, cores = layers.used(layer)
    assert train is not None
    plan = planner.Cost(0.0, 0.0, (1,), fused=True)
    monkeypatch.setattr(layers, "_plan", lambda *_: (plan, None, None))
    y, wanted = layer(x), nn.functional.linear(x, weight, bias)
    assert error(y, wanted) < 2e-5
    g = torch.randn_like(y)
    ours = torch.autograd.grad(y, [x, bias], g)
    for found, right in zip(ours, torch.autograd.grad(wanted, [x, bias], g), strict=True):
        assert error(found, right) < 2e-5


def test_the_planner_takes_the_kernels_where_they_are_faster() -> None:
    task = planner.Task(rows=4096)
    large = planner.Train((8,) * 4, (8,) * 4, (4096, 4096))
    assert planner.cheapest(large, (1, 4, 4, 4, 1), task, planner.CUDA).fused
    assert not planner.cheapest(large, (1, 8, 32, 8, 1), task, planner.CUDA).fused
    assert not planner.cheapest(large, (1, 4, 4, 4, 1), task, planner.CUDA._replace(fused=0.0)).fused
    huge = planner.Train((256, 256), (256, 256), (65536, 65536))
    assert not planner.cheapest(huge, (1, 2, 1), task, planner.CUDA).fused


@pytest.mark.skipif(not CUDA or fast() is None, reason="needs a CUDA device, and perf")
@pytest.mark.parametrize("autocast", [False, True])
def test_eager_compiled_and_captured_layers_agree(autocast: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    layer = TensorLinear(4096, 4000, max_rank=2).cuda()
    x = torch.randn(2048, 4096, device="cuda", requires_grad=True)
    expected = layers.expect(layer, x, training=True)
    assert expected is not None
    assert expected[0] == "two factors, one kernel"
    g = torch.randn(2048, 4000, device="cuda")

    def passes(run: Any) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = run(x)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], g.to(y.dtype))]

    wanted = passes(layer.to_dense())[:2]
    eager = passes(layer)
    torch._dynamo.reset()
    compiled = passes(torch.compile(layer, fullgraph=True))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        passes(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        replayed = passes(layer)
    graph.replay()
    torch.cuda.synchronize()
    tolerance = 1e-2 if autocast else 3e-3
    assert all(error(found, right) < tolerance for found, right in zip(eager, wanted, strict=False))
    for found in (compiled, replayed):
        assert all(error(own, right) < tolerance for own, right in zip(found, eager, strict=True))
