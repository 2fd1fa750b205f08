"""Windows: an order cut where it holds little, so that each piece is planned as a step of its own.

A batch in parts is a row of small steps, and little lives from one to the next: sums of gradients, and what the parts
still read. Searches over all of them at once change one part at a time, and know one place where a backward begins.
Here the order is cut at its waists, the windows between them are graphs of their own, and identical ones are planned
once, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lowtide.costs import Costs
from lowtide.graph import Alternative, Graph, Input, Op, Output, Read
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.plan.settings import WAISTS, WINDOW_CLASSES, WINDOW_LEAST

Plan = Callable[["Window", int], Ints | None]  # a window and its bytes -> a sequence of its ops


@dataclass(frozen=True)
class Window:
    """A piece of an order as a graph of its own: what comes from before it are inputs, what goes on are outputs."""

    graph: Graph
    costs: Costs
    ops: tuple[int, ...]  # of the whole graph, for each op of this one
    beside: int  # bytes that are there all the time, beside what the window's own graph has

    @cached_property
    def signature(self) -> bytes:
        """Equal for windows of which a sequence of one is a sequence of the other, with the same bytes in use."""
        arrays = problem(self.graph, self.costs)
        rows = (arrays.read_start, arrays.reads, arrays.make_start, arrays.makes, arrays.over_made, arrays.over_read)
        sizes = (arrays.nbytes, arrays.maker, arrays.killer, arrays.temporaries, arrays.required, arrays.pinned)
        more = (arrays.repeatable, arrays.optional, np.array([arrays.persistent, self.beside], np.int64))
        table = (arrays.table.start, arrays.table.keeper, arrays.table.instead_op)
        return b"|".join(array.tobytes() for array in (*rows, *sizes, *more, *table))


def windows(whole: Problem, order: Ints) -> list[Window]:
    """The windows of an order, first to last; none where it has no waists, or few of its windows are alike."""
    held = _held(whole, order)
    own = int(whole.profile(order).max(initial=0))
    for part in WAISTS:
        ends = waists(held, int(part * own))
        pieces = [order[first:last] for first, last in zip([0, *ends], [*ends, len(order)], strict=True)]
        if len(pieces) >= WINDOW_LEAST and _repeats(whole, pieces):
            return list(_windows(whole, pieces))
    return []


def in_windows(found: list[Window], budget: int, plan: Plan) -> Ints | None:
    """The sequences of all windows one after the other, each within the budget; None where one has none."""
    known: dict[bytes, Ints | None] = {}
    sequences = []
    for window in found:
        key = window.signature
        if key not in known:
            known[key] = plan(window, budget - window.beside)
        inside = known[key]
        if inside is None:
            return None
        sequences.append(np.array(window.ops, np.int64)[inside])
    return np.concatenate(sequences)


def _held(whole: Problem, order: Ints) -> Ints:
    """The bytes that are there between the run before each place and the one at it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(map(int, order)):
        for value in whole.make_rows[op]:
            first.setdefault(value, place)
        last.update(dict.fromkeys(whole.read_rows[op], place))
    change = np.zeros(len(order) + 1, np.int64)
    for value, place in first.items():
        end = len(order) if whole.required[value] else last.get(value, place)
        if end > place:
            change[place + 1] += whole.nbytes[value]
            change[min(end + 1, len(order))] -= whole.nbytes[value]
    return np.cumsum(change)[: len(order)]


def waists(held: Ints, most: int) -> list[int]:
    """One place in each row of places, inside, at which few bytes are there: the one with the fewest."""
    found = []
    low = np.flatnonzero(held <= most)
    for row in np.split(low, np.flatnonzero(np.diff(low) > 1) + 1):
        if len(row) and row[0] > 0 and row[-1] < len(held) - 1:
            found.append(int(row[held[row].argmin()]))
    return found


def _repeats(whole: Problem, pieces: list[Ints]) -> bool:
    """Whether much of the order is in pieces that call the same ops."""
    calls = {tuple(whole.graph.ops[op].target for op in piece) for piece in pieces}
    few = len(calls) <= WINDOW_CLASSES * len(pieces)
    return few and sum(map(len, calls)) <= WINDOW_CLASSES * sum(map(len, pieces))


def _windows(whole: Problem, pieces: list[Ints]) -> Iterator[Window]:
    graph = whole.graph
    inside = np.full(len(graph.ops), -1, np.int64)
    for number, piece in enumerate(pieces):
        inside[piece] = number
    last = np.full(len(graph.values), -1, np.int64)  # the last window that reads each value
    for number, piece in enumerate(pieces):
        for op in piece:
            last[whole.read_rows[op]] = number
    last[np.flatnonzero(whole.required)] = len(pieces)
    offered = _offered(whole, inside)
    for number, piece in enumerate(pieces):
        yield _Writer(whole, inside, last, number).write([*map(int, piece)], offered.get(number, []))


