"""`lowtide plan`: a program of a training step that keeps within a budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lowtide import report
from lowtide.budget import read_budget
from lowtide.cli.profile import CostsFrom, Json, Target, captured_target, common, costs_of, describe, optimizer_name
from lowtide.cli.talk import answering, show, show_json, talk
from lowtide.costs import Costs
from lowtide.errors import FileError
from lowtide.graph import Graph
from lowtide.plan import TIME_LIMIT, as_eager
from lowtide.plan import plan as find_plan
from lowtide.program import Plan
from lowtide.simulate import simulate

BUDGET = "The most bytes that the whole step may hold: 2GiB, 800MB, or 50%, which is what stays between steps and half "
BUDGET += "of what eager's step adds to it."
TimeLimit = Annotated[float, typer.Option(min=0, metavar="<seconds>", help="Seconds of search for a quicker plan.")]


@answering
def plan(
    target: Target,
    budget: Annotated[str, typer.Option(metavar="<bytes>", help=BUDGET, show_default=False)],
    costs: Annotated[
        CostsFrom, typer.Option(help="Measure each distinct op here, or only estimate.")
    ] = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="<file>", help="Save the program here.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Plan a training step within a budget, and show what it costs."""
    refuse_early(budget)
    if out is not None and out.exists() and not force:
        raise FileError(f"{out} exists already.", hint="choose another name, or pass --force.")
    built, captured, _ = captured_target(target)
    graph = captured.graph
    found = costs_of(graph, costs)
    planned, eager_peak = plan_within(graph, found, budget, time_limit=time_limit, seed=seed)
    if out is not None:
        planned.program.save(out, force=force)
    summary = report.summarize(graph, found, planned, eager_peak=eager_peak)
    notes = [*graph.notes, *found.notes]
    if as_json:
        show_json(
            {
                "target": target,
                **common(stays=summary.stays, predicted=summary.peak, metered=None),
                "optimizer": optimizer_name(built.optimizer),
                "costs": {"origin": found.origin, "machine": found.machine},
                **summary.to_json(),
                "out": None if out is None else str(out),
                "notes": notes,
            }
        )
        return
    heading = report.Heading(target, optimizer_name(built.optimizer), describe(found))
    show(report.PlanReport(heading, budget, summary, notes))
    if out is not None:
        talk().print(f"saved to {out}", markup=False, soft_wrap=True)


def refuse_early(budget: str) -> None:
    """Raise where this is no budget, before anything is captured or measured."""
    read_budget(budget, stays=1, eager_peak=1)


def plan_within(graph: Graph, costs: Costs, budget: str, *, time_limit: float, seed: int = 0) -> tuple[Plan, int]:
    """The plan within a budget as people write it, and the bytes of eager's peak."""
    stays = costs.stays(graph)
    eager_peak = simulate(graph, costs, as_eager(graph)).peak
    nbytes = read_budget(budget, stays=stays, eager_peak=eager_peak)
    with _searching() as progress:
        return find_plan(graph, costs, nbytes, time_limit=time_limit, seed=seed, progress=progress), eager_peak


@contextmanager
def _searching() -> Iterator[Callable[[float], None]]:
    """Show in a terminal how long the search has taken and the least overhead so far."""
    console = talk()
    columns = (SpinnerColumn(), TextColumn("planning"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with (
        redirect_stdout(sys.stderr),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=None)

        def progress(overhead: float) -> None:
            bar.update(task, description=f"best overhead so far {report.show_overhead(overhead)}")

        yield progress
