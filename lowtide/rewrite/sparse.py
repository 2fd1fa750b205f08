"""Sparse weights: values where a mask has a bit, and nothing elsewhere: no state, no update.

What differs: the weights that have no bit are zero, the smallest ones at first. With a mask that stays, training is
that of the dense model whose weights and gradients are multiplied by the mask, up to rounding. The dense weight is made
for the ops that need it, and so is its gradient, which is read at the bits.
"""

from __future__ import annotations

import math

from lowtide.errors import UsageError
from lowtide.forms import BLOCK
from lowtide.graph import Graph, Input
from lowtide.rewrite.forms import Layout, candidates, in_parts
from lowtide.rewrites import Setting

DENSITY = 0.3  # where nothing is said
LEAST = 4096  # elements of a weight: smaller ones, and vectors, matter more than they weigh
INDEXED = ("embedding", "index_select", "gather")  # rows that are looked up get gradients now and then only


def read_density(setting: Setting) -> float:
    """The part of the weights that there are."""
    try:
        found = float(DENSITY if setting is None else setting)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise UsageError(f"sparse has no setting {setting!r}.", hint="write sparse:0.3 for a density of 30%.")
    return found


def sparse(graph: Graph, setting: Setting) -> Graph:
    """The graph whose large weights have values at the bits of a mask."""
    density = read_density(setting)
    chosen: list[tuple[Input, Layout]] = []
    counts: dict[str, tuple[tuple[int, ...], int]] = {}
    for item in candidates(graph, "parameter"):
        value = graph.values[item.value]
        elements = math.prod(value.shape)
        if len(value.shape) < 2 or elements < LEAST or not _trained(graph, item) or _indexed(graph, item):
            continue
        count = max(1, round(density * elements / BLOCK)) * BLOCK
        counts[str(item.path[0])] = value.shape, count
        chosen.append((item, Layout(count=count)))
    for item in candidates(graph, "state"):
        shape, count = counts.get(str(item.path[0]), ((), 0))
        if graph.values[item.value].shape == shape:
            chosen.append((item, Layout(count=count)))
    return in_parts(graph, chosen) if counts else graph


def _trained(graph: Graph, item: Input) -> bool:
    storage = graph.values[item.value].storage
    return any(graph.values[old].storage == storage for op in graph.ops for _, old in op.updates)


def _indexed(graph: Graph, item: Input) -> bool:
    return any(word in graph.ops[op].target for op in graph.readers[item.value] for word in INDEXED)
