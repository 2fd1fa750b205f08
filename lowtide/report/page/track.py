"""One program over time, as columns: what runs when, the bytes of each category, and each value's place in the arena.

A *point* is an instruction during which memory may change: a run, a copy or a wait. A `Free` takes no time, so what it
does is seen at the next point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeGuard

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.lifetimes import BEFORE, OUTSIDE, Lifetimes, lifetimes
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait
from lowtide.report.profile import CATEGORIES, STATES, TEMPORARIES
from lowtide.simulate import COMPUTE, Span, memory_states, simulate, spans

EMPTIED = "storages kept empty"  # the caller's, whose content is elsewhere for a while
NAMES = (*CATEGORIES.values(), TEMPORARIES, STATES, EMPTIED)
NO_VALUE = -1  # of bytes that are an op's temporaries


@dataclass(frozen=True)
class Box:
    """Bytes in one place over a stretch of points: a value, or the temporaries of an op."""

    value: int  # NO_VALUE: temporaries
    op: int  # that made it; -1: it was there before the step
    first: int  # point
    last: int  # point, half-open
    nbytes: int
    offset: int  # in the arena; OUTSIDE: not in it
    over: bool  # it took the bytes of another value


@dataclass(frozen=True)
class Track:
    """A program over time."""

    name: str  # "eager", "plan"
    peak: int  # bytes that the device must have
    at: int  # the first point with the most bytes in use
    seconds: float  # of one step
    arena: int  # bytes
    points: tuple[int, ...]  # for each point its instruction
    spans: tuple[Span, ...]  # for each point
    live: tuple[int, ...]  # bytes in use, for each point
    categories: dict[str, tuple[int, ...]]  # for each point; they add up to `live`
    boxes: tuple[Box, ...]
    phases: tuple[tuple[str, float, float], ...]  # name, begin and end in seconds
    program: Program = field(repr=False)

    def instructions(self) -> Iterator[tuple[int, Instruction, Span]]:
        """Point, instruction and times."""
        for point, (number, span) in enumerate(zip(self.points, self.spans, strict=True)):
            yield point, self.program.instructions[number], span


def track(name: str, graph: Graph, costs: Costs, program: Program) -> Track:
    """Run a program in the head, and write down what is there at each point."""
    simulation = simulate(graph, costs, program)
    times = list(spans(graph, costs, program))
    points = [number for number, item in enumerate(program.instructions) if not isinstance(item, Free)]
    before = list(accumulate((not isinstance(item, Free) for item in program.instructions), initial=0))
    found = lifetimes(graph, program, costs.nbytes, costs.arena_temporaries)
    live = tuple(simulation.live[number] for number in points)
    states = [(memory.temporaries, memory.states) for memory in memory_states(graph, costs, program)]
    categories = _categories(graph, found, before, live, [states[number] for number in points])
    return Track(
        name=name,
        peak=simulation.peak + (costs.staging if program.copies else 0),
        at=live.index(max(live)),
        seconds=simulation.seconds,
        arena=program.arena,
        points=tuple(points),
        spans=tuple(times[number] for number in points),
        live=live,
        categories=categories,
        boxes=tuple(_boxes(graph, found, before, program)),
        phases=tuple(_phases(graph, program, times, simulation.seconds)),
        program=program,
    )


def _phases(graph: Graph, program: Program, times: Sequence[Span], end: float) -> Iterator[tuple[str, float, float]]:
    """Forward, backward and update; updates that run before the backward has ended are part of it here."""
    first = [(number, item.op) for number, item in enumerate(program.instructions) if _is_first(item)]
    beyond = [times[number].begin for number, op in first if graph.ops[op].phase != "forward"]
    backward = [times[number].end for number, op in first if graph.ops[op].phase == "backward"]
    turn = min(beyond, default=end)
    done = max(backward, default=turn)
    for phase, begin, until in (("forward", 0.0, turn), ("backward", turn, done), ("update", done, end)):
        if until > begin:
            yield phase, begin, until


def _is_first(item: Instruction) -> TypeGuard[Run]:
    return isinstance(item, Run) and not item.again


def _categories(
    graph: Graph, found: Lifetimes, before: Sequence[int], live: Sequence[int], states: Sequence[tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """The bytes of each category at each point; what the lifetimes do not explain is a storage without its content."""
    changes: dict[str, Counter[int]] = {name: Counter() for name in CATEGORIES.values()}
    for block in found.blocks:
        if not block.dropped:
            for held in block.holds:
                change = changes[CATEGORIES[graph.values[held.value].kind]]
                change[before[max(held.first, 0)]] += block.nbytes
                change[before[held.last]] -= block.nbytes
    count = len(live)
    columns = {
        name: tuple(accumulate(change.get(point, 0) for point in range(count))) for name, change in changes.items()
    }
    columns[TEMPORARIES] = tuple(temporaries for temporaries, _ in states)
    columns[STATES] = tuple(saved for _, saved in states)
    sums = [sum(column) for column in zip(*columns.values(), strict=True)]
    columns[EMPTIED] = tuple(whole - known for whole, known in zip(live, sums, strict=True))
    return {name: columns[name] for name in NAMES if any(columns[name])}


def _boxes(graph: Graph, found: Lifetimes, before: Sequence[int], program: Program) -> Iterator[Box]:
    """Each stretch of a value's life, and the temporaries of ops, in the order of the blocks."""
    runs = {number: item.op for number, item in enumerate(program.instructions) if isinstance(item, Run)}
    for block in found.blocks:
        if not block.holds:
            first = before[block.first]
            yield Box(NO_VALUE, runs[block.first], first, before[block.last], block.nbytes, block.offset, False)
        over = False
        for held in block.holds:
            first, last = before[max(held.first, 0)], before[held.last]
            maker = graph.maker[held.value] if held.first != BEFORE else -1
            if last > first:  # an input may be written over before anything can be seen of it
                yield Box(held.value, maker, first, last, block.nbytes, block.offset, over)
                over = True


