"""`lowtide curve`: what each budget costs, from the least feasible one to that which needs no recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from lowtide import report
from lowtide.candidates import MANY_OPS
from lowtide.choice import Leave, eager_peak
from lowtide.cli.plan import Allow, FromCosts, OffloadBudget, OffloadDir, Rounding, TimeLimit, read_offload
from lowtide.cli.profile import (
    CostsFrom,
    Json,
    Target,
    captured_target,
    common,
    costs_of,
    optimizer_name,
    resized_target,
)
from lowtide.cli.talk import answering, counting, show, show_json
from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.page.frontier import find_classics, point_of
from lowtide.plan import curve as find_curve
from lowtide.program import Plan
from lowtide.rewrites import KEEPS, ROUNDING, Rewrite, exactness, read_allow
from lowtide.trials import with_tried

TIME_LIMIT = 2.0  # seconds of search for each point
FEW = 5  # budgets of each technique that is allowed


@answering
def curve(
    target: Target,
    points: Annotated[int, typer.Option(min=2, help="How many budgets.")] = 12,
    classics: Annotated[bool, typer.Option(help="Show what published methods do, too.")] = True,
    offload: Annotated[
        str | None,
        typer.Option(metavar="<place>", help="Let values wait in a file (disk).", show_default="nothing is offloaded"),
    ] = None,
    offload_budget: OffloadBudget = None,
    offload_dir: OffloadDir = None,
    allow: Allow = None,
    rounding: Rounding = False,
    costs: FromCosts = CostsFrom.MEASURED,
    time_limit: TimeLimit = TIME_LIMIT,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the least time for each peak, down to the least feasible."""
    asked = read_offload(offload, offload_budget, offload_dir)
    allowed = Leave(read_allow(allow, rounding)).allowed
    built, captured, _ = captured_target(target)
    away = asked.away(captured.graph.device, lasting=False)
    leave, _ = with_tried(
        Leave(allowed, resized_target(built, captured) if allowed else None),
        captured.graph,
        lambda graph: costs_of(graph, costs, offload_dir),
    )
    rewritten = leave.apply(captured.graph, () if away is None else away.rewrites())
    graph = rewritten.graph
    found = costs_of(graph, costs, offload_dir)
    with counting("planning budgets", patience=0.0) as progress:
        progress(0, points)
        plans = find_curve(graph, found, points=points, time_limit=time_limit, seed=seed, progress=progress)
    budgets = [plan.budget for plan in plans if plan.budget is not None]
    techniques: list[report.Technique] = []
    if allowed:

        def find(graph: Graph) -> list[Plan]:
            price = costs_of(graph, costs, offload_dir)
            return find_curve(graph, price, points=FEW, time_limit=time_limit, seed=seed)

        techniques = _techniques(captured.graph, leave, find, plans[-1].base_seconds)
    frontier = report.Frontier(
        heading=report.Heading(target, optimizer_name(built.optimizer), report.describe_costs(found)),
        persistent=found.persistent(graph),
        eager_peak=eager_peak(captured.graph, rewritten, found, lambda one: costs_of(one, costs)),
        points=[point_of(plan) for plan in plans],
        classics=_classics(graph, found, budgets) if classics else {},
        ops=len(graph.ordinary),
        notes=[*graph.notes, *found.notes],
        techniques=techniques,
    )
    if not as_json:
        show(frontier)
        return
    keys = common(persistent=frontier.persistent, predicted=plans[-1].peak, metered=None)
    show_json(
        {
            "target": target,
            **keys,
            "least_feasible": frontier.least_feasible,
            "least_bound": plans[0].least_bound,
            "planning_seconds": frontier.planning_seconds,
            "optimizer": optimizer_name(built.optimizer),
            "costs": {"origin": found.origin, "machine": found.machine},
            **frontier.to_json(),
            "notes": list(frontier.notes),
        }
    )


def _techniques(
    graph: Graph, leave: Leave, find: Callable[[Graph], list[Plan]], seconds: float
) -> list[report.Technique]:
    """The frontier with each technique that is allowed, and with all of them."""
    alone = {name: rungs for name in (*ROUNDING, *leave.allowed.lossy) if (rungs := leave.rungs(graph, name))}
    sets: dict[str, list[tuple[Rewrite, ...]]]
    sets = {name: [(rung,) for rung in dict.fromkeys((rungs[0], rungs[-1]))] for name, rungs in alone.items()}
    if len(alone) > 1:
        level = leave.levels(graph)[-1]
        sets["all together"] = [_with_parts(graph, leave, lossy) for lossy in dict.fromkeys((level[0], level[-1]))]
    found = []
    with counting("planning what is allowed", patience=0.0) as progress:
        for done, (name, choices) in enumerate(sets.items()):
            progress(done, len(sets))
            graphs = [leave.apply(graph, rewrites) for rewrites in choices]
            plans = [plan for one in graphs if exactness(one.rewrites) != "bitwise" for plan in find(one.graph)]
            points = [replace(point_of(plan), overhead=plan.seconds / seconds - 1) for plan in plans]
            if points:
                points.sort(key=lambda point: point.budget)
                found.append(report.Technique(name, KEEPS[exactness(graphs[-1].rewrites)], points))
    return found


def _with_parts(graph: Graph, leave: Leave, lossy: tuple[Rewrite, ...]) -> tuple[Rewrite, ...]:
    """These techniques with what splits a step that is changed by them: the finest parts that are soon planned."""
    found = [(*mild, *lossy) for mild in leave.after(graph, lossy)]
    soon = (one for one in reversed(found) if len(leave.apply(graph, one).graph.ops) <= MANY_OPS)
    return next(soon, found[0])


def _classics(graph: Graph, costs: Costs, budgets: Sequence[int]) -> dict[str, list[report.Point | None]]:
    with counting("planning as published", patience=0.0) as progress:
        return find_classics(graph, costs, budgets, progress)
