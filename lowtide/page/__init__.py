"""A planned step -> its page: the frontier and the advice are planned here, and steps are run to be metered."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from statistics import median
from time import perf_counter
from typing import Any

from lowtide import report
from lowtide.budget import free_memory
from lowtide.captured import Captured
from lowtide.choice import Choice, eager_step
from lowtide.costs import Costs
from lowtide.execute import execute
from lowtide.graph import Graph
from lowtide.page.advice import Situation, advise
from lowtide.page.frontier import find_classics, point_of
from lowtide.peaks import metered_peak, why_not
from lowtide.plan import as_eager, curve

ROOM = 0.7  # of the memory that is free, in which eager's steps may run
STEPS = 5  # that are timed, after those that learn
WARM_UPS = 6  # of a planned step: the first learns what ops allocate, the next ones time them
LONG = 2.0  # seconds of a step, from which fewer are timed

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Looks:
    """How much is planned for the page, beside the plan itself."""

    points: int = 10  # budgets of the frontier; 0: there is none
    time_limit: float = 1.0  # seconds of search for each
    classics: bool = True
    advice: bool = True
    seed: int = 0


def page_of(
    heading: report.Heading,
    now: Situation,
    *,
    asked: str = "",
    metered: report.Metered | None = None,
    looks: Looks | None = None,
    least_feasible: int | None = None,
    notes: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> report.Page:
    """The page of a step that is planned."""
    looks, chosen = looks or Looks(), now.chosen
    graph, costs, plan = chosen.graph, chosen.costs, chosen.plan
    whole, priced = eager_step(now.captured, graph, plan.rewrites, costs, now.price)
    frontier = find_frontier(heading, chosen, looks, tell) if looks.points else None
    return report.Page(
        heading=heading,
        asked=asked,
        eager=report.Step(whole, priced, as_eager(whole)),
        plan=report.Step(graph, costs, plan.program),
        promise=plan,
        summary=report.summarize(graph, costs, plan, eager_peak=chosen.eager_peak, least_feasible=least_feasible),
        metered=metered or report.Metered(),
        frontier=frontier,
        advice=advise(now, frontier, tell) if looks.advice else (),
        notes=notes,
        version=version("lowtide"),
    )


def find_frontier(
    heading: report.Heading, chosen: Choice, looks: Looks, tell: Callable[[str], None]
) -> report.Frontier:
    """What each budget costs, with the graph that was chosen."""
    graph, costs = chosen.graph, chosen.costs
    budgets = "planning the frontier, budget {} of {}"
    plans = curve(
        graph,
        costs,
        points=looks.points,
        time_limit=looks.time_limit,
        seed=looks.seed,
        progress=lambda done, all_: tell(budgets.format(done + 1, all_)),
    )
    given = [plan.budget for plan in plans if plan.budget is not None]
    classics: dict[str, list[report.Point | None]] = {}
    if looks.classics and not any(item.home != "device" for item in graph.inputs):
        published = "planning as published, method {} of {}"
        classics = find_classics(graph, costs, given, lambda done, all_: tell(published.format(done + 1, all_)))
    return report.Frontier(
        heading=heading,
        persistent=costs.persistent(graph),
        eager_peak=chosen.eager_peak,
        points=[point_of(plan) for plan in plans],
        classics=classics,
        ops=len(graph.ordinary),
    )


def meter(
    captured: Captured,
    chosen: Choice,
    example: tuple[Any, ...],
    notes: list[str],
    *,
    folder: str | os.PathLike[str] | None = None,
) -> report.Metered:
    """Run the step in eager and by its plan, and meter both; the model is trained by them. Notes say what was not."""
    costs = chosen.costs
    if costs.origin == "roofline":
        notes.append("with --costs roofline nothing was run: temporaries inside ops are not known, nothing is metered.")
        return report.Metered()
    if (reason := why_not(captured)) is not None:
        notes.append(reason)
        return report.Metered()
    if max(chosen.eager_peak, chosen.plan.peak) > ROOM * free_memory():
        notes.append(
            f"no step was run to be metered: eager needs {report.show_bytes(chosen.eager_peak)}, and "
            f"{report.show_bytes(free_memory())} are free."
        )
        return report.Metered()

    def eager() -> Any:
        return captured.step(captured.model, captured.optimizer, *example)

    eager_peak = metered_peak(captured, _priced(captured.graph, costs, chosen.graph), eager)
    eager_seconds = _seconds(eager, chosen.plan.base_seconds)
    runner = execute(replace(captured, graph=chosen.graph), chosen.plan.program, costs.nbytes, folder=folder)
    for _ in range(WARM_UPS):
        runner(*example)
    seconds = _seconds(lambda: runner(*example), chosen.plan.seconds)
    return report.Metered(runner.peak, eager_peak, seconds, eager_seconds)


def _priced(captured: Graph, costs: Costs, planned: Graph) -> Costs:
    """Costs that know the bytes of the captured graph's inputs, which the planned graph has, too."""
    known = {item.path: costs.nbytes[item.value] for item in planned.inputs}
    nbytes = [value.nbytes for value in captured.values]
    for item in captured.inputs:
        nbytes[item.value] = known.get(item.path, nbytes[item.value])
    return replace(costs, nbytes=tuple(nbytes))


def _seconds(run: Callable[[], Any], expected: float) -> float:
    times = []
    for _ in range(STEPS if expected < LONG else 2):
        begun = perf_counter()
        run()
        times.append(perf_counter() - begun)
    return median(times)
