"""The graphs that a step may be planned as, tried from the one that changes least: which is planned, and how it ends.

Floors come first. What can't fit whatever is measured is not priced, and what can't fit with what was measured is not
planned, for steps in many parts have tens of thousands of ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from lowtide.aten import ADD
from lowtide.costs import Costs
from lowtide.errors import BudgetError
from lowtide.graph import Graph
from lowtide.kernels import is_product
from lowtide.measure import roofline
from lowtide.plan import as_eager
from lowtide.plan.copies import least_seconds
from lowtide.plan.infeasible import floor
from lowtide.plan.problem import problem
from lowtide.plan.settings import SAME_SECONDS
from lowtide.program import Plan
from lowtide.rewrite import EXACT, TRIED, Rewritten, Trail, apply
from lowtide.rewrites import FORMS, STORED, Rewrite, exactness, name_part
from lowtide.simulate import simulate

if TYPE_CHECKING:
    from lowtide.choice import Leave

AS_EAGER = {"sizes", "narrow", "offload"}  # rewrites after which eager's own program is still one of the graph
BROUGHT = {"offload", "homes"} | {one.name for one in TRIED}  # by a plan: they need no leave, for every bit stays
IN_PARTS = "microbatch"  # the rewrite whose setting is into how many parts all of the step goes
MANY_OPS = 8_000  # ops of graphs planned with lossy rewrites, after which one that fits is good enough
WORTH = 0.01  # of the step's seconds that a cut must save, where the layers fit as they are


@dataclass(frozen=True)
class Effort:
    """How hard one of several searches tries."""

    part: float = 1.0  # of the time limit
    explain: bool = True  # whether an error must say what would fit; else it may come at once


LOOK = Effort(0.0, explain=False)  # enough to see whether anything fits
Search = Callable[[Graph, Costs, int, Effort], Plan]  # graph, costs, eager's peak, and how hard it tries
Say = Callable[[str], None]


class Prices:
    """What graphs cost, each asked for once; at a `glance` bytes are measured, and seconds more or less.

    Where values may wait elsewhere costs have those of copies, too, while the arithmetic is the same.
    """

    def __init__(self, full: Callable[[Graph], Costs], glance: Callable[[Graph], Costs] | None = None) -> None:
        self._full, self._hurried = full, glance or full
        self._known: dict[tuple[str, frozenset[str]], Costs] = {}
        self._glances: dict[tuple[str, frozenset[str]], Costs] = {}

    def __call__(self, graph: Graph) -> Costs:
        """The costs of a graph."""
        return self._once(graph, self._known, self._full)

    def glance(self, graph: Graph) -> Costs:
        """The same for a graph of which is asked whether anything fits at all."""
        if _priced(graph) in self._known:
            return self(graph)
        return self._once(graph, self._glances, self._hurried)

    def _once(
        self, graph: Graph, known: dict[tuple[str, frozenset[str]], Costs], price: Callable[[Graph], Costs]
    ) -> Costs:
        key = _priced(graph)
        if key not in known:
            known[key] = price(graph)
        return known[key]


def _priced(graph: Graph) -> tuple[str, frozenset[str]]:
    return graph.fingerprint, frozenset(row.place for row in graph.alternatives)


@dataclass(frozen=True)
class Choice:
    """A plan, and what it is a plan of."""

    graph: Graph  # with its optional ops
    costs: Costs
    plan: Plan  # which says what rewrites led from the captured graph to this one
    eager_peak: int  # bytes, predicted; eager's layers are whole

    @property
    def chunks(self) -> int:
        """Into how many recurrent layers are cut in time; 1: they are whole."""
        return next((int(one.setting or 1) for one in self.plan.rewrites if one.name == "chunks"), 1)


def eager_step(
    captured: Graph, planned: Graph, rewrites: Iterable[Rewrite], costs: Costs, price: Callable[[Graph], Costs]
) -> tuple[Graph, Costs]:
    """The step as eager runs it, with its costs: the planned one, or the captured one where rewrites changed that."""
    if not {rewrite.name for rewrite in rewrites} - AS_EAGER:
        return planned, costs
    whole = apply(captured, [one for one in EXACT if one.name in AS_EAGER]).graph
    return whole, price(whole)


def eager_peak(captured: Graph, rewritten: Rewritten, costs: Costs, price: Callable[[Graph], Costs]) -> int:
    """The bytes that eager needs for a captured step, predicted; it makes the second runs that plans do without."""
    whole, priced = eager_step(captured, rewritten.graph, rewritten.rewrites, costs, price)
    return simulate(whole, priced, as_eager(whole)).peak


class Chooser:
    """Plans one candidate after another, and keeps the best."""

    def __init__(
        self,
        graph: Graph,
        price: Prices,
        search: Search,
        leave: Leave,
        say: Say,
    ) -> None:
        self.graph, self.price, self.search, self.leave, self.say = graph, price, search, leave, say
        self.effort = Effort()
        self.best: Choice | None = None
        self.fits = False  # whether the last graph that was planned did
        self.failure: BudgetError | None = None  # the one with the least peak
        self.eager: int | None = None  # bytes
        self.closed: set[tuple[str, ...]] = set()  # techniques that split, and are above the budget whatever is lost
        self.seen: dict[str, Graph] = {}  # the graph after rewrites, with few parts
        self.lasting: dict[str, int] = {}  # bytes that persist, by what changes them
        self.trail, self.few = Trail(), Trail()  # the passes that were last run, and those with few parts
        self.needs: dict[str, int] = {}  # bytes of the largest product, measured, by what it is known by
        self.planned = 0  # ops of the graphs that were planned
        self.homes: tuple[Rewrite, ...] = ()  # what lets state and parameters live elsewhere, in every candidate

    def all_of(self, besides: tuple[Rewrite, ...]) -> None:
        """Plan the step with these passes and the fewest lossy techniques with which any plan fits."""
        self.effort = Effort(explain=not self.leave.allowed.lossy)
        self.mildly(besides)
        self.effort = Effort()
        self.lossily(besides)

    def mildly(self, besides: tuple[Rewrite, ...]) -> None:
        """Plan the step with these passes and what changes the rounding at most."""
        self.exactly(self.leave.after(self.graph, ()), besides)

    def lossily(self, besides: tuple[Rewrite, ...]) -> None:
        """Plan the step with these passes and as few lossy techniques as can be, where nothing fits without."""
        if self.best is not None:
            return
        _, *levels = self.leave.levels(self.graph, self.useful())
        if levels:
            self.close(levels[-1][-1])
        for level in levels:
            if self.best is None:
                self.at_level(level, besides)
        if self.best is None and self.effort.explain:
            self.explain(self.leave.after(self.graph, ()), besides)

    def lossily_elsewhere(self, leave: Leave, homes: tuple[Rewrite, ...]) -> None:
        """The same with state and parameters elsewhere: what was seen of floors with them here is forgotten."""
        self.leave, self.homes = leave, homes
        self.closed, self.seen, self.lasting, self.needs = set(), {}, {}, {}
        self.lossily(homes)

    def useful(self) -> tuple[str, ...]:
        """The lossy techniques that change anything here; the others would only stand in the way."""
        rungs = ((name, self.leave.rungs(self.graph, name)) for name in self.leave.allowed.lossy)
        tried = ((name, self.leave.apply(self.graph, found[-1:])) for name, found in rungs if found)
        return tuple(name for name, found in tried if name in {one.name for one in found.rewrites})

    def exactly(self, milds: Sequence[tuple[Rewrite, ...]], besides: tuple[Rewrite, ...]) -> None:
        """Plan the step with what changes the rounding at most; the quickest is kept, the exact one where it may be."""
        for number, mild in enumerate(milds):
            if self.take((*mild, *besides)):
                break
            if not number and self.best is None:  # nothing exact fits
                self.best = self.split((), besides, milds[1:], self.effort)
                break

    def take(self, rewrites: tuple[Rewrite, ...]) -> bool:
        """Plan the graph after these passes; whether nothing that changes more can be better."""
        exact, limit = exactness(rewrites) == "bitwise", None
        if self.best is not None:
            known = exactness(self.best.plan.rewrites) == "bitwise"
            # Other rounding must be worth it beside an exact plan; beside other rounding, an exact plan may cost more.
            limit = self.best.plan.seconds * (1 - WORTH) ** (known - exact)
        found = self.attempt(rewrites, limit)
        if found is None:
            return False
        if limit is None or found.plan.seconds < limit:
            self.best = found
        return exact and found.plan.seconds <= found.plan.base_seconds * (1 + WORTH)  # too little is left to save

    def attempt(
        self, rewrites: tuple[Rewrite, ...], quicker: float | None = None, effort: Effort | None = None
    ) -> Choice | None:
        """A plan of the graph after these passes that takes less seconds than this; None: there is none.

        Where what is lossy is tried next, a look shows whether anything fits before all is measured and searched for.
        """
        if self.best is None and self.leave.allowed.lossy and effort is not LOOK:
            if self.attempt(rewrites, quicker, LOOK) is None:
                return None
        self.fits = False
        if exactness(rewrites) != "bitwise":
            self.say(f"trying {', '.join(map(str, rewrites))}")
        rewritten = self.leave.apply(self.graph, rewrites, self.trail)
        candidate, exact = rewritten.graph, exactness(rewritten.rewrites) == "bitwise"
        if not exact and not {one.name for one in rewrites} <= {one.name for one in rewritten.rewrites} | BROUGHT:
            return None  # a technique found nothing to do here: the same was planned without it
        if not exact and self.above(candidate, roofline(candidate)):
            return None  # whatever is measured inside of ops
        price = self.price.glance if effort is LOOK else self.price
        costs = price(candidate)
        if costs.differing:  # calls of other sizes than those that were tried
            rewritten = self.leave.untried().apply(self.graph, rewrites)
            candidate, costs = rewritten.graph, price(rewritten.graph)
        if self.eager is None:
            self.eager = eager_peak(self.graph, rewritten, costs, self.price)
        if quicker is not None and self.quickest(candidate, costs, exact=exact) * (1 + SAME_SECONDS) >= quicker:
            self.fits = True
            return None  # slower, even if nothing runs twice
        self.needs[self.parting(rewrites)] = max(map(partial(_need, candidate, costs), _products(candidate)), default=0)
        if not exact and self.above(candidate, costs):
            return None
        self.planned += len(candidate.ops)
        try:
            found = self.search(candidate, costs, self.eager, effort or self.effort)
        except BudgetError as error:
            self.failure = min(self.failure or error, error, key=least_of)
            return None
        self.fits = True
        return Choice(candidate, costs, replace(found, rewrites=rewritten.rewrites), self.eager)

    def quickest(self, graph: Graph, costs: Costs, *, exact: bool) -> float:
        """Seconds that no plan takes less than: those of all ops once, and of the copies of what lives elsewhere."""
        best = self.best
        if best is not None and exact and exactness(best.plan.rewrites) == "bitwise":
            return least_seconds(graph, costs, best.plan.base_seconds)  # the same ops
        return least_seconds(graph, costs, sum(costs.seconds[op] for op in graph.ordinary))

    def above(self, graph: Graph, costs: Costs) -> bool:
        """Whether one op alone needs more than the budget that others failed to keep."""
        budget = None if self.failure is None else self.failure.budget
        return budget is not None and floor(problem(graph, costs))[0] > budget

    def close(self, harshest: tuple[Rewrite, ...]) -> None:
        """Find the ways to split whose finest parts are above the budget even with all that may be lost."""
        lossy = self.leave.unalike(harshest)
        for names, way in groupby(self.leave.after(self.graph, lossy), key=_names):
            *_, mild = way
            if IN_PARTS not in names:
                candidate = self.leave.apply(self.graph, (*mild, *lossy, *self.homes)).graph
                if self.above(candidate, roofline(candidate)):
                    self.closed.add(names)

    def at_level(self, level: Sequence[tuple[Rewrite, ...]], besides: tuple[Rewrite, ...]) -> None:
        """Plan the step with these lossy techniques, each tuple with harsher settings than the one before.

        The first settings with which anything fits are kept; then each technique but the last is left out again, or a
        milder one takes its place, where something fits without it. Looks are enough for all of that; what is left is
        planned as hard as any step.
        """
        if self.hopeless(level[-1]):
            return
        for lossy in level:
            milds = self.leave.after(self.graph, lossy)
            first = [mild for mild in milds if not mild or IN_PARTS in _names(mild)]  # which needs least, as a rule
            self.best = self.split(lossy, besides, first, LOOK)
            if self.best is None:
                self.best = self.split(lossy, besides, [mild for mild in milds if mild not in first], LOOK)
            if self.best is not None:
                self.relent(lossy, besides)
                self.best = self.searched(self.best)
                return

    def searched(self, found: Choice) -> Choice:
        """The plan of a graph that a look found, searched for as hard as any, with all that is measured."""
        costs, effort = self.price(found.graph), replace(self.effort, explain=False)
        try:
            plan = self.search(found.graph, costs, found.eager_peak, effort)
        except BudgetError:  # ops need more than at the glance
            return found
        if costs is found.costs and not _is_quicker(plan, found):
            return found
        return replace(found, costs=costs, plan=replace(plan, rewrites=found.plan.rewrites))

    def split(
        self,
        lossy: tuple[Rewrite, ...],
        besides: tuple[Rewrite, ...],
        milds: Sequence[tuple[Rewrite, ...]],
        effort: Effort,
    ) -> Choice | None:
        """The quickest plan with these techniques and some way to split: of each way the finest parts come first.

        Coarser parts need more: none of them is tried where finer ones do not fit.
        """
        best: Choice | None = None
        begun = self.planned
        for names, way in groupby(milds, key=_names):
            for mild in reversed([*way]) if names not in self.closed else ():
                if best is not None and self.planned - begun > MANY_OPS:
                    return best
                if self.hopeless((*mild, *lossy)):
                    break
                found = self.attempt((*mild, *lossy, *besides), None if best is None else best.plan.seconds, effort)
                if found is None:
                    break
                best = found
        return best

    def explain(self, milds: Sequence[tuple[Rewrite, ...]], besides: tuple[Rewrite, ...]) -> None:
        """Let the error say how little the finest parts of each way to split need, where that is soon found."""
        for _, way in groupby(milds, key=_names):
            *_, finest = way
            graph = self.leave.apply(self.graph, (*finest, *besides)).graph
            if self.eager is None or (finest and len(graph.ops) > MANY_OPS):
                continue
            try:
                self.search(graph, self.price(graph), self.eager, Effort(0.0))
            except BudgetError as error:
                self.failure = min(self.failure or error, error, key=least_of)

    def relent(self, lossy: tuple[Rewrite, ...], besides: tuple[Rewrite, ...]) -> None:
        """Leave out again what the plan can do without, the most lossy first."""
        assert self.best is not None
        mild = tuple(one for one in self.best.plan.rewrites if one.exactness == "rounding")
        for name in reversed(self.leave.allowed.lossy):
            one = next((one for one in lossy[:-1] if one.name == name), None)
            if one is None:
                continue
            for instead in self.leave.milder(self.graph, one):
                fewer = tuple(new for old in lossy for new in (instead if old is one else (old,)))
                hopeless = self.hopeless((*mild, *fewer))
                found = None if hopeless else self.attempt((*mild, *fewer, *besides), effort=LOOK)
                if found is not None:
                    self.best, lossy = found, fewer
                    break

    def hopeless(self, rewrites: tuple[Rewrite, ...]) -> bool:
        """Whether what persists and one matrix product or the like are above the budget, seen without many parts.

        A batch in two parts shows both: what persists is the same in any number of parts, so are the sums of gradients
        between them, and of what the products read and make, all that has the size of such a part shrinks with it.
        """
        budget = None if self.failure is None else self.failure.budget
        if budget is None:
            return False
        if self.persistent(rewrites) > budget:
            return True
        parts = next((int(one.setting or 2) for one in rewrites if one.name == IN_PARTS), 0)
        seen = tuple(replace(one, setting=2) if one.name == IN_PARTS else one for one in rewrites)
        key = " ".join(map(str, sorted(seen, key=lambda one: one.name)))
        if key not in self.seen:
            self.seen[key] = self.leave.apply(self.graph, (*seen, *self.homes), self.few).graph
        graph = self.seen[key]
        examples = 0 if self.leave.resized is None else self.leave.resized.examples
        half, share = examples // 2, 1.0
        if parts and half:
            share = min(1.0, -(-examples // parts) / half)

        def need(op: int) -> float:
            own = [graph.values[value] for value in _own(graph, op)]
            shrinks = [any(size and size % half == 0 for size in value.shape) for value in own]
            return sum(value.nbytes * (share if less else 1) for value, less in zip(own, shrinks, strict=True))

        least = max(map(need, _products(graph)), default=0) if parts and half else 0
        return _persistent(graph) + _summed(graph) + max(least, self.needs.get(self.parting(rewrites), 0)) > budget

    def persistent(self, rewrites: tuple[Rewrite, ...]) -> int:
        """The bytes that are there between steps, seen of the whole batch."""
        stored = tuple(one for one in rewrites if one.name in STORED)
        key = " ".join(map(str, stored))
        if key not in self.lasting:
            self.lasting[key] = _persistent(self.leave.apply(self.graph, (*stored, *self.homes)).graph)
        return self.lasting[key]

    def parting(self, rewrites: tuple[Rewrite, ...]) -> str:
        """By what the products are known that run: the same ones need the same, whatever else is lost."""
        unalike = self.leave.unalike(rewrites)
        split = (str(one) for one in rewrites if one.exactness == "rounding" or one not in unalike)
        return " ".join(sorted((*split, *(one.name for one in rewrites if one.name in FORMS))))


def _is_quicker(plan: Plan, found: Choice) -> bool:
    return plan.seconds < found.plan.seconds


def least_of(error: BudgetError) -> float:
    """The least peak that was reached where nothing fitted, in bytes."""
    return float("inf") if error.least is None else error.least


def _names(rewrites: tuple[Rewrite, ...]) -> tuple[str, ...]:
    return tuple(one.name for one in rewrites)


def _persistent(graph: Graph) -> int:
    """The bytes of a graph that are on the device between steps."""
    return sum(graph.values[item.value].nbytes for item in graph.inputs if item.home == "device")


def _summed(graph: Graph) -> int:
    """The bytes of the gradients of a first part that wait for those of others."""
    gradients = [value for value, one in enumerate(graph.values) if one.kind == "gradient" and graph.maker[value] >= 0]
    first = [value for value in gradients if graph.ops[graph.maker[value]].name.endswith(name_part("", 0))]
    return sum(graph.values[v].nbytes for v in first if any(graph.ops[op].target == ADD for op in graph.readers[v]))


def _products(graph: Graph) -> list[int]:
    """The matrix products, convolutions and the like: they write over nothing."""
    return [op for op in graph.ordinary if is_product(graph.ops[op].target) and not graph.ops[op].updates]


def _own(graph: Graph, op: int) -> list[int]:
    """What an op reads and makes that is not the caller's."""
    values = dict.fromkeys((*graph.reads[op], *graph.makes[op]))
    return [value for value in values if graph.values[value].storage not in graph.device_storages]


def _need(graph: Graph, costs: Costs, op: int) -> int:
    """The bytes that an op needs, with what was measured inside; without weights and gradients, whose forms differ."""
    own = (value for value in _own(graph, op) if graph.values[value].kind not in ("parameter", "gradient"))
    return sum(costs.nbytes[value] for value in own) + costs.fewest_temporaries(op)
