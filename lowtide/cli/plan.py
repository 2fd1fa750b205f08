"""`lowtide plan`: a program of a training step that keeps within a budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar

from lowtide import report
from lowtide.budget import LEAST, read_budget
from lowtide.captured import Captured
from lowtide.choice import Away, Effort, Leave, Offload, choose, given, judged
from lowtide.cli.profile import (
    CostsFrom,
    Json,
    Target,
    captured_target,
    common,
    costs_of,
    optimizer_name,
    promised,
    resized_target,
)
from lowtide.cli.talk import answering, show, show_json, show_text, spoken, talk, working
from lowtide.costs import Costs
from lowtide.errors import FileError, ProgramError, UsageError
from lowtide.fit.lowest import lowest as lowest_of
from lowtide.graph import Graph, Place
from lowtide.plan import BEST, CLASSICS, METHODS, OFFLOAD, TIME_LIMIT
from lowtide.plan.planning import Planning
from lowtide.program import Plan
from lowtide.progress import Spoken
from lowtide.rewrite import EXACT, apply, with_narrow
from lowtide.rewrites import LOSSY_ORDER, ROUNDING, read_allow
from lowtide.simulate import simulate

BUDGET = (
    "The most bytes that the whole step may hold: 2GiB, 800MB, or 50%, which is what persists between steps and half "
)
BUDGET += "of what eager's step adds to it; least: as few as can be planned."
METHOD = f"How to plan: {BEST} is the search; one-shot only reorders; {OFFLOAD} copies to --offload and runs nothing "
METHOD += f"twice; the others are as published: {', '.join(CLASSICS)}."
EXPLAIN = "Say instead why this value is kept, made again, offloaded, kept narrow or let go: a number (%123), an op "
EXPLAIN += "(addmm_5) or a module (layer1.0.conv2)."
TimeLimit = Annotated[float, typer.Option(min=0, metavar="<seconds>", help="Seconds of search for a quicker plan.")]
ALLOW = "What may change the bits, each only where it is needed: rounding (the same results up to rounding), lossy "
ALLOW += f"(less precision, fewer numbers), or names: {', '.join((*ROUNDING, *LOSSY_ORDER))}; sparse:0.3 sets a number."
Allow = Annotated[str | None, typer.Option("--allow", metavar="<names>", help=ALLOW, show_default="nothing")]
Rounding = Annotated[bool, typer.Option("--rounding", help="Short for --allow rounding.")]
OFFLOAD_TO = "Let values wait in a file (disk) where that is quicker than to make them again; where the budget asks "
OFFLOAD_TO += "for it, optimizer state and parameters live there, too."
OffloadTo = Annotated[
    str | None, typer.Option("--offload", metavar="<place>", help=OFFLOAD_TO, show_default="nothing is offloaded")
]
OFFLOAD_BUDGET = "The most bytes that may be there: 20GiB."
OffloadBudget = Annotated[
    str | None, typer.Option(metavar="<bytes>", help=OFFLOAD_BUDGET, show_default="most of what is free")
]
OffloadDir = Annotated[
    Path | None,
    typer.Option(metavar="<folder>", help="The folder of that file.", show_default="that of temporary files"),
]
FromCosts = Annotated[CostsFrom, typer.Option(help="Measure each distinct op here, or only estimate.")]


@answering
def plan(
    target: Target,
    budget: Annotated[str | None, typer.Option(metavar="<bytes>", help=BUDGET, show_default=False)] = None,
    method: Annotated[str, typer.Option(metavar="<name>", help=METHOD)] = BEST,
    explain: Annotated[str | None, typer.Option(metavar="<value>", help=EXPLAIN, show_default=False)] = None,
    offload: OffloadTo = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    costs: FromCosts = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, metavar="<file>", help="Save the plan here.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    load: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, metavar="<file>", help="Show a saved plan; nothing is planned.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a training step within a budget, and show what it costs."""
    _refuse_calls(budget, method, out, force, load)
    asked = read_offload(offload, offload_budget, offload_dir, planned=load is not None)
    _refuse_method(method, offload)
    allowed = Leave(read_allow(allow, rounding)).allowed
    built, captured, _ = captured_target(target)
    leave = Leave(allowed, resized_target(built, captured))
    if explain is not None and not allowed:
        report.find_values(with_optional(captured).graph, explain)  # raises where there is none, before all work

    plannings: dict[str, Planning] = {}  # graph -> its planning

    def price(graph: Graph) -> Costs:
        return costs_of(graph, costs, offload_dir)

    def search(graph: Graph, found: Costs, eager_peak: int, effort: Effort) -> Plan:
        with searching(time_limit) as progress:
            planning = Planning(graph, found, time_limit=effort.part * time_limit, seed=seed, progress=progress)
            plannings[graph.fingerprint] = planning
            nbytes, lowest = budget_of(budget or "", planning, eager_peak)
            return planning.within(nbytes, method, lowest, explain=effort.explain)

    away = asked.away(captured.graph.device)
    if budget == LEAST and allowed and away is None and method == BEST and load is None:
        with working("looking for the least peak"):
            planner = partial(Planning, time_limit=time_limit, seed=seed)
            budget = str(lowest_of(captured.graph, price, leave, planner))
    if load is not None:
        chosen = given(load, captured.graph, price, leave)
    else:
        could = Away.nearest(captured.graph.device) if method == BEST else None
        chosen = choose(captured.graph, price, search, leave=leave, away=away, could=could)
    graph, found, planned, eager_peak = chosen.graph, chosen.costs, chosen.plan, chosen.eager_peak
    notes = [*graph.notes, *found.notes]
    least_feasible: int | None = None
    if load is not None:
        planned = load_plan(load, graph, found, notes)
    elif explain is None:
        with working("looking for the least feasible budget"):
            lowest = [planned, plannings[graph.fingerprint].least()]
            if away is not None and method in (BEST, OFFLOAD):
                lowest.append(_least_of_all(captured.graph, away, price))
            least_feasible = min(one.peak for one in lowest)
            bound = min(one.least_bound for one in lowest)
    if out is not None:
        planned.save(out, force=force)
    if explain is not None:
        _explain(target, graph, found, planned, explain, as_json)
    else:
        if least_feasible is not None:
            planned = replace(planned, least_bound=bound)
        summary = report.summarize(graph, found, planned, eager_peak=eager_peak, least_feasible=least_feasible)
        if as_json:
            show_json(
                {
                    "target": target,
                    **common(persistent=summary.persistent, predicted=summary.peak, metered=None),
                    "optimizer": optimizer_name(built.optimizer),
                    "costs": {"origin": found.origin, "machine": found.machine},
                    "method": None if load is not None else method,
                    "chunks": chosen.chunks,
                    **summary.to_json(),
                    "out": None if out is None else str(out),
                    "notes": notes,
                }
            )
        else:
            heading = report.Heading(target, optimizer_name(built.optimizer), report.describe_costs(found))
            by = "" if method == BEST else method
            show(report.PlanReport(heading, budget or "", summary, notes, by))
    if out is not None and not as_json:
        talk().print(f"saved to {out}", markup=False, soft_wrap=True)


