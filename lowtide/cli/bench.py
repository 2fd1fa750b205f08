"""`lowtide bench`: the benches add it themselves, where they are; an installed lowtide says where that is."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

from lowtide.cli.talk import answering
from lowtide.errors import UsageError

ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_bench(app: typer.Typer) -> None:
    """Add the command to the others."""
    if find_spec("lowtide.bench") is not None:
        import_module("lowtide.bench.cli")
    else:
        app.command(context_settings=ANYTHING)(bench)


@answering
def bench() -> None:
    """Measure what lowtide claims (in its repository)."""
    raise UsageError(
        "the benches are not part of an installed lowtide.",
        hint="they are in its repository: there, `make bench` makes every published table, and after "
        "`pip install -e .` the command `lowtide bench` runs each.",
    )
