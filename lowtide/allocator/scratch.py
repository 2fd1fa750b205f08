"""Room for what an op makes and drops again: one piece of memory beside its results, as small as first fit makes it.

What an op no longer needs when a result appears may have the bytes of that result. Who measures an op and who gives its
temporaries their places must find the same room, so both ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.allocator.arena import Event
from lowtide.costs import ALIGNMENT

TINY = 16  # bytes, of the offsets of blocks below the alignment: numbers that an op wraps in a tensor
NEVER = 1 << 62  # of an event that did not come


@dataclass
class Block:
    """A block that was allocated, by the numbers of its events."""

    nbytes: int
    made: int
    freed: int = NEVER
    instruction: int = 0  # that made it
    gone: int = NEVER  # the instruction after which it was freed

    def meets(self, other: Block) -> bool:
        """Whether both were there at one time."""
        return self.made < other.freed and other.made < self.freed


@dataclass(frozen=True)
class Place:
    """Where a temporary goes."""

    block: Block
    under: Block | None  # the result whose bytes it has; None: the piece beside the results
    offset: int  # from there


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """The blocks that were allocated, in order."""
    found: list[Block] = []
    alive: dict[int, Block] = {}
    for number, event in enumerate(events):
        if not event.freed:
            alive[event.block] = Block(event.nbytes, number, instruction=event.instruction)
            found.append(alive[event.block])
        elif event.block in alive:  # else it was there before
            block = alive.pop(event.block)
            block.freed, block.gone = number, event.instruction
    return found


def arrange(passing: Iterable[Block], results: Sequence[Block]) -> list[Place]:
    """A place for each temporary, the large ones first."""
    found: list[Place] = []
    for block in sorted(passing, key=lambda block: -block.nbytes):
        beside = [place for place in found if place.block.meets(block)]
        under = next(
            (
                result
                for result in results
                if result.nbytes >= block.nbytes
                and not result.meets(block)
                and all(place.under is not result for place in beside)
            ),
            None,
        )
        offset = 0 if under is not None else _lowest(block, [place for place in beside if place.under is None])
        found.append(Place(block, under, offset))
    return found


def height(places: Iterable[Place]) -> int:
    """The bytes of the piece beside the results."""
    return max((place.offset + place.block.nbytes for place in places if place.under is None), default=0)


def most(blocks: Sequence[Block]) -> int:
    """The most bytes of the blocks that are there at one time."""
    changes = [(block.made, block.nbytes) for block in blocks]
    changes += [(block.freed, -block.nbytes) for block in blocks]
    return max(accumulate((nbytes for _, nbytes in sorted(changes)), initial=0))


def aligned(offset: int, nbytes: int) -> int:
    """The next offset at which a block of this size may be."""
    step = ALIGNMENT if nbytes >= ALIGNMENT else TINY
    return -(-offset // step) * step


def _lowest(block: Block, beside: Iterable[Place]) -> int:
    """The lowest offset with room."""
    low = 0
    for place in sorted(beside, key=lambda place: place.offset):
        if place.offset - low >= block.nbytes:
            break
        low = max(low, aligned(place.offset + place.block.nbytes, block.nbytes))
    return low
