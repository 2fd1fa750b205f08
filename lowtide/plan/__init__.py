"""Graph + Costs + budget -> Program; each way to arrange a step is a file, and none of them knows torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from lowtide.check import check
from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.plan.cut import Turn
from lowtide.plan.emit import emit
from lowtide.plan.infeasible import explain
from lowtide.plan.keep import as_eager, keep_everything
from lowtide.plan.order import captured_order, early_updates
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.plan.recompute import recompute
from lowtide.program import Plan
from lowtide.simulate import simulate

__all__ = ["TIME_LIMIT", "as_eager", "keep_everything", "plan"]

TIME_LIMIT = 6.0  # seconds of search


def plan(
    graph: Graph,
    costs: Costs,
    budget: int | None = None,
    *,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Plan:
    """The quickest program within the budget that can be found in the time; without a budget nothing runs twice."""
    begun = time.monotonic()
    arrays = problem(graph, costs)
    orders = sorted((early_updates(graph), captured_order(graph)), key=arrays.peak)
    sequence, target, bound = orders[0], budget, 0.0
    while True:
        if target is not None and arrays.peak(sequence) > target:
            bound, starts = _starts(arrays, orders, budget or target)
            until = max(begun + time_limit, time.monotonic() + time_limit / 4)
            found = recompute(arrays, starts, target, until=until, seed=seed, progress=progress)
            if found.sequence is None:
                raise explain(arrays, budget or 0, found.least_peak)
            sequence = found.sequence
        program = emit(arrays, sequence)
        simulation = simulate(graph, costs, program)
        if budget is None or target is None or simulation.peak <= budget:
            break
        # Saved states of the random generator are not in the arrays: aim lower by what they take.
        target -= simulation.peak - budget
    check(graph, costs, program, budget=budget)
    return Plan(
        program=program,
        budget=budget,
        peak=simulation.peak,
        seconds=simulation.seconds,
        base_seconds=arrays.time(orders[0]),
        bound_seconds=arrays.time(orders[0]) + bound,
        planning_seconds=time.monotonic() - begun,
    )


def _starts(arrays: Problem, orders: list[Ints], budget: int) -> tuple[float, list[Ints]]:
    """A lower bound on the seconds of recomputation, and sequences to start from: the orders, and cuts at the turn."""
    turn = Turn(arrays, orders[0])
    bound, cuts = turn.search(budget - arrays.stays)
    sets = {cut.keep: cut.nbytes for cut in cuts}
    near = sorted(sets, key=lambda keep: abs(sets[keep] - (budget - arrays.stays)))[:8]
    sequences = (turn.sequence(keep) for keep in near)
    return bound, [orders[0], *(sequence for sequence in sequences if arrays.allows(sequence))]
