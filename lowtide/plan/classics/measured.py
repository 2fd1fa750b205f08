"""The segments of a real step as a chain of `rotor`: what each takes, and which of its internals are worth keeping.

Bytes are those of the memory profile, in place and temporaries included. A menu begins with all internals; then they go
one by one, and minimum cuts at several prices of a byte are tried besides. Identical segments are measured once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from itertools import chain
from operator import le

import numpy as np

from lowtide.plan.classics.cut import Net
from lowtide.plan.classics.rotor import Chain, Way
from lowtide.plan.classics.segments import Menus, Segment, Segments, Values
from lowtide.plan.classics.tape import Tape
from lowtide.plan.problem import Floats, Ints
from lowtide.plan.settings import MENU_FEW, MENU_PRICES

Menu = list[tuple[Way, Values]]


def measured_chain(segments: Segments, *, menus: bool) -> tuple[Chain, Menus]:
    """The chain, and the internals that each way of each segment keeps: one way for all of them, or a menu."""
    meter = Meter(segments)
    choose = meter.menu if menus else meter.whole
    known: dict[Hashable, list[tuple[Way, list[int]]]] = {}
    found: list[Menu] = []
    for number, part in enumerate(segments.parts):
        signature, values = meter.signature(number)
        place = {value: index for index, value in enumerate(values)}
        if signature not in known:
            known[signature] = [(way, [place[value] for value in keep]) for way, keep in choose(number, part)]
        found.append([(way, Values(values[at] for at in keep)) for way, keep in known[signature]])
    return meter.chain(found)


class Meter:
    """Measures stretches of the step as if nothing else were there."""

    def __init__(self, segments: Segments) -> None:
        self.segments, self.links, self.parts = segments, segments.links, segments.parts
        self.problem = segments.links.problem
        self.required = self.problem.required.copy()  # what outlives a stretch is marked here
        self.probe = replace(self.problem, required=self.required)
        self.last: dict[int, int] = {}  # of what the backward makes: the segment of its last reader
        for number, part in reversed(list(enumerate(self.parts))):
            for op in part.backward:
                self.last.update(dict.fromkeys(self.links.makes[op], number))
                self.last.update((value, number) for value in self.links.reads[op] if value in self.last)

    def chain(self, menus: Sequence[Menu]) -> tuple[Chain, Menus]:
        """The chain with these ways, to which gradients from before are added, and what each way keeps."""
        gradient = self.gradient()
        ways = []
        for number, menu in enumerate(menus):
            more = [float(gradient[number + way.stages - 1]) for way, _ in menu]
            ways.append(
                tuple(
                    replace(way, backward=way.backward + by, alone=way.alone + by)
                    for (way, _), by in zip(menu, more, strict=True)
                )
            )
        made = Chain(
            seconds=np.array([self.seconds(part.forward) for part in self.parts]),
            ways=tuple(ways),
            crossing=self.crossing(),
            transit=self.transit(),
            gradient=gradient,
        )
        return made, [[keep for _, keep in menu] for menu in menus]

    def seconds(self, ops: Iterable[int]) -> float:
        """The seconds of these runs."""
        return float(self.problem.seconds[list(ops)].sum())

    def nbytes(self, values: Iterable[int]) -> int:
        """The bytes of these values."""
        return int(self.problem.nbytes[list(values)].sum())

    def profile(self, ops: Sequence[int], outlive: Iterable[int]) -> Ints:
        """The bytes during each run beyond those at the start, when these values must be there at the end."""
        marked = list(outlive)
        self.required[marked] = 1
        found = self.probe.profile(np.array(ops, np.int64))
        self.required[marked] = self.problem.required[marked]
        return found

    def gradient(self) -> Floats:
        """The bytes that the backward has made and still needs when it comes to each segment."""
        found = np.zeros(len(self.parts))
        for number, part in enumerate(self.parts):
            for value in {value for op in part.backward for value in self.links.makes[op]}:
                end = 0 if self.problem.required[value] else self.last[value]
                found[end:number] += self.problem.nbytes[value]
        return found

    def crossing(self) -> Floats:
        """For each pair (i, k) the bytes that enter segment k and are made in i or later."""
        count = len(self.parts)
        born = {value: number for number, part in enumerate(self.parts) for value in part.made}
        found = np.zeros((count, count))
        for k, part in enumerate(self.parts):
            for value in part.entering:
                found[: born[value] + 1, k] += self.problem.nbytes[value]
        return found

    def transit(self) -> Floats:
        """For each pair (i, l) the most bytes in the forward of l on a run ahead from i."""
        count = len(self.parts)
        starts = np.cumsum([0, *(len(part.forward) for part in self.parts)])
        read: set[int] = set()  # by a later forward
        late: set[int] = set()  # only the backward of a later segment reads it
        for part in reversed(self.parts):
            late |= (part.made & part.leaving) - read
            read |= {value for op in part.forward for value in self.links.reads[op]}
        forward = [op for part in self.parts for op in part.forward]
        found = np.zeros((count, count))
        for i, part in enumerate(self.parts):
            if forward[starts[i] :]:
                profile = self.profile(forward[starts[i] :], [*part.entering, *late])
                found[i, i:] = np.maximum.reduceat(profile, starts[i:count] - starts[i])
        return found

    def way(self, number: int, part: Segment, keep: Values) -> Way:
        """What it takes, gradients from before aside, to keep these internals and to make others again."""
        touched = {v for op in part.backward for v in (*self.links.reads[op], *self.links.makes[op])}
        after = [*part.entering, *(value for value in touched if self.last.get(value, number) < number)]
        backward = self.backward(part, keep)
        there = (keep | part.leaving) & part.made & {value for op in backward for value in self.links.reads[op]}
        return Way(
            kept=self.nbytes(keep),
            forward=float(self.profile(part.forward, part.entering | keep | part.leaving).max(initial=0)),
            backward=self.nbytes(there) + float(self.profile(backward, after).max(initial=0)),
            alone=float(self.profile([*part.forward, *backward], after).max(initial=0)),
            seconds=self.seconds(backward) - self.seconds(part.backward),
        )

    def backward(self, part: Segment, keep: Values) -> list[int]:
        """The backward of a segment of which these internals were kept."""
        tape = Tape(self.links)
        tape.dropped = set(part.made - keep - part.leaving)
        for op in part.backward:
            tape.run(op)
        return tape.ops

    def whole(self, number: int, part: Segment) -> Menu:
        """The one way that keeps all internals."""
        return [(self.way(number, part, part.internals), part.internals)]

    def menu(self, number: int, part: Segment) -> Menu:
        """Ways to keep ever less, without those that are worse than another in everything; it begins at this number."""
        keeps = dict.fromkeys((*self.greedy(part), *self.cuts(part)))
        found = {keep: astuple(self.way(number, part, keep)) for keep in keeps}
        sizes = list(found.values())
        better = [size for size in sizes if not any(other != size and all(map(le, other, size)) for other in sizes)]
        return [(Way(*size), keep) for keep, size in found.items() if size in better]

    def greedy(self, part: Segment) -> Iterator[Values]:
        """All internals, then ever fewer: the one goes that costs the least seconds for its bytes."""
        keep = part.internals
        yield keep
        while keep and len(part.internals) <= MENU_FEW:
            now = self.seconds(self.backward(part, keep))
            price = {v: (self.seconds(self.backward(part, keep - {v})) - now) / self.nbytes([v]) for v in sorted(keep)}
            keep = keep - {min(price, key=price.__getitem__)}
            yield keep

    def cuts(self, part: Segment) -> Iterator[Values]:
        """The minimum cuts of the segment as a byte is made ever dearer."""
        problem = self.problem
        if part.internals:
            nbytes = problem.nbytes.astype(np.float64)
            nbytes[list(part.leaving)] = 0
            sizes, seconds = nbytes[list(part.internals)], max(self.seconds(part.forward), 1e-12)
            to_run = np.where(problem.repeatable, problem.seconds, np.inf)
            net = Net(self.links, part.forward, {value for op in part.backward for value in self.links.reads[op]})
            for price in np.geomspace(1e-3 * seconds / sizes.sum(), 2 * seconds / sizes.min(), MENU_PRICES):
                yield net.cheapest(price * nbytes, to_run) & part.made - part.leaving

    def signature(self, number: int) -> tuple[Hashable, list[int]]:
        """What is equal for segments that are identical, and their values in an order of their own."""
        part, problem = self.parts[number], self.problem
        rows: list[Hashable] = [len(part.forward)]
        place: dict[int, int] = {}
        for op in (*part.forward, *part.backward):
            over = problem.over_rows[op]
            reads, makes = self.links.reads[op], self.links.makes[op]
            for value in (*reads, *makes, *chain.from_iterable(over)):  # what is written over need not be read
                place.setdefault(value, len(place))
            rows.append((float(problem.seconds[op]), int(problem.temporaries[op]), self.links.repeatable[op]))
            rows.append(tuple(tuple(place[value] for value in values) for values in (reads, makes, *over)))
        for value in place:
            sets = (part.made, part.entering, part.leaving, part.internals)
            rows.append((int(problem.nbytes[value]), bool(problem.required[value]), *(value in one for one in sets)))
            rows.append(self.last.get(value, number) < number)
        return tuple(rows), list(place)
