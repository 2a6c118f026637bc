"""`python -m records` writes the page of the results recorded in folders of ``results/records``."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "records"

INTRODUCTION = """# Records

Every folder here has the `result.json` of a run: its command, settings, environment and commit. `python -m records`
writes this page. Settings are chosen on training data; test images and the validation text are read once.
"""


def finetuned(name: str, found: dict[str, Any]) -> list[str]:
    """The cells of a ResNet."""
    accuracies = [f"{found[key]:.2f} %" for key in ("dense_accuracy", "compressed_accuracy", "accuracy")]
    return [f"[{name}]({name}/result.json)", f"{found['parameters']:,}", f"{found['ratio']:.2f}", *accuracies]


def text(name: str, found: dict[str, Any]) -> list[str]:
    """The cells of a GPT."""
    losses = [f"{found[key]:.4f}" for key in ("held_out_loss", "validation_loss")]
    return [f"[{name}]({name}/result.json)", f"{found['parameters']:,}", f"{found['ratio']:.2f}", *losses]


TABLES = (
    ("records.finetune", "Pretrained ResNets, compressed and fine-tuned on CIFAR-10", finetuned,
     ["run", "parameters", "times smaller", "test accuracy before", "compressed", "fine-tuned"]),
    ("records.gpt", "A character GPT on Tiny Shakespeare", text,
     ["run", "parameters", "times smaller", "loss on held-out training text", "validation loss"]),
)  # fmt: skip


def page(results: Path) -> str:
    """The page, with a table for each kind of record, larger networks first."""
    found = {file.parent.name: json.loads(file.read_text()) for file in sorted(results.glob("*/result.json"))}
    written = INTRODUCTION
    for module, title, cells, header in TABLES:
        own = {name: result for name, result in found.items() if f" {module} " in result["command"]}
        rows = [cells(name, own[name]) for name in sorted(own, key=lambda name: -own[name]["parameters"])]
        lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
        about = dict.fromkeys(
            f"{about['device']}; torch {about['torch']}; commit {str(about['commit'])[:10]}; {about['started'][:10]}."
            for about in (result["environment"] for result in own.values())
        )
        if own:
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            written += f"\n## {title}\n\n" + "\n".join(about) + f"\n\n{table}\n"
    return written


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(page(RESULTS))
