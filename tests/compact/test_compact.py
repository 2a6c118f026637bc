"""`compact_`: what it promises about the weight, a second call, the report and its notes, for every format."""

import copy

import pytest
import torch
from compact_kit import FORMATS, PLANTED, Layer, Particles, change, dense, planted, weight, with_lambda
from torch import Tensor, nn

from bayestrain.compact import compact_
from bayestrain.errors import ConfigError
from bayestrain.formats import TensorTrain, algebra
from bayestrain.formats.align import change_gauge
from bayestrain.nn import FactorizedWeight, Layout, TensorConv2d, TensorLinear, count_parameters, ranks

RULES = (None, "rounding", "contribution")
TREES = [kind for kind in FORMATS if weight(kind).equation.is_tree]
CASES = [(kind, rule) for kind in FORMATS for rule in RULES if rule != "rounding" or kind in TREES]


@pytest.mark.parametrize(("kind", "rule"), CASES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tol", [0.05, 0.6])
def test_the_weight_stays_within_the_tolerance(kind: str, rule: str | None, padded: bool, tol: float) -> None:
    model = nn.Sequential(Layer(weight(kind, 5, padded=padded, decay=0.5)))  # no gap: the tolerance really cuts
    before = dense(model)
    report = compact_(model, tol=tol, rule=rule)
    error = change(before, dense(model))
    assert error <= tol
    assert report.layers[0].error == pytest.approx(error, abs=1e-7)
    if tol == 0.6:
        assert report.changed


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_planted_ranks_are_found_and_made_physical(kind: str, rule: str | None) -> None:
    model = planted(kind)
    sizes = model[0].factorized.layout.sizes
    report = compact_(model, rule=rule)
    assert ranks(model) == {"0": PLANTED[kind]}
    equation = model[0].factorized.equation
    assert [tuple(core.shape) for core in model[0].factorized.cores] == equation.shapes(sizes, PLANTED[kind])
    assert report.parameters == count_parameters(model) < report.parameters_before
    assert " ".join(map(str, PLANTED[kind])) in str(report)


def in_another_gauge(model: nn.Sequential, turn: bool) -> nn.Sequential:
    """The same network; `turn` mixes the indices of every bond, otherwise they only change their scale."""
    other = copy.deepcopy(model)
    own = other[0].factorized
    cores: list[Tensor] = [core.detach() for core in own.cores]
    for bond in own.equation.bonds:
        scale, (first, second, *_) = 10 ** torch.randn(6, dtype=torch.float64), own.equation.owners(bond)
        for core, factor in ((first, scale), (second, 1 / scale)):
            axis = own.equation.axis(core, bond)
            cores[core] = (cores[core].movedim(axis, -1) * factor).movedim(-1, axis)
        if turn:
            orthogonal = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
            cores = change_gauge(own.equation, cores, bond, orthogonal, orthogonal.mT)
    own.set_cores(cores)
    torch.testing.assert_close(dense(other), dense(model), rtol=1e-8, atol=1e-8)
    return other


GAUGES = [(kind, None) for kind in TREES] + [(kind, "contribution") for kind in FORMATS]


@pytest.mark.parametrize(("kind", "rule"), GAUGES)
@pytest.mark.parametrize("seed", range(5))
def test_gauge_changes_alter_nothing_that_a_rule_keeps(kind: str, rule: str | None, seed: int) -> None:
    torch.manual_seed(seed)
    model = planted(kind)
    other = in_another_gauge(model, turn=rule is None)
    for each in (model, other):
        compact_(each, rule=rule)
    assert ranks(model) == ranks(other) == {"0": PLANTED[kind]}
    torch.testing.assert_close(dense(other), dense(model), rtol=1e-6, atol=1e-8)


def test_an_absolute_threshold_on_lambda_depends_on_the_gauge() -> None:
    """Why the paper's rule is not the default: one and the same network, two answers."""
    model = planted("tt")
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for core, scale in zip(scaled[0].factorized.cores, (1e-6, 1e-6, 1e12), strict=True):
            core.mul_(scale)
    torch.testing.assert_close(dense(scaled), dense(model))
    reports = [compact_(with_lambda(each), rule="lambda") for each in (model, scaled)]
    assert ranks(model) != ranks(scaled)
    assert "collapsed" in str(reports[1])


@pytest.mark.parametrize(("kind", "rule"), [*CASES, ("tt", "lambda"), ("cp", "lambda")])
def test_compacting_twice_does_nothing(kind: str, rule: str | None) -> None:
    model = with_lambda(nn.Sequential(Layer(weight(kind, 5, decay=0.5)), nn.Linear(20, 2)))
    assert compact_(model, tol=0.5, rule=rule).changed
    before = copy.deepcopy(model.state_dict())
    report = compact_(model, tol=0.5, rule=rule)
    assert not report.changed
    assert all(row.error == 0.0 for row in report.layers)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_after_more_training_compaction_looks_again() -> None:
    for rule in ("contribution", "lambda"):
        model = with_lambda(planted("tt"))
        compact_(model, rule=rule)
        own = model[0].factorized
        with torch.no_grad():
            if rule == "lambda":
                own.rank_state.log_lambdas[0][2] = -20.0
            else:
                own.cores[0][..., 0] *= 1e-6
        assert compact_(model, rule=rule).changed


def test_a_refit_brings_the_weight_nearer_than_the_cut() -> None:
    """Components that are nearly alike: each can go, if the other takes over its part."""
    own = weight("cp", 3)
    with torch.no_grad():
        for core in own.cores:
            core[:, 2] = core[:, 1] + 0.05 * core[:, 1].norm() * torch.randn(len(core), dtype=core.dtype)
        own.cores[0][:, 0] *= 3.0
    cut = nn.Sequential(Layer(own))
    fitted = copy.deepcopy(cut)
    before = dense(cut)
    compact_(cut, parameters=count_parameters(cut) - 1, rule="contribution")
    compact_(fitted, parameters=count_parameters(fitted) - 1)
    assert ranks(cut) == ranks(fitted) == {"0": (2,)}
    assert change(before, dense(fitted)) < 0.5 * change(before, dense(cut))


@pytest.mark.parametrize("rule", ["rounding", "contribution"])
@pytest.mark.parametrize("seed", range(10))
def test_the_tolerance_is_one_of_the_visible_weight_with_padded_modes(rule: str, seed: int) -> None:
    torch.manual_seed(seed)
    layer = TensorLinear(5, 5, in_modes=(3, 2), out_modes=(3, 2), max_rank=6)
    with torch.no_grad():
        layer.cores[0].view(3, 3, -1)[2] *= 30.0  # the last rows, of which one exists only inside
    model = nn.Sequential(layer, TensorConv2d(5, 7, 3, in_modes=(3, 2), out_modes=(2, 2, 2), max_rank=6))
    before = [dense(model, name) for name in "01"]
    report = compact_(model, tol=0.3, rule=rule)
    for old, name, row in zip(before, "01", report.layers, strict=True):
        error = change(old, dense(model, name))
        assert error <= 0.3
        assert row.error == pytest.approx(error, abs=1e-5)


def test_small_tolerances_hold_in_single_precision() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        layer = TensorLinear(256, 256, max_rank=12)
        with torch.no_grad():
            layer.cores[1][..., 0] *= 5e-6
        own = layer.factorized
        before = own.dense([core.detach().double() for core in own.cores])
        compact_(nn.Sequential(layer), tol=1e-6)
        assert change(before, own.dense([core.detach().double() for core in own.cores])) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_can_be_compacted_with_lambda(dtype: torch.dtype, autocast: bool) -> None:
    model = nn.Sequential(TensorLinear(64, 27, max_rank=6, dtype=dtype), TensorLinear(27, 4, max_rank=4, dtype=dtype))
    for layer in model:
        layer.factorized.attach_rank_state()
    with torch.autocast("cpu", enabled=autocast):
        assert compact_(model, 0.6).changed
    assert {core.dtype for core in model.parameters()} == {dtype}
    assert all(u.dtype == dtype and u.isfinite().all() for u in model[0].factorized.rank_state.log_lambdas)


def test_slices_that_are_alike_are_not_dropped_together() -> None:
    """Each of two equal slices fits the tolerance, both together do not: the cross terms count."""
    layer = TensorLinear(36, 36, in_modes=(6, 6), out_modes=(6, 6), max_rank=4, bias=False).double()
    with torch.no_grad():
        first, second = layer.cores
        first.copy_(nn.functional.normalize(first, dim=0))
        second.copy_(nn.functional.normalize(second, dim=1))
        first[:, 2:] *= 0.3
        first[:, 3], second[3] = first[:, 2].clone(), second[2].clone()
    model = nn.Sequential(layer)
    whole = dense(model)
    (each,) = algebra.contributions(layer.factorized.equation, [core.detach() for core in layer.cores])
    one = float(each[3] / whole.norm())
    compact_(model, tol=1.6 * one, rule="contribution")  # two of size `one`: 1.41 if unrelated, 2 if alike
    assert layer.factorized.ranks == (3,)
    assert change(whole, dense(model)) <= 1.6 * one


def test_a_weight_of_zeros_keeps_rank_one() -> None:
    for kind in FORMATS:
        model = with_lambda(planted(kind))
        with torch.no_grad():
            for core in model[0].factorized.cores:
                core.zero_()
        compact_(model)
        assert set(model[0].factorized.ranks) == {1}
        assert not dense(model).any()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rule": "magic"}, "rule must be None or one of"),
    ({"tol": 1.0}, r"tol must lie in \[0, 1\), got 1.0"),
    ({"tol": -0.1}, "got -0.1"),
    ({"tol": 900}, "For a number of parameters, pass parameters="),
    ({"rule": "lambda"}, "rule='lambda' needs lambda"),
    ({"tol": 0.1, "parameters": 900}, "parameters= replaces tol"),
    ({"rule": "lambda", "parameters": 900}, "parameters= replaces tol"),
    *(({"parameters": n}, "an integer of at least 1") for n in (0, -5, 900.7, float("nan"), True, "900")),
])  # fmt: skip
def test_bad_arguments_leave_the_model_alone(arguments: dict[str, float], message: str) -> None:
    model = planted("tt")
    with pytest.raises(ConfigError, match=message):
        compact_(model, **arguments)
    assert model[0].factorized.ranks == (6, 6)


