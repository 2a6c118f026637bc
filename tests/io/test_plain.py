"""Plain models compute the same with PyTorch's own modules, and every model survives every way out and back."""

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from safetensors.torch import load_file, save_file
from test_transformers import MODELS
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import ConfigError, ConversionError
from bayestrain.formats import FORMATS, Format
from bayestrain.io import plain as forms
from bayestrain.nn import FactorizedWeight, TensorConvTranspose2d, TensorEmbeddingBag, TensorLayer
from bayestrain.nn.layout import LAYOUTS

KINDS: dict[str, tuple[type[TensorLayer], dict[str, Any], tuple[int, ...]]] = {
    "linear": (bt.TensorLinear, {"in_features": 60, "out_features": 42}, (60,)),
    "padded linear": (bt.TensorLinear, {"in_features": 59, "out_features": 41, "bias": False}, (5, 59)),
    "conv 1d": (bt.TensorConv1d, {"in_channels": 16, "out_channels": 18, "kernel_size": 3, "stride": 2}, (16, 9)),
    "conv 2d": (bt.TensorConv2d, {"in_channels": 17, "out_channels": 16, "kernel_size": 3, "padding": "same",
                                  "padding_mode": "reflect"}, (17, 7, 6)),
    "conv 3d": (bt.TensorConv3d, {"in_channels": 4, "out_channels": 17, "kernel_size": (2, 1, 3)}, (4, 3, 4, 5)),
    "transposed": (TensorConvTranspose2d, {"in_channels": 17, "out_channels": 5, "kernel_size": (3, 2), "stride": 2,
                                           "output_padding": 1}, (17, 4, 5)),
    "table": (bt.TensorEmbedding, {"num_embeddings": 97, "embedding_dim": 20, "padding_idx": 3}, (4,)),
    "bag": (TensorEmbeddingBag, {"num_embeddings": 97, "embedding_dim": 20, "padding_idx": 3, "mode": "mean"}, (4,)),
}  # fmt: skip
PRECISION = {torch.float32: 1e-5, torch.float64: 1e-10}


