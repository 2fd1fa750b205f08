"""The one editor of graphs: new values, views and ops, and the graph of what is there when it is done.

A pass that only adds optional ops, or changes ops in their places, ends with `grown`. One that takes ops out, or puts
others in their places, ends with `reordered`: that finds an order in which they can run, and numbers the values anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from lowtide.graph import Alternative, Arg, Graph, Op, Read, Value, View, waits
from lowtide.kernels.shapes import Shapes

Key = tuple[int, int, int]  # where an op wants to be: in the place of this op, at this step, then as it was put


@dataclass(frozen=True)
class Placed:
    """An ordinary op, and where it wants to be."""

    key: Key
    origin: int  # the op of the old graph that it is, or does a part of
    op: Op


class Editor:
    """A graph that is being changed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values, self.views = list(graph.values), list(graph.views)
        self.inputs, self.outputs = list(graph.inputs), list(graph.outputs)
        self.released: set[int] = set()  # values that the caller held, and that end with their last reader now
        self.placed = {op: Placed((op, -1, 0), op, graph.ops[op]) for op in graph.ordinary}  # by number
        self.optional = [op for op in graph.ops if op.optional]
        self.alternatives = list(graph.alternatives)
        self.count = len(graph.ordinary)  # of numbers that ordinary ops ever had
        self.storage = max((value.storage for value in graph.values), default=0)  # the last one that is taken
        self.known = {view: number for number, view in reversed(list(enumerate(graph.views)))}
        self.shapes = Shapes(self.values, self.views)

    def value(self, like: Value) -> int:
        """A new value like this one, in a storage of its own."""
        self.storage += 1
        self.values.append(replace(like, storage=self.storage))
        return len(self.values) - 1

    def view(self, view: View) -> int:
        """The number of a view."""
        number = self.known.setdefault(view, len(self.views))
        if number == len(self.views):
            self.views.append(view)
        return number

    def change(self, index: int, op: Op) -> None:
        """Let an ordinary op be another one, in the same place."""
        self.placed[index] = replace(self.placed[index], op=op)

    def take_out(self, index: int) -> None:
        """Take out an ordinary op."""
        del self.placed[index]

    def put(self, anchor: int, step: int, origin: int, op: Op) -> None:
        """Add an ordinary op that does a part of an old one; what is new of its results gets the sizes that it has."""
        for value, form in zip(op.outputs, self.shapes.made(op), strict=True):
            if value is not None and form is not None and value >= len(self.graph.values):
                self.values[value] = replace(
                    self.values[value], dtype=form.dtype, shape=form.shape, stride=form.stride, nbytes=form.nbytes
                )
        self.placed[self.count] = Placed((anchor, step, self.count), origin, op)
        self.count += 1

    def offer(self, op: Op) -> int:
        """Add an op that a program may run or not: its number in the graph that is grown."""
        self.optional.append(replace(op, optional=True))
        return len(self.graph.ordinary) + len(self.optional) - 1

    def grown(self) -> Graph:
        """The graph with what was added and changed; every op and value has the number that it had."""
        return replace(
            self.graph,
            ops=(*(self.placed[op].op for op in self.graph.ordinary), *self.optional),
            values=tuple(self.values),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            views=tuple(self.views),
            alternatives=tuple(self.alternatives),
        )

    def reordered(self) -> Graph:
        """The graph of the ops, in an order in which they can run, and of the values that they make."""
        if self.optional or self.alternatives:
            raise ValueError("ops are taken out of a graph and put into it before it gets optional ones")
        placed = _in_order(sorted(self.placed.values(), key=lambda item: item.key))
        ops = [item.op for item in placed]
        last = _last_of_each(placed, len(self.graph.ops))
        ends = dict.fromkeys(range(len(self.values)), -1)  # the last op that makes or reads each value
        for number, op in enumerate(ops):
            ends.update(dict.fromkeys((*op.makes, *op.reads), number))
        there = {item.value for item in self.inputs}.union(*(op.makes for op in ops))
        numbers = {old: new for new, old in enumerate(sorted(there))}
        return replace(
            self.graph,
            ops=tuple(_renumbered(op, numbers) for op in ops),
            values=tuple(self._ending(value, ends[value], last) for value in numbers),
            inputs=tuple(replace(item, value=numbers[item.value]) for item in self.inputs),
            outputs=tuple(replace(item, value=numbers[item.value]) for item in self.outputs),
            views=tuple(replace(view, args=_arguments(view.args, numbers)) for view in self.views),
        )

    def _ending(self, value: int, end: int, last: list[int]) -> Value:
        """A value that is let go of after the same op as before, or after its last reader if it is new."""
        item = self.values[value]
        if value < len(self.graph.values) and value not in self.released:
            end = -1 if item.eager_end < 0 else max(end, last[item.eager_end])
        return replace(item, eager_end=end)

    def row(self, alternative: Alternative) -> None:
        """Add a way to be without a value for a while."""
        self.alternatives.append(alternative)


def _last_of_each(placed: list[Placed], count: int) -> list[int]:
    """For each op of the old graph the last that does a part of it, or of those before it where it was taken out."""
    last = [-1] * count
    for number, item in enumerate(placed):
        last[item.origin] = number
    before = accumulate(last, max)
    return [number if number >= 0 else earlier for number, earlier in zip(last, before, strict=True)]


def _in_order(placed: list[Placed]) -> list[Placed]:
    """The ops by their keys, but each after all that it waits for; they come sorted by their keys."""
    ops = [item.op for item in placed]
    waiting = [set(before) for before in waits(ops, [op.updates for op in ops])]
    followers: list[list[int]] = [[] for _ in placed]
    for number, others in enumerate(waiting):
        for other in others:
            followers[other].append(number)
    ready = [number for number, others in enumerate(waiting) if not others]
    heapq.heapify(ready)
    found = []
    while ready:
        number = heapq.heappop(ready)
        found.append(placed[number])
        for follower in followers[number]:
            waiting[follower].discard(number)
            if not waiting[follower]:
                heapq.heappush(ready, follower)
    assert len(found) == len(placed), "the ops wait for each other"
    return found


def _renumbered(op: Op, numbers: dict[int, int]) -> Op:
    return replace(
        op,
        args=_arguments(op.args, numbers),
        kwargs=tuple((key, _argument(arg, numbers)) for key, arg in op.kwargs),
        outputs=tuple(None if value is None else numbers[value] for value in op.outputs),
        updates=tuple((numbers[new], numbers[old]) for new, old in op.updates),
    )


def _arguments(args: Iterable[Arg], numbers: dict[int, int]) -> tuple[Arg, ...]:
    return tuple(_argument(arg, numbers) for arg in args)


def _argument(arg: Arg, numbers: dict[int, int]) -> Arg:
    if isinstance(arg, Read):
        return Read(numbers[arg.value], arg.view)
    return _arguments(arg, numbers) if isinstance(arg, tuple) else arg
