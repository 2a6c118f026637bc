"""The commands of `bayestrain`, and how their errors are reported."""

import errno
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from bayestrain import __version__
from bayestrain.app.cli.data import data_app
from bayestrain.app.cli.init import init
from bayestrain.app.cli.predict import predict
from bayestrain.app.cli.runs import HELP, evaluate, inspect, report
from bayestrain.app.cli.train import train
from bayestrain.errors import BayesTrainError, Interrupted


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
            room = " Make room first." if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
            what = "A file" if error.filename is None else error.filename
            fail(error, f"{what} cannot be read or written: {error.strerror or error}.{room}")
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            fail(error, "out of memory. Try fewer --particles, a smaller --set fit.batch_size=.. or posterior.chunk=..")


def fail(error: BaseException, message: str, code: int = 2) -> NoReturn:
    """Print one message, with the notes that were added to the error, and exit."""
    typer.secho("bayestrain: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(" ".join([message, *getattr(error, "__notes__", ())]), err=True)
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
    cls=CleanErrors, add_completion=False, no_args_is_help=True, rich_markup_mode="rich",
    pretty_exceptions_enable=False, context_settings=HELP,
)  # fmt: skip


@app.callback(epilog="Start with [bold]bayestrain train[/], which needs no download, or with [bold]bayestrain init[/].")
def bayestrain(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, metavar="", help="Print the version.")
    ] = False,
) -> None:
    """Compact neural networks that find their own tensor ranks while they train."""


for command in (train, report, evaluate, inspect, predict, init):
    app.command()(command)
app.add_typer(data_app, name="data")


def main() -> None:
    """The console script `bayestrain`."""
    sys.path.insert(0, str(Path.cwd()))  # where --model and --data are looked for, as `python -m` does
    app(prog_name="bayestrain")
