"""The commands put together, and what happens when one fails."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bayestrain import __version__
from bayestrain.cli.data import data_app
from bayestrain.cli.evaluate import evaluate
from bayestrain.cli.inspect import inspect
from bayestrain.cli.predict import predict
from bayestrain.cli.report import report
from bayestrain.cli.screen import HELP, failed_access, in_full, print_error
from bayestrain.cli.table import table
from bayestrain.cli.train import TrainCommand, train, train_help
from bayestrain.errors import BayesTrainError


class CleanErrors(TyperGroup):
    """Turns a user's error into one message on stderr and exit code 2, and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BayesTrainError as error:
            print_error(in_full(error))
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise  # nobody reads on, and click ends quietly
        except OSError as error:
            print_error(failed_access(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print_error("stopped by Ctrl-C.")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=CleanErrors,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"bayestrain {__version__}")
        raise typer.Exit


@app.callback(epilog="Begin with [bold]bayestrain train[/]: two minutes on any machine, nothing to download.")
def bayestrain(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, metavar="", help="Say the version and leave."),
    ] = False,
) -> None:
    """Neural networks of tensor trains that find their own ranks while they train."""


app.command(cls=TrainCommand, help=train_help())(train)
app.command()(report)
app.command()(table)
app.command()(evaluate)
app.command()(inspect)
app.command()(predict)
app.add_typer(data_app, name="data")


def main() -> None:
    """The console script `bayestrain`."""
    app(prog_name="bayestrain")
