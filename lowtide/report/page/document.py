"""The document of a page: one JSON object with all that a report shows, also for `--json` and `lowtide diff`.

Tables are columns. `ops` and `values` are written once; tracks, boxes and points refer to them by number. Bytes are
whole numbers, seconds are seconds. A reader may rely on the names here; a later version may add some, and counts
`version` up where one changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.program import Plan, Program
from lowtide.report.bytes import show_bytes
from lowtide.report.frontier import Frontier
from lowtide.report.page.fates import FATES, fate_tree, second_tree, spent
from lowtide.report.page.track import NAMES, Track, to_json, track
from lowtide.report.plan import Summary
from lowtide.report.profile import CATEGORIES, profile
from lowtide.report.show import Heading
from lowtide.rewrites import exactness

KIND, VERSION = "report", 1
LARGEST = 40  # rows of the table of values at the peak


@dataclass(frozen=True)
class Step:
    """A program, and what it is a program of."""

    graph: Graph
    costs: Costs
    program: Program


@dataclass(frozen=True)
class Metered:
    """What real steps did, to hold against what was predicted; None: not known."""

    peak: int | None = None  # bytes, of the plan
    eager_peak: int | None = None  # bytes
    seconds: float | None = None  # of one step of the plan
    eager_seconds: float | None = None


@dataclass(frozen=True)
class Advice:
    """A change that was planned, and what it would do."""

    what: str  # "allow 64.00 MiB more"
    how: str  # as one writes it: `--budget 320MiB`
    seconds: float  # of a step, with it
    peak: int  # bytes, with it
    saved_seconds: float  # less than now; negative: more
    saved_bytes: int  # less than now; negative: more
    exact: bool = True  # whether every bit stays eager's


@dataclass(frozen=True)
class Page:
    """All that a page shows."""

    heading: Heading
    asked: str  # the budget as it was written; "": none
    eager: Step
    plan: Step
    promise: Plan
    summary: Summary
    metered: Metered = Metered()
    frontier: Frontier | None = None
    advice: Sequence[Advice] = ()
    notes: Sequence[str] = ()
    version: str = ""  # of lowtide

    def to_json(self) -> dict[str, Any]:
        """The document."""
        eager = track("eager", self.eager.graph, self.eager.costs, self.eager.program)
        plan = track("plan", self.plan.graph, self.plan.costs, self.plan.program)
        same = self.eager.graph is self.plan.graph
        return {
            "lowtide": KIND,
            "version": VERSION,
            "made_by": f"lowtide {self.version}".strip(),
            "heading": {
                "target": self.heading.target,
                "optimizer": self.heading.optimizer,
                "costs": self.heading.costs,
                "machine": self.plan.costs.machine,
                "origin": self.plan.costs.origin,
                "asked": self.asked,
                "exactness": exactness(self.summary.rewrites),
            },
            "numbers": self._numbers(eager, plan),
            "summary": self.summary.to_json(),
            "category_names": list(NAMES),
            "fate_names": list(FATES),
            "steps": [_step(self.plan, [plan] if not same else [eager, plan])]
            + ([] if same else [_step(self.eager, [eager])]),
            "peaks": {"eager": _at_peak(self.eager), "plan": _at_peak(self.plan)},
            "fates": [branch.to_json() for branch in fate_tree(*_of(self.plan))],
            "seconds": {
                "eager": _seconds(self.eager, eager),
                "plan": _seconds(self.plan, plan),
            },
            "frontier": None if self.frontier is None else self.frontier.to_json(),
            "advice": [asdict(one) for one in self.advice],
            "notes": list(self.notes),
        }

    def _numbers(self, eager: Track, plan: Track) -> dict[str, Any]:
        """The figures that stand first."""
        own = max(1, eager.peak - self.summary.persistent)
        return {
            "budget": self.summary.budget,
            "persistent": self.summary.persistent,
            "eager_peak": eager.peak,
            "predicted_peak": self.summary.peak,
            "metered_peak": self.metered.peak,
            "eager_metered_peak": self.metered.eager_peak,
            "saved": 1 - self.summary.peak / eager.peak,
            "own_part": (self.summary.peak - self.summary.persistent) / own,
            "eager_seconds": eager.seconds,
            "predicted_seconds": plan.seconds,
            "metered_seconds": self.metered.seconds,
            "eager_metered_seconds": self.metered.eager_seconds,
            "overhead": self.summary.overhead,
            "bound": self.summary.bound,
            "planning_seconds": self.summary.planning_seconds,
            "ops": self.summary.ops,
            "runs": self.summary.runs,
        }


def _of(step: Step) -> tuple[Graph, Costs, Program]:
    return step.graph, step.costs, step.program


def _step(step: Step, tracks: Iterable[Track]) -> dict[str, Any]:
    """The ops and values of a graph as columns, and the tracks that refer to them."""
    graph, costs = step.graph, step.costs
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    ops = {
        "name": [op.name for op in graph.ops],
        "target": [number(op.target) for op in graph.ops],
        "module": [number(op.module) for op in graph.ops],
        "source": [number(op.source) for op in graph.ops],
        "phase": [number(op.phase) for op in graph.ops],
        "seconds": list(costs.seconds),
    }
    values = {
        "name": [value.name for value in graph.values],
        "category": [number(CATEGORIES[value.kind]) for value in graph.values],
        "type": [number(f"{value.dtype}[{'x'.join(map(str, value.shape))}]") for value in graph.values],
        "bytes": list(costs.nbytes),
    }
    numbers = {value: value for value in range(len(graph.values))}
    rows = [to_json(one, numbers) for one in tracks]
    return {"strings": list(strings), "ops": ops, "values": values, "tracks": rows}


def _at_peak(step: Step) -> dict[str, Any]:
    """What is there at the peak."""
    found = profile(*_of(step)).to_json()
    largest = found["largest"][:LARGEST]
    return {name: found[name] for name in ("predicted_peak", "peak_at", "categories", "modules")} | {"largest": largest}


def _seconds(step: Step, found: Track) -> dict[str, Any]:
    """Where the seconds of a program go."""
    return {
        "nanoseconds": [branch.to_json() for branch in second_tree(step.graph, step.costs, found)],
        "targets": [asdict(one) for one in spent(step.graph, found)],
    }


def show_advice(one: Advice) -> str:
    """What a change would do, in a line: `64.00 MiB more: 3.1% quicker`."""
    parts = []
    if abs(one.saved_seconds) > 1e-3 * one.seconds:
        share = abs(one.saved_seconds) / (one.seconds + one.saved_seconds)
        parts.append(f"{share:.1%} {'quicker' if one.saved_seconds > 0 else 'slower'}")
    if one.saved_bytes:
        parts.append(f"{show_bytes(abs(one.saved_bytes))} {'less' if one.saved_bytes > 0 else 'more'}")
    return f"{one.what}: {', '.join(parts) or 'no change'}"
