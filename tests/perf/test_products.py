"""Every way to multiply by a train computes the same; what inference keeps follows the cores; priors made together."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.nn import TensorConv2d, TensorLayer, TensorLinear
from bayestrain.nn.fast import fast
from bayestrain.perf import layers, trains
from bayestrain.perf.planner import CPU_THREAD, CUDA, Task, Train, cheapest, dense_cost
from bayestrain.perf.stacks import Stacks, Together
from bayestrain.perf.tables import FEW, Tables
from bayestrain.prior.density import newton_step
from bayestrain.prior.groups import Group

pytestmark = pytest.mark.skipif(fast() is None, reason="perf is switched off")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

LAYERS = {
    "paired": lambda: TensorLinear(24, 30, in_modes=(2, 3, 4), out_modes=(5, 2, 3), max_rank=(4, 5)),
    "padded": lambda: TensorLinear(23, 29, in_modes=(2, 3, 4), out_modes=(5, 2, 3), max_rank=3),
    "no bias": lambda: TensorLinear(24, 30, False, in_modes=(2, 3, 4), out_modes=(5, 2, 3), max_rank=3),
    "split": lambda: TensorLinear(24, 30, layout="split", max_rank=4),
    "conv": lambda: TensorConv2d(16, 24, 3, stride=2, padding=1, max_rank=5),
}


def layer(kind: str) -> TensorLayer:
    torch.manual_seed(0)
    return LAYERS[kind]().double()


def inputs(own: TensorLayer, rows: int = 5) -> Tensor:
    size = (rows, 16, 7, 7) if isinstance(own, TensorConv2d) else (rows, own.factorized.shape[1])
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def everything(own: TensorLayer, x: Tensor, y: Tensor) -> list[Tensor]:
    return [y, *torch.autograd.grad(y.square().sum(), [x, *own.parameters()])]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_the_fast_pass_is_the_readable_one(kind: str, training: bool) -> None:
    own = layer(kind).train(training)
    x, dense = inputs(own), own.to_dense()
    y = layers.multiply(own, x)
    assert y is not None
    torch.testing.assert_close(y, dense(x), **CLOSE)
    torch.testing.assert_close(everything(own, x, y), everything(own, x, own.multiply(x)), **CLOSE)


@pytest.mark.parametrize(("ins", "outs"), [((2, 3, 4), (6, 5)), ((3, 3, 3), (2, 4, 4)), ((24,), (30,))])
@pytest.mark.parametrize("bias", [True, False])
def test_one_node_for_two_factors_has_all_derivatives(ins: tuple[int, ...], outs: tuple[int, ...], bias: bool) -> None:
    """Also where the modes are padded, where some tensors need no gradient, and a second time."""
    own = TensorLinear(24, 30, bias, layout="split", in_modes=ins, out_modes=outs, max_rank=4).double()
    x = torch.randn(3, 2, 24, dtype=torch.float64, requires_grad=True)
    own.cores[0].requires_grad_(False)
    wanted = [x, *(parameter for parameter in own.parameters() if parameter.requires_grad)]

    def derivatives(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y.pow(3).sum(), wanted, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(each.square().sum() for each in first), wanted)]

    torch.testing.assert_close(derivatives(own(x)), derivatives(F.linear(x, own.weight, own.bias)), **CLOSE)
    with torch.autocast("cpu", torch.bfloat16):
        y = own.float()(x.float())
    assert all(found.isfinite().all() for found in torch.autograd.grad(y.sum(), own.cores[1], create_graph=True))
    own.double()
    frozen = own.requires_grad_(False)(x)
    torch.testing.assert_close(torch.autograd.grad(frozen.sum(), x), torch.autograd.grad(own.to_dense()(x).sum(), x))


@pytest.mark.parametrize("kind", ["paired", "padded"])
def test_every_chain_computes_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trains, "ROWS_AT_ONCE", 8)
    own = layer(kind)
    train, cores = layers.used(own)
    for rows, cuts, few in product((7, 20), ((1,), (2,), (1, 2)), (0, 100)):
        monkeypatch.setattr(trains, "FEW_ROWS", few)
        assert cuts in train.cuts()
        x = inputs(own, rows)
        expected = F.linear(x, own.weight)
        chain = trains.factors(train, cores, cuts)
        y = trains.multiply(F.pad(x, (0, 24 - x.shape[1])), chain)[:, : own.out_features]
        torch.testing.assert_close(y, expected, **CLOSE)
        pair = (torch.autograd.grad(out.square().sum(), [x, *cores]) for out in (y, expected))
        torch.testing.assert_close(*pair, **CLOSE)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("rank", [2, 40])
def test_both_forms_of_a_convolution_keep_the_memory_format(channels_last: bool, rank: int) -> None:
    own = TensorConv2d(32, 32, 3, padding=1, max_rank=rank).double()
    x = torch.randn(2, 32, 6, 6, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    y = own(x)
    torch.testing.assert_close(y, own.to_dense()(x), **CLOSE)
    assert y.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("kind", ["paired", "conv"])
def test_what_inference_keeps_follows_every_change_of_the_cores(kind: str) -> None:
    own = layer(kind).eval()
    x = inputs(own).detach()

    def same() -> None:
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(own(x), own.to_dense()(x), **CLOSE)

    same()
    with torch.no_grad():
        own.cores[0].mul_(2.0)
    same()
    own.factorized.set_cores([core * 1.5 for core in own.cores])
    same()
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    own(x).square().sum().backward()
    optimizer.step()
    same()
    own.cores[1].data[0] += 1.0  # no counter shows this
    own.eval()
    same()
    bt.compact_(own, 0.5)
    same()
    own.double().float()
    x = x.float()
    with torch.no_grad():
        torch.testing.assert_close(own(x), own.to_dense()(x), rtol=1e-4, atol=1e-4)


def test_what_takes_the_readable_way() -> None:
    with torch.inference_mode():
        made = layer("paired").eval()
        x = torch.randn(3, 24, dtype=torch.float64)
        torch.testing.assert_close(made(x), made.to_dense()(x), **CLOSE)
    own = layer("paired")
    nn.utils.parametrize.register_parametrization(own.cores, "0", nn.Identity())
    assert layers.multiply(own, inputs(own)) is None
    assert layers.multiply(layer("paired"), torch.zeros(0, 24, dtype=torch.float64)) is None
    for format in bt.formats.FORMATS:
        own = TensorLinear(8, 8, format=format, max_rank=2)
        assert (layers.multiply(own, torch.randn(2, 8)) is None) == (format.name != "tt")


PAIRED = Train((5, 5, 5, 5), (7, 4, 7, 4), (625, 784))


def test_plans() -> None:
    for machine in (CPU_THREAD, CUDA):
        assert cheapest(PAIRED, (1, 20, 400, 20, 1), Task(128), machine).cuts == ()
    for task in (Task(128), Task(1, merged=True, training=False)):
        assert len(cheapest(PAIRED, (1, 4, 2, 3, 1), task, CPU_THREAD).cuts) == 1
    train = Train((1, 1, 1, 8, 16), (9, 8, 16, 1, 1), (128, 128, 3, 3), middle=3, inputs_first=True)
    found = [cheapest(train, (1, 9, 72, rank, 16, 1), Task(8 * 32 * 32), CPU_THREAD).cuts for rank in (8, 120)]
    assert found == [(3,), ()]
    dense, found = dense_cost(625, 784, Task(128), CPU_THREAD), cheapest(PAIRED, (1, 4, 2, 3, 1), Task(128), CPU_THREAD)
    assert found.seconds < dense.seconds
    assert found.operations < dense.operations
    kind, work, ours, theirs = layers.expect(TensorLinear(784, 625, max_rank=2), torch.zeros(128, 784), True)
    assert (kind, work < 1, ours < theirs) == ("two factors", True, True)


def test_stacks_and_weights_made_together() -> None:
    weights = {rank: TensorLinear(size, 6, layout="split", max_rank=rank).factorized for rank, size in ((2, 8), (3, 6))}
    stacks = Stacks(weights)
    stacked = stacks()
    assert [len(stack) for stack in stacked] == [2] * len(weights[2].cores)
    for name, cores in stacks.apart(stacked).items():
        assert all(map(torch.equal, cores, weights[name].cores))
    assert sum(stack.count_nonzero() for stack in stacked) == sum(weight.numel for weight in weights.values())
    sum((k + 1) * stack.sum() for k, stack in enumerate(stacked)).backward()
    for weight in weights.values():
        assert all((core.grad == k + 1).all() for k, core in enumerate(weight.cores))
    kinds = [TensorLinear(16, 16, in_modes=(4, 4), out_modes=(4, 4), max_rank=r) for r in (16, 12, 16)]
    model = nn.Sequential(*kinds, TensorLinear(16, 8, max_rank=8), kinds[0]).double()
    model.insert(4, nn.Linear(8, 16).double())
    twin, together = copy.deepcopy(model), Together()
    x = torch.randn(300, 16, dtype=torch.float64)
    expected = twin(x).square().sum()
    expected.backward()
    for number in range(3):
        model.zero_grad()
        with together():
            y = model(x).square().sum()
            assert bool(together._stacks) == (number > 0)
        y.backward()
        torch.testing.assert_close(y, expected, **CLOSE)
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE, msg=name)
    torch.testing.assert_close(model(x).square().sum(), expected, **CLOSE)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(TensorLinear(8, 8, max_rank=2 + k % 3) for k in range(FEW + 1)))


def same_as_readable(tables: Tables) -> None:
    readable = Group(tables.weights, tables.held)
    torch.testing.assert_close(tables.log_prob(1.0), readable.log_prob(1.0), check_dtype=False)
    found = []
    for group in (tables, readable):
        for weight in group.weights.values():
            for u in weight.rank_state.log_lambdas:
                u.fill_(0.5)
        group.move_(newton_step, sweeps=2)
        found.append([u.clone() for weight in group.weights.values() for u in weight.rank_state.log_lambdas])
    torch.testing.assert_close(*found)


def test_tables_follow_types_and_leave_others_to_the_readable_group() -> None:
    model = network()
    model.append(TensorLinear(8, 8, dtype=torch.float64))
    tables, rest = bt.RankPrior(model, 10).groups
    assert (type(tables), list(tables.weights)) == (Tables, [str(k) for k in range(FEW + 1)])
    assert (type(rest), list(rest.weights)) == (Group, [str(FEW + 1)])
    same_as_readable(tables)
    model = network()
    (tables,) = bt.RankPrior(model, 10).groups
    same_as_readable(tables)
    model[1].double()
    same_as_readable(tables)
    model.double()
    same_as_readable(tables)


def test_frozen_split_layers_save_only_their_factors() -> None:
    own, h = layer("split").requires_grad_(False), torch.randn(64, 24, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        x = h * 1
        y = own(x)
    assert not any(len(tensor) == 64 for tensor in saved if tensor is not h)
    with torch.no_grad():
        x.add_(1)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), h)[0], own.weight.sum(0).expand(64, -1))


def test_compiled_layers_under_transformations_of_torch_func() -> None:
    own, x = layer("split"), torch.randn(3, 24, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(torch.func.grad(lambda x: own(x).square().sum())), backend="aot_eager")
    torch.testing.assert_close(compiled(x), 2 * own(x) @ own.weight, **CLOSE)


def test_nested_inputs_of_a_split_layer() -> None:
    own, x = layer("split"), torch.randn(5, 24, dtype=torch.float64)
    nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    torch.testing.assert_close(own(nested).values(), own(x), **CLOSE)
