"""`lowtide bench scan`: the time of a loop within a part of its memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import scan as scans
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish, rows_of
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering
from lowtide.errors import UsageError
from lowtide.report import Table, show_bytes


@answering
def scan(
    widths: Annotated[
        list[str] | None, typer.Argument(help="Widths of the cell instead of 256.", show_default=False)
    ] = None,
    part: Annotated[float, typer.Option(min=0.1, max=100, help="Percent of what the plain loop keeps.")] = scans.PART,
    length: Annotated[int, typer.Option(min=2, help="Time steps.")] = scans.LENGTH,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes of each, taken by turns.")] = scans.ROUNDS,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Time a scan over an LSTM cell, without gradients of its inputs, against the plain loop."""

    def one(width: str) -> Row:
        if not width.isdecimal() or not int(width):
            raise UsageError(f"{width} is no width of a cell.", hint="give a number, such as 256.")
        found = scans.time_scan(int(width), part=part, rounds=rounds, length=length)
        return {**asdict(found), "ratio": found.ratio, "ok": found.ok}

    options = ("--part", f"{part:g}", "--length", str(length), "--rounds", str(rounds))
    rows = rows_of("scan", widths or [str(width) for width in scans.LIMITS], one, *options)
    cells = [
        [
            row["target"],
            f"{row['part']:g}%",
            f"{row['forwards']:,}",
            show_bytes(row["own"]),
            show_bytes(row["plain_own"]),
            f"{row['ratio']:.3f}",
            f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}",
            "ok" if row["ok"] else "too slow" if row["equal"] else "differs",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["width", "of the memory", "forwards", "own", "plain loop's", "of its time", "range", ""]
    finish([Part("rows", rows, [Table("srrrrrrl", cells, titles, ("bold", *[""] * 7))])], as_json, markdown)
