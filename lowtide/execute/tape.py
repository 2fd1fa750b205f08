"""From what a step really allocated to where its allocations go from now on.

The plan says where values and temporaries go; what an op allocates, and in which order, only shows when it runs. So the
first step runs without an arena and is written down. A block that came and went as the plan says gets the offset of the
plan. What an instruction makes and drops again gets room beside what is alive. Whatever the plan did not foresee (a
block that somebody still holds, one of another size) stays outside. So no two blocks that are there together can meet,
however wrong the plan is; it can only cost bytes, which are counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lowtide.allocator.arena import Event
from lowtide.allocator.scratch import NEVER, Block, aligned, arrange, blocks_of, height, most
from lowtide.graph import Graph
from lowtide.lifetimes import OUTSIDE, lifetimes
from lowtide.program import Copy, Program, Run


@dataclass(frozen=True)
class Places:
    """For each instruction the bytes of its allocations in turn, and their offsets; -1: outside the arena."""

    start: list[int]  # of each instruction's entries, and the end of the last
    nbytes: list[int]
    offset: list[int]
    outside: int = 0  # bytes: the most that is outside at a time
    strays: int = 0  # allocations that should have been in the arena and are not


@dataclass(frozen=True)
class _Planned:
    """A block as the plan has it."""

    nbytes: int
    offset: int
    gone: int  # the last instruction that may allocate while it is there


def places(graph: Graph, program: Program, nbytes: Sequence[int], events: Iterable[Event]) -> Places:
    """The places of what the events say was allocated; `nbytes` is for each value what the plan counted with."""
    made = _made(program, events)
    planned, spare = _plan(graph, program, nbytes)
    arena = _Arena(program.arena)
    found = Places([0], [], [])
    strays: list[Block] = []
    outside: list[Block] = []
    for number, blocks in enumerate(made):
        arena.advance(number)
        at: dict[int, int] = {}  # block, by its first event -> its offset
        lasting = [one for one in planned.get(number, ()) if one.gone > number]
        unused = [one.offset for one in planned.get(number, ()) if one.gone == number]
        passing = [block for block in blocks if block.gone == number]
        _leave_out_state(graph, program, number, passing)
        strays += _match(arena, [block for block in blocks if block.gone > number], lasting, at)
        strays += _squeeze(arena, passing, blocks, [*spare.get(number, ()), *unused], at)
        found.nbytes.extend(block.nbytes for block in blocks)
        found.offset.extend(at.get(block.made, OUTSIDE) for block in blocks)
        found.start.append(len(found.nbytes))
        outside += [block for block in blocks if block.made not in at]
    return replace(found, outside=most(outside), strays=len(strays))


def _leave_out_state(graph: Graph, program: Program, number: int, passing: list[Block]) -> None:
    """Take out the state that the generator goes back to after an op that draws again: it is counted outside."""
    run = program.instructions[number] if number < len(program.instructions) else None
    if isinstance(run, Run) and run.again and graph.ops[run.op].random:
        state = next((block for block in passing if block.nbytes == graph.generator_bytes), None)
        if state is not None:
            passing.remove(state)


def _made(program: Program, events: Iterable[Event]) -> list[list[Block]]:
    """The blocks that each instruction allocated and, in the end, those from before the first."""
    made: list[list[Block]] = [[] for _ in range(len(program.instructions) + 1)]
    for block in blocks_of(events):
        made[block.instruction].append(block)
    return made


def temporaries(
    graph: Graph, program: Program, nbytes: Sequence[int], events: Iterable[Event]
) -> dict[int, tuple[int, int]]:
    """For each op what its temporaries really were, in bytes: one piece beside its results, and the heap at its peak.

    Only runs count that keep all their results: of the others it can't be told which blocks are temporaries.
    """
    made = _made(program, events)
    found: dict[int, tuple[int, int]] = {}
    for number, run in enumerate(program.instructions):
        if not isinstance(run, Run):
            continue
        results = [block for block in made[number] if block.gone > number]
        passing = [block for block in made[number] if block.gone == number]
        fresh = {value for value in graph.makes_of(run.op, again=run.again) if nbytes[value]} - dict(run.over).keys()
        if len(results) == len(fresh):
            piece, heap = found.get(run.op, (0, 0))
            temporaries = most(made[number]) - sum(block.nbytes for block in results)
            beside = results if graph.outliving.isdisjoint(fresh) else ()  # what the caller keeps is not in the arena
            found[run.op] = max(piece, height(arrange(passing, beside))), max(heap, temporaries)
    return found


def _plan(
    graph: Graph, program: Program, nbytes: Sequence[int]
) -> tuple[dict[int, list[_Planned]], dict[int, tuple[int, ...]]]:
    """For each instruction the blocks that it puts into the arena, and the offsets meant for what it drops again."""
    found = lifetimes(graph, program, nbytes)
    allocating = [n for n, item in enumerate(program.instructions) if isinstance(item, (Run, Copy))]
    blocks: dict[int, list[_Planned]] = {}
    spare: dict[int, tuple[int, ...]] = {}
    for number, row in enumerate(found.made):
        made = [found.blocks[k] for k in row if found.blocks[k].first == number and found.blocks[k].offset != OUTSIDE]
        passing = sorted((block for block in made if block.dropped or not block.holds), key=lambda one: one.dropped)
        spare[number] = tuple(block.offset for block in passing)
        blocks[number] = [
            _Planned(block.nbytes, block.offset, _gone(block.last, found.end, allocating))
            for block in made
            if block.holds and block.nbytes and not block.dropped
        ]
    return blocks, spare


def _gone(last: int, end: int, allocating: list[int]) -> int:
    """The last instruction that may allocate before this one."""
    return NEVER if last == end else allocating[bisect_left(allocating, last) - 1]


@dataclass
class _Arena:
    """What is in the arena while an instruction runs."""

    nbytes: int
    live: list[tuple[int, int]] = field(default_factory=list)  # (offset, end), sorted, none meets another
    leaving: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    reached: int = 0  # instruction

    def advance(self, number: int) -> None:
        """Let go of what is gone before this instruction."""
        while self.reached < number:
            for span in self.leaving.pop(self.reached, ()):
                del self.live[bisect_left(self.live, span)]
            self.reached += 1

    def free(self, offset: int, end: int, absent: Container[tuple[int, int]] = ()) -> bool:
        """Whether nothing is between these offsets but what is absent."""
        position = max(0, bisect_left(self.live, (offset, offset)) - 1)
        while position < len(self.live) and self.live[position][0] < end:
            span = self.live[position]
            if span[1] > offset and span not in absent:
                return False
            position += 1
        return end <= self.nbytes

    def put(self, block: Block, offset: int) -> None:
        """Let a block be there until it is gone."""
        span = (offset, offset + block.nbytes)
        insort(self.live, span)
        self.leaving[block.gone].append(span)


def _match(arena: _Arena, blocks: list[Block], planned: list[_Planned], at: dict[int, int]) -> list[Block]:
    """Give blocks that stay for a while the offsets of planned ones of their size; return those that should be inside.

    The planned one that goes first takes, of the blocks that do not go after it, the one that goes last.
    """
    left = list(blocks)
    for one in sorted(planned, key=lambda one: one.gone):
        fitting = [block for block in left if block.nbytes == one.nbytes and block.gone <= one.gone]
        if fitting:
            block = max(fitting, key=lambda block: block.gone)
            left.remove(block)
            if arena.free(one.offset, one.offset + block.nbytes):
                at[block.made] = one.offset
                arena.put(block, one.offset)
    outside = sorted((block for block in blocks if block.made not in at), key=lambda block: -block.nbytes)
    return outside[: len(planned) - len(at)]


def _squeeze(
    arena: _Arena, passing: list[Block], blocks: list[Block], spare: Sequence[int], at: dict[int, int]
) -> list[Block]:
    """Give blocks that the instruction itself drops room beside all that is there with them; return the others."""
    strays: list[Block] = []
    results = [block for block in blocks if block.made in at]
    for place in arrange(passing, results):
        block = place.block
        beside = [_span(at, one) for one in blocks if one.made in at and block.meets(one)]
        # What lasts is in the arena's list for the whole instruction; before it is made its bytes are free.
        absent = {_span(at, one) for one in results if not block.meets(one)}
        planned = [base + place.offset for base in spare] if place.under is None else [at[place.under.made]]
        for offset in _tries(arena, block.nbytes, planned, beside, absent):
            end = offset + block.nbytes
            if offset >= 0 and arena.free(offset, end, absent) and _apart(offset, end, beside):
                at[block.made] = offset
                break
        else:
            strays += [block] if spare else []  # what has no planned room is meant to be outside
    return strays


def _span(at: dict[int, int], block: Block) -> tuple[int, int]:
    return at[block.made], at[block.made] + block.nbytes


def _apart(offset: int, end: int, spans: Iterable[tuple[int, int]]) -> bool:
    return all(stop <= offset or start >= end for start, stop in spans)


def _tries(
    arena: _Arena, nbytes: int, planned: list[int], beside: list[tuple[int, int]], absent: set[tuple[int, int]]
) -> Iterator[int]:
    """Offsets for a block: those that are meant for it, then the lowest that is free."""
    yield from planned
    yield _gap(arena, nbytes, beside, absent)


def _gap(arena: _Arena, nbytes: int, beside: list[tuple[int, int]], absent: set[tuple[int, int]]) -> int:
    """The lowest offset with so many free bytes; -1 if there is none."""
    low = 0
    for start, stop in sorted({span for span in arena.live if span not in absent} | set(beside)):
        if start - low >= nbytes:
            break
        low = max(low, aligned(stop, nbytes))
    return low if low + nbytes <= arena.nbytes else OUTSIDE