def _least_of_all(graph: Graph, away: Away, price: Callable[[Graph], Costs]) -> Plan:
    """The plan with the least peak, with all state and parameters elsewhere that can be."""
    rewritten = apply(graph, (*EXACT, *away.rewrites(max(away.homes(graph), default=0))))
    return Planning(rewritten.graph, price(rewritten.graph)).least()


def read_offload(place: str | None, budget: str | None, folder: Path | None, *, planned: bool = False) -> Offload:
    """What may go where, as it is asked for; wrong words are refused before all work."""
    asked = Offload(cast(Place | None, place), budget, folder)
    asked.refuse(planned=planned)
    return asked


def _refuse_method(method: str, offload: str | None) -> None:
    """Raise where a method can't do with offload, or without."""
    if method == OFFLOAD and offload is None:
        raise UsageError(f"the method {OFFLOAD} needs a place to copy to.", hint="pass --offload disk.")
    if offload is not None and method not in (BEST, OFFLOAD):
        raise UsageError(
            f"the method {method} can't offload.", hint=f"leave out --offload, or plan by {BEST} or {OFFLOAD}."
        )


def _refuse_calls(budget: str | None, method: str, out: Path | None, force: bool, load: Path | None) -> None:
    """Raise where the options do not go together, before anything is captured or measured."""
    if load is None and budget is None:
        raise UsageError("a plan needs a budget.", hint="pass --budget 50%, or --load a saved plan.")
    if load is not None and (budget is not None or out is not None or method != BEST):
        raise UsageError("a saved plan is only shown.", hint="leave out --budget, --method and --out, or --load.")
    if method not in (*METHODS, OFFLOAD):
        raise UsageError(f"there is no method {method!r}.", hint=f"choose one of {', '.join((*METHODS, OFFLOAD))}.")
    if budget is not None:
        refuse_early(budget)
    if out is not None and out.exists() and not force:
        raise FileError(f"{out} exists already.", hint="choose another name, or pass --force.")


