"""Sparse weights: values where a mask has a bit, and nothing elsewhere: no state, no update.

What differs: the weights that have no bit are zero, the smallest ones at first. With a mask that stays, training is
that of the dense model whose weights and gradients are multiplied by the mask, up to rounding. Convolutions and linear
layers take the values as they are; other ops, or all where that is said, get the dense weight while they run, and make
a dense gradient, which is read at the bits.
"""

from __future__ import annotations

import math

from lowtide.forms import BLOCK
from lowtide.graph import Graph, Input
from lowtide.rewrite.forms import Layout, candidates, in_parts
from lowtide.rewrite.sparse_products import with_kernels
from lowtide.rewrites import Setting
from lowtide.sparsity import read_choice, room

LEAST = 4096  # elements of a weight: smaller ones, and vectors, matter more than they weigh
INDEXED = ("embedding", "index_select", "gather")  # rows that are looked up get gradients now and then only


def sparse(graph: Graph, setting: Setting) -> Graph:
    """The graph whose large weights have values at the bits of a mask."""
    choice = read_choice(setting)
    chosen: list[tuple[Input, Layout]] = []
    counts: dict[str, tuple[tuple[int, ...], int]] = {}
    rooms: dict[str, int] = {}  # of gradients: as many values as a weight may ever have
    for item in candidates(graph, "parameter"):
        value = graph.values[item.value]
        elements = math.prod(value.shape)
        if len(value.shape) < 2 or elements < LEAST or not _trained(graph, item) or _indexed(graph, item):
            continue
        count = min(elements, max(1, round(choice.density * elements / BLOCK)) * BLOCK)
        counts[str(item.path[0])] = value.shape, count
        rooms[str(item.path[0])] = room(count, elements) if choice.every else count
        chosen.append((item, Layout(count=count)))
    for item in candidates(graph, "state"):
        shape, count = counts.get(str(item.path[0]), ((), 0))
        if graph.values[item.value].shape == shape:
            chosen.append((item, Layout(count=count)))
    if not counts:
        return graph
    divided = in_parts(graph, chosen)
    return with_kernels(divided, rooms) if choice.kernels else divided


def _trained(graph: Graph, item: Input) -> bool:
    storage = graph.values[item.value].storage
    return any(graph.values[old].storage == storage for op in graph.ops for _, old in op.updates)


def _indexed(graph: Graph, item: Input) -> bool:
    return any(word in graph.ops[op].target for op in graph.readers[item.value] for word in INDEXED)