def inputs(layer: TensorLayer, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if isinstance(layer, bt.TensorEmbedding):
        return torch.randint(0, layer.num_embeddings, shape)
    return torch.randn(shape, dtype=dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().amax() <= PRECISION[expected.dtype] * expected.abs().amax())


def is_plain(model: nn.Module) -> bool:
    return not any(type(module).__module__.startswith("bayestrain") for module in model.modules())


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_becomes_plain(kind: str, format: Format, layout: str, dtype: torch.dtype) -> None:
    make, settings, event = KINDS[kind]
    layer = make(**settings, format=format, layout=layout, max_rank=2, dtype=dtype)
    x, before = inputs(layer, (3, *event), dtype), {name: own.clone() for name, own in layer.state_dict().items()}
    plain = bt.to_plain(layer)
    assert is_plain(plain)
    assert close(plain(x), layer(x))
    assert {own.dtype for own in plain.parameters()} == {dtype}
    assert all(torch.equal(own, before[name]) for name, own in layer.state_dict().items())


def test_plain_modules_have_thin_factors_dense_weights_or_cores() -> None:
    thin = bt.to_plain(bt.TensorLinear(60, 42, layout="split", max_rank=3))
    assert list(thin.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    assert thin[0].weight.shape == (3, 60)
    assert isinstance(bt.to_plain(bt.TensorLinear(60, 42, layout="split", max_rank=40)), nn.Linear)
    convolutions = bt.to_plain(bt.TensorConv2d(16, 18, 3, stride=2, max_rank=2))
    assert all(type(own) is nn.Conv2d for own in convolutions)
    assert isinstance(bt.to_plain(bt.TensorConv2d(4, 4, 3, max_rank=20)), nn.Conv2d)
    table = bt.to_plain(bt.TensorEmbedding(97, 20, max_rank=2))
    assert [type(own) for own in table] == [nn.Embedding, nn.Linear]
    layer = bt.TensorLinear(784, 625, in_modes=(7, 4, 7, 4), out_modes=(5, 5, 5, 5), max_rank=3)
    plain = bt.to_plain(layer)
    assert isinstance(plain, torch.fx.GraphModule)
    assert list(plain.state_dict()) == ["core_0", "core_1", "core_2", "core_3", "bias"]
    assert bt.count_parameters(plain) == bt.count_parameters(layer)
    x = torch.randn(2, 3, 784, requires_grad=True)
    assert close(plain(x), layer(x))
    plain(x).sum().backward()  # it trains, too
    assert plain.core_0.grad.abs().sum() > 0


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(("inputs", "outputs"), [(784, 625), (783, 622)], ids=["whole", "padded"])
def test_where_weights_are_folded_a_paired_weight_acts_as_two_halves(format: Format, inputs: int, outputs: int) -> None:
    modes: dict[str, Any] = {"in_modes": (7, 4, 7, 4), "out_modes": (5, 5, 5, 5)}
    layer = bt.TensorLinear(inputs, outputs, **modes, format=format, layout="paired", max_rank=2)
    made, x = forms.plain(layer, smallest=True, folds=True), torch.randn(2, 3, inputs)
    assert close(made(x), layer(x))
    assert bt.count_parameters(made) == bt.count_parameters(layer)
    assert [node.target for node in made.graph.nodes].count(operator.matmul) == 2  # no other product has the batch


@pytest.mark.parametrize("kind", ["conv 2d", "transposed"])
def test_where_weights_are_folded_thin_convolutions_must_save_much(kind: str) -> None:
    make, settings, event = KINDS[kind]
    layer, x = make(**settings, max_rank=6), torch.randn(3, *event)
    made = forms.plain(layer, smallest=True, folds=True)
    assert not isinstance(made, nn.Sequential | TensorLayer)
    assert bt.count_parameters(made) == bt.count_parameters(layer)
    assert close(made(x), layer(x))


class Odd(nn.Module):
    """Attention, recurrence, an encoder, a layer used twice, and a parent that reads its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)
        self.lstm, self.once = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)
        self.again, self.head = self.once, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.attention(x, x, x)[0])
        x = self.again(self.once(self.lstm(x)[0]))
        return self.head(x.to(self.head.weight.dtype))


class Reading(nn.Module):
    """Reads its layers' weights and settings in the ways in which people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.alias, self.helped, self.looped = nn.Linear(32, 32), nn.Linear(32, 32), nn.ModuleList([nn.Linear(32, 32)])
        self.block, self.thin = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(32, 32))}), nn.Linear(32, 32)
        self.conv, self.table = nn.Conv1d(32, 32, 3, stride=2), nn.Embedding(60, 32)

    def helper(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.helped.weight, self.helped.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.helper(self.table(x % self.table.num_embeddings))
        for layer in self.looped:
            x = x @ layer.weight
        fc = self.alias
        x = sum([x @ self.block["inner"][i].weight for i in range(1)]) + fc.weight.sum() + fc.bias
        return self.conv(x.mT)[..., : x.shape[1] // self.conv.stride[0]] + len(self.conv.kernel_size)


class Deeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reading, self.head = Reading(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        part = self.reading
        return self.head(self.reading(x).mT) @ part.thin.weight.T * self.head.in_features


def test_what_modules_around_a_layer_read_is_there() -> None:
    model = Deeper()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=2, layout="split"), include=["all-linear", "*conv", "*table"])
    assert not any(type(own) in (nn.Linear, nn.Conv1d, nn.Embedding) for own in model.modules())
    plain, x = bt.to_plain(model), torch.arange(20).reshape(2, 10)
    assert is_plain(plain)
    assert close(plain(x), model(x))
    assert isinstance(plain.head, nn.Sequential)  # only its settings are read
    assert type(plain.reading.thin) is nn.Linear
    layer = bt.TensorLinear(784, 625, in_modes=(7, 4, 7, 4), out_modes=(5, 5, 5, 5), max_rank=3)
    assert copy.deepcopy(bt.to_plain(layer)).out_features == 625


def test_whisper_reads_the_strides_of_its_convolutions() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    sizes |= {"vocab_size": 99, "d_model": 48, "num_mel_bins": 40}
    positions = {"max_source_positions": 20, "max_target_positions": 10}
    config = transformers.WhisperConfig(**sizes, **positions, **tokens)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=2))
    batch = {"input_features": torch.randn(2, 40, 40), "decoder_input_ids": torch.arange(8).reshape(2, 4)}
    plain = bt.to_plain(model)
    assert isinstance(plain.model.encoder.conv1, nn.Sequential)
    with torch.no_grad():
        assert close(plain(**batch).logits, model(**batch).logits)


def test_modules_keep_their_classes_modes_hooks_and_what_they_share() -> None:
    model, seen = Odd(), []
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=2, layout="split"))
    prior = bt.RankPrior(model, num_data=10, hold_scale=())
    model.once.register_forward_hook(lambda *_: seen.append(1))
    model.encoder.linear1.requires_grad_(False)
    model.eval().once.train()
    x = torch.randn(2, 5, 32)
    expected = model(x)
    seen.clear()
    plain = bt.to_plain(model)
    assert is_plain(plain)
    assert close(plain(x), expected)
    assert seen == [1, 1]
    assert (type(plain.attention), type(plain.lstm)) == (nn.MultiheadAttention, nn.LSTM)
    assert isinstance(plain.once, nn.Sequential)
    assert plain.once is plain.again
    assert type(plain.head) is nn.Linear  # its weight is read
    assert not any(own.requires_grad for own in plain.encoder.linear1.parameters())
    assert plain.once.training
    assert not plain.training
    assert not any("log_lambda" in name for name in plain.state_dict())
    prior.remove_()
    assert torch.equal(model(x), expected)


def tied(symbols: int, rank: int, **options: Any) -> nn.Sequential:
    format, shape = bt.formats.get("tt"), torch.Size((symbols, 32))
    layout = bt.TensorLinear.fold(shape, format, "split", (32,), (symbols,))
    weight = FactorizedWeight.random(format, layout, rank)
    head = bt.TensorLinear.of(nn.Linear(32, symbols, bias=False), weight)
    return nn.Sequential(bt.TensorEmbedding.of(nn.Embedding(symbols, 32, **options), weight), head)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}], ids=["plain", "padding"])
