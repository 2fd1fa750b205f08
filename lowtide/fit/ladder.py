"""Sizes that are planned ahead, so that batches of ever other lengths need few searches.

A batch that is longer than all before is planned at a *notch* above it, with room for those that come; shorter ones
take the sequence of the next larger notch. Which sizes change is seen from the batches; nothing is ever padded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lowtide import tree
from lowtide.graph import Graph

AHEAD = 1.3  # times the size that came: a notch above all known sizes
BETWEEN = 1.1  # the same for a notch below a known one
EVEN = 8  # sizes of notches are multiples of this
EMBEDDING = "aten.embedding.default"
SEARCHES = 6  # that other sizes may ask for; then what is known is made to do where it can

Shapes = tuple[tuple[int, ...] | None, ...]  # of the leaves of a batch; None: no tensor


class Ladder:
    """What is known of the sizes of one step's batches."""

    def __init__(self) -> None:
        self.searches = 0  # for notches and for sizes that no notch has
        self._first: Shapes | None = None
        self._largest: Shapes | None = None  # of each dimension
        self._too_large: set[Shapes] = set()  # notches for which there is no plan
        self._limits: dict[int, int] = {}  # by a size, how large the step lets it become

    def see(self, batch: tuple[Any, ...]) -> None:
        """A batch has come."""
        shapes = _shapes(batch)
        if self._first is None or not _alike(self._first, shapes):
            self._first = self._largest = shapes
            self._too_large.clear()
        assert self._largest is not None
        pairs = zip(self._largest, shapes, strict=True)
        self._largest = tuple(
            None if one is None or other is None else tuple(map(max, one, other)) for one, other in pairs
        )

    def learn(self, graph: Graph) -> None:
        """Of a captured step: how many positions its tables have, which no size of a batch goes beyond."""
        for size, rows in positions(graph).items():
            self._limits[size] = min(rows, self._limits.get(size, rows))

    def above(self, batch: tuple[Any, ...], ahead: float = AHEAD) -> tuple[Any, ...] | None:
        """A batch without contents whose changing sizes are those of a notch; None where that is no larger."""
        if self.searches >= SEARCHES:
            ahead **= 2
        leaves, structure = tree.flatten(batch)
        shapes = self._raised(_shapes(batch), ahead)
        if shapes is None or shapes == _shapes(batch) or shapes in self._too_large:
            return None
        made = [
            leaf if shape is None else leaf.new_empty(shape).requires_grad_(leaf.requires_grad)
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return tuple(structure.build(made))

    def refuse(self, notch: tuple[Any, ...]) -> None:
        """There is no plan for this notch within the budget."""
        self._too_large.add(_shapes(notch))

    def _raised(self, shapes: Shapes, ahead: float) -> Shapes | None:
        """These sizes, those that change with room above them."""
        assert self._first is not None
        assert self._largest is not None
        found: list[tuple[int, ...] | None] = []
        for shape, first, largest in zip(shapes, self._first, self._largest, strict=True):
            if shape is None or first is None or largest is None:
                found.append(None)
                continue
            sizes = zip(shape, first, largest, strict=True)
            found.append(tuple(min(_notch(*one, ahead), self._limits.get(one[0], sys.maxsize)) for one in sizes))
        return tuple(found)


def _notch(size: int, first: int, largest: int, ahead: float) -> int:
    if size == first == largest:
        return size  # it never grew
    even = -(-math.ceil(size * ahead) // EVEN) * EVEN
    return min(even, largest) if size < largest else even


def positions(graph: Graph) -> dict[int, int]:
    """By a number of positions that a step looks up, whatever its batch contains, how many its table has."""
    data = {item.value for item in graph.inputs if graph.values[item.value].kind == "batch"}
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.target == EMBEDDING:
            table, indices = (read.value for read in op.arguments())
            if indices not in data and graph.values[indices].shape:
                size, rows = graph.values[indices].shape[-1], graph.values[table].shape[0]
                found[size] = min(rows, found.get(size, rows))
        elif data.intersection(op.reads):
            data.update(op.makes)
    return found


def _shapes(batch: tuple[Any, ...]) -> Shapes:
    leaves, _ = tree.flatten(batch)
    return tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def _alike(one: Shapes, other: Shapes) -> bool:
    """Whether two batches have as many tensors, of as many dimensions."""
    return [_dimensions(shape) for shape in one] == [_dimensions(shape) for shape in other]


def _dimensions(shape: Sequence[int] | None) -> int | None:
    return None if shape is None else len(shape)
