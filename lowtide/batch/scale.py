"""A step at all batch sizes: captured and measured at a few of them, its peaks and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lowtide.capture import capture
from lowtide.costs import Costs
from lowtide.errors import BatchError, CaptureError, UsageError
from lowtide.graph import Graph
from lowtide.plan import BEST, as_eager, carry, least
from lowtide.program import Plan
from lowtide.resized import Resized
from lowtide.rewrite import EXACT, apply
from lowtide.rewrites import Rewrite
from lowtide.simulate import simulate
from lowtide.sizes import Way

LONGEST = 2.5  # seconds of a step by its ops, up to which sizes are measured; larger ones follow from these
APART = 4  # from one size that is measured to the next
MOST = 2**20  # examples: no size above is looked at
FINE = 16  # parts of a size: the largest batch is found to within one of them, or one example

Progress = Callable[[str], None]
Price = Callable[[Graph], Costs]


class Parts(NamedTuple):
    """A training step for one batch size."""

    step: Callable[..., Any]
    model: Any
    optimizer: Any
    example: tuple[Any, ...]


@dataclass
class Scale:
    """A step at all sizes, after some passes."""

    make: Callable[[int], Parts]
    budget: int
    price: Price
    tell: Progress
    name: str = ""  # of what the passes do
    passes: Callable[[Graph, int], tuple[Rewrite, ...]] = lambda graph, batch: ()  # besides those that keep every bit
    method: str = BEST  # by which the least peak is looked for
    captured: dict[int, Graph] = field(default_factory=dict)  # by batch size
    sizes: tuple[int, ...] = ()  # that are measured, where that is known

    def __post_init__(self) -> None:
        self.graphs: dict[int, Graph] = {}
        self.measured: dict[int, Costs] = {}

    def seen(self, batch: int) -> Graph:
        """The step of one size as it is captured."""
        if batch not in self.captured:
            self.tell(f"capturing a batch of {batch}")
            self.captured[batch] = capture(*self.make(batch)).graph
        return self.captured[batch]

    def graph(self, batch: int) -> Graph:
        """The step of one size after the passes."""
        if batch not in self.graphs:
            seen = self.seen(batch)
            rewrites = self.passes(seen, batch)
            self.graphs[batch] = apply(seen, (*EXACT, *rewrites), self.resized(batch)).graph
        return self.graphs[batch]

    def resized(self, batch: int) -> Resized:
        """The step of one size, and of others."""
        return Resized(self.seen(batch), batch, self.seen)

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
        return self.sizes or tuple(sorted(self.measured))

    def at(self, batch: int) -> tuple[Graph, Costs]:
        """The step of one size with its costs: where two sizes around it are alike, by the graph of one of them."""
        if (like := self.like(batch)) == batch:
            if batch not in self.measured:
                self.measured[batch] = self.price(self.graph(batch))
            return self.graph(batch), self.measured[batch]
        low, high = self._around(batch)
        costs = _between(self.at(low)[1], self.at(high)[1], (batch - low) / (high - low))
        graph = self.graph(like)
        return graph, replace(costs, graph=graph.fingerprint)

    def like(self, batch: int) -> int:
        """The size whose graph stands for that of another one: its own, or the one above it that is alike."""
        if batch in self.measured or batch in self.steps:
            return batch
        low, high = self._around(batch)
        return high if _alike(self.graph(low), self.graph(high)) else batch

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
        self.tell(f"looking for the least peak of a batch of {batch}{self.name and f' with {self.name}'}")
        graph, costs = self.at(batch)
        return graph, least(graph, costs, method=self.method)

    def smallest(self, batch: int) -> Plan:
        """The plan with the least peak, of any size: the one that is known, or else its own."""
        graph, costs = self.at(batch)
        known, found = self._lowest
        return carry(found, known, graph, costs, None) or least(graph, costs, method=self.method)

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
