"""`bayestrain train`: from names or a file to a run folder with a report."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayestrain.app.cli.runs import DEVICE, print_closing, resolve_device
from bayestrain.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from bayestrain.train.config import RunConfig

WHAT, WHERE, SHOW = "What to train", "Where", "What to print"


def option(panel: str, name: str, metavar: str, help: str) -> Any:
    """A `typer.Option` whose help states its default, if that matters."""
    return typer.Option(*name.split(), help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


def train(
    model: Annotated[str, option(WHAT, "--model", "PKG.MOD:BUILD", "Function that builds the network.")] = "",
    data: Annotated[str, option(WHAT, "--data", "PKG.MOD:LOADERS", "Function that returns the data: "
                                "(train, validation) or (train, validation, test).")] = "",
    config: Annotated[Path | None, option(WHAT, "--config", "FILE.toml", "Settings of the run.")] = None,
    overrides: Annotated[list[str] | None, option(WHAT, "--set", "KEY=VALUE", "Change a setting, as in fit.epochs=3. "
                                                  "May be repeated.")] = None,
    particles: Annotated[int | None, option(WHAT, "--particles", "N", "Train a posterior of N networks; 5 to 20 are "
                                            "good numbers.")] = None,
    from_run: Annotated[Path | None, option(WHAT, "--from", "RUN", "Start from the network of a finished run, for "
                                            "example to make it smaller.")] = None,
    seed: Annotated[int | None, option(WHAT, "--seed", "N", "Seed of all random numbers.")] = None,
    out: Annotated[Path | None, option(WHERE, "--out", "DIR", "Folder of the run. Default: runs/NAME-seedN")] = None,
    device: Annotated[str, option(WHERE, "--device", "DEVICE", DEVICE)] = "auto",
    resume: Annotated[bool, option(WHERE, "--resume", "", "Continue the run in DIR after an interruption.")] = False,
    overwrite: Annotated[bool, option(WHERE, "--overwrite", "", "Replace the run in DIR.")] = False,
    quiet: Annotated[bool, option(SHOW, "--quiet -q", "", "Print only the path of the report.")] = False,
    as_json: Annotated[bool, option(SHOW, "--json", "", "Print only the result, as JSON.")] = False,
    print_config: Annotated[bool, option(SHOW, "--print-config", "", "Print all settings with their meaning as TOML, "
                                         "and train nothing.")] = False,
) -> None:  # fmt: skip
    """Train a network whose ranks shrink to what the data support, and write a report.

    Without --model, --data and --config it trains the embedded example, a small network on 12,000 digits.

    ```sh
    bayestrain train
    bayestrain train --model nets:build --data nets:loaders --out first
    bayestrain train --config run.toml --set fit.target_ratio=30 --seed 1
    bayestrain train --config run.toml --particles 10
    bayestrain train --config run.toml --from first --set fit.target_ratio=50
    bayestrain train --print-config > run.toml
    bayestrain train --resume --out first
    ```
    """
    short = {"run.model": model, "run.data": data, "run.seed": seed, "posterior.particles": particles}
    short |= {"run.from_run": str(from_run)} if from_run else {}
    given = {key: value for key, value in short.items() if value not in (None, "")}
    chosen = choose_config(config, given, overrides or [], out if resume else None)
    from bayestrain.train.callbacks import ProgressPrinter
    from bayestrain.train.config import dumps
    from bayestrain.train.run import train_run

    if print_config:
        print(dumps(chosen), end="")
        return
    main = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun the one that writes and prints
    lost = bool(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))  # after a lost worker: the same folder
    folder = out or default_folder(chosen, resume or lost)
    checkpoint = folder / "checkpoint.pt"
    if config is not None and config.resolve() == (folder / "config.toml").resolve():
        raise ConfigError(f"the run would overwrite your own {config}. Choose another --out, or rename the file.")
    place, talks = resolve_device(device), main and not (quiet or as_json)
    program = "python -m bayestrain" if Path(sys.argv[0]).name == "__main__.py" else "bayestrain"
    try:
        result = train_run(
            chosen, folder, device=place, resume=resume, overwrite=overwrite,
            callbacks=[ProgressPrinter()] if talks else [], command=f"{program} {shlex.join(sys.argv[1:])}",
        )  # fmt: skip
    except (Interrupted, KeyboardInterrupt, OSError) as error:
        again = f"Continue with: {program} train --resume --out {shlex.quote(str(folder))}"
        again += "" if device == "auto" else f" --device {device}"
        error.add_note(again if checkpoint.exists() else "Nothing was saved yet: run the same command again.")
        raise
    if talks:
        print_closing(folder)
    elif main:
        from bayestrain.app.report import write_report

        full = {**result, "folder": str(folder), "report": str(write_report(folder))}
        print(json.dumps(full, indent=2, ensure_ascii=False) if as_json else full["report"])


def choose_config(file: Path | None, short: dict[str, Any], overrides: list[str], resumed: Path | None) -> "RunConfig":
    """The settings that the options select: a file, a resumed run, a model with its data, or the embedded example."""
    from bayestrain.train import config

    if resumed is not None and file is None and "run.model" not in short:
        file = resumed / "config.toml"
    model, data = (short.get(key) for key in ("run.model", "run.data"))
    if file is None and bool(model) != bool(data):
        raise ConfigError("--model and --data go together. Give both, or a --config file that has the other.")
    if file is None and model:
        name = model.partition(":")[2] or "run"
        start = config.RunConfig.from_dict({"run": {"name": name, "model": model, "data": data}})
    else:
        start = config.load(file or Path(__file__).parents[1] / "example.toml")
    return start.override([*(f"{key}={json.dumps(value)}" for key, value in short.items()), *overrides])


def default_folder(config: "RunConfig", resume: bool) -> Path:
    """runs/NAME-seedN, with a counter if that exists; to resume, the latest of these."""
    name = re.sub(r"[^\w.-]+", "-", config.run.name).strip("-.") or "run"
    first, number = f"{name}-seed{config.run.seed}", 1
    last = free = Path("runs") / first
    while free.exists():
        number += 1
        last, free = free, free.with_name(f"{first}-{number}")
    return last if resume else free
