"""`lowtide bench models`: models of other people's libraries, each a few steps within a budget beside eager."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated

import typer

from lowtide.bench.cli.verbs import Markdown, Part, Row, elsewhere, finish
from lowtide.bench.models import trial
from lowtide.bench.models.others import FAMILIES
from lowtide.cli.profile import Json
from lowtide.cli.talk import answering, counting, working
from lowtide.errors import UsageError
from lowtide.report import Table, show_bytes, show_seconds

STEPS = 3


@answering
def models(
    names: Annotated[list[str] | None, typer.Argument(help="Models to run instead of all.", show_default=False)] = None,
    budget: Annotated[
        str, typer.Option(metavar="<bytes>", help="Of the whole step; where it does not fit, the least that does.")
    ] = "50%",
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = STEPS,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Models at a time; one on each core if left out.", show_default=False)
    ] = None,
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Train models of transformers, timm, torchvision and diffusers within a budget, beside eager."""
    if unknown := [name for name in names or () if name not in FAMILIES]:
        raise UsageError(f"there is no model {', '.join(unknown)}.", hint=f"there are {', '.join(FAMILIES)}.")
    chosen = names or list(FAMILIES)
    missing = [name for name in chosen if not FAMILIES[name].installed]
    chosen = [name for name in chosen if name not in missing]
    rows = _rows(chosen, budget, steps, jobs or os.cpu_count() or 1)
    finish([_part(rows, missing)], as_json, markdown)


def _rows(names: Sequence[str], budget: str, steps: int, jobs: int) -> list[Row]:
    """A row for each model: a single one is run here, several in processes of their own."""
    if len(names) == 1:
        logging.getLogger("transformers").setLevel(logging.ERROR)  # what it says of small configurations
        with working(f"models {names[0]}"):
            found = trial.run(FAMILIES[names[0]], steps=steps, budget=budget)
        return [{"target": names[0], **asdict(found), "ok": found.ok}]
    options = ("--budget", budget, "--steps", str(steps))
    done = 0
    with counting("bench models") as progress, ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(elsewhere, "models", name, *options, key="rows") for name in names]
        rows = []
        for one in waiting:
            rows.append(one.result())
            done += 1
            progress(done, len(names))
    return rows


def _part(rows: list[Row], missing: Sequence[str]) -> Part:
    cells = [_cells(row) for row in rows if "failure" not in row]
    titles = ["model", "numbers", "ops", "budget", "", "metered", "eager", "before", "equal", ""]
    table = Table("srrrlrrrrl", cells, titles, ("bold", *[""] * 9))
    lines = []
    for library in dict.fromkeys(FAMILIES[row["target"]].library for row in rows):
        mine = [row for row in rows if FAMILIES[row["target"]].library == library]
        captured, good = sum(row.get("captured", False) for row in mine), sum(row["ok"] for row in mine)
        lines.append(f"{library}: {len(mine)} models, {captured} captured, {good} exact and within the budget.")
    if missing:
        lines.append(f"not installed, not run: {', '.join(missing)}.")
    return Part("rows", rows, [table], lines=lines)


def _cells(row: Row) -> list[str]:
    if not row["captured"]:
        return [row["target"], f"{row['parameters']:,}", *[""] * 7, row["reason"]]
    return [
        row["target"],
        f"{row['parameters']:,}",
        f"{row['ops']:,}",
        show_bytes(row["budget"]),
        row["asked"],
        "-" if row["peak"] is None else show_bytes(row["peak"]),
        show_bytes(row["eager_peak"]),
        show_seconds(row["seconds"]),
        f"{row['equal']} of {row['steps']}",
        "ok" if row["ok"] else row["reason"] or ("differs" if row["equal"] < row["steps"] else "over its budget"),
    ]
