"""Advice: the changes that would help a step most, each of them planned, with what it would do.

A change is tried, not guessed: the step is planned again with it, by the same planner and with the same costs. Changes
are compared by what they save, of the step's time and of its memory, each as a part of what it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from lowtide import device as devices
from lowtide import report
from lowtide.choice import EXACTLY, Away, Choice, Effort, Leave, Offload, choose
from lowtide.costs import Costs
from lowtide.errors import LowtideError
from lowtide.graph import Graph
from lowtide.plan import plan
from lowtide.program import Plan
from lowtide.rewrite import longest
from lowtide.rewrite.chunks import SHORTEST
from lowtide.rewrites import Allowed, exactness

MOST = 3  # changes that are shown
WORTH = 0.005  # of the step's time and memory together: what a change must save to be shown


@dataclass(frozen=True)
class Situation:
    """A step as it is planned now."""

    captured: Graph  # before any rewrite
    chosen: Choice
    price: Callable[[Graph], Costs]
    budget: int | None  # bytes
    leave: Leave = EXACTLY  # what may change its bits already
    away: Away | None = None  # where values may go already
    time_limit: float = 3.0  # seconds of search for each change
    halved: Callable[[], tuple[Graph, int] | None] = lambda: None  # the step with half of its batch, and that batch

    def search(self, graph: Graph, costs: Costs, eager_peak: int, effort: Effort) -> Plan:
        """Plan a graph within the same budget, in a part of the time."""
        return plan(graph, costs, self.budget, time_limit=effort.part * self.time_limit, explain=effort.explain)

    def again(self, graph: Graph, *, leave: Leave | None = None, away: Away | None = None) -> Choice:
        """The quickest plan of a graph within the same budget."""
        return choose(graph, self.price, self.search, leave=leave or self.leave, away=away or self.away)


Tell = Callable[[str], None]


def advise(now: Situation, frontier: report.Frontier | None, tell: Tell = lambda _: None) -> list[report.Advice]:
    """The changes that would help most, at most three, the best first."""
    found = list(_budgets(now, frontier)) if frontier is not None else []
    for name, attempt in CHANGES.items():
        tell(f"planning with {name}")
        try:
            one = attempt(now)
        except LowtideError:  # nothing fits, or it can't be done here
            continue
        found += [] if one is None else [one]
    return best(found, now.chosen.plan)


def best(found: Iterable[report.Advice], now: Plan) -> list[report.Advice]:
    """Those that are worth it, the one that saves most first."""

    def saved(one: report.Advice) -> float:
        return one.saved_seconds / now.seconds + one.saved_bytes / now.peak

    worth = [one for one in found if saved(one) > WORTH]
    return sorted(worth, key=saved, reverse=True)[:MOST]


def _budgets(now: Situation, frontier: report.Frontier) -> Iterator[report.Advice]:
    """The best other budget above this one, and the best below: both were planned for the frontier."""
    plan = now.chosen.plan
    rows = []
    for point in frontier.points:
        seconds = plan.base_seconds * (1 + point.overhead)
        more = point.peak - plan.peak
        what = f"{'allow' if more > 0 else 'do with'} {report.show_bytes(abs(more))} {'more' if more > 0 else 'less'}"
        how = f"--budget {point.peak}"
        rows.append(report.Advice(what, how, seconds, point.peak, plan.seconds - seconds, -more))
    for above in (True, False):
        yield from best((row for row in rows if (row.peak > plan.peak) is above), plan)[:1]


def _advice(now: Situation, chosen: Choice, what: str, how: str) -> report.Advice:
    before, after = now.chosen.plan, chosen.plan
    exact = exactness(after.rewrites) == "bitwise"
    return report.Advice(
        what, how, after.seconds, after.peak, before.seconds - after.seconds, before.peak - after.peak, exact
    )


def _offload(now: Situation) -> report.Advice | None:
    """Let values wait on the disk."""
    device = devices.of(now.captured.device)
    if now.away is not None or now.budget is None or "disk" not in device.stores:
        return None
    chosen = now.again(now.captured, away=Offload("disk").away(now.captured.device))
    if not chosen.plan.program.copies:
        return None
    return _advice(now, chosen, "let values wait on the disk", '--offload disk, or offload="disk"')


def _rounding(now: Situation) -> report.Advice | None:
    """Cut recurrent layers in time."""
    if "chunks" in now.leave.allowed or longest(now.captured) < 2 * SHORTEST:
        return None
    chosen = now.again(now.captured, leave=Leave(Allowed(named=(("chunks", None),))))
    return _advice(now, chosen, "cut recurrent layers in time", '--allow chunks, or allow="chunks"')


def _cleared(now: Situation) -> report.Advice | None:
    """Let go of gradients right after their update: the step leaves none behind."""
    graph = now.captured
    ours = {output.value for output in graph.outputs if output.role == "gradient"}
    added = any(graph.values[item.value].kind == "gradient" and graph.readers[item.value] for item in graph.inputs)
    if not ours or added:  # gradients that are added up over several steps are needed after each
        return None
    outputs = tuple(output for output in graph.outputs if output.value not in ours)
    chosen = now.again(replace(graph, outputs=outputs))
    return _advice(
        now, chosen, "clear gradients at the end of the step", "call optimizer.zero_grad() after optimizer.step()"
    )


def _left_to_the_plan(now: Situation) -> report.Advice | None:
    """Let the plan decide about what functions of `lowtide.recompute` forget."""
    functions = sorted({op.forgotten for op in now.captured.ops if op.forgotten})
    if not functions:
        return None
    graph = replace(now.captured, ops=tuple(replace(op, forgotten="") for op in now.captured.ops))
    names = ", ".join(functions[:3]) + (", ..." if len(functions) > 3 else "")
    return _advice(
        now, now.again(graph), "let the plan choose what is made again", f"take lowtide.recompute off {names}"
    )


def _half_batch(now: Situation) -> report.Advice | None:
    """Half of the batch, twice as often: the seconds are of as many examples as now."""
    found = now.halved()
    if found is None:
        return None
    graph, batch = found
    chosen = now.again(graph)
    both, before = 2 * chosen.plan.seconds, now.chosen.plan
    exact = exactness(chosen.plan.rewrites) == "bitwise"
    return report.Advice(
        f"two steps with batches of {batch}",
        "halve the batch; the seconds are of two such steps",
        both,
        chosen.plan.peak,
        before.seconds - both,
        before.peak - chosen.plan.peak,
        exact,
    )


CHANGES: dict[str, Callable[[Situation], report.Advice | None]] = {
    "gradients cleared at the end": _cleared,
    "values on the disk": _offload,
    "recurrent layers cut in time": _rounding,
    "nothing forgotten by hand": _left_to_the_plan,
    "half of the batch": _half_batch,
}
