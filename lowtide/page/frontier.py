"""The frontier of a step: plans of many budgets, and what published methods find within the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide import report
from lowtide.costs import Costs
from lowtide.errors import BudgetError
from lowtide.graph import Graph
from lowtide.plan import CLASSICS
from lowtide.plan.planning import Planning
from lowtide.program import Plan

Progress = Callable[[int, int], None]


def point_of(plan: Plan) -> report.Point:
    """A plan in its numbers."""
    assert plan.budget is not None
    return report.Point(plan.budget, plan.peak, plan.overhead, plan.bound, plan.planning_seconds)


def find_classics(
    graph: Graph, costs: Costs, budgets: Sequence[int], progress: Progress | None = None
) -> dict[str, list[report.Point | None]]:
    """What each classic finds within these budgets; None where it finds nothing."""
    planning = Planning(graph, costs)
    found: dict[str, list[report.Point | None]] = {}
    for done, name in enumerate(CLASSICS):
        if progress is not None:
            progress(done, len(CLASSICS))
        found[name] = [_classic(planning.within, budget, name) for budget in budgets]
    return found


def _classic(within: Callable[[int, str], Plan], budget: int, name: str) -> report.Point | None:
    try:
        return point_of(within(budget, name))
    except BudgetError:
        return None
