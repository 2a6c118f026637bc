"""Parameters of modules that keep their class: attention, recurrent layers, and whatever has a name."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from operations import Operations
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import bayestrain as bt
from bayestrain.formats import FORMATS, Format
from bayestrain.nn import factorized_weights

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Experts(nn.Module):
    """A mixture of experts with one parameter for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 32, 20))
        self.gate = nn.Parameter(torch.randn(3, 32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,eio,bte->bto", x, self.experts, (x @ self.gate.mT).softmax(-1))


def attention(**options: Any) -> Callable[[], nn.Module]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.MultiheadAttention(32, 2, batch_first=True, **options)

        def forward(self, x: Tensor) -> Tensor:
            others = {32: x, 24: x[..., :24], 20: x[..., :20]}
            return self.own(x, others[self.own.kdim], others[self.own.vdim])[0]

    return Attention


class First(nn.Module):
    """A recurrent layer's outputs without its state."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.own = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)[0]


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "packed attention": (attention(), None),
    "separate attention": (attention(kdim=24, vdim=20, bias=False), None),
    "lstm": (lambda: First(nn.LSTM(32, 24, num_layers=2, bidirectional=True, proj_size=16)), None),
    "gru": (lambda: First(nn.GRU(32, 24, bias=False)), None),
    "rnn": (lambda: First(nn.RNN(32, 24, nonlinearity="relu")), None),
    "experts": (Experts, ["experts", "gate"]),
}
EVERY = [
    pytest.param(build, include, format, layout, id=f"{format.name}, {layout}, {name}")
    for name, (build, include) in CASES.items()
    for format in FORMATS
    for layout in ("paired", "split")
]


def made(build: Callable[[], nn.Module], include: Any, format: Format, layout: str, rank: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = build().double()
    bt.tensorize_(model, bt.TensorizeConfig(rank, format, layout), include=include)
    return model


def plain(model: nn.Module) -> nn.Module:
    """The model with whole parameters."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if hasattr(module, "to_dense"):
            parent, _, attribute = name.rpartition(".")
            if not name:
                return module.to_dense()
            setattr(twin.get_submodule(parent), attribute, module.to_dense())
    assert not factorized_weights(twin)
    return twin


@pytest.mark.parametrize(("build", "include", "format", "layout"), EVERY)
def test_values_and_gradients_are_the_dense_twins(build: Any, include: Any, format: Format, layout: str) -> None:
    model, x = made(build, include, format, layout), torch.randn(2, 5, 32, dtype=torch.float64)
    if isinstance(model, Experts):
        assert not any(core.requires_grad for core in model.factorized.gate.cores)
    twin = plain(model)
    names = {type(module).__name__ for module in build().modules()}
    assert {type(module).__name__ for module in twin.modules()} <= {*names, "Linear"}
    assert {n: p.shape for n, p in twin.named_parameters()} == {n: p.shape for n, p in build().named_parameters()}
    assert_close(model(x), twin(x))
    with torch.no_grad():
        assert_close(model.eval()(x), twin.eval()(x))
    model.train(), twin.train()
    cores = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(model(x).square().sum(), list(cores.values()))

    names = [name for name, p in twin.named_parameters() if p.requires_grad]
    whole = dict.fromkeys(names)
    for name in names:
        owner, _, key = name.rpartition(".")
        whole[name] = getattr(model.get_submodule(owner), key)
    loss = functional_call(twin, whole, (x,)).square().sum()
    for one, other in zip(found, torch.autograd.grad(loss, list(cores.values())), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(("build", "include", "format", "layout"), EVERY[::2])
def test_copies_files_and_state_dicts(build: Any, include: Any, format: Format, layout: str) -> None:
    model, x = made(build, include, format, layout).eval(), torch.randn(2, 5, 32, dtype=torch.float64)
    buffer = io.BytesIO()
    if include is None and "Attention" not in type(model).__name__:  # a class in a function cannot be pickled
        torch.save(model, buffer)
        buffer.seek(0)
        assert_close(torch.load(buffer, weights_only=False)(x), model(x))
        assert type(pickle.loads(pickle.dumps(model.own))) is type(model.own)
    assert_close(copy.deepcopy(model)(x), model(x))
    other = made(build, include, format, layout, rank=3).eval()
    other.load_state_dict(model.state_dict())
    assert_close(other(x), model(x))
    assert bt.ranks(other) == bt.ranks(model)
    half = copy.deepcopy(model).float()
    assert half(x.float()).dtype == torch.float32
    again = copy.deepcopy(model)
    bt.compact_(again, tol=0.9)
    assert bt.count_parameters(again) < bt.count_parameters(model)
    assert again(x).shape == model(x).shape


@pytest.mark.parametrize(("build", "include"), CASES.values(), ids=CASES)
def test_they_are_saved_and_loaded(build: Any, include: Any, tmp_path: Any) -> None:
    model, x = made(build, include, FORMATS[0], "split").eval(), torch.randn(2, 5, 32, dtype=torch.float64)
    bt.save(model, tmp_path)
    assert_close(bt.load(tmp_path, build())(x), model(x))
    assert_close(bt.load(tmp_path, made(build, include, FORMATS[0], "split", rank=4))(x), model(x))


def test_a_parameter_is_made_once_and_an_encoder_with_padding_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = made(*CASES["packed attention"], FORMATS[0], "split"), list[object]()
    weight = model.own.factorized.in_proj_weight
    original = type(weight).dense
    monkeypatch.setattr(type(weight), "dense", lambda self: calls.append(self) or original(self))
    model.eval()(torch.randn(2, 5, 32, dtype=torch.float64))
    assert calls.count(weight) == 1
    model, x = encoder(), torch.randn(2, 6, 64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    expected = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = model.eval()(x, src_key_padding_mask=padding)
    assert_close(found[~padding], expected[~padding].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["packed attention", "experts"])
def test_compiled_and_under_autocast(name: str) -> None:
    model, x = made(*CASES[name], FORMATS[0], "split"), torch.randn(2, 5, 32, dtype=torch.float64)
    torch._dynamo.reset()
    assert_close(torch.compile(model, backend="aot_eager")(x), model(x))
    single = copy.deepcopy(model).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(single(x.float()).double(), model(x), rtol=0.1, atol=0.1)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def multiplications(model: nn.Module, x: Tensor) -> int:
    """Those of a pass in evaluation mode; PyTorch's counter does not see into fast paths, so they are off."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.eval()(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("include", ["*.linear?", None])
def test_an_encoder_in_evaluation_mode_takes_less_work_than_its_dense_twin(include: Any, tmp_path: Any) -> None:
    model, x = encoder().eval(), torch.randn(4, 50, 64)
    dense = multiplications(model, x)
    with Operations() as seen, torch.no_grad():
        model(x)
    assert "_transformer_encoder_layer_fwd.default" in seen.names
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4, layout="split"), include=include)
    bt.save(model, tmp_path)
    for own in (model, copy.deepcopy(model), bt.load(tmp_path, encoder())):
        with Operations() as seen, torch.no_grad():
            y = own.eval()(x)
        assert "_transformer_encoder_layer_fwd.default" not in seen.names
        assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-5)
        assert multiplications(own, x) < 0.7 * dense


FORBIDDEN = torch.ones(5, 5).triu(1).bool()
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).repeat(20, 1)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": FORBIDDEN, "is_causal": True},
    "scores": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
    "per head": {"attn_mask": FORBIDDEN.expand(80, 5, 5)},
    "padding": {"key_padding_mask": PADDING},
    "causal and padding": {"attn_mask": FORBIDDEN, "key_padding_mask": PADDING, "is_causal": True},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_goes_through_its_factors_with_every_mask(mask: str, batch_first: bool) -> None:
    model = nn.ModuleList([nn.MultiheadAttention(256, 2, batch_first=batch_first, dtype=torch.float64)])
    nn.init.normal_(model[0].in_proj_bias)
    bt.tensorize_(model, bt.TensorizeConfig(2, layout="split"))
    own, twin = model[0], plain(model)[0]
    x = torch.randn(40, 5, 256).double().transpose(0, 1 - batch_first)
    options = {"need_weights": False, **MASKS[mask]}
    with Operations() as seen:
        found, _ = own(x, x, x, **options)
    assert 3 * 256 * 256 not in seen.entries
    assert_close(found, twin(x, x, x, **options)[0])
    whole = own(x, x, x.clone(), **options)[0]  # what is not the same thrice is left to PyTorch
    tensors = list(own.parameters())
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), tensors) for y in (found, whole)), strict=True):
        assert_close(one, other)
    with torch.no_grad():
        assert_close(own.eval()(x, x, x, **options)[0], whole)
        own.factorized.in_proj_weight.cores[0].data.zero_()  # hidden from version counters
        twin.in_proj_weight.zero_()
        assert_close(own.eval()(x, x, x, **options)[0], twin(x, x, x, **options)[0])


def test_a_compiled_encoder_multiplies_by_factors_and_compiles_once_for_each_mode() -> None:
    model, x, graphs = encoder(), torch.randn(3, 5, 64), list[torch.fx.GraphModule]()
    bt.tensorize_(model, bt.TensorizeConfig(4, layout="split"))

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    for training in (True, False):
        for autocast in (False, True):
            model.train(training)
            before = len(graphs)
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(training):
                    y, wanted = compiled(x), model(x)
                assert_close(y, wanted, rtol=0.1 if autocast else 1e-4, atol=0.1 if autocast else 1e-4)
                if training:
                    y.float().square().sum().backward()
            assert len(graphs) - before == (2 if training else 1)  # a backward pass has a graph of its own
    sizes = {node.meta["val"].numel() for graph in graphs for node in graph.graph.nodes if "mm" in str(node.target)}
    assert sizes
    assert sizes.isdisjoint({64 * 192, 64 * 64, 64 * 256})