@pytest.mark.parametrize(("symbols", "rank", "numbers"), [(300, 3, 3 * 332), (64, 32, 64 * 32)])
def test_an_embedding_and_head_share_tensors(options: dict[str, Any], symbols: int, rank: int, numbers: int) -> None:
    model = tied(symbols, rank, **options)
    plain, x = bt.to_plain(model), torch.tensor([[3, 0, symbols - 1, 3]])
    assert is_plain(plain)
    assert close(plain(x), model(x))
    assert set(plain[0].parameters()) == set(plain[1].parameters())
    assert bt.count_parameters(plain) == numbers


def test_what_cannot_be_plain_is_refused() -> None:
    with pytest.raises(ConfigError, match="particle"):
        bt.to_plain(bt.Posterior([bt.TensorLinear(8, 6, max_rank=2) for _ in range(2)], 10))
    with pytest.raises(ConfigError, match="lazy"):
        bt.to_plain(nn.Sequential(nn.LazyLinear(3)))
    own = nn.ModuleDict({"table": bt.TensorLinear(8, 6, max_rank=2).factorized})
    assert isinstance(own["table"], FactorizedWeight)
    with pytest.raises(ConversionError, match="'table'"):
        bt.to_plain(own)


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "bayestrain":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
torch.set_num_threads(1)  # as in the tests: others add in another order
"""


def test_a_plain_model_is_read_where_bayestrain_is_not_installed(tmp_path: Path) -> None:
    words = tied(300, 2, padding_idx=3)
    paired = nn.Sequential(bt.TensorLinear(60, 42, max_rank=2), nn.ReLU(), bt.TensorLinear(42, 9, layout="split"))
    found = []
    for model, x in ((words, torch.randint(0, 300, (2, 5))), (paired, torch.randn(2, 60))):
        plain = bt.to_plain(model)
        found.append({"model": plain, "state": plain.state_dict(), "x": x, "y": plain(x)})
    torch.save(found, tmp_path / "plain.pt")
    code = f"""{WITHOUT}
for own in torch.load({str(tmp_path / "plain.pt")!r}, weights_only=False):
    assert torch.equal(own["model"](own["x"]), own["y"]), "differs"
assert "bayestrain" not in sys.modules"""
    python("-c", code)


ROWS, WORDS = torch.randn(3, 6, 32), torch.randint(0, 200, (3, 6))


class Tied(nn.Module):
    """An embedding, two recurrent layers and attention, in front of a head that is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 32, padding_idx=0), nn.Linear(32, 200)
        self.lstm, self.gru = nn.LSTM(32, 32, batch_first=True), nn.GRU(32, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(self.lstm(self.embed(x))[0])[0]
        return self.head(self.attention(h, h, h)[0])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.grow = nn.EmbeddingBag(200, 64, mode="mean"), nn.ConvTranspose2d(16, 18, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grow(self.bag(x).unflatten(1, (16, 2, 2)))


def picture() -> nn.Module:
    return nn.Sequential(nn.Conv1d(6, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 18, 3), nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    **{name: (build, batch) for name, (build, batch, _) in MODELS.items()},
    "tied": (Tied, {"x": WORDS}),
    "bags": (Bags, {"x": WORDS}),
    "convolutions": (picture, {"input": ROWS}),
}


@torch.no_grad()
def answer(model: Any, batch: Any) -> Tensor:
    y = model.eval()(**batch)
    return y if isinstance(y, Tensor) else y.logits


@pytest.mark.filterwarnings("ignore::bayestrain.errors.HoldWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_way_out_and_back(name: str, tmp_path: Path) -> None:
    build, batch = CASES[name]
    torch.manual_seed(0)
    model: Any = build()
    dense = bt.count_parameters(model)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    bt.compact_(model, 0.5)
    expected, size = answer(model, batch), bt.count_parameters(model)
    names = 200 * len(model.state_dict())  # in the header

    bt.save(model, tmp_path / "saved")
    assert torch.equal(answer(bt.load(tmp_path / "saved", into=build()), batch), expected)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size <= 4 * size + names

    plain = bt.to_plain(model)
    assert is_plain(plain)
    found = answer(plain, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert bt.count_parameters(plain) < dense
    tensors = {key: own.contiguous().clone() for key, own in plain.state_dict().items()}
    save_file(tensors, tmp_path / "plain.safetensors")
    blank = bt.to_plain(model)
    for own in blank.parameters():
        own.data.zero_()
    blank.load_state_dict(load_file(tmp_path / "plain.safetensors"))
    assert torch.equal(answer(blank, batch), found)
    bt.save(plain, tmp_path / "plain")
    stored = (tmp_path / "plain" / "model.safetensors").stat().st_size
    assert stored <= 4 * bt.count_parameters(plain) + names
    assert torch.equal(answer(bt.load(tmp_path / "plain", into=blank), batch), found)
