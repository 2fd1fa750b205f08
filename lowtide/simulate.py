"""Run a program in the head: the memory curve, the peak and the seconds; the one place where bytes are added up.

It trusts its program; `check` is the one that doubts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.costs import Costs
from lowtide.engines import Engines
from lowtide.graph import Graph, Place
from lowtide.program import Copy, Free, Program, Run, Wait


@dataclass(frozen=True)
class Simulation:
    """What a program does to the device, instruction by instruction."""

    live: tuple[int, ...]  # bytes in use during each instruction, temporaries inside ops included
    outside: tuple[int, ...]  # of these, bytes that are not in the arena
    start: int  # bytes of the inputs that are there before the first instruction
    arena: int  # bytes
    seconds: float  # of one step

    @property
    def peak(self) -> int:
        """The bytes that the device must have: all that is in use, or the arena and what is outside it."""
        return self.arena + max((self.start, *self.outside)) if self.arena else max((self.start, *self.live))

    @property
    def at(self) -> int:
        """The first instruction with the most bytes in use."""
        return self.live.index(max(self.live))


@dataclass
class MemoryState:
    """The device during one instruction; the same object moves on from one to the next."""

    present: dict[int, int]  # value -> its offset in the arena, -1 outside
    homes: dict[int, int | None]  # the caller's storages on the device -> the value that is there
    in_arena: int = 0  # bytes of values in the arena
    outside: int = 0  # bytes of values outside it
    states: int = 0  # bytes of saved generator states
    temporaries: int = 0  # bytes of the running op's temporaries, and of duplicates that it makes and drops
    temporaries_outside: int = 0  # of these, bytes that are not in the arena

    def add(self, value: int, nbytes: int, offset: int) -> None:
        """Put a value on the device."""
        self.present[value] = offset
        if offset < 0:
            self.outside += nbytes
        else:
            self.in_arena += nbytes

    def remove(self, value: int, nbytes: int) -> None:
        """Take a value off the device."""
        if self.present.pop(value) < 0:
            self.outside -= nbytes
        else:
            self.in_arena -= nbytes


def simulate(graph: Graph, costs: Costs, program: Program) -> Simulation:
    """Add up the bytes and the seconds of a valid program."""
    live, outside = [], []
    for memory in memory_states(graph, costs, program):
        live.append(memory.in_arena + memory.outside + memory.states + memory.temporaries)
        outside.append(memory.outside + memory.states + memory.temporaries_outside)
    start = sum(costs.nbytes[item.value] for item in graph.inputs if item.home == "device")
    return Simulation(tuple(live), tuple(outside), start, program.arena, elapsed(graph, costs, program))


def memory_states(graph: Graph, costs: Costs, program: Program) -> Iterator[MemoryState]:
    """The device during each instruction, in order."""
    nbytes = costs.nbytes
    memory = MemoryState({}, {})
    storage = [value.storage for value in graph.values]
    present = [item for item in graph.inputs if item.home == "device"]
    kept = {storage[item.value] for item in present if item.persistent}
    for item in present:
        memory.add(item.value, nbytes[item.value], -1)
        memory.homes[storage[item.value]] = item.value
    ends = _last_replays(graph, program)
    replaying = set(ends.values())
    seen: set[int] = set()
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Run(op, at, over, again):
                if op in replaying and op not in seen:
                    memory.states += graph.generator_bytes
                seen.add(op)
                makes = graph.makes_of(op, again=again)
                onto = dict(over)
                placed = bool(at) and at[-1] >= 0
                memory.temporaries = costs.temporaries(op, placed=placed)
                memory.temporaries_outside = 0 if placed else memory.temporaries
                if again and graph.ops[op].random:
                    memory.states += graph.generator_bytes  # the present state, put aside for the old one
                for position, value in enumerate(makes):
                    offset = at[position] if at else -1
                    if value in onto:
                        memory.add(value, nbytes[value], memory.present[onto[value]])
                        memory.remove(onto[value], nbytes[value])
                        if memory.homes.get(storage[value]) == onto[value]:
                            memory.homes[storage[value]] = value
                    elif value in memory.present:
                        memory.temporaries += nbytes[value]
                        memory.temporaries_outside += nbytes[value] if offset < 0 else 0
                    else:
                        memory.add(value, nbytes[value], offset)
                yield memory
                memory.temporaries = memory.temporaries_outside = 0
                if again and graph.ops[op].random:
                    memory.states -= graph.generator_bytes
                if number in ends:
                    memory.states -= graph.generator_bytes
            case Free(value, place):
                yield memory
                if place == "device" and memory.homes.get(storage[value]) != value:
                    memory.remove(value, nbytes[value])
                elif place == "device" and storage[value] in kept:
                    del memory.present[value]  # the caller's storage keeps its bytes
                    memory.homes[storage[value]] = None
                elif place == "device":
                    memory.remove(value, nbytes[value])
                    del memory.homes[storage[value]]
            case Copy(value, to, offset):
                if to == "device" and offset < 0 and storage[value] in memory.homes:
                    memory.present[value] = -1
                    memory.homes[storage[value]] = value
                elif to == "device":
                    memory.add(value, nbytes[value], offset)
                yield memory
            case Wait():
                yield memory


def _last_replays(graph: Graph, program: Program) -> dict[int, int]:
    """Instruction number -> random op, for the last repeated run of each random op."""
    last = {
        instruction.op: number
        for number, instruction in enumerate(program.instructions)
        if isinstance(instruction, Run) and instruction.again and graph.ops[instruction.op].random
    }
    return {number: op for op, number in last.items()}


def elapsed(graph: Graph, costs: Costs, program: Program) -> float:
    """The seconds of one step: ops one after another, copies beside them."""
    engines = Engines(costs.lanes)
    arrival: dict[tuple[int, Place], float] = {}
    ready = {(item.value, item.home) for item in graph.inputs}  # what can be read in other places
    for instruction in program.instructions:
        match instruction:
            case Run(op):
                engines.run(costs.seconds[op])
            case Copy(value, "device"):
                place: Place = "host" if (value, "host") in ready else "disk"
                arrival[value, "device"] = engines.copy(place, "in", costs.nbytes[value])
            case Copy(value, to):
                arrival[value, to] = engines.copy(to, "out", costs.nbytes[value])
            case Wait(value, place):
                engines.wait(arrival[value, place])
                ready.add((value, place))
            case Free(value, place):
                ready.discard((value, place))
    return engines.now
