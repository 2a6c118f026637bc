"""`compress_`: the budget is met, calibration helps, the report is true, and errors leave the model unchanged."""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compress_kit import Network, images, unchanged
from torch import Tensor, nn
from torch.testing import assert_close

import bayestrain as bt
from bayestrain.compress.budget import cost, front, hull, spend
from bayestrain.compress.curves import Point
from bayestrain.compress.moments import ROWS, collect, rows_of
from bayestrain.errors import ConfigError, ConversionError


def silent(model: nn.Module, **options: Any) -> bt.compress.CompressReport:
    return bt.compress_(model, progress=False, **options)


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor]:
    """A network whose batch norm knows its inputs, and images."""
    torch.manual_seed(1)
    model, x = Network(), images()
    for _ in range(20):
        model(x)
    return model.eval(), x


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_budget_is_met_and_more_parameters_change_less(trained: tuple[nn.Module, Tensor], calibrated: bool) -> None:
    model, x = trained
    errors = []
    for ratio in (6, 3, 1.5):
        small = copy.deepcopy(model)
        report = silent(small, ratio=ratio, calibration=[x] if calibrated else None)
        before = bt.count_parameters(model)
        assert 0.97 * before / ratio < bt.count_parameters(small) <= before / ratio
        assert (report.parameters_before, report.parameters) == (before, bt.count_parameters(small))
        assert sum(row.parameters_before - row.parameters for row in report.layers) == before - report.parameters
        errors.append(sum(row.error**2 for row in report.layers))
    assert errors[0] > 1.05 * errors[1] > 1.05 * errors[2]


def test_sizes_and_tolerances(trained: tuple[nn.Module, Tensor]) -> None:
    by_ratio, by_number, by_error = (copy.deepcopy(trained[0]) for _ in range(3))
    silent(by_ratio, ratio=2)
    silent(by_number, parameters=bt.count_parameters(trained[0]) // 2)
    assert bt.ranks(by_ratio) == bt.ranks(by_number)
    report = silent(by_error, tolerance=0.3, calibration=[trained[1]])
    assert report.layers
    assert all(row.error <= 0.3 for row in report.layers)
    model = two()
    with pytest.raises(ConfigError, match="smallest model has") as caught:
        silent(model, parameters=41)
    fewest = int(str(caught.value).split("parameters=")[1].split()[0])
    assert silent(model, parameters=fewest).parameters == fewest


def test_spend_is_nearly_as_good_as_trying_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        fronts = {}
        for name in "abc":
            sizes = torch.randperm(60, generator=generator)[:6].add(1).tolist()
            errors = torch.rand(6, generator=generator).tolist()
            fronts[name] = front([*map(Point, sizes, errors), Point(70, 0.0)])
        budget = 100
        best = min(
            sum(map(cost, chosen)) for chosen in product(*fronts.values()) if sum(p.size for p in chosen) <= budget
        )
        ours = spend(fronts, budget)
        assert sum(point.size for point in ours.values()) <= budget
        assert sum(map(cost, ours.values())) <= 1.25 * best + 1e-9


def test_fronts_and_hulls_and_a_bound_on_rows() -> None:
    points = [Point(10, 0.5), Point(10, 0.4), Point(12, 0.45), Point(20, 0.39), Point(30, 0.1), Point(50, 0.0)]
    assert [point.size for point in front(points)] == [10, 20, 30, 50]
    assert [point.size for point in hull(front(points))] == [10, 30, 50]
    assert len(rows_of(nn.Linear(3, 2), torch.randn(50, 200, 3))) == ROWS


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2, "padding_mode": "circular"}],
    ids=["plain", "strided", "dilated"],
)  # fmt: skip
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_rows_are_what_a_convolution_multiplies(kind: Any, options: dict[str, Any]) -> None:
    d = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[kind]
    layer = kind(2, 3, (3, 2, 3)[:d], bias=False, **options).double()
    x = torch.randn(2, 2, *(6, 7, 8)[:d], dtype=torch.float64)
    y = layer(x).movedim(1, -1).reshape(-1, 3)
    assert_close(rows_of(layer, x) @ layer.weight.flatten(1).mT, y)


