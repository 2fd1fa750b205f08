"""Graph + Costs + budget -> Program; each way to arrange a step is a file, and none of them knows torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lowtide.costs import Costs
from lowtide.errors import BudgetError
from lowtide.graph import Graph
from lowtide.plan.carry import carry
from lowtide.plan.classics import CLASSICS
from lowtide.plan.infeasible import floor
from lowtide.plan.keep import as_eager, keep_everything
from lowtide.plan.overlap import overlap
from lowtide.plan.planning import BEST, METHODS, OFFLOAD, Planning, Progress
from lowtide.plan.settings import TIME_LIMIT
from lowtide.program import Plan

__all__ = [
    "BEST",
    "CLASSICS",
    "METHODS",
    "OFFLOAD",
    "TIME_LIMIT",
    "as_eager",
    "carry",
    "curve",
    "keep_everything",
    "least",
    "overlap",
    "plan",
]


def plan(
    graph: Graph,
    costs: Costs,
    budget: int | None = None,
    *,
    method: str = BEST,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
    known: Iterable[Plan] = (),
    progress: Progress | None = None,
    explain: bool = True,
    clock: bool = True,
) -> Plan:
    """The quickest program within the budget that can be found in the time; without a budget nothing runs twice.

    A classic by name plans as its paper does. Plans that are `known` already are where the search starts from, and no
    result is slower than those of them that fit. The same seed gives the same plan, unless the machine is so slow that
    the clock ends the search. Without `explain` the error of a budget that one op exceeds comes at once, in few words;
    without `clock` only the work ends the search that is a matter of `time_limit` seconds on an idle machine.
    """
    planning = Planning(graph, costs, time_limit=time_limit, seed=seed, progress=progress, clock=clock)
    return planning.within(budget, method, known, explain=explain)


def least(graph: Graph, costs: Costs, *, method: str = BEST) -> Plan:
    """The plan with the least peak that is found, whatever time it takes; OFFLOAD: with copies only."""
    return Planning(graph, costs).least(method)


def curve(
    graph: Graph,
    costs: Costs,
    budgets: Sequence[int] | None = None,
    *,
    points: int = 12,
    method: str = BEST,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Plan]:
    """A plan for each budget, by default from the least that can be planned to what needs no recomputation.

    With more bytes no plan is slower, and with fewer none has a higher peak: where another budget's plan fits and is
    quicker than a budget's own, it stands in. Budgets that nothing fits are left out. `time_limit` is for each.
    """
    planning = Planning(graph, costs, time_limit=time_limit, seed=seed)
    if budgets is None:
        low = planning.least().peak if method == BEST else floor(planning.arrays)[0]
        high = planning.within(None).peak
        budgets = [round(low + (high - low) * part / max(1, points - 1)) for part in range(points)]
    found: dict[int, Plan] = {}
    for done, budget in enumerate(sorted(set(budgets), reverse=True)):
        if progress is not None:
            progress(done, len(budgets))
        try:
            found[budget] = planning.within(budget, method, found.values())
        except BudgetError:
            continue
    return [_quickest(budget, found.values()) for budget in sorted(found)]


def _quickest(budget: int, plans: Iterable[Plan]) -> Plan:
    """The plan for a budget: of all that fit the quickest, and of those the smallest."""
    own = next(one for one in plans if one.budget == budget)
    best = min((one for one in plans if one.peak <= budget), key=lambda one: (one.seconds, one.peak))
    return replace(best, budget=budget, bound_seconds=min(own.bound_seconds, best.seconds))
