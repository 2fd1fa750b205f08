"""Which batch size pays: the throughput of each, the largest that fits with what, and the one to use.

Ops are measured at a few sizes, doubled each time; between them, and beyond the last, the seconds and temporaries of an
op follow a straight line. Real steps at the smallest and the largest of these sizes say by how much a step differs from
the sum of its ops. Nothing is trained at any other size: whether it fits follows from its graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

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
MOST = 2**20  # examples: no size above is looked at
STEPS = 3  # real steps, after a first one, whose median is compared with the sum of their ops
FINE = 16  # parts of a size: the largest batch is found to within one of them, or one example


Progress = Callable[[str], None]
Price = Callable[[Graph], Costs]


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
    """The throughput of a step against its batch size within a budget; `real` compares with steps that are run."""
    scale = _Scale(make, budget, price, tell)
    scale.measure()
    corrections = scale.compare() if real else dict.fromkeys(("eager", "plan"), (1.0, 1.0))
    tell("looking for the largest batch")
    largest: dict[str, int | None] = {"eager": scale.largest(scale.eager_fits), "sharing": scale.largest(scale.shares)}
    smallest_plan = scale.lowest()
    carried = scale.largest(lambda batch: scale.carries(smallest_plan, batch))
    found: dict[int, Plan] = {}

    def plans(batch: int) -> bool:
        tell(f"planning a batch of {batch}")
        graph, costs = scale.at(batch)
        try:
            found[batch] = plan(graph, costs, budget, time_limit=time_limit)
        except BudgetError:
            return False
        return True

    largest["plan"] = scale.refine(max(carried or 0, largest["sharing"] or 0), plans)
    points = []
    for batch in scale.shown(largest):
        fits = batch in found or plans(batch)
        points.append(scale.point(batch, found[batch] if fits else None, corrections))
    return Sizes(budget, tuple(points), largest, corrections)


@dataclass
class _Scale:
    """The graphs and costs of a step at all sizes."""

    make: Callable[[int], Parts]
    budget: int
    price: Price
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
        """Measure ops at doubled sizes, from the smallest that the step takes, while a step is short and fits."""
        batch = self._smallest()
        while batch <= MOST:
            self.tell(f"measuring a batch of {batch}")
            graph = self.graph(batch)
            costs = self.measured[batch] = self.price(graph)
            seconds = sum(costs.seconds[op] for op in graph.ordinary)
            low = max(item.nbytes for item in graph.values)
            if len(self.measured) > 1 and (2 * seconds > LONGEST or 2 * low > self.budget):
                break
            batch *= 2

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
        """The step of one size with its costs."""
        graph = self.graph(batch)
        if batch not in self.measured:
            low, high = self._around(batch)
            if not _alike(graph, self.graphs[low]) or not _alike(graph, self.graphs[high]):
                self.measured[batch] = self.price(graph)
            else:
                one, other = self.measured[low], self.measured[high]
                return graph, _between(graph, one, other, (batch - low) / (high - low))
        return graph, self.measured[batch]

    def _around(self, batch: int) -> tuple[int, int]:
        """The two sizes that were measured and that a size lies between, or nearest to."""
        above = next((place for place, size in enumerate(self.steps) if size > batch), len(self.steps) - 1)
        above = max(1, above)
        return self.steps[above - 1], self.steps[above]

    def eager_fits(self, batch: int) -> bool:
        """Whether eager's step fits."""
        return self.eager(batch).fits

    def eager(self, batch: int) -> Way:
        """Eager's step."""
        graph, costs = self.at(batch)
        simulation = simulate(graph, costs, as_eager(graph))
        return Way(simulation.peak, simulation.seconds, simulation.peak <= self.budget)

    def shares(self, batch: int) -> bool:
        """Whether a step in which nothing runs twice fits."""
        graph, costs = self.at(batch)
        return plan(graph, costs).peak <= self.budget

    def lowest(self) -> tuple[Graph, Plan]:
        """The plan with the least peak, of one size."""
        batch = self.steps[-1]
        self.tell(f"looking for the least peak of a batch of {batch}")
        graph, costs = self.at(batch)
        return graph, least(graph, costs)

    def carries(self, known: tuple[Graph, Plan], batch: int) -> bool:
        """Whether the plan with the least peak of another size fits in this one."""
        graph, costs = self.at(batch)
        return carry(known[1], known[0], graph, costs, self.budget) is not None

    def largest(self, fits: Callable[[int], bool]) -> int | None:
        """The largest batch that fits, to within a fine part of it."""
        low, high = 0, self.steps[0]
        while high <= MOST and fits(high):
            low, high = high, 2 * high
        return self._narrow_down(low, high, fits) or None

    def refine(self, start: int, fits: Callable[[int], bool]) -> int | None:
        """The largest batch that fits, looked for around one that is likely to."""
        if start == 0:
            return self.largest(fits)
        low, high = (start, 0) if fits(start) else (0, start)
        while low and not high:
            more = low + max(1, low // FINE)
            low, high = (more, 0) if more <= MOST and fits(more) else (low, more)
        while not low and high > self.steps[0]:
            less = high - max(1, high // FINE)
            low, high = (less, high) if fits(less) else (0, less)
        return low or None

    def _narrow_down(self, low: int, high: int, fits: Callable[[int], bool]) -> int:
        while high - low > max(1, low // FINE) and low:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def compare(self) -> dict[str, tuple[float, float]]:
        """Real steps over the sum of their ops, at the least and the most size that was measured."""
        ends = (self.steps[0], self.steps[-1])
        self.tell("running steps")
        return {
            "eager": (self._eager_steps(ends[0]), self._eager_steps(ends[1])),
            "plan": (self._planned_steps(ends[0]), self._planned_steps(ends[1])),
        }

    def _eager_steps(self, batch: int) -> float:
        parts = self.make(batch)
        seconds = _median(lambda: parts.step(parts.model, parts.optimizer, *parts.example))
        return seconds / self.eager(batch).seconds

    def _planned_steps(self, batch: int) -> float:
        parts = self.make(batch)
        try:
            train = fit(*parts[:3], example=parts.example, budget=self.budget, time_limit=1.0)
        except BudgetError:
            return 1.0
        return _median(lambda: train(*parts.example)) / train.plan.seconds

    def shown(self, largest: dict[str, int | None]) -> Iterator[int]:
        """The sizes of the curve: doubled ones up to the largest that fits, and the largest of each way."""
        most = max((size for size in largest.values() if size is not None), default=self.steps[-1])
        doubled = [self.steps[0] << power for power in range(64) if self.steps[0] << power <= most]
        yield from sorted({*doubled, *(size for size in largest.values() if size is not None)})

    def point(self, batch: int, found: Plan | None, corrections: dict[str, tuple[float, float]]) -> Size:
        """One size, with what real steps say about the sum of ops."""
        first, last = self.steps[0], self.steps[-1]
        part = math.log(min(batch, last) / first) / math.log(last / first)
        more = {way: low * (high / low) ** part for way, (low, high) in corrections.items()}
        eager = self.eager(batch)
        planned = None if found is None else Way(found.peak, found.seconds * more["plan"], True)
        return Size(batch, batch in self.measured, replace(eager, seconds=eager.seconds * more["eager"]), planned)


def _median(step: Callable[[], Any]) -> float:
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


def _between(graph: Graph, one: Costs, other: Costs, part: float) -> Costs:
    """The costs of a graph on the line through those of two others; between them, or beyond one."""

    def line(low: float, high: float) -> float:
        return low + (high - low) * part

    def bytes_(low: Sequence[int], high: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(0, math.ceil(line(a, b))) for a, b in zip(low, high, strict=True))

    least_seconds = [min(a, b) for a, b in zip(one.seconds, other.seconds, strict=True)]
    seconds = zip(one.seconds, other.seconds, least_seconds, strict=True)
    plain = [value.nbytes for value in graph.values]
    return replace(
        other,
        graph=graph.fingerprint,
        seconds=tuple(max(line(a, b), low if part > 0 else 0.5 * low) for a, b, low in seconds),
        extra=bytes_(one.extra, other.extra),
        inside=bytes_(one.inside, other.inside) if one.inside and other.inside else (),
        nbytes=tuple(max(a, b) for a, b in zip(plain, bytes_(one.nbytes, other.nbytes), strict=True)),
        in_place=tuple(
            tuple(pair for pair in a if pair in b) for a, b in zip(one.in_place, other.in_place, strict=True)
        ),
    )