def _explain(target: str, graph: Graph, costs: Costs, planned: Plan, name: str, as_json: bool) -> None:
    """Print why the values of this name are where they are."""
    values = report.find_values(graph, name)
    found = report.explain(report.Story(graph, costs, planned), name)
    if as_json:
        keys = common(persistent=costs.persistent(graph) - costs.elsewhere(graph), predicted=planned.peak, metered=None)
        keys |= promised(planned)
        show_json({"target": target, **keys, "values": values, "explained": [item.to_json() for item in found]})
        return
    for item in found:
        show(item)
    if len(values) > len(found):
        rest = ", ".join(f"%{value}" for value in values[len(found) :][:12])
        more = ", ..." if len(values) > len(found) + 12 else ""
        show_text(f"\n{name} makes {len(values)} values; ask for the others by number: {rest}{more}")


def refuse_early(budget: str) -> None:
    """Raise where this is no budget, before anything is captured or measured."""
    read_budget(budget, persistent=1, eager_peak=1, least=lambda: 1)


def with_optional(captured: Captured) -> Captured:
    """The step as it is saved, loaded and planned: without second runs, with the optional ops that a plan may use."""
    return replace(captured, graph=with_narrow(captured.graph))


def load_plan(path: Path, graph: Graph, costs: Costs, notes: list[str]) -> Plan:
    """A saved plan of this graph, judged again with these costs; a note says where it was made with others."""
    planned = Plan.load(path, graph)
    try:
        peak = judged(graph, costs, planned.program, budget=planned.budget)
    except ProgramError as error:
        raise FileError(
            f"{path} does not hold with these costs: {error.message.splitlines()[0]}",
            hint="it was planned with others, on another machine or with --costs roofline: plan again.",
        ) from error
    seconds = simulate(graph, costs, planned.program).seconds
    if peak != planned.peak or abs(seconds - planned.seconds) > 1e-6 * planned.seconds:
        then = f"{report.show_bytes(planned.peak)} and {report.show_seconds(planned.seconds)} a step"
        now = f"{report.show_bytes(peak)} and {report.show_seconds(seconds)}"
        notes.append(f"planned with other costs: {then}, here {now}; overhead and bound are those of then.")
    return replace(planned, peak=peak)


class _Clock(ProgressColumn):
    """A bar of the time that a search may take; it moves to and fro where it takes longer."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def render(self, task: Task) -> ProgressBar:
        passed = task.elapsed or 0.0
        return ProgressBar(total=self.limit, completed=passed, width=30, pulse=passed > self.limit)


def budget_of(budget: str, planning: Planning, eager_peak: int) -> tuple[int, list[Plan]]:
    """A budget as it was written, in bytes, and the plan that was made to find it, if it is the least."""
    lowest: list[Plan] = []

    def least() -> int:
        lowest.append(planning.least())
        return lowest[0].peak

    persistent = planning.costs.persistent(planning.graph)
    return read_budget(budget, persistent=persistent, eager_peak=eager_peak, least=least), lowest


@contextmanager
def searching(limit: float) -> Iterator[Callable[[float, float], None]]:
    """Show how long the search has taken, the least overhead so far, and the bound."""
    console = talk()
    columns = (TextColumn("planning"), _Clock(limit), TimeElapsedColumn(), TextColumn("{task.description}"))
    lines = nullcontext() if console.is_terminal else spoken("planning")
    with (
        redirect_stdout(sys.stderr),
        lines,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=None)

        def progress(overhead: float, bound: float) -> None:
            best, least = report.show_overhead(overhead), report.show_overhead(bound)
            bar.update(task, description=f"best overhead {best}, bound {least}")
            if isinstance(lines, Spoken):
                lines.news = f"best overhead {best}, bound {least}"

        yield progress
