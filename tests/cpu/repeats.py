"""Programs that use every instruction, made without a planner: ops run again, in place, values sent away and back."""

from __future__ import annotations

import random
from collections import Counter

import lowtide
from lowtide.costs import Costs
from lowtide.graph import Graph, Place
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait


class Repeater:
    """Writes a program that forgets the results of a random part of the repeatable ops between their uses."""

    def __init__(self, graph: Graph, seed: int, part: float) -> None:
        self.graph = graph
        chance = random.Random(seed)
        self.forgets = {op for op in range(len(graph.ops)) if graph.repeatable(op) and chance.random() < part}
        self.instructions: list[Instruction] = []
        self.present = {item.value for item in graph.inputs}
        self.persisting = {item.value for item in graph.inputs if item.persistent} | graph.required
        self.makeable_until = self.horizons()
        self.ran: set[int] = set()
        self.repeated: set[int] = set()
        self.now = 0
        self.wanted: Counter[int] = Counter()  # reads of the runs that are about to come

    def write(self) -> lowtide.Program:
        for op in range(len(self.graph.ops)):
            self.now = op
            self.run(op)
        return lowtide.Program(self.graph.fingerprint, tuple(self.instructions))

    def run(self, op: int) -> None:
        """Run the op, after those that must run again for it, each once and in their captured order."""
        order = [*sorted(self.missing_makers(op)), op]
        self.wanted = Counter(read for item in order for read in self.graph.reads_of(item, again=item in self.ran))
        for item in order:
            self.emit(item)

    def missing_makers(self, op: int) -> set[int]:
        found: set[int] = set()
        waiting = [op]
        while waiting:
            item = waiting.pop()
            for read in self.graph.reads_of(item, again=item in self.ran):
                maker = self.graph.maker[read]
                if read not in self.present and maker not in found:
                    found.add(maker)
                    waiting.append(maker)
        return found

    def emit(self, op: int) -> None:
        again = op in self.ran
        reads, makes = self.graph.reads_of(op, again=again), self.graph.makes_of(op, again=again)
        self.wanted.subtract(reads)
        left = self.graph.effects[op] if again else ()
        over = tuple(
            (new, old)
            for new, old in self.graph.ops[op].updates
            if (new, old) not in left and new not in self.present and not (again and self.keeps(old))
        )
        if again:
            self.repeated.add(op)
        self.ran.add(op)
        self.instructions.append(Run(op, over=over, again=again))
        self.present -= {old for _, old in over}
        self.present |= set(makes)
        for value in dict.fromkeys((*reads, *makes)):
            if value in self.present and value not in self.persisting and not self.keeps(value):
                self.present.remove(value)
                self.instructions.append(Free(value))

    def keeps(self, value: int) -> bool:
        if self.wanted[value] > 0:
            return True
        later = [reader for reader in self.graph.readers[value] if reader > self.now or reader not in self.ran]
        if not later:
            return False
        soon = later[0] <= self.now + 2
        maker = self.graph.maker[value]
        forgotten = maker in self.forgets and maker not in self.repeated and self.makeable_until[value] > later[-1]
        return soon or not forgotten

    def horizons(self) -> list[int]:
        """For each value the op from which on it can no longer be made again."""
        overwritten_at = {old: op for op, item in enumerate(self.graph.ops) for _, old in item.updates}
        never = len(self.graph.ops)
        horizon = [overwritten_at.get(value, never) for value in range(len(self.graph.values))]
        for op in range(never):
            reads = self.graph.reads_of(op, again=True)
            until = min([horizon[read] for read in reads], default=never) if self.graph.repeatable(op) else -1
            for value in self.graph.makes[op]:
                horizon[value] = until
        return horizon


def all_in_place(graph: Graph, costs: Costs) -> Program:
    """The captured order, with every result that may sit on a dying argument sitting there."""
    kept = {item.value for item in graph.inputs} | graph.required | {old for op in graph.ops for _, old in op.updates}
    instructions: list[Instruction] = []
    gone: set[int] = set()
    for instruction in lowtide.keep_everything(graph).instructions:
        if isinstance(instruction, Run):
            over = list(instruction.over)
            for made, read in costs.in_place[instruction.op]:
                last = graph.readers[read][-1] == instruction.op and read not in kept
                if last and made not in dict(over) and costs.nbytes[made] == costs.nbytes[read]:
                    over.append((made, read))
                    gone.add(read)
            instructions.append(Run(instruction.op, over=tuple(over)))
        elif not (isinstance(instruction, Free) and instruction.value in gone):
            instructions.append(instruction)
    return Program(graph.fingerprint, tuple(instructions))


def all_away_and_back(graph: Graph, place: Place) -> Program:
    """The captured order, with every activation that the backward needs away from the device in between."""
    backward = next(index for index, op in enumerate(graph.ops) if op.phase == "backward")
    away: dict[int, int] = {}  # value -> the op that reads it first after its absence
    for value, item in enumerate(graph.values):
        later = [reader for reader in graph.readers[value] if reader >= backward]
        if item.kind == "activation" and 0 <= graph.maker[value] < backward and later and value not in graph.required:
            away[value] = later[0]
    instructions: list[Instruction] = []
    for instruction in lowtide.keep_everything(graph).instructions:
        if isinstance(instruction, Run):
            if instruction.op == backward:
                for value in away:
                    instructions += [Copy(value, place), Wait(value, place), Free(value)]
            for value, first in away.items():
                if first == instruction.op:
                    instructions += [Copy(value, "device"), Wait(value, "device"), Free(value, place)]
        instructions.append(instruction)
    return Program(graph.fingerprint, tuple(instructions))


def inputs_away_and_back(graph: Graph, place: Place) -> Program:
    """The captured order, after every tensor of the caller was sent away and came back."""
    tensors = [item.value for item in graph.inputs if graph.values[item.value].kind != "scalar"]
    rows = [row for value in tensors for row in (*away(value, place), *back(value, place))]
    return Program(graph.fingerprint, (*rows, *lowtide.keep_everything(graph).instructions))


def updated_elsewhere(graph: Graph) -> Program:
    """The captured order, with every update of the caller's storages on a copy in the arena, which then goes home.

    The arena is not laid out yet.
    """
    instructions: list[Instruction] = []
    for row in lowtide.keep_everything(graph).instructions:
        pairs = graph.effects[row.op] if isinstance(row, Run) else ()
        for _, old in pairs:
            instructions += [*away(old, "host"), *back(old, "host", at=0)]
        instructions.append(row)
        for new, _ in pairs:
            instructions += [*away(new, "host"), *back(new, "host")]
    return Program(graph.fingerprint, tuple(instructions))


def away(value: int, place: Place) -> list[Instruction]:
    """Send a value away from the device."""
    return [Copy(value, place), Wait(value, place), Free(value)]


def back(value: int, place: Place, at: int = -1) -> list[Instruction]:
    """Have it back."""
    return [Copy(value, "device", at), Wait(value, "device"), Free(value, place)]
