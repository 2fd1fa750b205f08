"""Writes sequences: ops in order, and before each of them, made again, what it reads and was dropped meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from lowtide.plan.problem import Ints, Problem


class Links:
    """What each op reads and makes, as lists, and which ops may run again at all."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.reads = _rows(problem.read_start, problem.reads)
        self.makes = _rows(problem.make_start, problem.makes)
        self.maker: list[int] = problem.maker.tolist()
        self.repeatable: list[bool] = problem.repeatable.astype(bool).tolist()
        self.overwrites: dict[int, list[int]] = {}  # op -> inputs that are gone for good after it
        for value in np.flatnonzero(problem.killer >= 0).tolist():
            self.overwrites.setdefault(int(problem.killer[value]), []).append(value)


class Tape:
    """A sequence in the making; a value that nobody dropped is there from the run that makes it."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.ops: list[int] = []
        self.dropped: set[int] = set()
        self.overwritten: set[int] = set()  # inputs

    def run(self, op: int) -> None:
        """Run an op after all that it lacks."""
        reads = self.links.reads[op]
        if not self.dropped.isdisjoint(reads):
            self.bring(reads)
        self._append(op)

    def bring(self, values: Iterable[int]) -> None:
        """Make again those of the values that were dropped, and whatever that takes."""
        links, again = self.links, set[int]()
        waiting = [value for value in values if value in self.dropped]
        while waiting:
            value = waiting.pop()
            maker = links.maker[value]
            if value not in self.dropped or maker in again:
                continue
            if links.repeatable[maker] and self.overwritten.isdisjoint(links.reads[maker]):
                again.add(maker)
                waiting += links.reads[maker]
            else:
                self.dropped.remove(value)  # nothing can make it again: it was kept after all
        for op in sorted(again):
            self._append(op)

    def _append(self, op: int) -> None:
        self.ops.append(op)
        self.dropped.difference_update(self.links.makes[op])
        if op in self.links.overwrites:
            self.overwritten.update(self.links.overwrites[op])

    def sequence(self) -> Ints:
        """The sequence, without repeated runs whose results nobody reads."""
        links = self.links
        left = Counter(self.ops)
        wanted = set(np.flatnonzero(links.problem.required).tolist())
        kept: list[int] = []
        for op in reversed(self.ops):
            left[op] -= 1
            if not left[op] or not wanted.isdisjoint(links.makes[op]):
                kept.append(op)
                wanted.difference_update(links.makes[op])
                wanted.update(links.reads[op])
        return np.array(kept[::-1], np.int64)


def split_at_backward(problem: Problem, order: Ints) -> tuple[list[int], list[int]]:
    """The ops before the first one of the backward, and the others."""
    ops: list[int] = order.tolist()
    start = problem.graph.forward_ends(ops)
    return ops[:start], ops[start:]


def _rows(start: Ints, flat: Ints) -> list[list[int]]:
    items: list[int] = flat.tolist()
    return [items[begin:end] for begin, end in pairwise(start.tolist())]
