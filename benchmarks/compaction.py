"""What cutting ranks during training saves: one experiment with it and without it, side by side.

    python benchmarks/compaction.py mnist

Both runs start together, each a process with one thread on a core of its own, so both see the same machine. Writes
``results/benchmarks/compaction-NAME.json`` with times, accuracies and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

VARIANTS = {"with": [], "without": ["--set", "fit.compact_every=0"]}


def side_by_side(commands: dict[str, list[str]]) -> dict[str, str]:
    """What each run prints. When one fails, or this is interrupted, the others are ended as well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        processes = {}
        for variant, command in commands.items():
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            processes[variant] = stack.enter_context(process)  # waits for its end
            stack.callback(process.kill)  # before that; nothing to one that has ended
        outputs = {}
        for variant, process in processes.items():
            outputs[variant], _ = process.communicate()
            if process.returncode:
                sys.exit(f"the run {variant} compaction failed with exit code {process.returncode}")
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="mnist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    shared = [part for setting in arguments.sets for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as scratch:
        commands = {}
        for variant, extra in VARIANTS.items():
            command = [sys.executable, "-m", "bayestrain", "train", arguments.name, "--seed", str(arguments.seed)]
            out = ["--out", str(Path(scratch) / variant), "--json"]
            commands[variant] = [*command, *out, *shared, *extra]
        found: dict[str, dict[str, Any]] = {
            variant: json.loads(output) for variant, output in side_by_side(commands).items()
        }
        environment_of_run = json.loads((Path(scratch) / "with" / "environment.json").read_text())
    del environment_of_run["command"]  # that of one variant, into a folder that is gone
    keys = ("seconds", "accuracy", "log_likelihood", "params", "ratio", "ranks")
    report = {
        "experiment": arguments.name,
        "seed": arguments.seed,
        "settings": arguments.sets,
        "command": f"python benchmarks/compaction.py {' '.join(sys.argv[1:])}".rstrip(),
        **{variant: {key: result[key] for key in keys} for variant, result in found.items()},
        "speedup": found["without"]["seconds"] / found["with"]["seconds"],
        "accuracy_difference": found["with"]["accuracy"] - found["without"]["accuracy"],
        "environment": environment_of_run,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"compaction-{arguments.name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['speedup']:.2f}x faster with compaction; accuracy {report['accuracy_difference']:+.2%}; {path}")


if __name__ == "__main__":
    main()
