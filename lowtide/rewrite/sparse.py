"""Sparse weights: values where a mask has a bit, and nothing elsewhere: no state, no update.

What differs: the weights that have no bit are zero, the smallest ones at first. With a mask that stays, training is
that of the dense model whose weights and gradients are multiplied by the mask, up to rounding. Convolutions and linear
layers take the values as they are; other ops, or all where that is said, get the dense weight while they run, and make
a dense gradient, which is read at the bits.

A setting is a density and words behind it: `0.3`, `0.3/dense`, `0.3/move`, `0.3/move:200`. Weights that move do so
between steps, in `fit/moving.py`; gradients have room for as many as a layer may then have.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lowtide.errors import UsageError
from lowtide.forms import BLOCK
from lowtide.graph import Graph, Input
from lowtide.rewrite.forms import Layout, candidates, in_parts
from lowtide.rewrite.sparse_products import LEAST, with_kernels
from lowtide.rewrites import Setting

DENSITIES = (0.3, 0.2, 0.1, 0.05, 0.02)  # that are tried where nothing is said, the mildest first
DENSE = "dense"  # the word for dense weights while their layers run, and torch's kernels
MOVE = re.compile(r"move(?:[:=](\d+))?")  # the word for weights that move, every so many steps
EVERY = 100  # steps, where nothing is said
GROWTH, LEAST_GROWTH = 0.25, 16384  # a layer may gain so large a part of its weights, or so many
INDEXED = ("embedding", "index_select", "gather")  # rows that are looked up get gradients now and then only


@dataclass(frozen=True)
class Choice:
    """What a setting says."""

    density: float  # the part of the weights that there are
    kernels: bool = True  # products straight from the values
    every: int = 0  # steps after which weights move; 0: never


def read_choice(setting: Setting) -> Choice:
    """What a setting says."""
    number, *words = str(DENSITIES[0] if setting is None else setting).split("/")
    moves = [found for found in map(MOVE.fullmatch, words) if found is not None]
    every = int(moves[0][1] or EVERY) if moves else 0
    try:
        density = float(number)
    except ValueError:
        density = 0.0
    known = len(moves) + words.count(DENSE) == len(words) == len({word[:4] for word in words})
    if not 0 < density < 1 or not known or (moves and not every):
        raise UsageError(
            f"sparse has no setting {setting!r}.",
            hint="write sparse:0.3 for a density of 30%, sparse:0.3/move:200 for weights that move every 200 steps, or "
            "sparse:0.3/dense for dense weights while their layers run.",
        )
    return Choice(density, DENSE not in words, every)


def room(count: int, elements: int) -> int:
    """How many weights a layer may have at most that has so many at first."""
    more = max(int(GROWTH * count), LEAST_GROWTH) // BLOCK * BLOCK
    return max(count, min(count + more, elements // BLOCK * BLOCK))


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