def test_models_and_formats_that_cannot_be_compacted_say_so() -> None:
    model = nn.Sequential(Layer(weight("tt")), Layer(weight("cp")))
    with pytest.raises(ConfigError, match=r"layer '1' has format 'written'\. Leave rule out"):
        compact_(model, rule="rounding")
    assert ranks(model) == {"0": (6, 6), "1": (6,)}
    assert compact_(model, 0.9).rule == "default"
    with pytest.raises(ConfigError, match=r"no factorised weight to compact. Call bayestrain.tensorize_\(model\)"):
        compact_(nn.Linear(3, 3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_weights_are_named_before_anything_is_decomposed(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old code took spectra first, and a diverged run died with a LinAlgError."""
    model = nn.Sequential(Layer(weight("tt")), Layer(weight("tt")))
    with torch.no_grad():
        model[1].factorized.cores[1][0, 0, 0] = value
    monkeypatch.setattr(torch.linalg, "svd", lambda *_, **__: pytest.fail("decomposed before the check"))
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_, **__: pytest.fail("decomposed before the check"))
    for arguments in ({}, {"parameters": 200}, {"rule": "contribution"}):
        with pytest.raises(ConfigError, match="Layer '1' has NaN or infinite weights"):
            compact_(model, **arguments)
    assert ranks(model) == {"0": (6, 6), "1": (6, 6)}


def test_bare_shared_and_boundless_weights() -> None:
    assert isinstance(own := planted("cp")[0].factorized, FactorizedWeight)
    assert compact_(own).layers[0].ranks == own.ranks == PLANTED["cp"]
    bare = Particles([planted("cp")[0].factorized for _ in range(2)])
    assert [(row.name, row.ranks) for row in compact_(bare).layers] == [("", PLANTED["cp"])]
    layer = planted("tt")[0]
    report = compact_(nn.Sequential(layer, nn.Linear(12, 20), layer))
    assert [row.ranks for row in report.layers] == [PLANTED["tt"]]
    alone = FactorizedWeight(TensorTrain(), Layout((4,), (4,), ((4,),), ((0,),)), [torch.randn(4)])
    assert compact_(nn.Sequential(alone)).layers[0].ranks == ()


def shrunk(factor: float = 1e-2) -> nn.Sequential:
    model = nn.Sequential(TensorLinear(144, 144, max_rank=4))
    with torch.no_grad():
        for core in model[0].cores:
            core *= factor
    return model


def test_ranks_did_not_move_or_a_weight_vanished() -> None:
    model = shrunk(factor=1)
    assert "no rank moved. Train longer or with a larger prior weight, check that" in str(compact_(model, tol=1e-9))
    compact_(with_lambda(model), 0.9)
    assert compact_(model, tol=1e-9).notes == ()  # some fell before
    model = shrunk()
    assert not any("almost nothing" in note for note in compact_(model, tol=1e-9).notes)  # no prior was there
    (note,) = compact_(with_lambda(shrunk()), tol=1e-9).notes
    assert note.startswith("the weight of '0' has shrunk to almost nothing. The prior probably outweighed the data")
    held = with_lambda(shrunk())
    held[0].factorized.rank_state.held_norm.fill_(1e-2)  # in front of a normalisation sizes mean nothing
    for fine in (with_lambda(shrunk(factor=0.5)), held):
        (note,) = compact_(fine, tol=1e-9).notes
        assert note.startswith("no rank moved. Train longer or with a larger prior weight, ")


@pytest.mark.parametrize("kind", ["tt", "cp"])
def test_a_layer_collapsed(kind: str) -> None:
    model = planted(kind)
    with torch.no_grad():
        for core in model[0].factorized.cores:
            core *= 1e-3
            core[tuple(0 if n == 6 else slice(None) for n in core.shape)] = 1.0
    (note,) = compact_(model).notes
    assert note == "layer '0' collapsed to rank 1 at every bond. If accuracy fell, lower the prior weight."


def test_particles_are_counted_and_have_no_loop_of_their_own() -> None:
    particles = Particles([with_lambda(shrunk(factor=factor)) for factor in (1e-2, 0.5, 1e-2)])
    assert "'0' has shrunk to almost nothing in 2 of 3 particles. The prior" in str(compact_(particles, 1e-9))
    (note,) = compact_(Particles([with_lambda(shrunk(factor=0.5))]), 1e-9).notes
    assert note == "no rank moved. Train longer or with a larger prior weight, or raise tol."
