"""Layout: an offset in one arena for all that a program makes, so that blocks that are there together do not overlap.

First fit, the largest first; where that leaves holes, a search that piles the blocks up below a height: the skyline of
Burke, Kendall and Whitwell 2004, pruned by what is still to come at each time as in MiniMalloc (Moffitt 2023), with
restarts that put first what failed (squeaky wheel, Joslin and Clements 1999). It takes the program as it is: it
moves no run, and undoes no in-place.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np

from lowtide import native
from lowtide.costs import ALIGNMENT, Costs
from lowtide.graph import Graph
from lowtide.lifetimes import BEFORE, OUTSIDE, Block, Lifetimes, lifetimes
from lowtide.plan.compiled import answered, compiled
from lowtide.plan.problem import INT, INTS, REALS, Floats, Ints, ints, reals
from lowtide.plan.settings import (
    APART,
    CLOSE_TO_LIVE,
    LARGE_BUFFERS,
    LAYOUT_HEIGHTS,
    LAYOUT_NOISE,
    LAYOUT_RESTART,
    LAYOUT_STEPS,
    MOVING_BLOCKS,
    MOVING_PARTS,
    NEAR_LIVE,
    WAISTS,
    WINDOW_LEAST,
)
from lowtide.plan.windows import waists
from lowtide.program import Copy, Instruction, Program, Run
from lowtide.simulate import simulate

SOURCE = Path(__file__).with_name("layout.cpp")
SIGNATURES: native.Signatures = {
    "lowtide_first_fit": ([INT, INTS, INTS, INTS, INTS, INT, INTS], INT),
    "lowtide_skyline": ([INT, INTS, INTS, INTS, INT, INT, INT, REALS, INTS, INTS], INT),
}


def layout(
    graph: Graph,
    costs: Costs,
    program: Program,
    *,
    limit: int | None = None,
    steps: int = LAYOUT_STEPS,
    until: float = math.inf,
    seed: int = 0,
) -> Program:
    """The program with an arena and all offsets.

    It stops when the arena and what is outside it are within `limit` bytes, or, without one, when the arena is as small
    as its live bytes; else it returns the best that is found in so many steps, or until the clock says `until`. Where
    there is no compiler the program stays as it is, without an arena: nothing could serve one there.
    """
    if library() is None:
        return program
    found = lifetimes(graph, program, costs.nbytes, costs.arena_temporaries)
    at = [OUTSIDE if _leaves(graph, block) else 0 for block in found.blocks]
    simulation = simulate(graph, costs, _placed(program, found, at, costs.alignment))
    goal = limit if limit is not None else int(CLOSE_TO_LIVE * max(simulation.start, *simulation.live, 0))
    outside = np.array(simulation.outside, np.int64)
    moved, most = _move_out(graph, _in_arena(found, at), costs.alignment, simulation.start, outside, goal)
    for number in moved:
        at[number] = OUTSIDE
    placed = _in_arena(found, at)
    buffers = _buffers(placed.values(), costs.alignment)
    offsets = pack(buffers, enough=goal - most if limit is not None else 0, steps=steps, until=until, seed=seed)
    for number, offset in zip(placed, offsets, strict=True):
        at[number] = int(offset)
    return _placed(program, found, at, buffers.top(offsets))


# ---------------------------------------------------------------------------------------------- the blocks of a program

Placed = dict[int, Block]  # the blocks in the arena, by their numbers


def _leaves(graph: Graph, block: Block) -> bool:
    """Whether a block is the caller's: what was there before, what outlives the step, and what has no bytes.

    A copy of what the caller holds is ours; outside of the arena it would be the caller's own.
    """
    if block.first == BEFORE or not block.nbytes:
        return True
    return not _away(graph, block) and any(held.value in graph.outliving for held in block.holds)


def _away(graph: Graph, block: Block) -> bool:
    """Whether a block is a copy of what the caller holds."""
    return block.copied and block.offset >= 0 and graph.values[block.holds[0].value].storage in graph.device_storages


def _in_arena(found: Lifetimes, at: list[int]) -> Placed:
    return {number: block for number, block in enumerate(found.blocks) if at[number] != OUTSIDE}


def _placed(program: Program, found: Lifetimes, offsets: list[int], arena: int) -> Program:
    """The program with its blocks at these offsets."""
    rows: list[Instruction] = []
    for instruction, row in zip(program.instructions, found.made, strict=True):
        at = tuple(offsets[number] for number in row)
        match instruction:
            case Run(op, _, over, again):
                rows.append(Run(op, at if arena else (), over, again))
            case Copy(value, "device"):
                rows.append(Copy(value, "device", at[0]))
            case _:
                rows.append(instruction)
    return Program(program.graph, tuple(rows), arena)


def _buffers(blocks: Iterable[Block], step: int) -> Buffers:
    """What the blocks take of an arena whose offsets are multiples of `step` bytes."""
    rows = [(block.first, block.last, -(-block.nbytes // step) * step) for block in blocks]
    first, last, nbytes = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    return Buffers(first, last, nbytes, step)


def _move_out(graph: Graph, placed: Placed, step: int, start: int, outside: Ints, goal: int) -> tuple[list[int], int]:
    """The blocks to move out of the arena where all is more than `goal` bytes, and the most that is outside then.

    Bytes outside count while they are there, those of the arena always. So what outlives the step, such as a
    gradient, would have its bytes to itself from the start, when activations could use them until it is made.
    """
    buffers = _buffers(placed.values(), step)
    level = _level(buffers.first, buffers.last, buffers.nbytes, len(outside))
    most = max(start, int(outside.max(initial=0)))
    live = max(start, int((level + outside).max(initial=0)))
    best, moved = int(level.max(initial=0)) + most, list[int]()
    if not placed or best <= NEAR_LIVE * live:
        return [], most
    goal = goal if goal >= live else int(NEAR_LIVE * live)
    for part in MOVING_PARTS:
        if best <= goal:
            break
        chosen, kept, left = _divide(buffers, level, outside, int(part * max(0, goal - most)))
        if kept + max(start, left) < best:
            best, moved = kept + max(start, left), chosen
    numbers = list(placed)
    free = [number for number in (numbers[k] for k in moved) if not _away(graph, placed[number])]
    for number in free:
        outside[placed[number].first : placed[number].last + 1] += placed[number].nbytes
    return free, max(start, int(outside.max(initial=0)))


def _divide(buffers: Buffers, level: Ints, outside: Ints, arena: int) -> tuple[list[int], int, int]:
    """The buffers to move out so that `arena` bytes hold the others, and the most bytes in both places then."""
    level, outside, moved = level.copy(), outside.copy(), list[int]()
    first, last, nbytes = buffers.first, buffers.last.copy(), buffers.nbytes

    def outside_with(k: int) -> int:
        return int(outside[first[k] : last[k] + 1].max() + nbytes[k])

    while level.max() > arena:
        now = level.argmax()
        there = np.flatnonzero((first <= now) & (now < last))
        large = there[np.argsort(-nbytes[there], kind="stable")][:MOVING_BLOCKS].tolist()
        most = int(outside.max())
        k = min(large, key=lambda k: max(most, outside_with(k)))
        level[first[k] : last[k]] -= nbytes[k]
        outside[first[k] : last[k] + 1] += nbytes[k]
        last[k] = first[k]
        moved.append(k)
    return moved, int(level.max()), int(outside.max())


# ------------------------------------------------------------------------------------------------------------- packing


@dataclass(frozen=True)
class Buffers:
    """Boxes to be piled up: the half-open times of their lives, and their bytes, multiples of the alignment."""

    first: Ints
    last: Ints
    nbytes: Ints
    alignment: int = ALIGNMENT  # bytes

    @property
    def live(self) -> int:
        """The most bytes at any time: no arena is smaller."""
        return int(_level(self.first, self.last, self.nbytes, int(self.last.max(initial=0))).max(initial=0))

    def top(self, offsets: Ints) -> int:
        """The bytes of an arena with these offsets."""
        return int((offsets + self.nbytes).max(initial=0))

    def only(self, chosen: Ints) -> Buffers:
        """Some of them, with no more times than it takes to tell which are alive together."""
        first, last = self.first[chosen], self.last[chosen]
        starts = np.unique(first)
        first, last = np.searchsorted(starts, first), np.searchsorted(starts, last)
        ends = np.zeros(len(starts) + 1, np.int64)
        ends[last] = 1  # a time without an end after it holds no more than the next one
        when = np.concatenate(([0], np.cumsum(ends[1:])))
        return Buffers(when[first], when[last], self.nbytes[chosen], self.alignment)


def _level(first: Ints, last: Ints, nbytes: Ints, end: int) -> Ints:
    """The bytes that are there at each time."""
    change = np.zeros(end + 1, np.int64)
    np.add.at(change, first, nbytes)
    np.add.at(change, last, -nbytes)
    return change.cumsum()[:end]


def pack(
    buffers: Buffers, *, enough: int = 0, steps: int = LAYOUT_STEPS, until: float = math.inf, seed: int = 0
) -> Ints:
    """Offsets that need no more than the live bytes, or else at most `enough`, or else as few as are found."""
    apart = _apart(buffers, enough, steps, until, seed) if len(buffers.nbytes) > APART else None
    return _together(buffers, enough, steps, until, seed) if apart is None else apart


def _together(buffers: Buffers, enough: int, steps: int, until: float, seed: int) -> Ints:
    """Offsets of all buffers, packed at once."""
    low = live = buffers.live
    step = buffers.alignment
    by_size = np.lexsort((buffers.first, -buffers.nbytes))
    best = first_fit(buffers, by_size)
    ways = list(_ways(buffers, by_size, live))
    chance = np.random.default_rng(seed)
    for attempt in range(LAYOUT_HEIGHTS):
        top = buffers.top(best)
        if top <= max(low, enough if attempt else min(enough, int(CLOSE_TO_LIVE * live))):
            break
        height = (low + top) // 2 // step * step if attempt else live
        if attempt and low < enough < top:
            height = enough // step * step
        found = _below(buffers, height, ways, steps, until, chance)
        if found is not None and buffers.top(found) < top:
            best = found
        if found is None or buffers.top(found) > height:
            low = height + step
    return best


def _apart(buffers: Buffers, enough: int, steps: int, until: float, seed: int) -> Ints | None:
    """Offsets of many buffers, packed window by window between times that few live through; None without such times.

    What lives through them is at the bottom, for itself. Windows with the same buffers get the same offsets.
    """
    first, last, nbytes = buffers.first, buffers.last, buffers.nbytes
    through = _level(np.minimum(first + 1, last), last, nbytes, int(last.max(initial=0)))
    for part in WAISTS:
        cuts = np.array(waists(through, int(part * buffers.live)), np.int64)
        begun, ended = np.searchsorted(cuts, first, side="right"), np.searchsorted(cuts, last, side="left")
        if len(cuts) + 1 >= WINDOW_LEAST:
            break
    else:
        return None
    offsets, known = np.zeros(len(nbytes), np.int64), dict[bytes, Ints]()
    bottom = 0
    for window in (-1, *range(len(cuts) + 1)):  # those that live through a cut come first
        chosen = np.flatnonzero((begun == window) & (ended == window) if window >= 0 else begun != ended)
        boxes = buffers.only(chosen)
        key = b"|".join(array.tobytes() for array in (boxes.first, boxes.last, boxes.nbytes))
        if key not in known:
            known[key] = _together(boxes, max(0, enough - bottom), steps, until, seed)
        offsets[chosen] = bottom + known[key]
        bottom = boxes.top(known[key]) if window < 0 else bottom
    return offsets


@dataclass(frozen=True)
class _Way:
    """A way to search: which buffers are searched for, which of them come first, and the order of the others."""

    chosen: Ints
    boxes: Buffers
    weight: Floats
    blamed: Ints  # how often each of the boxes was lacking where nothing could lie
    others: Ints


def _ways(buffers: Buffers, by_size: Ints, live: int) -> Iterator[_Way]:
    """Large and small buffers apart, or all at once; the long ones first, or the large ones, or both."""
    sizes = set()
    for part in LARGE_BUFFERS:
        large = buffers.nbytes[by_size] > part * live
        chosen, others = by_size[large], by_size[~large]
        if not len(chosen) or len(chosen) in sizes:
            continue
        sizes.add(len(chosen))
        boxes = buffers.only(chosen)
        length, size = (boxes.last - boxes.first).astype(float), boxes.nbytes.astype(float)
        for weight in (length, size, length * size):
            yield _Way(chosen, boxes, weight, np.zeros(len(chosen), np.int64), others)


def _below(
    buffers: Buffers, height: int, ways: list[_Way], steps: int, until: float, chance: np.random.Generator
) -> Ints | None:
    """Offsets below a height; or a little above it, when only the small buffers had no room; or none."""
    best = None
    for number in count():
        way = ways[number % len(ways)]
        if steps <= 0 or time.monotonic() > until:
            break
        noise = LAYOUT_NOISE * (chance.random(len(way.chosen)) - 0.5) * (number >= len(ways))
        restart = LAYOUT_RESTART * len(way.chosen)
        state, piled = skyline(way.boxes, height, way.weight * np.exp(noise), way.blamed, steps=restart)
        if state < 0:
            break  # there is no such pile
        steps -= restart
        if state > 0:
            offsets = np.full(len(buffers.nbytes), -1, np.int64)
            offsets[way.chosen] = piled
            offsets = first_fit(buffers, way.others, offsets)
            if best is None or buffers.top(offsets) < buffers.top(best):
                best = offsets
            if buffers.top(best) <= height:
                break
    return best


@cache
def library() -> ctypes.CDLL | None:
    """The compiled inner loops, or None: then there is no arena."""
    return compiled(SOURCE, SIGNATURES)


def _loaded() -> ctypes.CDLL:
    inner = library()
    assert inner is not None, "there is nothing to lay out an arena with"
    return inner


def first_fit(buffers: Buffers, order: Ints, offsets: Ints | None = None) -> Ints:
    """The lowest offset with room for one buffer after the other, around those that have an offset already."""
    placed = np.full(len(buffers.nbytes), -1, np.int64) if offsets is None else offsets.copy()
    if not len(order):
        return placed
    boxes = (ints(array, len(placed)) for array in (buffers.first, buffers.last, buffers.nbytes))
    answered(_loaded().lowtide_first_fit(len(placed), *boxes, ints(order), len(order), ints(placed)))
    return placed


def skyline(buffers: Buffers, height: int, weight: Floats, blamed: Ints, *, steps: int) -> tuple[int, Ints]:
    """Search for offsets below a height: 1 and the offsets, 0 if the steps were too few, -1 if there are none.

    The height is at least that of the live bytes, and the times are as `only` counts them.

    Where there is a choice, the buffer with the most weight times blame comes first; those that could not be placed at
    a dead end are blamed.
    """
    offsets = np.full(len(buffers.nbytes), -1, np.int64)
    count, times = len(offsets), int(buffers.last.max(initial=0))
    boxes = (ints(array, count) for array in (buffers.first, buffers.last, buffers.nbytes))
    arrays = (reals(weight, count), ints(blamed, count), ints(offsets))
    return answered(_loaded().lowtide_skyline(count, *boxes, times, height, steps, *arrays)), offsets
