"""A third witness: a machine that executes programs on bytes, and knows neither rules nor symbols.

An op is a hash of its call, the bytes that it reads and the state of the generator: whatever is read at a wrong time,
missed, or drawn from a wrong state gives other bytes. Memory behaves as badly as it may. A run scribbles on its
temporaries and on its results before it reads anything, unless a result may sit on an argument. A copy is under way
from its `Copy` to its `Wait`, whatever happens to its two ends meanwhile. What is freed is scribbled on, and the arena
belongs to somebody else when the step is over. At the end the caller looks at its own arrays, and at what it is given.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.costs import Costs
from lowtide.graph import Graph, Op
from lowtide.program import Copy, Free, Program, Run, Wait

Bytes = NDArray[np.uint8]
NUMBER = 8  # bytes of a scalar, which no plan counts
SEED = b"seed"  # the generator's state before the step


class Wrong(Exception):
    """The program can't be executed, or leaves other bytes than eager's order does."""


def mix(*parts: bytes, nbytes: int = 16) -> bytes:
    """So many bytes, which depend on all that is given."""
    found = hashlib.shake_128()
    for part in parts:
        found.update(len(part).to_bytes(4, "little"))
        found.update(part)
    return found.digest(nbytes)


# ---------------------------------------------------------------------------------------------------------------- eager


class Step:
    """One training step in eager's order: what every value contains, and the generator's last state."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        self.numbers = {n for n, value in enumerate(graph.values) if value.kind == "scalar"}
        self.nbytes = [NUMBER if n in self.numbers else size for n, size in enumerate(costs.nbytes)]
        self.calls = [_call(graph, op) for op in graph.ops]
        self.contents = {
            item.value: mix(b"input", str(item.value).encode(), nbytes=self.nbytes[item.value]) for item in graph.inputs
        }
        self.generator = SEED
        self.world: dict[str, bytes] = {}
        for op in range(len(graph.ops)):
            self.contents = self.made(op, self.contents, self.generator) | self.contents
            self.generator = self.drawn(op, self.generator)
            self.world = self.acted(op, self.world, self.generator)

    def drawn(self, op: int, generator: bytes) -> bytes:
        """The generator's state after a run."""
        return mix(self.calls[op], generator) if self.graph.ops[op].random else generator

    def acted(self, op: int, world: dict[str, bytes], generator: bytes) -> dict[str, bytes]:
        """What the world outside is after a run; code that is handed over to sees all of it, and changes all of it."""
        channels = self.graph.ops[op].channels
        if not channels:
            return world
        seen = {**world, "generator": generator} if "handover" in channels else world
        before = [seen.get(channel, b"") for channel in (sorted(seen) if "handover" in channels else channels)]
        after = mix(self.calls[op], world.get("handover", b""), *before)
        return world | dict.fromkeys(channels, after)

    def made(self, op: int, contents: dict[int, bytes], generator: bytes) -> dict[int, bytes]:
        """What an op makes; of one that may run detached, outputs do not depend on what it updates for the caller."""
        item = self.graph.ops[op]
        detached = self.lasting(item) if item.detachable else set()
        draw = generator if item.random else b""
        plain = mix(self.calls[op], draw, *(contents[value] for value in item.reads if value not in detached))
        found = {
            value: mix(plain, b"output", str(n).encode(), nbytes=self.nbytes[value])
            for n, value in enumerate(item.outputs)
            if value is not None
        }
        for n, (new, old) in enumerate(item.updates):
            if old not in detached:
                found[new] = mix(plain, b"update", str(n).encode(), nbytes=self.nbytes[new])
            elif contents.keys() >= detached:
                whole = mix(plain, *(contents[value] for value in item.reads))
                found[new] = mix(whole, b"update", str(n).encode(), nbytes=self.nbytes[new])
        return found

    def lasting(self, op: Op) -> set[int]:
        """The values of the caller that an op writes over."""
        values = self.graph.values
        homes = {values[item.value].storage for item in self.graph.inputs}
        return {old for _, old in op.updates if values[old].storage in homes}


def _call(graph: Graph, op: Op) -> bytes:
    """All of a call but what it reads from memory."""
    views = []
    for read in op.arguments():
        view = read.view
        while view is not None:
            views.append(graph.views[view])
            view = graph.views[view].parent
    return repr((op.name, op.target, op.args, op.kwargs, views)).encode()


# -------------------------------------------------------------------------------------------------------------- program


@dataclass(eq=False)
class Block:
    """Bytes of the device or of another place."""

    memory: Bytes
    counted: int = 0  # bytes of the device outside the arena
    home: int | None = None  # the storage of the caller that this is


