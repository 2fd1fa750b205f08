"""Where in its place a value goes that is copied away: first fit over lifetimes, in the order of the program."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lowtide.graph import Graph, Place, Value
from lowtide.program import Copy, Free, Program

BLOCK = 4096  # bytes: offsets are multiples of it, as direct copies to a disk want it


@dataclass
class Slots:
    """Room for all that a program copies to one place."""

    nbytes: int = 0  # of the place
    offset: dict[int, int] = field(default_factory=dict)  # of the value that an instruction copies there
    room: dict[int, int] = field(default_factory=dict)  # bytes, for the same instruction


def slots(graph: Graph, program: Program, nbytes: Sequence[int]) -> dict[Place, Slots]:
    """For each place the offsets of what is copied there; `nbytes` is for each value what the plan counted with."""
    found: dict[Place, Slots] = {}
    live: defaultdict[Place, list[tuple[int, int]]] = defaultdict(list)  # (offset, end), sorted
    holding: dict[tuple[int, Place], tuple[int, int]] = {}
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Copy(value, to) if to != "device" and not goes_home(graph, value, to):
                room = -(-max(nbytes[value], span(graph.values[value])) // BLOCK) * BLOCK
                offset = 0
                for start, end in live[to]:
                    if start - offset >= room:
                        break
                    offset = max(offset, end)
                holding[value, to] = offset, offset + room
                insort(live[to], holding[value, to])
                place = found.setdefault(to, Slots())
                place.offset[number], place.room[number] = offset, room
                place.nbytes = max(place.nbytes, offset + room)
            case Free(value, from_) if (value, from_) in holding:
                live[from_].remove(holding.pop((value, from_)))
            case _:
                pass
    return found


def goes_home(graph: Graph, value: int, place: Place) -> bool:
    """Whether a copy of the value to this place goes to the caller's own storage there."""
    return graph.home[value] == place and graph.values[value].storage in graph.lasting_storages


def span(value: Value) -> int:
    """The bytes from the first element of a tensor of this form to its last one."""
    if value.kind == "scalar" or 0 in value.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    return int((1 + last) * getattr(torch, value.dtype).itemsize)
