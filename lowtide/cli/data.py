"""`lowtide data`: real data for the built-in models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide import data as real
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, show, show_json, show_text, talk
from lowtide.data import Entry
from lowtide.report import show_bytes

app = typer.Typer(invoke_without_command=True, help="List the datasets for the built-in models, and install them.")


@app.callback()
@answering
def listing(context: typer.Context, as_json: Json = False) -> None:
    """List the datasets for the built-in models, and install them."""
    if context.invoked_subcommand is not None:
        return
    entries = real.catalog()
    if as_json:
        show_json({"datasets": [asdict(entry) for entry in entries]})
    else:
        show(Listing(entries))


@app.command()
@answering
def install(
    name: Annotated[str, typer.Argument(help="The dataset, as `lowtide data` lists it.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Fetch it again where it is here already.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a dataset, and keep it in the cache folder."""
    with _status() as say:
        stored = real.install(name, force=force, say=say)
    (entry,) = (entry for entry in real.catalog() if entry.name == name)
    if as_json:
        show_json({**asdict(entry), "folder": str(stored.folder)})
    else:
        show_text(f"{name} is here: {entry.what}; {show_bytes(entry.nbytes)} in {stored.folder}")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line in a terminal that says what is being done."""
    console = talk()
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("...") as status:
        yield lambda what: status.update(f"{what}...")


@dataclass(frozen=True)
class Listing:
    """The list as a person reads it."""

    entries: list[Entry]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        longest = max(len(entry.name) for entry in self.entries)
        form = f"{{:{longest}}}  {{:>10}}  {{:4}}  "
        margin = len(form.format("", "", ""))
        width = min(options.max_width, 120) - margin
        yield Text(form.format("dataset", "size", "here") + "what it is, and the models that it suits", style="dim")
        for entry in self.entries:
            head = form.format(entry.name, show_bytes(entry.nbytes), "yes" if entry.here else "no")
            lines = [line for text in _texts(entry) for line in wrap(text, width, break_on_hyphens=False)]
            block = Text(head, style="bold", no_wrap=True, overflow="ignore")
            yield block.append(f"\n{' ' * margin}".join(lines), style="not bold")
        yield Text("\n`lowtide data install NAME` fetches one.", style="dim")


def _texts(entry: Entry) -> list[str]:
    origin = "comes with lowtide" if entry.install is None else f"from {', '.join(entry.packages)}"
    return [entry.what, f"for {', '.join(entry.suits)}", f"{origin}; {entry.licence}"]
