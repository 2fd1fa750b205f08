"""Which batch size pays: the throughput of each, the largest that fits with what, and the one to use.

A step is captured and its ops are measured at a few sizes, each four times the one before; between them, and beyond the
last, the bytes and seconds of its values and ops follow a straight line. So do peaks, nearly: the largest batch takes
few tries. Real steps at these sizes say by how much a step differs from the sum of its ops. Nothing is trained at any
other size.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

from lowtide import device
from lowtide.batch.forward import forward_of
from lowtide.batch.scale import Parts, Price, Progress, Scale
from lowtide.budget import free_memory
from lowtide.choice import Away, Effort, Leave, Offload, choose
from lowtide.costs import Costs
from lowtide.device import Device
from lowtide.errors import BudgetError
from lowtide.fit import fit
from lowtide.graph import Graph
from lowtide.measure import roofline
from lowtide.plan import BEST, OFFLOAD, carry, plan
from lowtide.program import Plan
from lowtide.rewrite import EXACT
from lowtide.rewrites import NOTHING, ROUNDING, Allowed, Rewrite
from lowtide.simulate import simulate
from lowtide.sizes import Size, Sizes, Way

__all__ = ["Levers", "Parts", "batch_sizes", "forward_of"]

WARM_UPS = 6  # real steps ahead, which learn: the first ones are timed op by op
STEPS = (3, 15)  # real steps whose median is compared with their ops: at least, and at most
LONG_ENOUGH = 1.0  # seconds of such steps
ROOM = 0.7  # of the memory that is free, in which real steps may run
PARTS = 16  # that a step may be split into, where nobody says how many: its graph grows with them
ALWAYS = {one.name for one in EXACT}

Corrections = dict[str, tuple[float, ...]]  # of each way, one for each size that was measured


@dataclass(frozen=True)
class Levers:
    """What may be done besides recomputation: copies to another place, and what changes bits by name."""

    offload: Offload = field(default_factory=Offload)
    allowed: Allowed = NOTHING

    def away(self, device: str) -> Away | None:
        """Where values, state and parameters may go."""
        return self.offload.away(device)


def batch_sizes(
    make: Callable[[int], Parts],
    budget: int,
    *,
    price: Price,
    time_limit: float,
    levers: Levers | None = None,
    real: bool = True,
    tell: Progress = lambda _: None,
) -> Sizes:
    """The throughput of a step against its batch size within a budget; `real` compares with steps that are run.

    A budget that no size fits is a BudgetError.
    """
    scale = Scale(make, budget, price, tell)
    scale.measure()
    curve = _Curve(scale, time_limit, levers or Levers())
    largest = {
        "eager": scale.largest("eager", lambda batch: scale.eager(batch).peak),
        "sharing": scale.largest("sharing", lambda batch: plan(*scale.at(batch)).peak),
    }
    others = {name: way.largest(name, partial(_least_peak, way)) for name, way in curve.ways.items()}
    # Whatever fits without a lever, fits with it.
    most = max((size for size in (*largest.values(), *others.values()) if size is not None), default=None)
    if most is None:
        needs = min(way.smallest(scale.steps[0]).peak for way in curve.ways.values())
        raise BudgetError(
            f"no batch fits {budget:,} bytes: a batch of {scale.steps[0]} needs {needs:,} at least.",
            hint=f"give a budget of {needs:,} bytes or more.",
            least=needs,
        )
    largest |= {**(others if len(others) > 1 else {}), "plan": most}
    corrections = curve.compare() if real else dict.fromkeys(("eager", "plan"), (1.0,) * len(scale.steps))
    points = [curve.point(batch, corrections) for batch in curve.shown(largest)]
    return Sizes(budget, tuple(points), largest, corrections)


def _least_peak(way: Scale, batch: int) -> int:
    return way.smallest(batch).peak


@dataclass
class _Curve:
    """The throughput of a step at all sizes, with all that may be done."""

    scale: Scale
    time_limit: float
    levers: Levers

    @cached_property
    def ways(self) -> Mapping[str, Scale]:
        """Each technique by which larger batches may fit, and in the end all of them."""
        scale, allowed = self.scale, self.levers.allowed
        found = {"recompute": scale}
        if self.away is not None:
            found |= {"offload": self._by("offload", self.away, method=OFFLOAD), "both": self._by("both", self.away)}
        names = tuple(name for name in (*ROUNDING, *allowed.lossy) if name in allowed)
        found |= {name: self._by(name, None, names=(name,)) for name in names}
        if names and (self.away is not None or len(names) > 1):
            found["all"] = self._by("all", self.away, names=names)
        return found

    @cached_property
    def away(self) -> Away | None:
        """Where values, state and parameters may go."""
        return self.levers.away(self.scale.seen(self.scale.steps[0]).device)

    def _by(self, name: str, away: Away | None, *, names: tuple[str, ...] = (), method: str = BEST) -> Scale:
        """The same step with these techniques, each as far as it goes."""

        def passes(graph: Graph, batch: int) -> tuple[Rewrite, ...]:
            homes = () if away is None else away.rewrites(max(away.homes(graph), default=0))
            return (*self._furthest(graph, batch, names), *homes)

        return replace(self.scale, name=name, passes=passes, method=method, sizes=self.scale.steps)

    def _furthest(self, graph: Graph, batch: int, names: tuple[str, ...]) -> tuple[Rewrite, ...]:
        """The strongest settings of these techniques that go together; what finds nothing to do is left out."""
        allowed = Allowed(named=tuple((name, self.levers.allowed.setting(name)) for name in names))
        leave = Leave(allowed, self.scale.resized(batch))
        lossy = leave.levels(graph)[-1][-1]
        milds = [mild for mild in leave.after(graph, lossy) if all(map(self._few, mild))]
        return (*milds[-1], *lossy)

    def _few(self, one: Rewrite) -> bool:
        said = self.levers.allowed.setting(one.name) is not None
        return said or not isinstance(one.setting, int) or one.setting <= PARTS

    def compare(self) -> Corrections:
        """Real steps over the sum of their ops, at each size that was measured; where none can run, as at the next."""
        found: Corrections = {}
        for way, steps in {"eager": self._eager_steps, "plan": self._planned_steps}.items():
            seen = {batch: more for batch in self.scale.steps if (more := steps(batch)) is not None} or {1: 1.0}
            found[way] = tuple(
                seen[min(seen, key=lambda other: abs(math.log(other / batch)))] for batch in self.scale.steps
            )
        return found

    def _eager_steps(self, batch: int) -> float | None:
        """None: there is no memory for them."""
        eager = self.scale.eager(batch)
        if eager.peak > ROOM * free_memory():
            return None
        self.scale.tell(f"running eager steps of a batch of {batch}")
        parts = self.scale.make(batch)
        where = device.of(self.scale.seen(batch).device)
        return _median(lambda: parts.step(parts.model, parts.optimizer, *parts.example), where) / eager.seconds

    def _planned_steps(self, batch: int) -> float | None:
        """None: nothing fits the budget."""
        parts = self.scale.make(batch)
        self.scale.tell(f"running planned steps of a batch of {batch}")
        try:
            train = fit(
                *parts[:3],
                example=parts.example,
                budget=self.scale.budget,
                time_limit=min(1.0, self.time_limit),
                offload=self.levers.offload.place,
                offload_budget=self.levers.offload.budget,
                offload_dir=self.levers.offload.folder,
                allow=str(self.levers.allowed) or None,
            )
        except BudgetError:
            return None
        graph = train.captured.graph
        expected = simulate(graph, self.scale.price(graph), train.program).seconds
        return _median(lambda: train(*parts.example), device.of(graph.device)) / expected

    def shown(self, largest: dict[str, int | None]) -> Iterator[int]:
        """The sizes of the curve: doubled ones up to the largest that fits, and the largest of each way."""
        most = max((size for size in largest.values() if size is not None), default=self.scale.steps[-1])
        doubled = [self.scale.steps[0] << power for power in range(64) if self.scale.steps[0] << power <= most]
        yield from sorted({*doubled, *(size for size in largest.values() if size is not None)})

    def point(self, batch: int, corrections: Corrections) -> Size:
        """One size, with what real steps say about the sum of ops."""
        self.scale.tell(f"planning a batch of {batch}")
        found = self._planned(batch)
        more = {way: self._more(seen, batch) for way, seen in corrections.items()}
        eager = self.scale.eager(batch)
        planned = (
            None
            if found is None
            else Way(found.peak, found.seconds * more["plan"], True, tuple(map(str, found.rewrites)))
        )
        return Size(batch, batch in self.scale.measured, replace(eager, seconds=eager.seconds * more["eager"]), planned)

    def _more(self, seen: Sequence[float], batch: int) -> float:
        """By how much a real step differs from the sum of its ops, between the two sizes around it."""
        sizes = self.scale.steps
        above = min(max(1, bisect(sizes, batch)), len(sizes) - 1)
        first, last, low, high = sizes[above - 1], sizes[above], seen[above - 1], seen[above]
        part = math.log(min(max(batch, first), last) / first) / math.log(last / first)
        return low * math.pow(high / low, part)

    def _planned(self, batch: int) -> Plan | None:
        """The quickest plan that keeps every bit; where none does, the first that fits with what is allowed."""
        exact = self._search if self.away is None else self._elsewhere
        allowed = [partial(self._search, name) for name in self.ways if name in self.levers.allowed or name == "all"]
        for search in (partial(exact, "recompute"), *allowed):
            try:
                return search(batch)
            except BudgetError:
                continue
        return None

    def _search(self, name: str, batch: int) -> Plan:
        """The quickest plan with one technique as far as it goes."""
        way = self.ways[name]
        graph, costs = way.at(batch)
        known = way.smallest(batch)
        _refuse(known.peak, way.budget)
        found = plan(graph, costs, way.budget, time_limit=self.time_limit, known=[known])
        like = way.like(batch)
        return replace(found, rewrites=way.passes(way.seen(like), like))

    def _elsewhere(self, _: str, batch: int) -> Plan:
        """With a place to go to: as `fit` would choose, by the costs of this size."""
        both, budget = self.ways["both"], self.scale.budget
        plain, (graph, costs) = self.scale.at(batch)[0], both.at(batch)
        least, lowest = self.scale.smallest(batch), both.smallest(batch)
        _refuse(min(least.peak, lowest.peak), budget)

        def price(other: Graph) -> Costs:
            same = len(other.ops) == len(graph.ops)  # else it is eager's, whose peak is not asked for
            return replace(costs, graph=other.fingerprint) if same else roofline(other)

        def search(other: Graph, known: Costs, eager_peak: int, effort: Effort) -> Plan:
            here = None if other.fingerprint == graph.fingerprint else carry(least, plain, other, known, None)
            starts = [one for one in (here, lowest) if one is not None and one.program.graph == other.fingerprint]
            limit = effort.part * self.time_limit
            return plan(other, known, budget, time_limit=limit, known=starts, explain=effort.explain)

        return choose(both.seen(both.like(batch)), price, search, away=self.away).plan


def _refuse(needed: int, budget: int) -> None:
    if needed > budget:
        raise BudgetError(f"{needed:,} bytes are needed.", least=needed, budget=budget)


def _named(found: Plan) -> tuple[str, ...]:
    return tuple(str(one) for one in found.rewrites if one.name not in ALWAYS)


def _median(step: Callable[[], Any], where: Device) -> float:
    """The seconds of a step: of those beside which no other process ran, unless one always does."""
    for _ in range(WARM_UPS):
        step()
    calm: list[float] = []
    disturbed: list[float] = []
    least, most = STEPS
    while len(calm) + len(disturbed) < most and (len(calm) < least or sum(calm) < LONG_ENOUGH):
        delay, begun = where.delay(), where.clock()
        step()
        seconds = where.clock() - begun
        (calm if where.calm(seconds, where.delay() - delay) else disturbed).append(seconds)
    return median(calm or disturbed)
