"""What `tensorize_` refuses; each error leaves the model alone."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from convert_kit import mlp, unchanged
from torch import nn
from torch.nn.utils import parametrizations, prune

import bayestrain as bt
from bayestrain import models
from bayestrain.errors import BayesTrainError, ConfigError, ConversionError, ShapeError


@pytest.mark.parametrize("max_rank", [0, -1, (3, 0), (), 2.5, True, "20"])
def test_bad_ranks(max_rank: Any) -> None:
    with pytest.raises(ConfigError) as error:
        bt.TensorizeConfig(max_rank=max_rank)
    assert str(error.value).startswith(
        f"max_rank must be an integer of at least 1, or a tuple of them, got {max_rank!r}."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init": "zeros"}, r"init must be one of \('he', 'paper', 'svd'\), got 'zeros'\."),
        ({"init": "svd", "tol": 1.0}, r"tol is a relative error and must lie in \[0, 1\), got 1\.0\."),
        ({"tol": 0.1}, r"tol=0\.1 only means something with init='svd', got init='he'\."),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bt.TensorizeConfig(**arguments)


def test_a_filter_in_the_place_of_the_config_is_named() -> None:
    model = mlp()
    with unchanged(model), pytest.raises(ConfigError, match=r"config must be a TensorizeConfig, got .*filter_fn="):
        bt.tensorize_(model, lambda _module, _name: True)


def test_a_tuple_of_ranks_must_fit_every_layer() -> None:
    model = models.mnist_mlp()
    with unchanged(model), pytest.raises(ShapeError, match=r"one number or 1 inner ranks, got \(8, 1, 5\)") as error:
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=(8, 1, 5)))
    assert error.value.__notes__ == ["This happened at layer '3' of the model; nothing was converted."]


@pytest.mark.parametrize("init", ["he", "svd"])
def test_modes_that_do_not_fit(init: str) -> None:
    model = mlp()
    for modes, message in [
        (
            ((5, 4), (4, 1)),
            r"The product of out_modes must be at least 6, got \(4, 1\) with product 4\. Try out_modes=",
        ),
        (((5, 4), (3, 2, 1)), r"equally many and at least 2, got \(5, 4\) and \(3, 2, 1\)\. Leave one of them out"),
        (((50, 4), None), r"in_modes are larger than needed: \(50, 4\) has product 200 for a size of 20"),
    ]:
        config = bt.TensorizeConfig(init=init, modes={"2": modes})  # the first layer would be fine
        with unchanged(model), pytest.raises(ShapeError, match=message):
            bt.tensorize_(model, config)


def test_modes_for_a_layer_that_is_not_there() -> None:
    model = mlp()
    with unchanged(model), pytest.raises(ConfigError) as error:
        bt.tensorize_(model, bt.TensorizeConfig(modes={"7": ((4, 5), None)}))
    assert str(error.value) == "modes names layers that are not converted: ['7']. Converted are ['0', '2']."


def test_nothing_matched() -> None:
    model = mlp()
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model, filter_fn=lambda _module, _name: False)
    assert str(error.value) == (
        "No layer matched, so nothing was converted. tensorize_ looks for nn.Linear and nn.Conv2d; "
        "kept were: 0 (filter_fn said no); 2 (filter_fn said no)."
    )
    with pytest.raises(ConversionError, match=r"looks for nn\.Linear and nn\.Conv2d; this model has none\."):
        bt.tensorize_(nn.Sequential(nn.ReLU(), nn.Conv1d(3, 3, 3)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("key", ["weight", "bias"])
def test_weights_that_are_not_finite(bad: float, key: str) -> None:
    model = mlp()
    with torch.no_grad():
        getattr(model[2], key).view(-1)[3] = bad
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    assert str(error.value) == (
        f"Cannot convert '2' (Linear): its {key} has NaN or infinite entries. Repair or re-initialise the model first."
    )


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(6), lambda: nn.LazyConv2d(6, 3)])
def test_a_lazy_module(lazy: Any) -> None:
    model = nn.Sequential(nn.Linear(24, 20), lazy())
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    assert str(error.value) == (
        f"Cannot convert '1' ({type(model[1]).__name__}): it is lazy and has no weights yet. "
        "Run one batch through the model first."
    )


def test_a_lazy_module_after_its_first_batch() -> None:
    model = nn.Sequential(nn.LazyLinear(20), nn.ReLU())
    model(torch.randn(2, 24))
    bt.tensorize_(model)
    assert isinstance(model[0], bt.TTLinear)


def test_a_quantised_module() -> None:
    model = nn.Sequential(nn.Linear(24, 20), nn.Sequential(nn.Linear(20, 6)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated, models made with it are still around
        model[1] = torch.ao.quantization.quantize_dynamic(model[1], {nn.Linear}, dtype=torch.qint8)
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    assert str(error.value) == (
        "Cannot convert '1.0' (Linear): it is quantised or its weight is not a plain floating point parameter. "
        "Leave it dense with filter_fn=lambda module, name: name != '1.0'."
    )
    bt.tensorize_(model, filter_fn=lambda _, name: name != "1.0")
    assert list(bt.ranks(model)) == ["0"]
    assert model(torch.randn(2, 24)).shape == (2, 6)


def test_a_pruned_module() -> None:
    model = mlp()
    prune.random_unstructured(model[2], "weight", 0.5)  # the weight is now computed from another parameter and a mask
    with (
        unchanged(model),
        pytest.raises(ConversionError, match=r"'2' \(Linear\): it is quantised or its weight is not a"),
    ):
        bt.tensorize_(model)
    prune.remove(model[2], "weight")
    bt.tensorize_(model)
    assert list(bt.ranks(model)) == ["0", "2"]


def test_a_parametrised_module_is_a_subclass() -> None:
    model = mlp()
    parametrizations.orthogonal(model[0])
    report = bt.tensorize_(model)
    assert report.kept == (("0", "ParametrizedLinear is a subclass whose users may rely on .weight"),)


def test_grouped_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=2))
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    assert str(error.value) == (
        "Cannot convert '1' (Conv2d): groups must be 1, got groups=2. "
        "Leave it dense with filter_fn=lambda module, name: name != '1'."
    )


def test_tied_weights() -> None:
    embedding, decoder = nn.Embedding(20, 24), nn.Linear(24, 20, bias=False)
    decoder.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(24, 24), decoder)
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    assert str(error.value) == (
        "Cannot convert '2' (Linear): its weight is shared with ['0']. "
        "Leave it dense with filter_fn=lambda module, name: name != '2'."
    )
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.bias = first.bias
    with pytest.raises(ConversionError, match=r"Cannot convert '0' \(Linear\): its bias is shared with \['1'\]\."):
        bt.tensorize_(nn.Sequential(first, second))


def test_a_model_that_is_itself_the_layer() -> None:
    model = nn.Linear(24, 20)
    with (
        unchanged(model),
        pytest.raises(ConversionError, match=r"cannot be replaced in place\. Wrap it in nn\.Sequent"),
    ):
        bt.tensorize_(model)


def test_a_filter_that_fails_leaves_the_model_alone() -> None:
    model = mlp()

    def fail(_module: nn.Module, name: str) -> bool:
        if name == "2":
            raise KeyError(name)
        return True

    with unchanged(model), pytest.raises(KeyError):
        bt.tensorize_(model, filter_fn=fail)


def test_all_errors_are_ours() -> None:
    assert all(issubclass(kind, BayesTrainError) for kind in (ConfigError, ShapeError, ConversionError))
