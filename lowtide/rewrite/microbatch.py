"""Microbatches: the whole forward and backward in parts of the batch, with the gradients of all of it."""

from __future__ import annotations

from dataclasses import replace

from lowtide.graph import Graph
from lowtide.resized import Resized
from lowtide.rewrite.axis import Coupled, axis_of
from lowtide.rewrite.merge import merged
from lowtide.rewrite.parts import split
from lowtide.rewrite.region import Region, region, splittable

RUNGS = (2, 8, 32)  # parts that are tried, and one example in each


def microbatch(graph: Graph, parts: int, resized: Resized) -> Graph:
    """The graph with its forward and backward in so many parts; as it is, with a note, where examples are coupled."""
    parts = min(parts, resized.examples)
    try:
        found = _everything(graph, resized)
    except Coupled as error:
        return replace(graph, notes=(*graph.notes, f"the batch is not split: {error}."))
    if parts < 2 or not found.ops:
        return graph
    done = f"the batch runs in {parts} parts; gradients are those of all of it, up to rounding."
    return replace(split(axis_of(graph, resized), [(found, parts)]), notes=(*graph.notes, done))


def counts(graph: Graph, resized: Resized) -> list[int]:
    """Into how many parts the batch may be split; none where examples are coupled."""
    whole = merged(graph)
    try:
        found = _everything(whole, resized)
    except Coupled:
        return []
    return rungs(resized.examples // axis_of(whole, resized).together(found.ops)) if found.ops else []


def rungs(examples: int) -> list[int]:
    """Numbers of parts to try, down to one example in each."""
    return sorted({min(count, examples) for count in (*RUNGS, examples)} - {1})


def _everything(graph: Graph, resized: Resized) -> Region:
    """The region of all ops that have the examples in them, found out once; raises where they are coupled."""
    key = f"microbatch {graph.fingerprint}"
    if key not in resized.known:
        axis = axis_of(graph, resized)
        try:
            resized.known[key] = region(axis, splittable(axis))
        except Coupled as error:
            resized.known[key] = error
    found = resized.known[key]
    if isinstance(found, Coupled):
        raise found
    assert isinstance(found, Region)
    return found
