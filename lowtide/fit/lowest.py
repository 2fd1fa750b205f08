"""The fewest bytes of a step with all that may be done to it: what the budget "least" stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from lowtide.candidates import MANY_OPS
from lowtide.choice import Leave
from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.plan.planning import Planning
from lowtide.rewrites import Rewrite
from lowtide.trials import with_tried


def lowest(
    graph: Graph, price: Callable[[Graph], Costs], leave: Leave, planning: Callable[[Graph, Costs], Planning]
) -> int:
    """The least peak of all graphs that a step may be planned as, with the strongest settings of what is allowed."""
    peaks = []
    for rewrites, allowed in _rows(graph, leave, with_tried(leave, graph, price)[0]):
        candidate = allowed.apply(graph, rewrites).graph
        if rewrites and len(candidate.ops) > MANY_OPS:
            continue  # to plan it takes minutes
        costs = price(candidate)
        if not costs.differing:  # else it has calls of other sizes than those that were tried
            peaks.append(planning(candidate, costs).least().peak)
    return min(peaks)


def _rows(graph: Graph, leave: Leave, tried: Leave) -> Iterator[tuple[tuple[Rewrite, ...], Leave]]:
    """What may be done to the step, the strongest of each kind: kernels of ours, parts, and what loses most."""
    for one in (leave,) if tried is leave else (leave, tried):
        for lossy in dict.fromkeys(((), one.levels(graph)[-1][-1])):
            for _, way in groupby(one.after(graph, lossy), key=lambda mild: tuple(item.name for item in mild)):
                *_, finest = way
                yield (*finest, *lossy), one
