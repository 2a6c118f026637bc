"""Does a layer choose well how it multiplies? Its own choice against every plan it could be told to take.

    python benchmarks/planner.py
    python benchmarks/planner.py --device cuda

A grid of 200 layers, linear and convolutions, trained and asked, at several batch sizes and ranks. A twin of the layer
for each plan, told to take it, and the layer itself, which also has to choose, run in turns. A shape that fails is
measured again with more rounds; the second measurement counts, both are in the file. Plans that are three times slower
than another in single calls are not timed further; plans that save memory are no choices for speed and left out. Writes
``results/benchmarks/planner-DEVICE.json``.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from record import arguments, claim, write
from rows import Case, Row, build, call, multiplications
from timing import check_plans, measure_rounds, once, precision, summarise
from torch import Tensor

OWN = "own choice"
WITHIN = 1.15
SHARE = 0.9
SHAPES = {"linear": 120, "conv": 80}
LIMIT = {"cpu": 6e9, "cuda": 4e12}
"""Multiplications of the dense layer's forward pass, above which a shape is left out of the grid."""
HOPELESS = 3.0
"""So many times slower than the fastest in single calls, and a plan is not timed further."""
AGAIN = 4
"""So many times more rounds for a shape that failed."""


def grid(device: str, number: dict[str, int] | None = None, seed: int = 0) -> list[Row]:
    """The shapes: a random choice, always the same one, from all that the lists below allow."""
    number = number or SHAPES
    wide = device == "cuda"
    sizes = (256, 512, 1024, 2048, 4096) if wide else (64, 128, 256, 400, 512, 784, 1024, 2048)
    batches = (1, 16, 128, 1024, 4096) if wide else (1, 8, 64, 128, 512, 1024)
    linear = [
        Row(inputs, outputs, rank, batch, training)
        for inputs, outputs, rank, batch, training in itertools.product(
            sizes, sizes, (1, 2, 4, 8, 16, 32), batches, (True, False)
        )
    ]
    channels = (32, 64, 128, 256)
    conv = [
        Row(inputs, outputs, rank, batch, training, side=side, kernel=kernel)
        for inputs, outputs, rank, batch, training, side, kernel in itertools.product(
            channels, channels, (2, 4, 8, 16, 32, 64), (1, 8, 32, 128) if wide else (1, 8, 32), (True, False),
            (4, 8, 16, 32), (1, 3),
        )
        if rank <= min(inputs * kernel**2, outputs)
    ]  # fmt: skip
    choose = random.Random(seed)
    chosen = []
    for kind, rows in (("linear", linear), ("conv", conv)):
        chosen += choose.sample([row for row in rows if multiplications(row) <= LIMIT[device]], number[kind])
    return [replace(row, precision="tf32") if wide else row for row in chosen]


def with_plan(case: Case, plan: str) -> Callable[[], Tensor]:
    """The timed call of a twin of the layer that always takes this plan."""
    twin = copy.deepcopy(case.layer)
    twin.force_plan(plan)
    return call(case, twin)


def worth_timing(case: Case, plans: list[str], chosen: str, device: str) -> tuple[list[str], dict[str, float]]:
    """The plans whose best of some single calls is not hopelessly slow, the chosen one in any case; and those bests."""
    single = {}
    for plan in plans:
        run = with_plan(case, plan)
        single[plan] = min(once(run, 1, device) for _ in range(3))
    limit = HOPELESS * min(single.values())
    return [plan for plan in plans if single[plan] <= limit or plan == chosen], single


def times_of(case: Case, plans: list[str], chosen: str, device: str, rounds: int, at_least: float) -> dict[str, Any]:
    """The layer as it is and told to take every plan, in turns; how far its choice is from the best plan."""
    calls = {OWN: call(case, case.layer), **{plan: with_plan(case, plan) for plan in plans}}
    raw = measure_rounds(calls, rounds=rounds, at_least=at_least, device=device)
    times = summarise(raw, OWN)
    best = min(plans, key=lambda plan: times[plan]["ratio"])
    over_best = summarise(raw, best)
    return {
        "seconds": {name: found["seconds"] for name, found in times.items()},
        "best": best,
        "chosen_over_best": over_best[chosen]["ratio"],
        "own_over_best": over_best[OWN]["ratio"],
    }


def measure(row: Row, device: str, rounds: int, at_least: float) -> dict[str, Any]:
    """One shape."""
    case = build(row, device)
    with torch.set_grad_enabled(row.training), precision(row.precision):
        plans = [plan for plan in case.layer.plans(case.x) if not plan.endswith("+recompute")]
        chosen = case.layer.plan_for(case.x).name
    assert chosen in plans, f"the layer chose {chosen}, which is none of its own plans {plans}"
    with torch.set_grad_enabled(row.training):
        errors = check_plans(case.layer, case.x, case.gradient, row.precision, device)
    with torch.set_grad_enabled(row.training), precision(row.precision):
        plans, single = worth_timing(case, plans, chosen, device)
        found = times_of(case, plans, chosen, device, rounds, at_least)
        measured = [found]
        if max(found["own_over_best"], found["chosen_over_best"]) > WITHIN:
            found = times_of(case, plans, chosen, device, AGAIN * rounds, at_least)
            measured.append(found)
    return {
        "title": row.title, **asdict(row), "ranks": list(case.layer.ranks), "chosen": chosen, "plans": plans,
        "seconds_of_single_calls": single,
        "measured": measured, "chosen_over_best": found["chosen_over_best"], "own_over_best": found["own_over_best"],
        "within": found["chosen_over_best"] <= WITHIN, "own_within": found["own_over_best"] <= WITHIN,
        "largest_error": max(errors.values()),
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=11)
    options = parser.parse_args()
    rounds, at_least, number = options.rounds, 2e-3, SHAPES
    if options.quick:
        rounds, at_least, number = 3, 5e-4, {"linear": 4, "conv": 4}
    rows = []
    for row in grid(options.device, number):
        found = measure(row, options.device, rounds, at_least)
        rows.append(found)
        verdict = "" if found["within"] else f"  <- {found['measured'][-1]['best']} is better"
        print(f"{row.title}: {found['chosen']}, {found['chosen_over_best']:.2f} of the best{verdict}", flush=True)
    what = f"the planner's choice is within {WITHIN - 1:.0%} of the best plan, {len(rows)} layer shapes"
    claims = [
        claim(words, sum(row[key] for row in rows) / len(rows), SHARE, ">=", "of the shapes")
        for key, words in (("within", what), ("own_within", f"{what}, time to choose included"))
    ]
    write("planner", options, claims, {"rows": rows})


if __name__ == "__main__":
    main()
