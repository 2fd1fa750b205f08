"""How good are plans, and how quickly are they made: eight steps, their budgets, and what a trial planner found."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from lowtide.capture import capture
from lowtide.costs import Costs
from lowtide.errors import BudgetError
from lowtide.graph import Graph
from lowtide.measure import roofline
from lowtide.peaks import resident
from lowtide.plan import TIME_LIMIT, as_eager, curve
from lowtide.plan.order import captured_order, early_updates
from lowtide.plan.planning import Planning
from lowtide.plan.problem import problem
from lowtide.program import Plan
from lowtide.rewrite import with_narrow
from lowtide.simulate import simulate

BUDGETS = (70.0, 50.0, 30.0, 20.0, 10.0)  # percent of the step's own part without recomputation
GAPS = ((50.0, 0.003), (30.0, 0.015))  # from this budget on, the most that overhead and bound may differ
ARENA = (30.0, 1.01)  # from this budget on, the most bytes that the device needs for each byte in use
OPS, SECONDS = (1_500, 26_000), (10.0, 60.0)  # and the most seconds of planning; between these in proportion
MEMORY = 10**9  # bytes by which planning may let the process grow
MONOTONE = 40  # budgets


@dataclass(frozen=True)
class Trial:
    """What the trial planner reached on a graph."""

    found: dict[float, float]  # budget in percent -> overhead in percent
    least: float  # the least peak, its own part as a fraction of that without recomputation
    proves: bool = True  # whether the gap to the bound has a limit
    also: tuple[float, ...] = ()  # budgets in percent that must have a plan where the trial had none

    def lower(self, budgets: Sequence[Found]) -> bool | None:
        """Whether every plan at 30% and below is quicker than the trial's; None: there is no such plan of the trial."""
        low = [item for item in budgets if item.percent <= 30 and item.percent in self.found]
        if not low:
            return None
        return all(item.overhead is not None and 100 * item.overhead < self.found[item.percent] for item in low)


TRIALS = {
    "resnet:batch=32,size=224": Trial({70: 3.2, 50: 6.4, 30: 11.8, 20: 21.5}, 0.15),
    "resnet:stages=3-24-36-3,batch=32,size=224": Trial({70: 3.2, 50: 6.3, 30: 10.3, 20: 14.1, 10: 28.1}, 0.07),
    "resnet:stages=3-130-197-3,batch=32,size=224": Trial({50: 6.25, 30: 10.1, 20: 13.2, 10: 21.6}, 0.03),
    "gpt:dropout=0": Trial({70: 1.7, 50: 9.4, 30: 20.2}, 0.25),
    "gpt:dropout=0,vocabulary=512": Trial({70: 0.96, 50: 6.1, 30: 12.6, 20: 16.2, 10: 36.3}, 0.10),
    "unet:width=64": Trial({70: 1.2, 50: 2.44, 30: 17.3}, 0.23),
    "densenet121:batch=32,size=224": Trial({70: 2.9, 50: 6.4, 30: 9.7, 20: 11.9, 10: 29.0}, 0.10),
    "lstm-cell:length=200": Trial({50: 8.0, 30: 18.2, 20: 23.7}, 0.20, proves=False, also=(10,)),
}


@dataclass(frozen=True)
class Found:
    """A plan for one budget, or None where nothing fits it."""

    percent: float  # of the step's own part without recomputation
    budget: int  # bytes
    trial: float | None  # overhead in percent that the trial found
    overhead: float | None = None
    bound: float | None = None
    peak: int | None = None  # bytes, predicted
    ratio: float | None = None  # of that to the most bytes in use
    seconds: float | None = None  # of planning
    missed: tuple[str, ...] = ()  # bars


@dataclass(frozen=True)
class Planned:
    """All plans of one step."""

    ops: int
    own: int  # bytes of the step's own part without recomputation
    least: float  # the least peak that was found, its own part as a fraction of that
    least_bound: float  # the same of what no program can do without
    least_trial: float | None
    least_seconds: float
    memory: int  # bytes by which the process grew, at most
    budgets: tuple[Found, ...]
    missed: tuple[str, ...]  # bars of the whole
    lower: bool | None  # whether it is quicker than the trial at 30% and below; None: nothing to compare with

    @property
    def ok(self) -> bool:
        """Whether every bar is met."""
        return not self.missed and not any(item.missed for item in self.budgets)


def own_part(graph: Graph, costs: Costs) -> int:
    """The bytes of the step's own part without recomputation, in the better of two orders."""
    arrays = problem(graph, costs)
    return min(arrays.peak(captured_order(graph)), arrays.peak(early_updates(graph))) - arrays.persistent


