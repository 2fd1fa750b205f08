"""`lowtide bench classics`: what others published, and what lowtide reaches, claim by claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from lowtide.bench.classics import CLAIMS, Figure, apart
from lowtide.bench.classics.drawing import draw
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, show_json, show_text, talk, working
from lowtide.errors import FileError, UsageError
from lowtide.files import write_atomically
from lowtide.report import Table, show_seconds

PLOTTED = "tanh-lengths"


@answering
def classics(
    names: Annotated[
        list[str] | None, typer.Argument(help="Claims to show instead of all.", show_default=False)
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only say which claims there are.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes, and no bars on time.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="<file>", help=f"Draw what {PLOTTED} finds as SVG.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let the drawing replace a file.")] = False,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Hold lowtide against what others published, claim by claim."""
    chosen = _chosen(names)
    if listing:
        _list(chosen, as_json, markdown)
        return
    if plot is not None:
        _check_plot(plot, chosen, force)
    rows = [_row(name, small) for name in chosen]
    if plot is not None:
        _draw(plot, next(row for row in rows if row["target"] == PLOTTED))
    finish([_part(rows)], as_json, markdown)


def _chosen(names: Sequence[str] | None) -> list[str]:
    wrong = [name for name in names or () if name not in CLAIMS]
    if wrong:
        raise UsageError(f"there is no claim {wrong[0]!r}.", hint=f"choose from {', '.join(CLAIMS)}.")
    return list(dict.fromkeys(names or CLAIMS))


def _command(name: str) -> str:
    return f"lowtide bench classics {name}"


def _list(chosen: Sequence[str], as_json: bool, markdown: bool) -> None:
    if as_json:
        claims = [{"name": name, "summary": CLAIMS[name].summary, "command": _command(name)} for name in chosen]
        show_json({"claims": claims})
        return
    table = Table("ll", [[name, CLAIMS[name].summary] for name in chosen], ["claim", ""])
    show_text(table.markdown() if markdown else "\n".join(f"{name:17} {CLAIMS[name].summary}" for name in chosen))


def _check_plot(plot: Path, chosen: Sequence[str], force: bool) -> None:
    """Refuse a drawing before hours of work."""
    if PLOTTED not in chosen:
        raise UsageError("these claims have nothing to draw.", hint=f"add {PLOTTED}.")
    if plot.exists() and not force:
        raise FileError(f"{plot} exists already.", hint="choose another name, or pass --force.")


def _row(name: str, small: bool) -> Row:
    """Run one claim, and say how it went as soon as it is known."""
    begun = monotonic()
    with working(f"bench classics {name}"):
        found = apart(name, small=small)
    seconds = monotonic() - begun
    row: Row = {"target": name, "summary": CLAIMS[name].summary, "command": _command(name), "seconds": seconds}
    if "failure" in found:
        row |= {"failure": found["failure"], "figures": [], "missed": [], "ok": False}
    else:
        figures = [Figure(**figure) for figure in found["figures"]]
        missed = [figure.what.strip() for figure in figures if not figure.ok]
        row |= {"figures": [_figure(figure) for figure in figures], "data": found["data"]}
        row |= {"missed": missed, "ok": not missed}
    talk().print(f"{name}: {_verdict(row)}, {show_seconds(seconds)}", markup=False, soft_wrap=True)
    return row


def _figure(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "shown": figure.shown, "bar": figure.bar, "ok": figure.ok}


def _verdict(row: Row) -> str:
    if "failure" in row:
        return f"failed: {row['failure']}"
    return f"missed: {', '.join(row['missed'])}" if row["missed"] else "ok"


def _part(rows: list[Row]) -> Part:
    """A line for each figure; then one for each claim, with its command."""
    cells = [
        [
            row["target"] if number == 0 else "",
            figure["what"],
            figure["published"],
            figure["shown"],
            figure["bar"],
            ("ok" if figure["ok"] else "missed") if figure["bar"] else "",
        ]
        for row in rows
        for number, figure in enumerate(row["figures"])
    ]
    commands = [
        [row["target"], "ok" if row["ok"] else "missed", show_seconds(row["seconds"]), row["command"]] for row in rows
    ]
    tables = [
        Table("llllll", cells, ["claim", "", "published", "ours", "bar", ""], ("bold", "", "", "bold", "", "")),
        Table("llrl", commands, ["claim", "", "took", "shown by"], ("bold", "", "", "")),
    ]
    lines = ["GB, MB: powers of ten, as in the papers; own part: what a step adds to the bytes between steps"]
    return Part("rows", rows, tables, lines=lines)


def _draw(plot: Path, row: Row) -> None:
    if "failure" in row:
        return
    data = row["data"]
    series = {name: [nbytes and nbytes / 10**6 for nbytes in line] for name, line in data["series"].items()}
    title = "A chain of tanh: MB of nodes and gradients that a training step holds"
    write_atomically(plot, draw(title, data["lengths"], series, x="nodes of 1 MB", y="MB"))
    talk().print(f"{plot}: drawn", markup=False, soft_wrap=True)
