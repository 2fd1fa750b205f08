"""`lowtide bench limited`, `steady` and `soak`: budgets that the system enforces, and runs that go on for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench import beyond as beyonds
from lowtide.bench import limited as limits
from lowtide.bench import soak as soaks
from lowtide.bench.cli.verbs import Markdown, Part, Row, finish, rows_of
from lowtide.cli.plan import TimeLimit
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting, telling
from lowtide.errors import UsageError
from lowtide.plan import TIME_LIMIT
from lowtide.report import Table, show_bytes, show_seconds

LIMITED = ("resnet:depth=50,batch=16,size=128",)
STEADY = ("gpt",)
SOAKED = ("gpt:layers=2,width=64,heads=2,context=32,vocabulary=256,batch=4,optimizer=adamw",)
HALF = "Let state and parameters live in a file, and the budget be half of what persists between steps."
BUDGET = "Of the whole step: bytes, a unit, or a part of eager's own."


@answering
def limited(
    targets: Annotated[
        list[str] | None, typer.Argument(help="Targets to run instead of resnet 50.", show_default=False)
    ] = None,
    budget: Annotated[str, typer.Option(metavar="<bytes>", help=BUDGET)] = "25%",
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 50,
    offload: Annotated[bool, typer.Option("--offload", help=HALF)] = False,
    time_limit: TimeLimit = TIME_LIMIT,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train where the system gives no more than the budget and 64 MiB."""
    if not limits.enforced():
        raise UsageError("this system does not hold processes to RLIMIT_DATA.", hint="run it on Linux 4.7 or later.")
    if offload:
        finish([_beyond(targets or [beyonds.TARGET], steps, time_limit)], as_json, markdown)
        return

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


def _beyond(targets: Sequence[str], steps: int, time_limit: float) -> Part:
    """Steps within half of what persists between them."""

    def one(target: str) -> Row:
        with telling(f"bench limited {target}") as say:
            found = beyonds.beyond(target, steps=steps, time_limit=time_limit, tell=say)
        return {**asdict(found), "ok": found.ok}

    rows = rows_of("limited", targets, one, "--offload", "--steps", str(steps), "--time-limit", str(time_limit))
    done = [row for row in rows if "failure" not in row]
    cells = [
        [
            row["target"],
            show_bytes(row["persistent"]),
            show_bytes(row["budget"]),
            show_bytes(row["resident"]),
            f"{row['fitted']} of {row['wanted']}",
            "-" if row["seconds"] is None else show_seconds(row["seconds"]),
            show_seconds(row["eager_seconds"]),
            f"{row['eager']} of {row['wanted']}",
            "ok" if row["ok"] else row["fitted_end"] or ("more is resident" if row["equal"] else "differs from eager"),
        ]
        for row in done
    ]
    titles = ["target", "persistent", "budget", "resident", "steps", "a step", "eager's, free", "eager's", ""]
    lines = [f"eager on {row['target']}, held: {row['eager_end']}" for row in done if row["eager_end"]]
    lines += [
        f"the limit on {row['target']} is the budget and {show_bytes(row['slack'])}, by {row['limit']}, in force from "
        "before the model is built: torch and lowtide are imported, torch's threads run, and no tensor is there"
        for row in done
    ]
    lines.append(
        "resident: the most since then, by VmHWM, pages of files included, less what was there before; prices of ops "
        "and copies that are not known yet are measured within the limit, too"
    )
    return Part("rows", rows, [Table("srrrrrrrl", cells, titles, ("bold", *[""] * 8))], lines=lines)


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