def plan_target(
    step: Any,
    model: Any,
    optimizer: Any,
    example: tuple[Any, ...],
    *,
    trial: Trial | None = None,
    budgets: Sequence[float] = BUDGETS,
    time_limit: float = TIME_LIMIT,
    narrow: bool = False,
) -> Planned:
    """Plan a step for each budget, with roofline costs, and hold the plans against the bars."""
    graph = capture(step, model, optimizer, example).graph
    costs = roofline(graph)
    own, persistent = own_part(graph, costs), costs.persistent(graph)
    if narrow:
        graph = with_narrow(graph)
        costs = roofline(graph)
    gc.collect()
    before = resident.reset_peak()
    limit = float(np.interp(len(graph.ops), OPS, SECONDS))
    found = []
    for percent in budgets:
        goal = trial.found.get(percent) if trial else None
        empty = Found(percent, int(persistent + percent / 100 * own), goal)
        found.append(_judged(_plan(graph, costs, empty, time_limit), limit, trial))
    least = Planning(graph, costs).least()
    memory = resident.peak() - before
    part = (least.peak - persistent) / own
    missed = [f"memory over {MEMORY:,} bytes"] if memory > MEMORY else []
    if trial is not None and round(part, 2) > trial.least:
        missed.append("least peak above the trial's")
    return Planned(
        ops=len(graph.ops),
        own=own,
        least=part,
        least_bound=(least.least_bound - persistent) / own,
        least_trial=trial.least if trial else None,
        least_seconds=least.planning_seconds,
        memory=memory,
        budgets=tuple(found),
        missed=tuple(missed),
        lower=trial.lower(found) if trial else None,
    )


def _plan(graph: Graph, costs: Costs, item: Found, time_limit: float) -> Found:
    """The plan for a budget, made from nothing, as a user's first one is."""
    start = perf_counter()
    try:
        plan = Planning(graph, costs, time_limit=time_limit).within(item.budget)
    except BudgetError:
        return item
    seconds = perf_counter() - start
    simulation = simulate(graph, costs, plan.program)
    return replace(
        item,
        overhead=plan.overhead,
        bound=plan.bound,
        peak=plan.peak,
        ratio=simulation.peak / max(simulation.start, *simulation.live),
        seconds=seconds,
    )


def _judged(item: Found, limit: float, trial: Trial | None) -> Found:
    """A plan with the bars that it misses; the trial's figures are rounded, and so is what is held against them."""
    missed = []
    if item.overhead is None or item.bound is None or item.ratio is None or item.seconds is None:
        wanted = trial is not None and (item.trial is not None or item.percent in trial.also)
        return replace(item, missed=("no plan",)) if wanted else item
    if item.trial is not None and 100 * item.overhead > item.trial + _half_a_digit(item.trial):
        missed.append("slower than the trial")
    gap = next((most for percent, most in GAPS if item.percent >= percent), None)
    if gap is not None and (trial is None or trial.proves) and item.overhead - item.bound > gap:
        missed.append(f"gap over {100 * gap:.1f}")
    if item.percent >= ARENA[0] and item.ratio > ARENA[1]:
        missed.append(f"arena over {ARENA[1]}")
    if item.seconds > limit:
        missed.append(f"over {limit:.0f} s")
    return replace(item, missed=tuple(missed))


def _half_a_digit(figure: float) -> float:
    """Half of the last digit with which a figure was written."""
    return 0.5 * 10.0 ** -len(f"{figure:g}".partition(".")[2])


@dataclass(frozen=True)
class Monotone:
    """Plans for many budgets of one step, held against each other."""

    ops: int
    least: int  # bytes, the lowest budget
    most: int  # bytes, the highest one: eager's peak
    budgets: int
    plans: int
    slower: int  # pairs of neighbours in which the larger budget's plan is slower
    larger: int  # pairs of neighbours in which the smaller budget's plan has the larger peak
    most_overhead: float  # of the lowest budget
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every budget has a plan, and peaks and overheads never cross."""
        return self.plans == self.budgets and not self.slower and not self.larger


def plan_monotone(
    step: Any, model: Any, optimizer: Any, example: tuple[Any, ...], *, time_limit: float, count: int = MONOTONE
) -> Monotone:
    """Plan a step for so many budgets from the least feasible one to eager's peak."""
    graph = with_narrow(capture(step, model, optimizer, example).graph)
    costs = roofline(graph)
    low, high = Planning(graph, costs).least().peak, simulate(graph, costs, as_eager(graph)).peak
    budgets = sorted({round(low + (high - low) * part / (count - 1)) for part in range(count)})
    plans: list[Plan] = curve(graph, costs, budgets, time_limit=time_limit)
    pairs = list(pairwise(plans))
    return Monotone(
        ops=len(graph.ordinary),
        least=low,
        most=high,
        budgets=len(budgets),
        plans=len(plans),
        slower=sum(large.seconds > small.seconds for small, large in pairs),
        larger=sum(small.peak > large.peak for small, large in pairs),
        most_overhead=plans[0].overhead if plans else 0.0,
        seconds=sum(plan.planning_seconds for plan in plans),
    )
