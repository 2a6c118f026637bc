"""Mutation testing: change one operator, constant or statement of a room, and see whether the room's tests notice.

    python tools/mutate.py [--rooms formats prior compact] [--mutants 300] [--seed 0] [--limit 120]

Mutants are a seeded sample of all single changes. Each runs the quick tests of its room, up to the first failure, in a
process of its own with a time limit. Writes results/trust/mutants.json, in which the survivors are named.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trust"))

SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,), ast.MatMult: (ast.Mult,), ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,), ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,), ast.USub: (ast.UAdd,),
}  # fmt: skip


def changes(node: ast.AST, parent: ast.AST) -> Iterator[tuple[str, str, Any]]:
    """(what it says, the field, its new value) of each change of one node."""
    for name in ("op", "ops"):
        old = getattr(node, name, None)
        for k, each in enumerate(old if isinstance(old, list) else [old] if old is not None else []):
            for other in SWAPS.get(type(each), ()):
                new = [*old[:k], other(), *old[k + 1 :]] if isinstance(old, list) else other()
                yield f"{type(each).__name__} to {other.__name__}", name, new
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", "op", ast.UAdd()
    if isinstance(node, ast.Constant) and not isinstance(parent, ast.Expr | ast.JoinedStr | ast.FormattedValue):
        if isinstance(node.value, bool):
            yield f"{node.value} negated", "value", not node.value
        elif isinstance(node.value, int | float):
            yield f"{node.value} plus 1", "value", node.value + 1
    if isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", "value", ast.Constant(None)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition negated", "test", ast.UnaryOp(ast.Not(), node.test)
    for k, each in enumerate(body if isinstance(body := getattr(node, "body", None), list) else ()):
        if isinstance(each, ast.Assign | ast.AugAssign | ast.Raise) or (
            isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
        ):
            yield f"`{ast.unparse(each)[:60]}` dropped", "body", [*body[:k], ast.Pass(), *body[k + 1 :]]


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, what changed, the new source) of every single change. Annotations and messages stay as they are."""
    tree = ast.parse(source)
    for owner in ast.walk(tree):
        for child in ast.iter_child_nodes(owner):
            child.parent = owner  # type: ignore[attr-defined]
    skipped = {id(x) for node in ast.walk(tree) for part in (
        getattr(node, "annotation", None), getattr(node, "returns", None), getattr(node, "exc", None)
    ) if part is not None for x in ast.walk(part)}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for what, field, value in changes(node, getattr(node, "parent", node)):
            old = getattr(node, field)
            setattr(node, field, value)
            changed = ast.unparse(ast.fix_missing_locations(copy.copy(tree)))
            setattr(node, field, old)
            yield getattr(node, "lineno", 1), what, changed


def sample(room: str, number: int, seed: int) -> list[tuple[str, int, str, str]]:
    """Mutants of a room: (file, line, what, source)."""
    found = [
        (path.relative_to(ROOT / "src").as_posix(), *mutant)
        for path in sorted((ROOT / "src" / "bayestrain" / room).glob("*.py"))
        for mutant in mutants(path.read_text())
    ]
    return random.Random(f"{seed} {room}").sample(found, min(number, len(found)))


def verdict(room: str, sources: Path, limit: float, deselected: list[str]) -> tuple[str, float]:
    """Whether the room's tests notice the sources: "survived", "killed" or "too slow"; and the seconds they took."""
    began = time.monotonic()
    if not (process := os.fork()):
        try:
            import pytest  # the parent has imported it, and torch, but nothing of ours

            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.setsid()
            os.chdir(ROOT)
            os.environ["PYTHONPATH"] = str(sources)
            sys.path.insert(0, str(sources))
            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/{room}"]
            os._exit(int(pytest.main([*options, *(f"--deselect={each}" for each in deselected)])))
        finally:
            os._exit(70)
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
        if time.monotonic() - began > limit:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "too slow", time.monotonic() - began
        time.sleep(0.02)
    return "killed" if ended[1] else "survived", time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=["formats", "prior", "compact"])
    parser.add_argument("--mutants", type=int, default=300, help="of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of one mutant")
    parser.add_argument("--deselect", nargs="*", default=[], help="tests that fail without any mutant")
    given = parser.parse_args()
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        sources = Path(place) / "src"
        shutil.copytree(ROOT / "src", sources)
        for room in given.rooms:
            if verdict(room, sources, 10 * given.limit, given.deselect)[0] != "survived":
                raise SystemExit(f"The tests of {room} fail without any mutant. See --deselect.")
            ends = {"killed": 0, "too slow": 0}
            survivors = []
            for number, (file, line, what, source) in enumerate(sample(room, given.mutants, given.seed)):
                target, original = sources / file, ROOT / "src" / file
                target.write_text(source)
                os.utime(target, (number, number))  # Python compiles it again
                end, seconds = verdict(room, sources, given.limit, given.deselect)
                shutil.copy2(original, target)
                if end == "survived":
                    survivors.append(f"{file}:{line} {what}")
                else:
                    ends[end] += 1
                print(f"{end:9} {seconds:5.1f} s  {file}:{line} {what}", flush=True)
            found[room] = {"mutants": sum(ends.values()) + len(survivors), **ends, "survivors": survivors}
    from trust_kit import record  # which imports the package, so not before

    record("mutants", {"seed": given.seed, "rooms": found})


if __name__ == "__main__":
    main()