def test_moments_are_those_of_the_inputs(trained: tuple[nn.Module, Tensor]) -> None:
    model, x = trained
    layers: dict[str, Any] = {"first": model.first, "head": model.head}
    found = collect(model, layers, [x[:40], (x[40:], torch.zeros(24))], print)
    rows = torch.cat([rows_of(model.first, x[:40]), rows_of(model.first, x[40:])])
    assert len(rows) == 64 * 64
    assert_close(found["first"], rows.mT @ rows / len(rows))


def test_calibration_changes_the_output_less(trained: tuple[nn.Module, Tensor]) -> None:
    model, x = trained
    plain, calibrated, fresh = copy.deepcopy(model), copy.deepcopy(model), images(128)
    silent(plain, ratio=4)
    silent(calibrated, ratio=4, calibration=[x])
    with torch.no_grad():
        errors = [float((small(fresh) - model(fresh)).norm()) for small in (plain, calibrated)]
    assert errors[1] < 0.8 * errors[0]
    # Of 40 inputs that span 5 directions a layer needs rank 5, whatever its weight.
    model = nn.Sequential(nn.Linear(40, 30))
    x = torch.randn(200, 5) @ torch.randn(5, 40)
    before = model(x).detach()
    report = silent(model, tolerance=0.05, calibration=[x])
    assert report.layers[0].parameters <= 5 * 70
    assert_close(model(x), before, rtol=0, atol=0.2 * float(before.std()))


def test_batches_may_be_dicts() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 20)

        def forward(self, *, given: Tensor) -> Tensor:
            return self.layer(given)

    model = Keyword()
    report = silent(model, ratio=2, calibration=[{"given": torch.randn(64, 20)}])
    assert report.measured == "output"
    assert report.layers


def test_the_report_names_winners_and_what_stayed_dense(trained: tuple[nn.Module, Tensor]) -> None:
    model = copy.deepcopy(trained[0])
    report = silent(model, ratio=3, filter_fn=lambda _, name: name != "first")
    assert [row.name for row in report.layers] == ["second", "head"]
    assert dict(report.kept)["first"] == "filter_fn returned False"
    for row in report.layers:
        weight = bt.nn.factorized_weights(model)[row.name]
        assert (row.shape, row.ranks, row.parameters) == (weight.shape, weight.ranks, weight.numel)
        dense, found = trained[0].get_submodule(row.name).weight.detach(), weight.dense().detach()
        assert_close(float((found - dense).norm() / dense.norm()), row.error, rtol=1e-3, atol=1e-4)
    text = str(report)
    assert "change of weight" in text
    assert "Kept dense: first (filter_fn returned False)." in text
    assert all(row.name in text and row.modes in text for row in report.layers)


@pytest.mark.parametrize("formats", [("svd",), *((format.name,) for format in bt.formats.FORMATS), None])
def test_every_format_computes_what_it_says_and_is_saved(
    formats: tuple[str, ...] | None, trained: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    model, x = copy.deepcopy(trained[0]), trained[1]
    report = silent(model, ratio=2, formats=formats, calibration=[x])
    assert {row.kind for row in report.layers} <= set(formats or bt.compress.candidates.KINDS)
    row = report.layers[-1]
    layer, dense, found = model.get_submodule(row.name), trained[0].get_submodule(row.name), list[Tensor]()
    with dense.register_forward_pre_hook(lambda _, args: found.append(args[0])), torch.no_grad():
        trained[0](x)
        bias = dense(torch.zeros_like(found[0]))
        change = float((layer(found[0]) - dense(found[0])).norm() / (dense(found[0]) - bias).norm())
        assert_close(change, row.error, rtol=0.05, atol=0.01)
    bt.save(model, tmp_path)
    assert_close(bt.load(tmp_path, Network())(x), model(x), rtol=0, atol=0)


def test_fit_recovers_what_compression_lost() -> None:
    digits = bt.data.load("mnist-mini").train
    x, y = digits.images[:600].float().flatten(1) / 255, digits.labels[:600]
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    bt.fit(model, (x, y), epochs=15, lr=3e-3, prior=False, progress=False)
    teacher = copy.deepcopy(model).eval()
    silent(model, ratio=40)
    lost = float((model(x).argmax(1) == y).float().mean())
    bt.fit(model, (x, y), epochs=15, lr=3e-3, prior=False, search=False, progress=False, teacher=teacher)
    assert float((model(x).argmax(1) == y).float().mean()) > lost + 0.05


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))