def _offered(whole: Problem, inside: Ints) -> dict[int, list[int]]:
    """For each window the optional ops all of whose values are made in it, or are there all the time."""
    found: dict[int, list[int]] = {}
    where = {value: int(inside[op]) for op in np.flatnonzero(inside >= 0) for value in whole.make_rows[op]}
    for op in np.flatnonzero(whole.optional):
        makers = {where[value] for value in (*whole.read_rows[op], *whole.make_rows[op]) if value in where}
        if len(makers) == 1:
            (number,) = makers
            where |= dict.fromkeys(whole.make_rows[op], number)
            found.setdefault(number, []).append(int(op))
    return found


class _Writer:
    """Writes one window."""

    def __init__(self, whole: Problem, inside: Ints, last: Ints, number: int) -> None:
        self.whole, self.graph, self.inside, self.last, self.number = whole, whole.graph, inside, last, number
        self.numbers: dict[int, int] = {}  # value of the whole graph -> of this one

    def write(self, piece: list[int], offered: list[int]) -> Window:
        graph, costs = self.graph, self.whole.costs
        ops = (*piece, *offered)
        places = {op: place for place, op in enumerate(ops)}
        made = {value for op in piece for value in graph.makes[op]}
        for op in ops:
            for value in (*graph.reads[op], *graph.makes[op]):
                self.numbers.setdefault(value, len(self.numbers))
        given = [value for value in self.numbers if value not in made and self._is_given(value)]
        kept = [value for value in self.numbers if value in made and self.last[value] > self.number]
        sums = self._sums(piece, set(given), set(kept))
        storages = {value: graph.values[sums.get(value, value)].storage for value in self.numbers}
        smaller = Graph(
            ops=tuple(self._op(op, sums) for op in ops),
            values=tuple(replace(graph.values[v], storage=storages[v], eager_end=-1) for v in self.numbers),
            inputs=tuple(Input(self.numbers[value], (place,)) for place, value in enumerate(given)),
            outputs=tuple(Output(self.numbers[value], "result", (place,)) for place, value in enumerate(kept)),
            alternatives=tuple(self._alternatives(places)),
            device=graph.device,
            generator_bytes=graph.generator_bytes,
        )
        inside = Costs(
            graph="",
            seconds=tuple(costs.seconds[op] for op in ops),
            arena_temporaries=tuple(costs.arena_temporaries[op] for op in ops),
            nbytes=tuple(costs.nbytes[value] for value in self.numbers),
            in_place=tuple(
                tuple((self.numbers[new], self.numbers[old]) for new, old in costs.in_place[op] if new not in sums)
                for op in ops
            ),
            origin=costs.origin,
            machine=costs.machine,
            heap_temporaries=tuple(costs.heap_temporaries[op] for op in ops) if costs.heap_temporaries else (),
            alignment=costs.alignment,
        )
        return Window(smaller, inside, ops, self._beside(given, inside))

    def _is_given(self, value: int) -> bool:
        """Whether a value that the window does not make is there when it begins."""
        maker = int(self.whole.maker[value])
        return maker < 0 or not self.whole.optional[maker]

    def _beside(self, given: list[int], inside: Costs) -> int:
        """The bytes of what the window neither reads nor makes, and of the caller's that it does not read."""
        crossing = sum(
            int(self.whole.nbytes[value])
            for value in np.flatnonzero((self.last > self.number) & (self.whole.nbytes > 0))
            if value not in self.numbers and 0 <= self.inside[self.whole.maker[value]] < self.number
        )
        known = self.graph.device_storages
        lasting = {self.graph.values[value].storage: inside.nbytes[self.numbers[value]] for value in given}
        return crossing + self.whole.persistent - sum(size for one, size in lasting.items() if one in known)

    def _sums(self, piece: list[int], given: set[int], kept: set[int]) -> dict[int, int]:
        """Results that go on and may take the place of what came: new value -> the one that it is written over."""
        found: dict[int, int] = {}
        for op in piece:
            for new, old in self.whole.over_rows[op]:
                ends = old in given and self.last[old] == self.number and self.graph.maker[old] >= 0
                alone = sum(old in self.whole.read_rows[other] for other in piece) == 1 if ends else False
                if ends and alone and new in kept and old not in found.values() and not self.graph.ops[op].updates:
                    found[new] = old
        return found

    def _op(self, op: int, sums: dict[int, int]) -> Op:
        item, numbers = self.graph.ops[op], self.numbers
        outputs = [None if value is None or value in sums else numbers[value] for value in item.outputs]
        over = [(numbers[new], numbers[sums[new]]) for new in item.makes if new in sums]
        return replace(
            item,
            args=tuple(Read(numbers[value]) for value in self.graph.reads[op]),
            kwargs=(),
            outputs=tuple(outputs),
            updates=(*((numbers[new], numbers[old]) for new, old in item.updates), *over),
        )

    def _alternatives(self, places: dict[int, int]) -> Iterator[Alternative]:
        """The rows whose ops are all here."""
        for row in self.graph.alternatives:
            ops = {row.store, *row.restore, *(op for pair in row.instead for op in pair)} - {-1}
            if row.place == "device" and ops <= places.keys() and {row.value, row.keeper} <= self.numbers.keys():
                yield Alternative(
                    self.numbers[row.value],
                    self.numbers[row.keeper],
                    store=places.get(row.store, -1),
                    restore=tuple(places[op] for op in row.restore),
                    instead=tuple((places[one], places[other]) for one, other in row.instead),
                )
