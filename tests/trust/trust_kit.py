"""Records of the trust tools: results/trust/*.json, and the page results/trust.md made from them."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bayestrain.files import write_atomically, write_json
from bayestrain.train.environment import describe_environment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "trust"
KEPT = ("bayestrain", "python", "torch", "cpu", "threads", "commit", "dirty", "started")


def record(name: str, content: dict[str, Any]) -> None:
    """Write results/trust/NAME.json, with command and commit, and the page again."""
    about = describe_environment(torch.device("cpu"))
    command = " ".join(["python", Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]])
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_json(RESULTS / f"{name}.json", {"command": command, **{key: about[key] for key in KEPT}, **content})
    write_atomically(ROOT / "results" / "trust.md", page(RESULTS))


def page(folder: Path) -> str:
    """The page of everything recorded in a folder."""
    parts = ["# Trust\n\nWritten by the commands named below from results/trust/*.json.\n"]
    for name, show in SECTIONS.items():
        if (file := folder / f"{name}.json").is_file():
            found = json.loads(file.read_text())
            where = (
                f"`{found['command']}` at commit {str(found['commit'])[:12]}{' with changes' * bool(found['dirty'])}"
            )
            parts.append(f"{show(found)}\n{where}, PyTorch {found['torch']}, {found['cpu']}.\n")
    return "\n".join(parts)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A table in Markdown; the first column is text."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(f'{x:,}' if type(x) is int else str(x) for x in line)} |\n" for line in lines)


def fuzz(found: dict[str, Any]) -> str:
    keys = ("inputs", "read", "refused", "unexpected", "slowest_seconds")
    rows = [[name, *(one.get(key, 0) for key in keys)] for name, one in found["readers"].items()]
    rows.append(["all", *(sum(row[k] for row in rows) for k in range(1, 5)), max(row[5] for row in rows)])
    text = "Damaged inputs per reader. Unexpected: anything but a result or a `BayesTrainError` in 5 s and 1 GB.\n\n"
    return f"## Hostile inputs\n\n{text}{table(['reader', *keys[:4], 'slowest (s)'], rows)}"


def faults(found: dict[str, Any]) -> str:
    rows = [
        [name, row["faults"], len(row["broken"]), "; ".join(f"{n} {end}" for end, n in sorted(row["ends"].items()))]
        for name, row in found["faults"].items()
    ]
    rows.append(["all", *(sum(row[k] for row in rows) for k in (1, 2)), ""])
    text = (
        "Each fault strikes a process that works on a folder. The promise is broken if finished work is lost or "
        "half-written, if damage changes a result without being named, or if the job does not finish afterwards in the "
        "bits of an undisturbed one.\n\n"
    )
    return f"## Faults\n\n{text}{table(['job, fault', 'faults', 'promise broken', 'how the job ended'], rows)}"


def mutants(found: dict[str, Any]) -> str:
    rows = [
        [room, row["mutants"], row["killed"], row["too slow"], len(row["survivors"]),
         f"{1 - len(row['survivors']) / row['mutants']:.0%}"]
        for room, row in found["rooms"].items()
    ]  # fmt: skip
    survivors = "".join(f"- `{each}`\n" for row in found["rooms"].values() for each in row["survivors"])
    text = "Single changes of the code, and whether the quick tests of its room notice. Survivors:"
    header = ["room", "mutants", "killed", "too slow", "survived", "noticed"]
    return f"## Mutants\n\n{table(header, rows)}\n{text}\n\n{survivors or '- none'}"


def coverage(found: dict[str, Any]) -> str:
    rows = [[room, f"{row['lines']:.1%}", f"{row['branches']:.1%}"] for room, row in found["rooms"].items()]
    return f"## Coverage\n\nOf all tests that need no GPU.\n\n{table(['room', 'lines', 'branches'], rows)}"


def soak(found: dict[str, Any]) -> str:
    text = f"{found['predictions']:,} predictions from {found['threads']} threads, of which {found['wrong']} differ "
    text += "from the serial ones. What the process holds meanwhile:\n\n"
    curve = found["curve"]
    rows = [list(curve[k].values()) for k in sorted({round(j * (len(curve) - 1) / 9) for j in range(10)})]
    return f"## Soak\n\n{text}{table(['seconds', 'megabytes', 'handles'], rows)}"


SECTIONS = {"fuzz": fuzz, "faults": faults, "soak": soak, "mutants": mutants, "coverage": coverage}