def with_nan() -> nn.Module:
    model = two()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    return model


def quantised() -> nn.Module:
    class Linear(nn.Module):
        __module__ = "torch.ao.nn.quantized"

    return nn.Sequential(nn.Linear(16, 16), Linear())


def once() -> Iterator[Tensor]:
    yield from ()


@pytest.mark.parametrize(("build", "options", "message"), [
    (two, {}, "Give one of ratio=, parameters= and tolerance=, got 0"),
    (two, {"ratio": 2, "parameters": 100}, "got 2 of them"),
    (two, {"ratio": 0.5}, "1 or more, got 0.5"),
    (two, {"ratio": float("nan")}, "1 or more, got nan"),
    (two, {"parameters": 0}, "parameters must be an integer of at least 1"),
    (two, {"tolerance": 1.0}, r"must lie in \(0, 1\), got 1.0"),
    (two, {"ratio": 2, "formats": ["qr"]}, "formats must be some of"),
    (two, {"parameters": 60}, r"60 parameters are too few: the smallest model has \d+\. Try parameters="),
    (two, {"ratio": 2, "calibration": []}, "calibration= has no batches"),
    (two, {"ratio": 2, "calibration": once()}, "calibration= has no batches"),
    (two, {"ratio": 2, "calibration": [torch.randn(4, 15)]}, r"refuses calibration batch 1 of shape \(4, 15\)"),
    (two, {"ratio": 2, "calibration": [3]}, "Calibration batch 1 is a int"),
    (two, {"ratio": 2, "calibration": [torch.full((4, 16), torch.nan)]}, "NaN or infinite inputs of layer '0'"),
    (with_nan, {"ratio": 2}, "weight of '2' .* has NaN or infinite entries"),
    (quantised, {"ratio": 2}, "'1' .* is quantised"),
    (lambda: nn.Sequential(nn.LazyLinear(4)), {"ratio": 2}, "'0' .* is lazy"),
    (lambda: nn.Sequential(nn.Linear(4, 4, device="meta")), {"ratio": 2}, "has no values"),
    (lambda: nn.Linear(16, 16), {"ratio": 2}, "The model itself is one Linear"),
    (lambda: nn.Sequential(nn.LSTM(4, 4)), {"ratio": 2}, "nothing to compress .* 0 stays dense .LSTM is none of"),
    (lambda: nn.Sequential(nn.ReLU()), {"ratio": 2}, "it has no weights"),
])  # fmt: skip
def test_errors_leave_the_model_alone(build: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    model = build()
    with unchanged(model), pytest.raises((ConfigError, ConversionError), match=message):
        silent(model, **options)


def test_what_is_shared_grouped_unreached_or_factorised() -> None:
    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    tied[1].weight = tied[0].weight
    report = silent(tied, ratio=1.2)
    assert [row.name for row in report.layers] == ["2"]
    assert dict(report.kept)["0"] == "its weight is shared with 1"
    layer = nn.Linear(16, 16)
    twice = nn.Sequential(layer, nn.ReLU(), layer)
    report = silent(twice, ratio=2, calibration=[torch.randn(64, 16)])
    assert twice[0] is twice[2]
    assert len(report.layers) == 1

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nn.Conv2d(8, 8, 3, groups=4, padding=1)
            self.used, self.unused = nn.Conv2d(8, 16, 3), nn.Linear(20, 20)
            self.already = bt.TensorLinear(16, 12, max_rank=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.already(self.used(self.grouped(x)).mean((2, 3)))

    model = Odd()
    report = silent(model, ratio=1.3, calibration=[torch.randn(32, 8, 6, 6)])
    assert [row.name for row in report.layers] == ["used"]
    kept = dict(report.kept)
    assert kept["grouped"] == "it has groups, and so few entries"
    assert kept["unused"] == "no calibration batch reached it"
    assert "already" not in kept


def test_progress_has_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bt.compress.compression, "SAY_EVERY", 0.0)
    bt.compress_(two(), ratio=2, calibration=[torch.randn(32, 16)])
    said = capsys.readouterr().out
    assert "calibration, pass 1 of 1: 2 layers" in said
    assert "curve 2/2: 2  0:00:0" in said
    assert "left" in said
