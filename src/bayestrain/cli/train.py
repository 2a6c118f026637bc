"""`bayestrain train`: from a name or a file to a run folder with a report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from bayestrain.cli import devices, runs
from bayestrain.cli.screen import print_error, print_json
from bayestrain.cli.view import shown_progress
from bayestrain.errors import ConfigError, Interrupted
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.places import has_work
from bayestrain.train.progress import Progress
from bayestrain.train.records import read_result

WHAT, WHERE, SHOW = "What to train", "Where", "What to show"
UNTOUCHED = "Nothing was changed; run the same command again."


class TrainCommand(TyperCommand):
    """Puts --help into the last panel."""

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = SHOW
        return option


def train_help() -> str:
    """The text of `bayestrain train --help` above the options."""
    width = max(map(len, toml.names()))
    experiments = "\n".join(f"  [cyan]{name:<{width}}[/]  {toml.about(name)}" for name in toml.names())
    return f"""Train a network whose ranks shrink while it learns, and report on it.

\b
[bold]Experiments[/]
{experiments}

\b
[bold]Examples[/]
  bayestrain train                             [dim]# a first look: mnist-mini[/]
  bayestrain train mnist --seed 1              [dim]# into runs/mnist-seed1[/]
  bayestrain train mnist --preset paper        [dim]# as the paper has it[/]
  bayestrain train mnist --target-ratio 300    [dim]# at least so many times smaller[/]
  bayestrain train mnist --from runs/mnist-seed0 --target-ratio 350
  bayestrain train mnist --kind dense          [dim]# an ordinary network, to compare with[/]
  bayestrain train mnist --particles 20        [dim]# a posterior, not a point[/]
  bayestrain train mnist --seed 1 --particles 20 --map runs/mnist-seed1
  bayestrain train mnist --set prior.weight=2  [dim]# any setting, also twice[/]
  bayestrain train mnist --print-config > my.toml
  bayestrain train --config my.toml --out my-run
  bayestrain train --resume --out my-run       [dim]# after Ctrl-C or a power cut[/]
"""


def option(help: str, *names: str, panel: str, metavar: str = "") -> Any:
    """A `typer.Option` whose default, if it matters, is told by its help."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


Name = Annotated[
    str | None, typer.Argument(help="One of the experiments above; mnist-mini if left out.", metavar="NAME")
]
Config = Annotated[
    Path | None,
    option(
        'Your own settings, complete or with a first line like base = "mnist".',
        "--config",
        panel=WHAT,
        metavar="FILE.toml",
    ),
]
Preset = Annotated[
    str | None,
    option(
        "paper: the paper's modes, ranks, prior and training. default: ours.", "--preset", panel=WHAT, metavar="PRESET"
    ),
]
Kind = Annotated[
    str | None,
    option(
        "low-rank: ranks are sought. tensorized: all stay. dense: an ordinary network, to compare with.",
        "--kind",
        panel=WHAT,
        metavar="KIND",
    ),
]
TargetRatio = Annotated[
    float | None,
    option(
        "How many times smaller than dense the network must be, at least.", "--target-ratio", panel=WHAT, metavar="X"
    ),
]
FromRun = Annotated[
    Path | None,
    option(
        "Begin with the network of a finished run, for instance to make it smaller still.",
        "--from",
        panel=WHAT,
        metavar="RUN",
    ),
]
Overrides = Annotated[
    list[str] | None,
    option("Change a setting, as in fit.epochs=3. May be repeated.", "--set", panel=WHAT, metavar="KEY=VALUE"),
]
Particles = Annotated[
    int | None,
    option(
        "Train a posterior of N networks (SVGD) instead of one; 20 is a good number.",
        "--particles",
        panel=WHAT,
        metavar="N",
    ),
]
Point = Annotated[
    Path | None,
    option(
        "The posterior's MAP point: a finished run with the same settings and seed, which is not trained again.",
        "--map",
        panel=WHAT,
        metavar="RUN",
    ),
]
Seed = Annotated[int | None, option("Seed of every random choice; 0 if left out.", "--seed", panel=WHAT, metavar="N")]
Out = Annotated[
    Path | None, option("Folder of the run; runs/NAME-seedN if left out.", "--out", panel=WHERE, metavar="DIR")
]
Device = Annotated[
    str,
    option("auto, cpu, cuda, cuda:N or mps. auto: a GPU if there is one.", "--device", panel=WHERE, metavar="DEVICE"),
]
Resume = Annotated[bool, option("Go on where a stopped run left off.", "--resume", panel=WHERE)]
Overwrite = Annotated[bool, option("Replace the run that is in DIR.", "--overwrite", panel=WHERE)]
Quiet = Annotated[bool, option("Print only the path of the report.", "--quiet", "-q", panel=SHOW)]
Json = Annotated[bool, option("Print only the result, as one JSON object.", "--json", panel=SHOW)]
PrintConfig = Annotated[
    bool, option("Print all settings, explained, as TOML; train nothing.", "--print-config", panel=SHOW)
]


