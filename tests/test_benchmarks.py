"""The benchmarks run, measure what they say, and their tables render: on tiny sizes, for a broken script."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bayestrain as bt

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts there import each other by name; what they import is forgotten again. One thread, for quiet."""
    before, threads = set(sys.modules), torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_ratios_of_known_work() -> None:
    from timing import interleaved

    calls = {"one": lambda: spin(1e-4), "three": lambda: spin(3e-4)}
    found = interleaved(calls, rounds=15, at_least=1e-3)
    assert found["one"]["ratio"] == 1
    assert found["three"]["ratio"] == pytest.approx(3, rel=0.4)  # other processes may get in between
    low, high = found["three"]["ratio_quartiles"]
    assert low <= found["three"]["ratio"] <= high
    assert 1e-4 <= found["one"]["seconds"] < 1e-3
    other = interleaved(calls, rounds=15, at_least=1e-3, baseline="three")
    assert other["one"]["ratio"] == pytest.approx(1 / 3, rel=0.4)


def test_quick_calls_are_repeated_and_slow_ones_are_not() -> None:
    from timing import repeats_for

    assert repeats_for(lambda: spin(2e-3), 1e-3, "cpu") == 1
    assert repeats_for(lambda: spin(1e-4), 2e-3, "cpu") >= 5
    assert repeats_for(lambda: pytest.fail("not to be called"), 0.0, "cpu") == 1


def test_a_wrong_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rows import CONV, LEARNED, build, small
    from timing import check_plans

    for row in (LEARNED, small(CONV)):
        case = build(row, "cpu")
        errors = check_plans(case.layer, case.x, case.gradient, "float32", "cpu")
        assert 0 < max(errors.values()) < 1e-5
    case = build(LEARNED, "cpu")
    right = bt.TTLinear.forward
    monkeypatch.setattr(bt.TTLinear, "forward", lambda self, x: 1.001 * right(self, x))
    with pytest.raises(AssertionError, match="is wrong by"):
        check_plans(case.layer, case.x, case.gradient, "float32", "cpu")


def test_wrong_gradients_are_refused_though_outputs_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from rows import LEARNED, build
    from timing import check_plans

    case = build(LEARNED, "cpu")
    right = bt.TTLinear.forward
    monkeypatch.setattr(bt.TTLinear, "forward", lambda self, x: right(self, 2 * x - x.detach()))
    with pytest.raises(AssertionError, match="input is wrong by"):
        check_plans(case.layer, case.x, case.gradient, "float32", "cpu")


def test_lower_precision_is_entered_anew_and_has_its_own_tolerance() -> None:
    from dataclasses import replace

    from rows import LEARNED, compare

    found = compare(replace(LEARNED, batch=8, precision="bf16"), "cpu", rounds=2, at_least=1e-4)
    assert 1e-4 < found["largest_error_of_plans"]["own choice"] < 5e-2
    assert not torch.is_autocast_enabled("cpu")


def test_the_planner_grid_has_200_shapes_that_are_always_the_same() -> None:
    from planner import LIMIT, grid
    from rows import multiplications

    rows = grid("cpu")
    assert len(rows) == len(set(rows)) == 200
    assert rows == grid("cpu")
    assert {bool(row.side) for row in rows} == {row.training for row in rows} == {True, False}
    assert max(multiplications(row) for row in rows) <= LIMIT["cpu"]
    assert len(grid("cuda")) == 200


def test_every_plan_of_a_shape_is_timed() -> None:
    from planner import measure
    from rows import Row

    for row in (Row(64, 64, 2, 8), Row(16, 16, 2, 2, training=False, side=4)):
        found = measure(row, "cpu", rounds=3, at_least=1e-4)
        assert found["chosen"] in found["plans"]
        assert set(found["measured"][0]["seconds"]) == {"own choice", *found["plans"]}
        assert not any(plan.endswith("recompute") for plan in found["plans"])
        assert found["chosen_over_best"] > 0.5  # the best by the median may lose by ratios, if hardly


