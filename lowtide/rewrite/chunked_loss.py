"""The head of a model and its loss in parts, forward and backward: the largest values before a loss are never whole."""

from __future__ import annotations

from dataclasses import replace

from lowtide.graph import Graph
from lowtide.resized import Resized
from lowtide.rewrite.axis import Axis, Coupled, axis_of
from lowtide.rewrite.merge import merged
from lowtide.rewrite.microbatch import rungs
from lowtide.rewrite.parts import split
from lowtide.rewrite.region import between, region, splittable

NEAR = 8  # ops from the loss to the results that are looked for
LARGE = 0.5  # of the largest of them: what is smaller is where the region may end
WORTH = 0.25  # of the largest activation of the step: smaller ones are not worth it


def chunked_loss(graph: Graph, parts: int, resized: Resized) -> Graph:
    """The graph with its head and loss in so many parts; as it is, with a note, where examples are coupled there."""
    parts = min(parts, resized.examples)
    try:
        axis = axis_of(graph, resized)
        wanted = _head(axis)
        found = region(axis, wanted) if wanted else None
    except Coupled as error:
        return replace(graph, notes=(*graph.notes, f"head and loss are not split: {error}."))
    if parts < 2 or found is None or not found.ops:
        return graph
    done = f"head and loss run in {parts} parts; gradients are those of the whole batch, up to rounding."
    return replace(split(axis, [(found, parts)]), notes=(*graph.notes, done))


def counts(graph: Graph, resized: Resized) -> list[int]:
    """Into how many parts head and loss may be split; none where that saves nothing, or examples are coupled there."""
    try:
        return rungs(resized.examples) if _head(axis_of(merged(graph), resized)) else []
    except Coupled:
        return []


def _head(axis: Axis) -> set[int]:
    """The ops around the largest values near the loss, and all between them; nothing where others are larger."""
    graph, may = axis.graph, splittable(axis)
    near = _near_the_loss(axis, may)
    nbytes = {value: graph.values[value].nbytes for op in may for value in graph.makes[op] if axis.dim(value) >= 0}
    largest = max((nbytes.get(value, 0) for op in near for value in graph.makes[op]), default=0)
    if not largest or largest < WORTH * max(nbytes.values()):
        return set()
    found = {op for op in near if any(nbytes.get(made, 0) >= LARGE * largest for made in graph.makes[op])}
    while True:
        values = {value for op in found for value in (*graph.reads[op], *graph.makes[op])}
        large = [value for value in values if nbytes.get(value, 0) >= LARGE * largest]
        more = {op for value in large for op in (graph.maker[value], *graph.readers[value])} & may
        if more <= found:
            return found | (between(graph, found) & may)
        found |= more


def _near_the_loss(axis: Axis, may: set[int]) -> set[int]:
    """The last ops of the forward with the examples in them: those that lead to the first ops of the backward."""
    graph = axis.graph
    backward = [op for op in graph.ordinary if graph.ops[op].phase == "backward" and op in may][:NEAR]
    found: set[int] = set()
    edge = set(backward)
    for _ in range(NEAR):
        edge = {graph.maker[value] for op in edge for value in graph.reads[op]} - found - {-1}
        edge = {op for op in edge if graph.ops[op].phase == "forward"}
        found |= edge
    return found & may