def train(
    name: Name = None,
    config: Config = None,
    preset: Preset = None,
    kind: Kind = None,
    target_ratio: TargetRatio = None,
    from_run: FromRun = None,
    overrides: Overrides = None,
    particles: Particles = None,
    point: Point = None,
    seed: Seed = None,
    out: Out = None,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
    print_config: PrintConfig = False,
) -> None:
    if overwrite and resume:
        raise ConfigError("--overwrite begins anew and --resume goes on: use one of them.")
    start = None if from_run is None else toml.quoted(str(from_run))
    short = {
        "experiment.kind": kind,
        "experiment.from_run": start,
        "fit.target_ratio": target_ratio,
        "posterior.particles": particles,
    }
    overrides = [*(overrides or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]
    chosen = choose_config(name, config, preset, overrides, seed, out if resume else None)
    if print_config:
        print(toml.dumps(chosen), end="")
        return
    folder = out or runs.default_folder(chosen, resume)
    if resume:
        runs.check_resumable(folder, chosen)
    else:
        runs.check_new(folder, overwrite)
        runs.check_own_config(folder, config)
        runs.check_elsewhere(folder, point, chosen.experiment.from_run)
    used_device = devices.resolve(device)
    is_new, cleared = runs.make_writable(folder), resume
    try:
        if is_new:
            toml.save(chosen, folder / "config.toml")  # from here on there is something to resume
        with shown_progress(quiet or as_json, runs.first_record(folder) if resume else None) as progress:
            if not resume:
                make_way(chosen, folder, used_device, point)
                cleared = True
            result, report = run(chosen, folder, used_device, resume, progress, point)
    except (Interrupted, KeyboardInterrupt):
        print_error(f"stopped by Ctrl-C. {how_to_go_on(folder, device) if cleared else UNTOUCHED}")
        raise typer.Exit(130) from None
    except OSError as error:
        error.add_note(how_to_go_on(folder, device) if cleared else UNTOUCHED)
        raise
    finally:
        if is_new:
            runs.tidy(folder)
    if as_json:
        print_json({**result, "folder": str(folder), "report": str(report)})
    else:
        print(report if quiet else f"report: {report}")


def make_way(config: RunConfig, folder: Path, device: str, point: Path | None) -> None:
    """Clear the folder for a new run; what cannot be trained does not cost the run that is there."""
    from bayestrain.train.experiment import rehearse

    rehearse(config, device, point)
    runs.clear(folder)


def run(
    config: RunConfig, folder: Path, device: str, resume: bool, progress: Progress, point: Path | None = None
) -> tuple[dict[str, Any], Path]:
    """Train and report; the result and the path of the report."""
    from bayestrain.report import write_report
    from bayestrain.train.experiment import run_experiment
    from bayestrain.train.map_point import check_point

    if resume and runs.is_finished(folder):
        if point is not None:
            check_point(config, point, folder)
        progress.message(f"The run in {folder} is finished already.")
        result = read_result(folder)
    else:
        result = run_experiment(
            config, folder, device=device, resume=has_work(folder), progress=progress,
            command=command_line(), point=point,
        ).summary  # fmt: skip
    return result, write_report(folder, folder / "report.html")


def choose_config(
    name: str | None, file: Path | None, preset: str | None, overrides: list[str], seed: int | None, begun: Path | None
) -> RunConfig:
    """The config that the arguments mean; `begun` is the folder to resume, whose config counts if no other is named."""
    if begun is not None and (name, file, preset) == (None, None, None):
        runs.check_begun(begun)
        config = toml.load(begun / "config.toml", overrides)
    elif file is None:
        config = toml.named(name or toml.names()[0], preset or "default", overrides)
    elif name is None and preset is not None:
        raise ConfigError(f'--preset goes with a NAME. In {file} write base = "mnist.{preset}".')
    else:
        config = toml.load(file, overrides, toml.base_name(name, preset or "default") if name is not None else "")
    if seed is None:
        return config
    try:
        return config.replace("experiment", seed=seed)
    except ConfigError as error:
        raise ConfigError(f"--seed {seed}: {error}") from None


def program() -> str:
    """How this program was called: "bayestrain", or "python -m bayestrain"."""
    return "python -m bayestrain" if Path(sys.argv[0]).name == "__main__.py" else "bayestrain"


def command_line() -> str:
    return f"{program()} {shlex.join(sys.argv[1:])}"


def how_to_go_on(folder: Path, device: str) -> str:
    """What to type next after an interruption."""
    if not has_work(folder):
        return "Nothing was saved yet; run the same command again."
    if runs.is_finished(folder):
        return f"The run itself is finished; for its report: {program()} report {shlex.quote(str(folder))}"
    device_option = "" if device == "auto" else f" --device {device}"
    return f"Go on with: {program()} train --resume --out {shlex.quote(str(folder))}{device_option}"
