"""`lowtide bench pace`: how far the best step of each model is from what this machine needs for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import pace as distances
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish, rows_of
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting
from lowtide.cli.target import build
from lowtide.models import SMALL, catalog
from lowtide.pace import ROUNDS
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_seconds


@answering
def pace(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to time instead of every built-in model.", show_default=False)
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes instead of the defaults.")] = False,
    budgets: Annotated[
        str, typer.Option(metavar="<list>", help="Within which steps are planned; the quickest is shown.")
    ] = ",".join(distances.BUDGETS),
    rounds: Annotated[int, typer.Option(min=1, help="Turns of the step and of eager's.")] = ROUNDS,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Show how far the best step of each model is from what the machine needs for it."""

    def one(target: str) -> Row:
        within = budgets.split(",")
        found = distances.distance(lambda: build(target), within, rounds=rounds, time_limit=time_limit, shown=counting)
        return {**asdict(found), "ok": True}

    chosen = targets or [SMALL[entry.name] if small else entry.name for entry in catalog()]
    options = ("--budgets", budgets, "--rounds", str(rounds), "--time-limit", str(time_limit))
    rows = rows_of("pace", chosen, one, *options)
    cells = [
        [
            row["target"],
            row["budget"],
            show_seconds(row["seconds"]),
            show_seconds(row["needed"]),
            f"{row['distance']:.2f}",
            f"{row['eager_distance']:.2f}",
            f"{row['time_ratio']:.3f}",
            f"{min(row['ratios']):.3f}..{max(row['ratios']):.3f}",
            f"{row['arithmetic']:.0%}",
            f"{row['uncounted']:.0%}",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "within", "a step", "needed", "distance", "eager's", "of eager", "by round", "arithmetic"]
    table = Table("srrrrrrrrr", cells, [*titles, "uncounted"], ("bold", "", "", "", "bold", *[""] * 5))
    lines = [
        "needed: of each op its arithmetic at the rate of matrix products here, or its bytes at that of memory;",
        "distance: how many times that the step takes; arithmetic: of the time, in ops that it holds up;",
        "uncounted: in ops whose operations no rule counts, held to their bytes",
    ]
    finish([Part("rows", rows, [table], lines=lines)], as_json, markdown)
