"""Which batch size pays: the throughput of each, the largest that fits with what, and the one to use.

A step is captured and its ops are measured at a few sizes, each four times the one before; between them, and beyond the
last, the bytes and seconds of its values and ops follow a straight line. So do peaks, nearly: the largest batch takes
few tries. Real steps at the smallest and the largest of these sizes say by how much a step differs from the sum of
its ops. Nothing is trained at any other size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from lowtide.budget import free_memory
from lowtide.capture import capture
from lowtide.costs import Costs
from lowtide.errors import BatchError, BudgetError, CaptureError, UsageError
from lowtide.fit import fit
from lowtide.graph import Graph
from lowtide.plan import as_eager, carry, least, plan
from lowtide.program import Plan
from lowtide.rewrite import with_narrow
from lowtide.simulate import simulate
from lowtide.sizes import Size, Sizes, Way

LONGEST = 2.5  # seconds of a step by its ops, up to which sizes are measured; larger ones follow from these
APART = 4  # from one size that is measured to the next
MOST = 2**20  # examples: no size above is looked at
WARM_UPS, STEPS = 2, 3  # real steps: those ahead, which learn, and those whose median is compared with their ops
FINE = 16  # parts of a size: the largest batch is found to within one of them, or one example
ROOM = 0.7  # of the memory that is free, in which real steps may run


Progress = Callable[[str], None]
Price = Callable[[Graph], Costs]
Corrections = dict[str, tuple[float, float]]


class Parts(NamedTuple):
    """A training step for one batch size."""

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    example: tuple[Any, ...]


def batch_sizes(
    make: Callable[[int], Parts],
    budget: int,
    *,
    price: Price,
    time_limit: float,
    real: bool = True,
    tell: Progress = lambda _: None,
) -> Sizes:
    """The throughput of a step against its batch size within a budget; `real` compares with steps that are run.

    A budget that no size fits is a BudgetError.
    """
    scale = _Scale(make, budget, price, time_limit, tell)
    scale.measure()
    largest = {
        "eager": scale.largest("eager", lambda batch: scale.eager(batch).peak),
        "sharing": scale.largest("sharing", lambda batch: plan(*scale.at(batch)).peak),
        "plan": scale.largest("a plan", lambda batch: scale.smallest(batch).peak),
    }
    most = max((size for size in largest.values() if size is not None), default=None)
    if most is None:
        needs = scale.smallest(scale.steps[0]).peak
        raise BudgetError(
            f"no batch fits {budget:,} bytes: a batch of {scale.steps[0]} needs {needs:,} at least.",
            hint=f"give a budget of {needs:,} bytes or more.",
            least=needs,
        )
    largest["plan"] = most  # whatever fits without a lever, fits with it
    corrections = scale.compare() if real else dict.fromkeys(("eager", "plan"), (1.0, 1.0))
    points = [scale.point(batch, corrections) for batch in scale.shown(largest)]
    return Sizes(budget, tuple(points), largest, corrections)


@dataclass
class _Scale:
    """A step at all sizes."""

    make: Callable[[int], Parts]
    budget: int
    price: Price
    time_limit: float
    tell: Progress

    def __post_init__(self) -> None:
        self.graphs: dict[int, Graph] = {}
        self.measured: dict[int, Costs] = {}

    def graph(self, batch: int) -> Graph:
        """The step of one size."""
        if batch not in self.graphs:
            self.tell(f"capturing a batch of {batch}")
            self.graphs[batch] = with_narrow(capture(*self.make(batch)).graph)
        return self.graphs[batch]

    def measure(self) -> None:
        """Measure ops at several sizes, from the smallest that the step takes, while a step is short and may fit."""
        batch = self._smallest()
        while batch <= MOST:
            self.tell(f"measuring a batch of {batch}")
            graph = self.graph(batch)
            costs = self.measured[batch] = self.price(graph)
            seconds = sum(costs.seconds[op] for op in graph.ordinary)
            low = max(item.nbytes for item in graph.values)
            if len(self.measured) > 1 and (APART * seconds > LONGEST or APART * low > self.budget):
                break
            batch *= APART

    def _smallest(self) -> int:
        """The smallest batch that the step takes: some need two examples."""
        for batch in (1, 2, 4):
            try:
                self.graph(batch)
            except (CaptureError, BatchError, ValueError, RuntimeError) as error:
                failure = error
            else:
                return batch
        raise UsageError("the step takes no batch of 1, 2 or 4.", hint=f"the last one failed: {failure}") from failure

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The sizes that were measured."""
        return tuple(sorted(self.measured))

    def at(self, batch: int) -> tuple[Graph, Costs]:
        """The step of one size with its costs: where two sizes around it are alike, by the graph of one of them."""
        if batch not in self.measured:
            low, high = self._around(batch)
            if _alike(self.graphs[low], self.graphs[high]):
                part = (batch - low) / (high - low)
                graph, costs = self.graphs[high], _between(self.measured[low], self.measured[high], part)
                return graph, replace(costs, graph=graph.fingerprint)
            self.measured[batch] = self.price(self.graph(batch))
        return self.graph(batch), self.measured[batch]

    def _around(self, batch: int) -> tuple[int, int]:
        """The two sizes that were measured and that a size lies between, or nearest to."""
        above = next((place for place, size in enumerate(self.steps) if size > batch), len(self.steps) - 1)
        above = max(1, above)
        return self.steps[above - 1], self.steps[above]

    def eager(self, batch: int) -> Way:
        """Eager's step."""
        graph, costs = self.at(batch)
        simulation = simulate(graph, costs, as_eager(graph))
        return Way(simulation.peak, simulation.seconds, simulation.peak <= self.budget)

    @cached_property
    def _lowest(self) -> tuple[Graph, Plan]:
        """The plan with the least peak, of one size."""
        batch = self.steps[-1]
        self.tell(f"looking for the least peak of a batch of {batch}")
        graph, costs = self.at(batch)
        return graph, least(graph, costs)

    def smallest(self, batch: int) -> Plan:
        """The plan with the least peak, of any size: the one that is known, or else its own."""
        graph, costs = self.at(batch)
        known, found = self._lowest
        return carry(found, known, graph, costs, None) or least(graph, costs)

    def largest(self, way: str, peak: Callable[[int], int]) -> int | None:
        """The largest batch whose peak is within the budget, to within a fine part of it.

        Peaks are nearly a straight line, so the next try is where the line through the last two meets the budget; a
        try that would be outside of what is known already is in its middle.
        """
        self.tell(f"looking for the largest batch with {way}")
        known = {batch: peak(batch) for batch in self.steps[-2:]}
        first = self.steps[0]
        low, high = 0, MOST
        while True:
            low = max([low, *(batch for batch, nbytes in known.items() if nbytes <= self.budget)])
            high = min([high, *(batch for batch, nbytes in known.items() if nbytes > self.budget)])
            if low + max(1, low // FINE) >= high:
                return low or None
            if high <= first:
                return None
            batch = min(max(self._meeting(known, low, high), low + 1, first), high - 1)
            known[batch] = peak(batch)

    def _meeting(self, known: dict[int, int], low: int, high: int) -> int:
        """Where the line through the two nearest sizes meets the budget, or the middle of what is left."""
        one, other = sorted(sorted(known, key=lambda batch: abs(known[batch] - self.budget))[:2])
        rise = known[other] - known[one]
        met = one + (self.budget - known[one]) * (other - one) / rise if rise > 0 else math.inf
        step = max(1, low // FINE)
        if abs(met - low) <= step:  # one more look, and it is known to be the last that fits, or
            return low + step
        if abs(met - high) <= step:  # the first that does not
            return high - step
        if low < met < high:
            return math.floor(met)
        return (low + high) // 2 if high < MOST else 2 * max(low, 1)

    def compare(self) -> Corrections:
        """Real steps over the sum of their ops, at the least and the most size that was measured."""
        ends = (self.steps[0], self.steps[-1])
        found: Corrections = {}
        for way, steps in {"eager": self._eager_steps, "plan": self._planned_steps}.items():
            low, high = (steps(batch) for batch in ends)
            found[way] = (low or high or 1.0, high or low or 1.0)
        return found

    def _eager_steps(self, batch: int) -> float | None:
        """None: there is no memory for them."""
        eager = self.eager(batch)
        if eager.peak > ROOM * free_memory():
            return None
        self.tell(f"running eager steps of a batch of {batch}")
        parts = self.make(batch)
        return _median(lambda: parts.step(parts.model, parts.optimizer, *parts.example)) / eager.seconds

    def _planned_steps(self, batch: int) -> float | None:
        """None: nothing fits the budget."""
        parts = self.make(batch)
        self.tell(f"running planned steps of a batch of {batch}")
        try:
            train = fit(*parts[:3], example=parts.example, budget=self.budget, time_limit=min(1.0, self.time_limit))
        except BudgetError:
            return None
        graph = train.captured.graph
        return _median(lambda: train(*parts.example)) / simulate(graph, self.price(graph), train.program).seconds

    def shown(self, largest: dict[str, int | None]) -> Iterator[int]:
        """The sizes of the curve: doubled ones up to the largest that fits, and the largest of each way."""
        most = max((size for size in largest.values() if size is not None), default=self.steps[-1])
        doubled = [self.steps[0] << power for power in range(64) if self.steps[0] << power <= most]
        yield from sorted({*doubled, *(size for size in largest.values() if size is not None)})

    def point(self, batch: int, corrections: Corrections) -> Size:
        """One size, with what real steps say about the sum of ops."""
        self.tell(f"planning a batch of {batch}")
        graph, costs = self.at(batch)
        try:
            found = plan(graph, costs, self.budget, time_limit=self.time_limit, known=[self.smallest(batch)])
        except BudgetError:
            found = None
        first, last = self.steps[0], self.steps[-1]
        part = math.log(min(batch, last) / first) / math.log(last / first)
        more = {way: low * (high / low) ** part for way, (low, high) in corrections.items()}
        eager = self.eager(batch)
        planned = None if found is None else Way(found.peak, found.seconds * more["plan"], True)
        return Size(batch, batch in self.measured, replace(eager, seconds=eager.seconds * more["eager"]), planned)


def _median(step: Callable[[], Any]) -> float:
    for _ in range(WARM_UPS):
        step()
    seconds = []
    for _ in range(STEPS):
        begun = perf_counter()
        step()
        seconds.append(perf_counter() - begun)
    return median(seconds)


def _alike(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same step at two sizes."""
    same = len(one.ops) == len(other.ops) and len(one.values) == len(other.values)
    return same and all(
        a.target == b.target and a.outputs == b.outputs for a, b in zip(one.ops, other.ops, strict=True)
    )


def _between(one: Costs, other: Costs, part: float) -> Costs:
    """Costs on the line through those of two sizes; between them, or beyond one."""

    def line(low: float, high: float) -> float:
        return low + (high - low) * part

    def bytes_(low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(0, math.ceil(line(a, b) - 1e-6)) for a, b in zip(low, high, strict=True))

    seconds = zip(one.seconds, other.seconds, strict=True)
    return replace(
        other,
        seconds=tuple(max(line(a, b), 0.5 * min(a, b)) for a, b in seconds),
        arena_temporaries=bytes_(one.arena_temporaries, other.arena_temporaries),
        heap_temporaries=bytes_(one.heap_temporaries, other.heap_temporaries)
        if one.heap_temporaries and other.heap_temporaries
        else (),
        nbytes=bytes_(one.nbytes, other.nbytes),
        in_place=tuple(
            tuple(pair for pair in a if pair in b) for a, b in zip(one.in_place, other.in_place, strict=True)
        ),
    )