class Machine:
    """Executes one program for a step."""

    def __init__(self, step: Step, program: Program) -> None:
        self.step, self.graph, self.costs, self.program = step, step.graph, step.costs, program
        self.arena: Bytes = np.zeros(program.arena, np.uint8)
        self.device: dict[int, Block] = {}
        self.away: dict[str, dict[int, Block]] = {"host": {}, "disk": {}}
        self.copies: dict[tuple[int, str], tuple[Block, Block, bytes]] = {}  # under way: from, to, what it was
        self.generator = SEED
        self.world: dict[str, bytes] = {}
        self.states: dict[int, bytes] = {}  # random op -> the state that its repetitions go back to
        self.repeats = [row.op for row in program.instructions if isinstance(row, Run) and row.again]
        self.dirt = 0
        self.outside, self.peak = 0, 0  # bytes of the device beside the arena, now and at most
        self.homes: dict[int | None, Block] = {}  # the caller's own arrays, and where they are
        self.lives = {self.graph.values[item.value].storage: item.home for item in self.graph.inputs}
        for item in self.graph.inputs:
            memory = np.frombuffer(step.contents[item.value], np.uint8).copy()
            storage = self.graph.values[item.value].storage
            counted = self.costs.nbytes[item.value] if item.home == "device" else 0
            self.homes[storage] = self.held(item.home)[item.value] = Block(memory, counted, storage)
            self.outside += counted
        self.kept = {self.graph.values[item.value].storage: item.value for item in self.graph.inputs if item.persistent}

    def held(self, place: str) -> dict[int, Block]:
        """The blocks in a place."""
        return self.device if place == "device" else self.away[place]

    def own(self, value: int, place: str) -> Block | None:
        """The caller's own array, if this is a place for what it holds."""
        storage = self.graph.values[value].storage
        return self.homes.get(storage) if self.lives.get(storage) == place else None

    def execute(self) -> int:
        """The most bytes that the device ever held; Wrong, if that is not what eager's order would have done."""
        self.count()
        for row in self.program.instructions:
            match row:
                case Run():
                    self.run(row)
                case Free(value, place):
                    self.free(value, place)
                case Copy(value, "device", at):
                    self.fetch(value, at)
                case Copy(value, place):
                    self.send(value, place)
                case Wait(value, place):
                    self.wait(value, place)
            self.count()
        self.look()
        return len(self.arena) + self.peak

    def count(self, more: int = 0) -> None:
        """Count what is there now."""
        self.peak = max(self.peak, self.outside + len(self.states) * self.graph.generator_bytes + more)

    def scribble(self, block: Block) -> None:
        """Fill a block with something else."""
        self.dirt = (self.dirt + 97) % 256
        block.memory.fill(self.dirt)

    def allocate(self, nbytes: int, offset: int, *, counted: bool = True) -> Block:
        """A block with whatever was there before."""
        if offset == -1 or not counted:
            block = Block(np.empty(nbytes, np.uint8), nbytes if counted else 0)
        else:
            block = Block(self.arena[offset : offset + nbytes])
            if offset < 0 or len(block.memory) != nbytes:
                raise Wrong(f"{nbytes} bytes at {offset} of {len(self.arena)}")
        self.outside += block.counted
        self.scribble(block)
        return block

    def release(self, block: Block) -> None:
        """A block is gone."""
        self.scribble(block)
        self.outside -= block.counted

    def run(self, run: Run) -> None:
        """Run an op, as badly as it may."""
        op, item, over = run.op, self.graph.ops[run.op], dict(run.over)
        left = self.step.lasting(item) if run.again else set()
        if left and not item.detachable:
            raise Wrong("an update that can't be left out")
        reads = [value for value in item.reads if value not in left]
        makes = [v for v in item.outputs if v is not None] + [new for new, old in item.updates if old not in left]
        if not self.device.keys() >= set(reads) or not over.keys() <= set(makes) or not {*over.values()} <= set(reads):
            raise Wrong("a value is not there")
        at = run.at if self.program.arena else (-1,) * (len(makes) + 1)
        if len(at) < len(makes) + (self.costs.arena_temporaries[op] > 0):
            raise Wrong("not enough offsets")
        results = {value: self.result(op, value, over, offset) for value, offset in zip(makes, at, strict=False)}
        temporaries = Block(np.empty(0, np.uint8))
        if self.costs.arena_temporaries[op]:
            nbytes = self.costs.temporaries(op, placed=bool(run.at) and run.at[-1] >= 0)
            temporaries = self.allocate(nbytes, at[len(makes)])
        contents = {value: self.device[value].memory.tobytes() for value in reads}
        made = self.step.made(op, contents, self.draw(run))
        if not run.again or item.channels != ("generator",):
            self.world = self.step.acted(op, self.world, self.generator)
        if item.optional and all(content == self.step.contents[value] for value, content in contents.items()):
            made = self.step.contents  # what optional ops are for
        for value, block in results.items():
            block.memory[:] = np.frombuffer(made[value], np.uint8)
        self.scribble(temporaries)
        self.count(self.graph.generator_bytes if item.random and run.again else 0)
        self.forget_state(run)
        self.release(temporaries)
        for value, block in results.items():
            if value in over:
                self.device.pop(over[value], None)
            elif value in self.device:
                self.release(block)
                continue
            self.device[value] = block

    def result(self, op: int, value: int, over: dict[int, int], offset: int) -> Block:
        """Where a result goes, scribbled on if that is not allowed to spoil what is read."""
        number = value in self.step.numbers
        if value not in over:
            return self.allocate(self.step.nbytes[value], offset, counted=not number)
        block, pair = self.device[over[value]], (value, over[value])
        if len(block.memory) != self.step.nbytes[value]:
            raise Wrong("a result on an argument of another size")
        if pair not in self.graph.ops[op].updates + self.costs.in_place[op]:
            self.scribble(block)
        return block

    def draw(self, run: Run) -> bytes:
        """The generator's state for this run."""
        if not self.graph.ops[run.op].random:
            return b""
        if run.again:
            if run.op not in self.states:
                raise Wrong("no state to go back to")
            return self.states[run.op]
        before, self.generator = self.generator, self.step.drawn(run.op, self.generator)
        if run.op in self.repeats:
            self.states[run.op] = before
        return before

    def forget_state(self, run: Run) -> None:
        """Let go of a state after the last run that goes back to it."""
        if run.again:
            self.repeats.remove(run.op)
            if run.op not in self.repeats:
                self.states.pop(run.op, None)

    def free(self, value: int, place: str) -> None:
        """Let go of a block; the caller's own stay as they are."""
        if value not in self.held(place):
            raise Wrong("nothing to free")
        block = self.held(place).pop(value)
        if block.home is None or (block.home not in self.kept and place == "device"):
            self.homes.pop(block.home, None)
            self.release(block)

    def send(self, value: int, place: str) -> None:
        """Start a copy from the device."""
        if value not in self.device or value in self.step.numbers:
            raise Wrong("nothing to copy")
        target = self.own(value, place) or Block(np.empty(self.step.nbytes[value], np.uint8))
        self.away[place][value] = target
        self.start(value, place, self.device[value], target)

    def fetch(self, value: int, at: int) -> None:
        """Start a copy to the device: to the caller's own array, or to new memory."""
        ready = [place for place in self.away if value in self.away[place] and (value, place) not in self.copies]
        if not ready:
            raise Wrong("nothing to copy")
        home = self.own(value, "device") if at == -1 else None
        self.device[value] = self.allocate(self.step.nbytes[value], at) if home is None else home
        self.start(value, "device", self.away[ready[0]][value], self.device[value])

    def start(self, value: int, to: str, source: Block, target: Block) -> None:
        """A copy begins; nobody knows when it reads and writes."""
        self.scribble(target)
        self.copies[value, to] = (source, target, source.memory.tobytes())

    def wait(self, value: int, place: str) -> None:
        """A copy ends, with what was there all the time or with anything."""
        if (value, place) in self.copies:
            source, target, before = self.copies.pop((value, place))
            self.scribble(target)
            if source.memory.tobytes() == before:
                target.memory[:] = source.memory

    def look(self) -> None:
        """The step is over."""
        self.arena.fill(self.dirt)
        wanted = self.step.contents
        for output in self.graph.outputs:
            found = self.held(output.home).get(output.value)
            if found is None or found.memory.tobytes() != wanted[output.value]:
                raise Wrong(f"%{output.value} is not what the step returns")
        last = dict(self.kept)
        for op in self.graph.ops:
            last |= {
                self.graph.values[old].storage: new for new, old in op.updates if self.graph.values[old].storage in last
            }
        for storage, value in last.items():
            if self.homes[storage].memory.tobytes() != wanted[value]:
                raise Wrong(f"the caller's array has not become %{value}")
        if self.generator != self.step.generator:
            raise Wrong("the generator has another state")
        if self.world != self.step.world:
            raise Wrong("the world has another state")
