"""A training step as a chain: the forward cut where little crosses, and the part of the backward that goes with each.

Nothing is assumed of the step. What skips over cuts crosses all of them; without narrow places there is one segment.
Values that are small, or that nothing can make again, are always kept and not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lowtide.plan.classics.chain import Action, Backward
from lowtide.plan.classics.tape import Links, Tape, split_at_backward
from lowtide.plan.problem import Floats, Ints, Problem
from lowtide.plan.settings import NOT_WORTH_DROPPING, SEGMENTS, USELESS, WIDEST_CROSSING, WINDOWS

Values = frozenset[int]
Menus = Sequence[Sequence[Values]]  # for each segment the sets of internals that may be kept


@dataclass(frozen=True)
class Segment:
    """A stretch of the forward, and the stretch of the backward that belongs to it."""

    forward: tuple[int, ...]  # ops
    backward: tuple[int, ...]  # ops, updates among them
    made: Values  # in its forward
    internals: Values  # made in it, and needed by nobody but its backward
    entering: Values  # made before it, and needed in it or after it
    leaving: Values  # made in it or before it, and needed after it


@dataclass(frozen=True)
class Segments:
    """The chain of one order of the ops; the backward runs the segments in reverse."""

    links: Links
    droppable: Values
    parts: tuple[Segment, ...]

    def joined(self, first: int, steps: int) -> Segment:
        """So many segments in a row as one."""
        if steps == 1:
            return self.parts[first]
        parts = self.parts[first : first + steps]
        backward = tuple(op for part in reversed(parts) for op in part.backward)
        made = Values().union(*(part.made for part in parts))
        read = made.intersection(value for op in backward for value in self.links.reads[op])
        return Segment(
            forward=tuple(op for part in parts for op in part.forward),
            backward=backward,
            made=made,
            internals=read - parts[-1].leaving,
            entering=parts[0].entering,
            leaving=parts[-1].leaving,
        )

    def replay(self, schedule: Sequence[Action], menus: Menus | None = None) -> Ints:
        """The sequence of a schedule in which each step is a segment."""
        tape = Tape(self.links)
        held: dict[int, Values] = {}  # segment -> what is kept for its backward
        holders = [0] * len(self.links.maker)  # for each value how many of the sets that are kept have it
        running = Values()  # what the segment that just ran has handed on
        begun: set[int] = set()
        for action in schedule:
            part, place = self.joined(action.step, action.steps), len(tape.ops)
            released = [running]
            running = Values()
            if isinstance(action, Backward):
                for op in part.backward:
                    tape.run(op)
                released.append(held.pop(action.step))
            else:
                kept = Values()
                if action.keep == "internals":
                    kept = part.leaving | (part.internals if menus is None else menus[action.step][action.way])
                if action.step in begun:
                    tape.bring(part.leaving | kept)
                else:
                    begun.update(range(action.step, action.step + action.steps))
                    for op in part.forward:
                        tape.run(op)
                running = part.leaving
                for value in running:
                    holders[value] += 1
                if action.keep != "nothing":
                    released.append(held.get(action.step, Values()))
                    held[action.step] = part.entering | kept
                    for value in held[action.step]:
                        holders[value] += 1
            for values in released:
                for value in values:
                    holders[value] -= 1
            fresh = {value for op in tape.ops[place:] for value in self.links.makes[op]} & self.droppable
            tape.dropped.update(value for value in fresh.union(*released) if not holders[value])
        return tape.sequence()


def segments(problem: Problem, order: Ints, *, most: int = SEGMENTS) -> Segments:
    """Cut a step into at most so many segments."""
    links, (ahead, back) = Links(problem), split_at_backward(problem, order)
    droppable = _droppable(links, ahead)
    ahead = _early(links, ahead, droppable)
    cuts = _narrow_places(links, ahead, back, droppable, most)
    stage = dict(zip(ahead, np.searchsorted(cuts, range(len(ahead))).tolist(), strict=True))
    born = {value: stage[links.maker[value]] for value in droppable}
    stage.update(_backward_stages(links, ahead, back, stage, born))

    last = dict(born)  # the last segment that needs each value
    for op in ahead + back:
        for value in links.reads[op]:
            if value in born:
                last[value] = max(last[value], stage[op])
                if stage[op] < born[value]:
                    del born[value]  # the backward needs it after its segment is done: never dropped
    born = {value: begin for value, begin in born.items() if last[value] - begin <= WIDEST_CROSSING}
    made: list[set[int]] = [set() for _ in range(len(cuts) + 1)]
    across: list[set[int]] = [set() for _ in range(len(cuts) + 2)]  # into each segment, and out of the last
    for value, begin in born.items():
        made[begin].add(value)
        for number in range(begin + 1, last[value] + 1):
            across[number].add(value)
    forward: list[list[int]] = [[] for _ in made]
    backward: list[list[int]] = [[] for _ in made]
    for op in ahead:
        forward[stage[op]].append(op)
    for op in back:
        backward[stage[op]].append(op)
    parts = []
    for number in range(len(made)):
        internals = {value for op in backward[number] for value in links.reads[op]} & made[number] - across[number + 1]
        crossing = Values(across[number]), Values(across[number + 1])
        parts.append(
            Segment(tuple(forward[number]), tuple(backward[number]), Values(made[number]), Values(internals), *crossing)
        )
    return Segments(links, Values(born), tuple(parts))


def _droppable(links: Links, forward: list[int]) -> Values:
    """The values made by the forward that can be made again and are worth it."""
    problem = links.problem
    made = [value for op in forward if links.repeatable[op] for value in links.makes[op]]
    sizes, counts = np.unique(problem.nbytes[made], return_counts=True)
    below = np.cumsum(sizes * counts)
    small = int(sizes[below <= NOT_WORTH_DROPPING * below[-1]].max(initial=0)) if made else 0
    return Values(value for value in made if problem.nbytes[value] > small and not problem.required[value])


def _early(links: Links, forward: list[int], droppable: Values) -> list[int]:
    """The forward, where what needs no more than it sets free (a time step's loss, say) runs right after what it reads.

    What makes nothing worth dropping counts as such.
    """
    place = {op: number for number, op in enumerate(forward)}
    pinned, nbytes = links.problem.pinned, links.problem.nbytes
    last = {value: op for op in forward for value in links.reads[op]}
    for op in forward:
        made = sum(int(nbytes[value]) for value in links.makes[op] if value in droppable)
        freed = sum(int(nbytes[value]) for value in links.reads[op] if value in droppable and last[value] == op)
        if not pinned[op] and made <= freed:
            place[op] = max((place.get(links.maker[value], -1) for value in links.reads[op]), default=-1)
    return sorted(forward, key=place.__getitem__)


def _narrow_places(links: Links, forward: list[int], backward: list[int], droppable: Values, most: int) -> list[int]:
    """The places after which to cut the forward: right before an op that makes something, where few bytes cross."""
    makers = [place for place, op in enumerate(forward) if not droppable.isdisjoint(links.makes[op])]
    if len(makers) < 2:
        return []
    first = {value: place for place in makers for value in links.makes[forward[place]] if value in droppable}
    last = first | {value: place for place, op in enumerate(forward) for value in links.reads[op] if value in first}
    useful = {value for op in backward for value in links.reads[op]}
    change = np.zeros(len(forward) + 1)
    for value in first:
        nbytes = float(links.problem.nbytes[value]) * (1 if value in useful else USELESS)
        change[first[value]] += nbytes
        change[last[value]] -= nbytes
    ends = np.array(makers[1:], np.int64) - 1
    width = np.cumsum(change)[ends]
    found = _minima(width, 1)
    for window in WINDOWS:
        if len(found) < most:
            break
        wider = _minima(width, window)
        found = wider if 2 * len(wider) >= len(found) else _narrower(width, found)
    while len(found) >= most:
        found = _narrower(width, found)
    return [int(place) for place in ends[found]]


def _minima(width: Floats, window: int) -> Ints:
    """The places that are nowhere wider than those near them, at least `window` apart."""
    near = sliding_window_view(np.pad(width, window, mode="edge"), 2 * window + 1).min(axis=1)
    found: list[int] = []
    for place in np.flatnonzero(width <= near * (1 + 1e-9)).tolist():
        if not found or place >= found[-1] + window:
            found.append(place)
    return np.array(found, np.int64)


def _narrower(width: Floats, places: Ints) -> Ints:
    """Of each two places in a row the narrower one."""
    pairs = places[: len(places) // 2 * 2].reshape(-1, 2)
    return np.take_along_axis(pairs, width[pairs].argmin(axis=1)[:, None], axis=1)[:, 0]


def _backward_stages(
    links: Links, forward: list[int], backward: list[int], stage: Mapping[int, int], born: Mapping[int, int]
) -> dict[int, int]:
    """For each op of the backward its segment: the latest one whose values or parameters it or a later op reads."""
    users: dict[int, set[int]] = {}  # of parameters: the segments that read them
    values = links.problem.graph.values
    for op in forward:
        for value in links.reads[op]:
            if links.maker[value] < 0 and values[value].kind == "parameter":
                users.setdefault(value, set()).add(stage[op])
    owner = dict(born) | {value: min(found) for value, found in users.items() if len(found) == 1}
    found: dict[int, int] = {}
    number = 0
    for op in reversed(backward):
        if links.problem.graph.ops[op].phase != "update":
            number = max(number, *(owner.get(value, 0) for value in links.reads[op]), 0)
        found[op] = number
    return found
