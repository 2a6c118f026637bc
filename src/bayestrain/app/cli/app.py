"""The commands of `bayestrain`, and how their errors are reported."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from bayestrain import __version__
from bayestrain.app.cli.compress import compress
from bayestrain.app.cli.predict import predict
from bayestrain.app.cli.runs import evaluate, export, inspect, report
from bayestrain.app.cli.serve import serve
from bayestrain.app.cli.train import train
from bayestrain.errors import BayesTrainError, ConfigError, Interrupted


class CleanErrors(TyperGroup):
    """Reports a user's error as one message on stderr with exit code 2; Ctrl-C exits with code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as error:
            fail(error, "stopped by Ctrl-C.", 130)
        except BayesTrainError as error:
            fail(error, str(error))
        except BrokenPipeError:
            raise  # the reader of a pipe has gone, and click ends quietly
        except OSError as error:
            what = "A file" if error.filename is None else error.filename
            fail(error, f"{what} cannot be read or written: {error.strerror or error}.")
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            fail(error, "out of memory. Try fewer --particles, a smaller --set fit.batch_size=.. or posterior.chunk=..")


def fail(error: BaseException, message: str, code: int = 2) -> NoReturn:
    """Print one message, with the notes that were added to the error, and exit."""
    number = os.environ.get("RANK", "0")  # of the processes of torchrun
    name = typer.style("bayestrain:" if number == "0" else f"bayestrain (process {number}):", fg="red", bold=True)
    typer.echo(" ".join([name, message, *getattr(error, "__notes__", ())]), err=True)
    raise typer.Exit(code) from None


def out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether an error means that memory ran out, on a GPU or in PyTorch's CPU allocator."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"bayestrain {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=CleanErrors, add_completion=False, no_args_is_help=True, rich_markup_mode="markdown",
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@app.callback(epilog="Start with **bayestrain train**, which needs no download, or with **bayestrain init**.")
def bayestrain(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, metavar="",
                                          help="Print the version.")] = False,
) -> None:  # fmt: skip
    """Compact neural networks that find their own tensor ranks while they train."""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; created if necessary.", metavar="DIR")] = Path(),
) -> None:
    """Write a small regression to replace by your own: data, network, settings, and a README. Overwrites nothing.

    ```sh
    bayestrain init my-task && cd my-task && bayestrain train --config run.toml --out first
    ```
    """
    starter = Path(__file__).with_name("starter")
    names = sorted(path.name for path in starter.iterdir() if path.is_file())
    if there := [name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{folder} already has {', '.join(there)}. Choose another folder: bayestrain init DIR")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(starter / name, folder / name)
    print(f"Wrote {', '.join(names)} to {folder}. Next:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {folder}")
    print("  bayestrain train --config run.toml --out first\n  bayestrain predict first new.csv")


for command in (train, compress, report, evaluate, inspect, predict, export, serve, init):
    app.command()(command)


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))  # where --model and --data are looked for, as `python -m` does
    app(prog_name="bayestrain")
