"""The command line: joins the verbs."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from lowtide.cli import data
from lowtide.cli.batch import batch
from lowtide.cli.bench import add_bench
from lowtide.cli.curve import curve
from lowtide.cli.diff import diff
from lowtide.cli.doctor import doctor
from lowtide.cli.models import models
from lowtide.cli.pebble import pebble
from lowtide.cli.plan import plan
from lowtide.cli.profile import profile
from lowtide.cli.report import make_report
from lowtide.cli.timeline import timeline
from lowtide.cli.train import train
from lowtide.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train a PyTorch model inside the memory you have, with the same results to the bit.",
    epilog="Data goes to stdout, talk to stderr. Exit codes: 0; 2 for a wrong call; 3 for a budget that nothing fits; "
    "4 for a step that can't be captured; 5 for a step that is not eager's.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowtide {version('lowtide')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(profile)
app.command()(plan)
app.command()(curve)
app.command("report")(make_report)
app.command()(diff)
app.command()(timeline)
app.command()(pebble)
app.command()(batch)
app.command()(train)
app.command()(verify)
app.command()(models)
app.command()(doctor)
app.add_typer(data.app, name="data", rich_help_panel=None)
add_bench(app)


def main() -> None:
    """The entry point of the console script."""
    app()
