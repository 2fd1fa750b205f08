"""`lowtide bench limited`, `steady` and `soak`: budgets that the system enforces, and runs that go on for long."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import limited as limits
from lowtide.bench import soak as soaks
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish, rows_of
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting
from lowtide.errors import UsageError
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_bytes

LIMITED = ("resnet:depth=50,batch=16,size=128",)
STEADY = ("gpt",)
SOAKED = ("gpt:layers=2,width=64,heads=2,context=32,vocabulary=256,batch=4,optimizer=adamw",)
BUDGET = "Of the whole step: bytes, a unit, or a part of eager's own."


@answering
def limited(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of resnet 50.", show_default=False)
    ] = None,
    budget: Annotated[str, typer.Option(metavar="<bytes>", help=BUDGET)] = "25%",
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 50,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train where the system gives no more than the budget and 64 MiB."""
    if not limits.enforced():
        raise UsageError("this system does not hold processes to RLIMIT_DATA.", hint="run it on Linux 4.7 or later.")

    def one(target: str) -> Row:
        found = limits.live(target, budget=budget, steps=steps, time_limit=time_limit)
        return {**asdict(found), "ok": found.ok}

    options = ("--budget", budget, "--steps", str(steps), "--time-limit", str(time_limit))
    rows = rows_of("limited", targets or LIMITED, one, *options)
    cells = [
        [
            row["target"],
            show_bytes(row["budget"]),
            show_bytes(row["fitted_resident"]),
            f"{row['fitted']} of {row['wanted']}",
            f"{row['eager']} of {row['wanted']}",
            "ok" if row["ok"] else row["fitted_end"] or "eager lives as well",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "budget", "resident", "steps", "eager's", ""]
    table = Table("srrrrl", cells, titles, ("bold", "", "", "", "", ""))
    lines = [f"eager on {row['target']}: {row['eager_end']}" for row in rows if row.get("eager_end")]
    finish([Part("rows", rows, [table], lines=lines)], as_json, markdown)


@answering
def steady(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of gpt.", show_default=False)
    ] = None,
    budget: Annotated[str, typer.Option(metavar="<bytes>", help=BUDGET)] = "30%",
    steps: Annotated[int, typer.Option(min=limits.WARM_UP + 1, help="How many steps.")] = 500,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train for long within a budget, and show what grows."""

    def one(target: str) -> Row:
        with counting("steps") as progress:
            found = limits.steady(target, budget=budget, steps=steps, time_limit=time_limit, progress=progress)
        return {**asdict(found), "growth": found.growth, "ok": found.ok}

    options = ("--budget", budget, "--steps", str(steps), "--time-limit", str(time_limit))
    rows = rows_of("steady", targets or STEADY, one, *options)
    cells = [
        [
            row["target"],
            str(row["steps"]),
            show_bytes(row["budget"]),
            "-" if row["peak"] is None else show_bytes(row["peak"]),
            "-" if row["early"] is None else show_bytes(row["early"]),
            "-" if row["late"] is None else show_bytes(row["late"]),
            f"{row['mismatches']:,}",
            "ok" if row["ok"] else "grows, or strays",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "steps", "budget", "peak", f"resident at {limits.WARM_UP}", "in the end", "mismatches", ""]
    finish([Part("rows", rows, [Table("srrrrrrl", cells, titles, ("bold", *[""] * 7))])], as_json, markdown)


@answering
def soak(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Targets to run instead of a small gpt; of sequences, like it.", show_default=False),
    ] = None,
    budget: Annotated[str, typer.Option(metavar="<bytes>", help=BUDGET)] = "60%",
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 1000,
    shapes: Annotated[int, typer.Option(min=1, help="How many shapes of batches.")] = 20,
    time_limit: TimeLimit = 0.0,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train on many shapes beside threads and workers."""

    def one(target: str) -> Row:
        with counting("steps") as progress:
            found = soaks.soak(
                target, budget=budget, steps=steps, shapes=shapes, time_limit=time_limit, progress=progress
            )
        return {**asdict(found), "growth": found.growth, "ok": found.ok}

    options = ("--budget", budget, "--steps", str(steps), "--shapes", str(shapes), "--time-limit", str(time_limit))
    rows = rows_of("soak", targets or SOAKED, one, *options)
    cells = [
        [
            row["target"],
            f"{row['steps']:,}",
            str(row["shapes"]),
            show_bytes(row["resident"][soaks.WARM - 1]),
            show_bytes(row["resident"][-1]),
            f"{row['mismatches']:,}",
            f"{row['checkpoints'] - len(row['differing'])} of {row['checkpoints']}",
            "ok" if row["ok"] else "grows, strays or differs",
        ]
        for row in rows
        if "failure" not in row
    ]
    titles = ["target", "steps", "shapes", "warm", "in the end", "mismatches", "equal", ""]
    lines = [
        f"warm: resident after half of the steps; it may grow by {show_bytes(soaks.GROWTH)}. {soaks.THREADS} threads "
        f"allocated beside the steps, and {soaks.WORKERS} workers made the batches, forked and spawned by turns"
    ]
    finish(
        [Part("rows", rows, [Table("srrrrrrl", cells, titles, ("bold", *[""] * 7))], lines=lines)], as_json, markdown
    )