@pytest.mark.parametrize("number", [0, 1])
def test_compacted_networks_are_small_enough_and_have_dense_twins(number: int) -> None:
    from inference import NETWORKS, compacted, densified, error

    network = NETWORKS[number]
    small, _ = compacted(network)
    dense = densified(small)
    assert not bt.ranks(dense)
    assert bt.count_parameters(dense) / bt.count_parameters(small) >= network.ratio
    assert error(small.eval(), dense.eval(), torch.randn(2, *network.shape)) < 1e-5


def test_a_step_of_all_particles_is_that_of_a_loop_over_networks() -> None:
    from particles import compare

    found = compare(3, rank=4, size=16, device="cpu", repeats=1)
    assert found["particles"] == 3
    assert found["largest_difference_float64"] < 1e-10
    assert min(found["seconds"], found["seconds_loop"], found["times_faster"]) > 0


def test_a_loop_that_steps_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import particles

    monkeypatch.setattr(particles, "stein_direction_", lambda *_: None)  # particles that do not know of each other
    with pytest.raises(AssertionError, match="the two ways differ by"):
        particles.compare(2, rank=4, size=16, device="cpu", repeats=1)


def test_a_run_that_fails_does_not_leave_the_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from compaction import side_by_side

    started: list[subprocess.Popen[str]] = []

    class Seen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    works = [sys.executable, "-c", "print('trained')"]
    assert side_by_side({"with": works, "without": works}) == {"with": "trained\n", "without": "trained\n"}
    fails, lasts = ([sys.executable, "-c", text] for text in ("raise SystemExit(3)", "import time; time.sleep(60)"))
    with pytest.raises(SystemExit, match="the run with compaction failed with exit code 3"):
        side_by_side({"with": fails, "without": lasts})
    assert [process.returncode for process in started] == [0, 0, 3, -9]


def read(results: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((results / f"{name}-cpu.json").read_text())
    assert report["quick"]
    assert report["environment"]["torch"] == torch.__version__
    assert str(results) not in report["command"]
    return report


def test_a_script_runs_as_a_user_starts_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(BENCHMARKS / "peers.py"), "--quick", "--results", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path, "peers")["rows"]


def test_scripts_run_and_their_tables_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tables import render

    names = ("layers", "peers", "scaling", "steps")
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--results", str(tmp_path)])
    for name in names:
        importlib.import_module(name).main()
    assert "of dense" in capsys.readouterr().out
    layers, peers, scaling, steps = (read(tmp_path, name) for name in names)
    assert len(layers["claims"]) == len(layers["rows"]) > 6
    assert all(line["target"] is None for line in layers["claims"])  # a quick run is no verdict
    assert set(peers["left_out"]) <= {"tensorly-torch, reconstructed", "tensorly-torch, factorised", "torchTT"}
    assert set(scaling["curves"]) == {"rank", "layer size", "batch", "layers", "particles"}
    assert all(step["prior_share_with_alignment"] > step["prior_share"] for step in steps["steps"])
    text = render(tmp_path)
    assert "## Layers against dense ones, on a CPU" in text
    assert "| 784x625, rank 20, batch 32, training |" in text
    assert "no result" in text
    for plot in ("peers-cpu.svg", "scaling-cpu.svg"):
        assert plot in text
        assert (tmp_path / plot).read_text().startswith("<?xml")


def test_verdicts_of_a_table(tmp_path: Path) -> None:
    from record import claim
    from tables import render

    environment = {"gpu": None, "cpu": "a CPU", "threads": 2, "torch": "2", "python": "3", "commit": "c" * 40,
                   "dirty": False, "started": "today"}  # fmt: skip
    lines = [claim("slow", 2.0, 1.5), claim("fast", 0.4, 0.5), claim("more", 1.6, 1.5, ">=", "times")]
    report = {"claims": lines, "rows": [], "environment": environment, "versions": {}, "quick": False, "command": "x"}
    (tmp_path / "planner-cpu.json").write_text(json.dumps(report))
    text = render(tmp_path)
    assert "| slow | 2 of dense | at most 1.5 | **no** |" in text
    assert "| fast | 0.4 of dense | at most 0.5 | yes |" in text
    assert "| more | 1.6 times | at least 1.5 | yes |" in text
    assert "a CPU, 2 threads" in text
