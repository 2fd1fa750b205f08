"""Lifetimes: which bytes of the device a program uses from when to when, and for what.

A *block* is bytes that stay in one place: of a value and of those that are written over it, or of an op's temporaries.
Times are numbers of instructions, and half-open: a block is there from `first` up to, not including, `last`. Layout,
placement and the reports read this; the judge and the simulator do not, they find out for themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.graph import Graph
from lowtide.program import Copy, Free, Program, Run

BEFORE = -1  # of what is there before the first instruction
OUTSIDE = -1  # of what is not in the arena


@dataclass(frozen=True, slots=True)
class Held:
    """A value in a block, from the instruction that puts it there up to the one at which it is gone."""

    value: int
    first: int  # BEFORE: an input
    last: int  # the number of all instructions: it is there at the end


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes in one place."""

    holds: tuple[Held, ...]  # each written over the one before; (): temporaries of an op
    first: int  # BEFORE: an input
    last: int
    nbytes: int
    offset: int  # in the arena; OUTSIDE: not in it
    copied: bool = False  # brought to the device by a copy, not made there
    dropped: bool = False  # a value that is made a second time while it is there; only the op that makes it sees this


@dataclass(frozen=True)
class Lifetimes:
    """The blocks of a program, the inputs first, then in the order in which they appear."""

    blocks: tuple[Block, ...]
    made: tuple[tuple[int, ...], ...]  # for each instruction the blocks of what it makes, then of its temporaries
    end: int  # the number of all instructions

    @cached_property
    def of(self) -> dict[int, list[tuple[Block, int]]]:
        """For each value when it is there: the blocks that hold it, and its place among what they hold, in order."""
        found: defaultdict[int, list[tuple[Block, int]]] = defaultdict(list)
        for block in self.blocks:
            if not block.dropped:
                for place, held in enumerate(block.holds):
                    found[held.value].append((block, place))
        for rows in found.values():
            rows.sort(key=lambda row: row[0].holds[row[1]].first)
        return dict(found)

    def at(self, instruction: int) -> list[int]:
        """The values that are on the device during an instruction, in the order in which they came."""
        found = [
            held
            for block in self.blocks
            if block.first <= instruction < block.last and not block.dropped
            for held in block.holds
            if held.first <= instruction < held.last
        ]
        return [held.value for held in sorted(found, key=lambda held: held.first)]


class _Open:
    """A block that may still change."""

    def __init__(self, holds: list[Held], first: int, nbytes: int, offset: int) -> None:
        self.holds, self.first, self.nbytes, self.offset = holds, first, nbytes, offset
        self.copied = self.dropped = False
        self.last = -1  # not known yet

    def ends(self, now: int) -> None:
        """Let go of the value that it holds."""
        if self.holds:
            self.holds[-1] = Held(self.holds[-1].value, self.holds[-1].first, now)

    def close(self, end: int) -> Block:
        """The block, which is there to the end where nothing ended it."""
        if self.last < 0:
            self.ends(end)
            self.last = end
        holds = tuple(self.holds)
        return Block(holds, self.first, self.last, self.nbytes, self.offset, self.copied, self.dropped)


def lifetimes(graph: Graph, program: Program, nbytes: Sequence[int], temporaries: Sequence[int] = ()) -> Lifetimes:
    """The blocks of a valid program; `nbytes` is of each value, `temporaries` of those of each op.

    Ops have temporaries where these are more than none, or where the program has an offset for them.
    """
    blocks: list[_Open] = []
    holding: dict[int, int] = {}  # value on the device -> its block
    made: list[tuple[int, ...]] = []

    def new(value: int | None, first: int, size: int, offset: int) -> int:
        blocks.append(_Open([] if value is None else [Held(value, first, -1)], first, size, offset))
        return len(blocks) - 1

    for item in (item for item in graph.inputs if item.home == "device"):
        holding[item.value] = new(item.value, BEFORE, nbytes[item.value], OUTSIDE)
    for now, instruction in enumerate(program.instructions):
        row: list[int] = []
        match instruction:
            case Free(value, "device"):
                block = blocks[holding.pop(value)]
                block.ends(now)
                block.last = now
            case Copy(value, "device", at):
                holding[value] = new(value, now, nbytes[value], at)
                blocks[-1].copied = True
                row.append(holding[value])
            case Run(op, at, over, again):
                onto = dict(over)
                makes = graph.makes_of(op, again=again)
                for place, value in enumerate(makes):
                    offset = at[place] if at else OUTSIDE
                    if value in onto:
                        holding[value] = holding.pop(onto[value])
                        block = blocks[holding[value]]
                        block.ends(now)
                        block.holds.append(Held(value, now, -1))
                        row.append(holding[value])
                    elif value in holding:
                        row.append(new(value, now, nbytes[value], offset))
                        blocks[-1].dropped = True
                    else:
                        holding[value] = new(value, now, nbytes[value], offset)
                        row.append(holding[value])
                passing = temporaries[op] if temporaries else 0
                if passing or len(at) > len(makes):
                    row.append(new(None, now, passing, at[-1] if len(at) > len(makes) else OUTSIDE))
                for number in row:
                    if blocks[number].dropped or not blocks[number].holds:
                        blocks[number].ends(now + 1)
                        blocks[number].last = now + 1
        made.append(tuple(row))
    end = len(program.instructions)
    return Lifetimes(tuple(block.close(end) for block in blocks), tuple(made), end)