def to_json(found: Track, number_of: dict[int, int]) -> dict[str, Any]:
    """A track as plain data; `number_of` gives for each value its row in the table of values."""
    kinds, subjects = [], []
    for _, item, _ in found.instructions():
        match item:
            case Run(op, again=again):
                kinds.append("again" if again else "run")
                subjects.append(op)
            case Copy(value, to):
                kinds.append("fetch" if to == "device" else "send")
                subjects.append(number_of[value])
            case Wait(value):
                kinds.append("wait")
                subjects.append(number_of[value])
    boxes = [box for box in found.boxes if box.nbytes]
    return {
        "name": found.name,
        "peak": found.peak,
        "at": found.at,
        "seconds": found.seconds,
        "arena": found.arena,
        "points": {
            "kind": kinds,
            "subject": subjects,  # an op of runs, a value of copies and waits
            "begin": [round(span.begin, 9) for span in found.spans],
            "end": [round(span.end, 9) for span in found.spans],
            "engine": {str(n): span.engine for n, span in enumerate(found.spans) if span.engine != COMPUTE},
            "bytes": list(found.live),
        },
        "categories": {name: _steps(column) for name, column in found.categories.items()},
        "boxes": {
            "value": [number_of.get(box.value, NO_VALUE) for box in boxes],
            "op": [box.op for box in boxes],
            "first": [box.first for box in boxes],
            "last": [box.last for box in boxes],
            "bytes": [box.nbytes for box in boxes],
            "offset": [box.offset for box in boxes],
            "over": [number for number, box in enumerate(boxes) if box.over],
        },
        "phases": [{"phase": phase, "begin": begin, "end": end} for phase, begin, end in found.phases],
    }


def _steps(column: Sequence[int]) -> dict[str, list[int]]:
    """A column by its changes: the points at which it becomes another number, and that number."""
    at = [point for point, nbytes in enumerate(column) if not point or nbytes != column[point - 1]]
    return {"at": at, "bytes": [column[point] for point in at]}


__all__ = ["EMPTIED", "NAMES", "NO_VALUE", "OUTSIDE", "Box", "Track", "to_json", "track"]
