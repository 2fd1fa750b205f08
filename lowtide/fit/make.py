"""From a request and a batch to a step that can run: captured, priced, planned and bound."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lowtide import device as devices
from lowtide import report
from lowtide.budget import LEAST, allowance, read_budget
from lowtide.capture import ONE_AT_A_TIME, capture
from lowtide.captured import Captured
from lowtide.choice import BROUGHT, FREE, Away, Choice, Effort, Leave, choose, eager_peak, given, judged
from lowtide.costs import Costs
from lowtide.errors import BudgetError, CaptureError
from lowtide.execute import REMEMBERED, Batch, Runner, execute
from lowtide.fit.beside import added_by_eager
from lowtide.fit.ladder import BETWEEN, SEARCHES, Ladder
from lowtide.fit.lowest import lowest
from lowtide.fit.ranks import Ranks, order, signature, sums
from lowtide.fit.request import PlanFrom, Request
from lowtide.fit.shards import as_first
from lowtide.fit.similar import scaled, smaller
from lowtide.graph import Graph
from lowtide.guards import Place
from lowtide.measure import correct, correct_lanes, differing, kept_open, measure, roofline, with_lanes
from lowtide.page.advice import Situation
from lowtide.plan import carry, overlap, plan
from lowtide.plan.planning import Planning
from lowtide.program import Plan
from lowtide.resized import Resized, resizable
from lowtide.rewrite import EXACT, Rewritten, apply
from lowtide.rewrites import FORMS, LOSSY_ORDER, ROUNDING, exactness, has_tried
from lowtide.verify.gradient import with_errors

TWICE = 2  # eager's memory, to hold the gradients of a step beside another step
SPARE = 2**28  # bytes: a process whose limits leave it less has its memory for steps, not for the book of prices

NEVER = 2**30  # collections of garbage of middle age before one of all
SHORTEST = 0.5  # seconds of search that every step is worth
PAYS = 20  # times the seconds of a step: what a longer search might find pays after thousands of steps only
ROOMY, WASTE = (
    0.75,
    0.02,
)  # of the budget, and overhead: a carried plan that leaves so much and costs so much is no good

Numbers = tuple[Place, ...]  # Python numbers that are to be inputs


@dataclass(frozen=True)
class Making:
    """What it took to make one step."""

    seconds: float
    searches: int  # for plans; 0: its sequence was that of another step


@dataclass(frozen=True)
class Manner:
    """How a step is captured and how its program is called: the whole step, or in some other way."""

    capture: Callable[[Request, tuple[Any, ...], Numbers], Captured]
    caller: Callable[[Runner], Callable[[Batch], Any]]  # what takes a step on a batch
    alone: str | None = None  # why its steps can't run beside eager's; None: they can
    lasting: bool = True  # whether state and parameters may live in another place between steps
    priced: Callable[[Graph, Costs], Costs] = lambda _, costs: costs  # what is known of its ops beside what is measured
    known: list[Fit] | None = (
        None  # steps of others, whose plans it may take, and its own for them; None: its own alone
    )


def _capture_whole(request: Request, batch: tuple[Any, ...], numbers: Numbers) -> Captured:
    return capture(request.step, request.model, request.optimizer, batch, numbers=numbers, ranks=True)


WHOLE = Manner(_capture_whole, lambda runner: runner.run)


@dataclass(frozen=True)
class Fit:
    """The step for batches of one kind."""

    runner: Runner
    call: Callable[[Batch], Any]  # by the runner, in the manner of the step
    plan: Plan
    costs: Costs
    eager_peak: int  # bytes, predicted
    chunks: int  # that recurrent layers are cut into in time; 1: they are whole
    seen: Graph  # the step as it was captured, before any rewrite


class Maker:
    """Makes the steps of one request, all within one budget."""

    def __init__(self, request: Request, manner: Manner, ranks: Ranks | None = None) -> None:
        self.budget: int | None = None  # bytes, once it is known what a part of the step is
        self.makings: list[Making] = []  # of all steps so far
        self._request, self._manner, self._ranks = request, manner, ranks
        self._ladder = Ladder()
        # Steps whose plans were searched for; those of notches may never run.
        self._sources: list[Fit] = [] if manner.known is None else manner.known
        self._lowest: dict[str, Planning] = {}  # by graph, while one of the budget "least" is chosen
        self._estimates: dict[str, Costs] = {}  # of the graphs of known steps, by fingerprint

    def make(
        self, batch: tuple[Any, ...], numbers: Numbers = (), *, known: Sequence[Fit] = (), together: bool = True
    ) -> Fit:
        """The step for batches like this one; from a similar one, where one is known: the latest are first.

        Ranks that make theirs `together` share a plan where they ask for the same.
        """
        begun, searches = time.monotonic(), self._ladder.searches
        self._ladder.see(batch)
        quiet = self._ranks is not None and self._ranks.number > 0  # rank 0 speaks for all
        with ONE_AT_A_TIME, nullcontext() if quiet else self._request.aloud, kept_open(), _collecting_later():
            if self._ranks is not None and together:
                made = self._make_together(self._ranks, batch, numbers, known)
            else:
                made = self._make(batch, numbers, known)
        self.makings.append(Making(time.monotonic() - begun, self._ladder.searches - searches))
        return made

    def _make_together(self, ranks: Ranks, batch: tuple[Any, ...], numbers: Numbers, known: Sequence[Fit]) -> Fit:
        """The step of one of several ranks, which all make theirs now."""
        captured = ranks.all_or_none(lambda: self._capture(batch, numbers))
        graph = captured.graph
        ranks.same(signature(graph))
        self._request.say(f"captured {len(graph.ordinary)} ops")

        def chosen(tried: bool) -> Choice:
            if not known and self._request.plan is not None:
                return self._given(self._request.plan, graph, self._leave(graph, batch, numbers, known))
            carried = self._carried(known, graph) if tried else None
            return carried or self._chosen(graph, batch, numbers, known, tried=tried)

        def shared(tried: bool) -> Choice:
            asked = (graph.fingerprint, self._request.asked, self.budget, len(known))
            if not ranks.sharded:
                return ranks.shared(asked, lambda: chosen(tried))
            first = ranks.shared(asked[1:], lambda: _overlapped(chosen(tried)))
            return ranks.all_or_none(lambda: as_first(first, graph))

        found = shared(True)
        if ranks.any(
            lambda: has_tried(found.plan.rewrites) and differing(found.graph) != ()
        ):  # other machines tried it
            found = shared(False)
        self.budget = found.plan.budget if self.budget is None else self.budget
        return self._finish(captured, batch, found)

    def _make(self, batch: tuple[Any, ...], numbers: Numbers, known: Sequence[Fit]) -> Fit:
        captured = self._capture(batch, numbers)
        self._request.say(f"captured {len(captured.graph.ordinary)} ops")
        graph = captured.graph
        self._ladder.learn(graph)
        if not known and self._request.plan is not None:
            leave = self._leave(graph, batch, numbers, known)
            return self._finish(captured, batch, self._given(self._request.plan, graph, leave))
        similar = (
            self._shrunk(graph, batch, numbers)
            or self._from_notch(known, graph, batch, numbers)
            or self._carried(known, graph)
        )
        if similar is None:
            return self._source(captured, batch, self._chosen(graph, batch, numbers, known))
        return self._finish(captured, batch, similar)

    def _source(self, captured: Captured, batch: tuple[Any, ...], chosen: Choice) -> Fit:
        """A step whose sequence others may take."""
        self._sources.append(self._finish(captured, batch, chosen))
        return self._sources[-1]

    def _chosen(
        self, graph: Graph, batch: tuple[Any, ...], numbers: Numbers, known: Sequence[Fit], *, tried: bool = True
    ) -> Choice:
        """What a search finds; `tried`: whether kernels of ours may stand for torch's."""
        self._ladder.searches += 1
        leave = self._leave(graph, batch, numbers, known)
        leave = leave if tried else leave.refusing_tried()
        away = self._request.places.away(graph.device, lasting=self._manner.lasting)
        if self._request.budget == LEAST and away is None:
            self._request.say("looking for the least peak")
            self.budget = max(self.budget or 0, lowest(graph, self._price, leave, self._least))
        try:
            return choose(
                graph,
                self._price,
                self._search,
                leave=leave,
                away=away,
                could=Away.nearest(graph.device, lasting=self._manner.lasting),
                glance=partial(self._price, hurried=True),
                say=self._request.say,
            )
        finally:
            self._lowest.clear()

    def _least(self, graph: Graph, costs: Costs) -> Planning:
        """A graph whose plan with the least peak is asked for, and maybe more."""
        key = graph.fingerprint
        if key not in self._lowest:
            self._lowest[key] = Planning(graph, costs, time_limit=self._request.time_limit)
        return self._lowest[key]

    def _finish(self, captured: Captured, batch: tuple[Any, ...], chosen: Choice) -> Fit:
        chosen = chosen if self._ranks is not None and self._ranks.sharded else _overlapped(chosen)
        found = self._with_errors(captured, batch, chosen)
        bytes_, seconds = report.show_bytes(found.peak), report.show_seconds(found.planning_seconds)
        self._request.say(f"planned {bytes_} with {report.show_overhead(found.overhead)} overhead in {seconds}")
        return self._bind(replace(captured, graph=chosen.graph), replace(chosen, plan=found), captured.graph)

    def _with_errors(self, captured: Captured, batch: tuple[Any, ...], chosen: Choice) -> Plan:
        """The plan, with what its lossy rewrites do to the gradients of this batch, where that can be measured."""
        found = chosen.plan
        if exactness(found.rewrites) != "lossy" or any(one.error is not None for one in found.rewrites):
            return found
        needed = TWICE * chosen.eager_peak
        if devices.of(captured.graph.device).free_bytes() < needed:
            self._request.say(f"errors are not measured: that takes {report.show_bytes(needed)} for a moment")
            return found
        return replace(found, rewrites=with_errors(captured, Batch.of(batch), found.rewrites))

    def anew(self, fit: Fit, aim: int, costs: Costs) -> Fit:
        """A step planned again with another aim, in bytes, or other costs; a BudgetError where nothing fits."""
        captured = fit.runner.captured

        def planned() -> Choice:
            found = plan(captured.graph, costs, aim, time_limit=self._request.time_limit)
            found = replace(found, budget=self.budget, rewrites=fit.plan.rewrites)
            return _overlapped(Choice(captured.graph, costs, found, fit.eager_peak))

        if self._ranks is not None and self._ranks.sharded:
            chosen = as_first(self._ranks.shared(None, planned), fit.seen)
        else:
            chosen = planned()
        made = self._bind(captured, chosen, fit.seen)
        made.runner.lessons.mismatches = fit.runner.lessons.mismatches
        self._sources[:] = [made if one is fit else one for one in self._sources]
        return made

    def most(self, fit: Fit) -> int | None:
        """The most bytes that a step is known to hold, on this rank or on any that runs the same sequence."""
        most = fit.runner.lessons.most
        return most if self._ranks is None else self._ranks.largest(most)

    def temporaries(self, fit: Fit) -> Mapping[int, tuple[int, int]]:
        """By op, what a step has shown of its temporaries, on this rank or on any that runs the same sequence."""
        found = fit.runner.lessons.temporaries
        return found if self._ranks is None else self._ranks.all_temporaries(found)

    @property
    def alone(self) -> bool:
        """Whether this process may plan a step anew without asking others."""
        return self._ranks is None or not self._ranks.sharded

    def correct(self, fit: Fit) -> bool:
        """Once the ops or copies of a step were timed in it: let later plans know; whether that is done."""
        if fit.runner.program.copies:
            return self._correct_lanes(fit)
        seconds = fit.runner.timings.ops
        if seconds is None:
            return False
        left = allowance()
        if fit.costs.origin == "measured" and (left is None or left > SPARE):
            correct(fit.runner.captured.graph, fit.costs, seconds)
        return True

    def _correct_lanes(self, fit: Fit) -> bool:
        steps = fit.runner.away.transfers
        if len(steps) < REMEMBERED:
            return False
        if fit.costs.origin == "measured":
            for place in dict.fromkeys(one.place for step in steps for one in step):
                correct_lanes(fit.runner.device, place, steps, folder=self._request.offload_dir)
        return True

    def _bind(self, captured: Captured, chosen: Choice, seen: Graph) -> Fit:
        runner = execute(captured, chosen.plan.program, chosen.costs.nbytes, folder=self._request.offload_dir)
        runner.arrangement.eager = added_by_eager(captured, chosen.costs, chosen.eager_peak)
        if self._ranks is not None:
            together = order(captured.graph, chosen.plan.program) if self._ranks.sharded else 0
            runner.gate = partial(self._ranks.ready, signature(seen) ^ together)
        call = self._manner.caller(runner)
        return Fit(runner, call, chosen.plan, chosen.costs, chosen.eager_peak, chosen.chunks, seen)

    def _capture(self, batch: tuple[Any, ...], numbers: Numbers) -> Captured:
        """Numbers that change all the time are inputs, unless the step can't take them as such."""
        try:
            return self._manner.capture(self._request, batch, numbers)
        except CaptureError:
            if not numbers:
                raise
            return self._manner.capture(self._request, batch, ())

    def _leave(self, graph: Graph, batch: tuple[Any, ...], numbers: Numbers, known: Sequence[Fit]) -> Leave:
        """What may be done to the step; parameters and state keep the form that a step has put them into."""
        before = known[0].plan.rewrites if known else ()
        always = tuple(one for one in before if one.name in FORMS)
        without = frozenset[str]() if self._manner.lasting else FORMS
        if self._ranks is not None:
            without |= {*ROUNDING, *LOSSY_ORDER}
        return Leave(self._request.allowed, self._resized(graph, batch, numbers), always, without)

    def _resized(self, graph: Graph, batch: tuple[Any, ...], numbers: Numbers) -> Resized | None:
        """The step at other sizes, where it is known what an example is."""
        return resizable(graph, batch, lambda other: self._capture(other, numbers).graph)

    def _given(self, source: PlanFrom, graph: Graph, leave: Leave) -> Choice:
        """The plan that was asked for, if it is one of this step and keeps its promise."""
        chosen = given(source, graph, self._price, leave)
        judged(chosen.graph, chosen.costs, chosen.plan.program, budget=chosen.plan.budget)
        self.budget = chosen.plan.budget
        return chosen

    def _shrunk(self, graph: Graph, batch: tuple[Any, ...], numbers: Numbers, *, notch: bool = True) -> Choice | None:
        """A plan from that of the next larger batch, without measuring; where that wastes time, by way of a notch."""
        rewritten, exact = self._exactly(graph)
        candidate = rewritten.graph
        same = next((one for one in exact if one.runner.captured.graph.fingerprint == candidate.fingerprint), None)
        if same is not None:
            self.budget = same.plan.budget if self.budget is None else self.budget
            return Choice(candidate, same.costs, same.plan, same.eager_peak)
        if self.budget is None:
            return None
        larger = [one for one in exact if smaller(one.runner.captured.graph, candidate)]
        if not larger:
            return None
        known = min(larger, key=lambda one: sum(one.costs.nbytes))
        before = known.runner.captured.graph
        costs = scaled(known.costs, before, candidate, self._estimate(before))
        found = carry(known.plan, before, candidate, costs, self.budget)
        peak = eager_peak(graph, rewritten, costs, roofline)
        idle = found is not None and self.budget is not None and found.peak < ROOMY * self.budget
        wasted = idle and found is not None and found.overhead > WASTE
        if found is None or (wasted and notch and self._ladder.searches < SEARCHES):
            if notch and self._between(known, batch, numbers):
                return self._shrunk(graph, batch, numbers, notch=False)
            self._ladder.searches += 1
            self._request.say("the next larger batch's plan is none for this one: planned anew, without measuring")
            found = self._search(candidate, costs, peak, Effort())
        return Choice(candidate, costs, replace(found, rewrites=rewritten.rewrites), peak)

    def _exactly(self, graph: Graph) -> tuple[Rewritten, list[Fit]]:
        """A step as the latest source was changed, if that keeps every bit here, too; and the sources like it."""
        tried = self._sources[-1].plan.rewrites if self._sources else ()
        rewritten = apply(graph, (*EXACT, *(one for one in tried if one.tried)))
        if has_tried(rewritten.rewrites) and differing(rewritten.graph):
            rewritten = apply(graph, EXACT)
        return rewritten, [one for one in self._sources if one.plan.rewrites == rewritten.rewrites]

    def _between(self, known: Fit, batch: tuple[Any, ...], numbers: Numbers) -> bool:
        """Plan a notch below a known step and above this batch, without measuring; whether there is one."""
        above = self._ladder.above(batch, BETWEEN)
        if above is None:
            return False
        captured = self._capture(above, numbers)
        rewritten, _ = self._exactly(captured.graph)
        candidate, before = rewritten.graph, known.runner.captured.graph
        if rewritten.rewrites != known.plan.rewrites or not smaller(before, candidate):
            return False
        costs = scaled(known.costs, before, candidate, self._estimate(before))
        peak = eager_peak(captured.graph, rewritten, costs, roofline)
        self._ladder.searches += 1
        found = replace(self._search(candidate, costs, peak, Effort()), rewrites=rewritten.rewrites)
        self._source(captured, above, Choice(candidate, costs, found, peak))
        return True

    def _from_notch(
        self, known: Sequence[Fit], graph: Graph, batch: tuple[Any, ...], numbers: Numbers
    ) -> Choice | None:
        """A batch that is larger than all known ones: plan a notch above it, and take its plan."""
        if not known or self._request.allowed or self._request.budget == LEAST or self._request.offload is not None:
            return None
        brought = [one for one in known[0].plan.rewrites if one.tried]
        candidate, above = apply(graph, (*EXACT, *brought)).graph, self._ladder.above(batch)
        if above is None or not any(smaller(candidate, one.runner.captured.graph) for one in known):
            return None
        try:
            captured = self._capture(above, numbers)
            self._request.say("a longer batch than all before: one with room for longer ones is planned")
            chosen = self._chosen(captured.graph, above, numbers, known)
        except (CaptureError, BudgetError):
            self._ladder.refuse(above)
            return None
        self._source(captured, above, chosen)
        return self._shrunk(graph, batch, numbers)

    def _estimate(self, graph: Graph) -> Costs:
        if graph.fingerprint not in self._estimates:
            self._estimates[graph.fingerprint] = roofline(graph)
        return self._estimates[graph.fingerprint]

    def _carried(self, fits: Sequence[Fit], graph: Graph) -> Choice | None:
        """A plan from one that is known for a similar graph: of the same step, with other numbers or other ops."""
        if not fits or exactness(fits[0].plan.rewrites) != "bitwise":
            return None
        known = fits[0]
        brought = [rewrite for rewrite in known.plan.rewrites if rewrite.name in BROUGHT]
        rewritten = apply(graph, (*EXACT, *brought))
        candidate, costs = rewritten.graph, self._price(rewritten.graph)
        if has_tried(rewritten.rewrites) and costs.differing != ():  # with these sizes some have other bits
            return None
        before = known.runner.captured.graph
        if before.fingerprint == candidate.fingerprint:
            return Choice(candidate, costs, known.plan, known.eager_peak)
        found = carry(known.plan, before, candidate, costs, self.budget)
        if found is None:
            return None
        found = replace(found, rewrites=rewritten.rewrites)
        return Choice(candidate, costs, found, eager_peak(graph, rewritten, costs, self._price))

    def _search(self, graph: Graph, costs: Costs, eager_peak: int, effort: Effort) -> Plan:
        most = max(SHORTEST, PAYS * sum(costs.seconds[: len(graph.ordinary)]))
        known = self._lowest.get(graph.fingerprint)
        planning = known or Planning(graph, costs)
        planning.time_limit = min(effort.part * self._request.time_limit, most)
        least = []
        if known is not None:
            least.append(planning.least())
        elif self._request.budget == LEAST and not self._lowest:  # of each shape: a later one may need more
            least.append(planning.least())
            self.budget = max(self.budget or 0, least[0].peak)
        if self.budget is None:
            self.budget = self._read_budget(graph.device, costs.persistent(graph), eager_peak)
        self._request.say(f"planning within {report.show_bytes(self.budget)}")
        return planning.within(self.budget, known=least, explain=effort.explain)

    def _read_budget(self, device: str, persistent: int, eager_peak: int) -> int:
        """The budget in bytes, the same for batches of every shape: what was asked for, or most of what is free."""
        if self._request.budget is not None:
            nbytes = read_budget(self._request.budget, persistent=persistent, eager_peak=eager_peak)
            part = str(self._request.budget).strip().endswith("%")  # of the step, to which nothing beside it belongs
            return nbytes if part else max(1, nbytes - self._request.beside)
        return persistent + int(FREE * devices.of(device).free_bytes())

    def situation(self, fit: Fit) -> Situation:
        """A step and its plan, to ask what else could be done."""
        graph = fit.runner.captured.graph
        away = self._request.places.away(graph.device, lasting=self._manner.lasting)
        chosen = Choice(graph, fit.costs, fit.plan, fit.eager_peak)
        leave = Leave(self._request.allowed)  # techniques that need the step at other sizes are not looked for again
        return Situation(fit.seen, chosen, self._price, fit.plan.budget, leave=leave, away=away)

    def _price(self, graph: Graph, *, hurried: bool = False) -> Costs:
        if self._request.costs == "roofline":
            costs = roofline(graph)
        else:
            costs = measure(
                graph,
                progress=lambda done, all_: self._request.say(f"measured {done} of {all_} distinct ops"),
                hurried=hurried,
            )
        return with_lanes(graph, self._manner.priced(graph, costs), folder=self._request.offload_dir)


@contextmanager
def _collecting_later() -> Iterator[None]:
    """A context in which Python looks for garbage among what is new only: to look at all objects of a large program
    takes it a third of a second, as long as all else that a step for another length needs."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _overlapped(chosen: Choice) -> Choice:
    """The choice with time for its collectives."""
    return replace(chosen, plan=overlap(chosen.plan, chosen.graph, chosen.costs, sums(chosen.graph)))
