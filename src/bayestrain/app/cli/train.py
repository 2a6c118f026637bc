"""`bayestrain train`: from names or a file to a run folder with a report."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayestrain.app.cli.runs import DEVICE, closing, resolve, write_page
from bayestrain.app.cli.screen import print_error, print_json
from bayestrain.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from bayestrain.train.config import RunConfig

WHAT, WHERE, SHOW = "What to train", "Where", "What to print"
CHECKPOINT = "checkpoint.pt"
EXAMPLE = Path(__file__).parents[1] / "example.toml"


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
    particles: Annotated[int | None, option(WHAT, "--particles", "N", "Train a posterior of N networks. 5 to 20 are "
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

    \b
    [bold]Examples[/]
      bayestrain train
      bayestrain train --model nets:build --data nets:loaders --out first
      bayestrain train --config run.toml --set fit.target_ratio=30 --seed 1
      bayestrain train --config run.toml --particles 10
      bayestrain train --config run.toml --from first --set fit.target_ratio=50
      bayestrain train --print-config > run.toml
      bayestrain train --resume --out first
    """
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it: give one of them.")
    short = {"run.model": model, "run.data": data, "run.seed": seed, "posterior.particles": particles}
    short["run.from_run"] = None if from_run is None else str(from_run)
    chosen = choose_config(config, {k: v for k, v in short.items() if v not in (None, "")}, overrides or [],
                           out if resume else None)  # fmt: skip
    if print_config:
        from bayestrain.train.config import dumps

        print(dumps(chosen), end="")
        return
    folder = out or default_folder(chosen, resume)
    if config is not None and config.resolve() == (folder / "config.toml").resolve():
        raise ConfigError(f"the run would overwrite your own {config}. Choose another --out, or rename the file.")
    if not (resume or overwrite) and any((folder / name).exists() for name in ("result.json", CHECKPOINT)):
        raise ConfigError(f"{folder} already holds a run. Add --resume or --overwrite, or choose another --out.")
    place = resolve(device)
    from bayestrain.app.cli.live import shown_progress
    from bayestrain.train import run

    try:
        with shown_progress(quiet or as_json) as callbacks:
            result = run.train_run(
                chosen, folder, device=place, resume=resume, overwrite=overwrite, callbacks=callbacks,
                command=command_line(),
            )  # fmt: skip
    except (Interrupted, KeyboardInterrupt):
        print_error(f"stopped by Ctrl-C. {how_to_resume(folder, device)}")
        raise typer.Exit(130) from None
    except OSError as error:
        error.add_note(how_to_resume(folder, device))
        raise
    page = write_page(folder)
    if as_json:
        print_json({**result, "folder": str(folder), "report": str(page)})
    elif quiet:
        print(page)
    else:
        closing(result, page)


def choose_config(file: Path | None, short: dict[str, Any], overrides: list[str], resumed: Path | None) -> RunConfig:
    """The settings that the options mean: of a file, a resumed run, a model with its data, or the embedded example."""
    from bayestrain.train import config

    if resumed is not None and file is None and "run.model" not in short:
        file = resumed / "config.toml"
        if not file.is_file():
            raise ConfigError(f"there is nothing to resume in {resumed}. Leave --resume out.")
    own = {"run.model", "run.data"} & short.keys()
    if file is None and len(own) == 1:
        raise ConfigError("--model and --data go together. Give both, or a --config file that has the other.")
    if file is None and own:
        names = {key.removeprefix("run."): short.pop(key) for key in own}
        start = config.RunConfig.from_dict({"run": {"name": names["model"].partition(":")[2] or "run", **names}})
    else:
        start = config.load(file or EXAMPLE)
    return start.override([*(f"{key}={config.shown(value)}" for key, value in short.items()), *overrides])


def default_folder(config: RunConfig, resume: bool) -> Path:
    """runs/NAME-seedN, with a counter if that exists; to resume, the latest of these."""
    name = re.sub(r"[^\w.-]+", "-", config.run.name).strip("-.") or "run"
    first = last = Path("runs") / f"{name}-seed{config.run.seed}"
    count, candidate = 1, first
    while candidate.exists():
        last, count = candidate, count + 1
        candidate = first.with_name(f"{first.name}-{count}")
    return last if resume else candidate


def program() -> str:
    """How this program was called: "bayestrain", or "python -m bayestrain"."""
    return "python -m bayestrain" if Path(sys.argv[0]).name == "__main__.py" else "bayestrain"


def command_line() -> str:
    return f"{program()} {shlex.join(sys.argv[1:])}"


def how_to_resume(folder: Path, device: str) -> str:
    """What to type after an interruption."""
    if not (folder / CHECKPOINT).is_file():
        return "Nothing was saved yet: run the same command again."
    option = "" if device == "auto" else f" --device {device}"
    return f"Continue with: {program()} train --resume --out {shlex.quote(str(folder))}{option}"
