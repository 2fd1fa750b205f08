"""Microbatches: the whole forward and backward in parts of the batch, with the gradients of all of it."""

from __future__ import annotations

from dataclasses import replace

from lowtide.graph import Graph
from lowtide.resized import Resized
from lowtide.rewrite.axis import Axis, Coupled
from lowtide.rewrite.parts import split
from lowtide.rewrite.region import region, splittable


def microbatch(graph: Graph, parts: int, resized: Resized) -> Graph:
    """The graph with its forward and backward in so many parts; as it is, with a note, where examples are coupled."""
    parts = min(parts, resized.examples)
    try:
        axis = Axis(graph, resized)
        found = region(axis, splittable(axis))
    except Coupled as error:
        return replace(graph, notes=(*graph.notes, f"the batch is not split: {error}."))
    if parts < 2 or not found.ops:
        return graph
    done = f"the batch runs in {parts} parts; gradients are those of all of it, up to rounding."
    return replace(split(axis, [(found, parts)]), notes=(*graph.notes, done))


def counts(graph: Graph, resized: Resized) -> list[int]:
    """Into how many parts the batch may be split: 2, 4, 8, ... down to one example."""
    return [count for power in range(1, 11) if (count := 2**power) < 2 * resized.examples]
