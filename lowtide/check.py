"""The judge: does a program do what its graph says, and in how many bytes; slow, naive, a stranger to `simulate`.

It walks the instructions once and keeps a list of the blocks that are there. It knows nothing of what values contain:
a program is right if every run finds all that it reads, if nothing is written over while it is needed, if what cannot
be repeated is not, and if what must outlive the step does: the last content of an input's storage at home, which is the
caller's own storage, on the device or in another place. What is copied to the place of its home goes home: on the
device, unless it is for the arena.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NoReturn, get_args

from lowtide.costs import Costs
from lowtide.errors import ProgramError
from lowtide.graph import GENERATOR, HANDOVER, Graph, Place
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait

# Where and which: ("device" | "host" | "disk", value). Also on the device, while they last: ("home", storage), the
# caller's own, which holds the bytes of the value in it; ("duplicate", value), ("temporaries", op), ("generator", op),
# the state of the random generator that repeats an op, and ("present state", op), the one put aside meanwhile.
Block = tuple[str, int]

# Why a block cannot be read, from the most ready (None: it can) to the least.
UNREADABLE = (None, "read before wait", "read after free", "read before made")


def check(graph: Graph, costs: Costs, program: Program, *, budget: int | None = None) -> int:
    """The peak of a valid program in bytes; a ProgramError with the rule and the instruction for any other."""
    judge = _Judge(graph, costs, program)
    judge.start()
    for index, instruction in enumerate(program.instructions):
        judge.now = index
        judge.note()
        match instruction:
            case Run():
                judge.run(instruction)
            case Free(value, place):
                judge.free((place, value))
            case Copy(value, to, at):
                judge.copy(value, to, at)
            case Wait(value, place):
                judge.wait((place, value))
    judge.end()
    return judge.peak(budget)


class _Judge:
    """What is there when instruction `now` executes."""

    def __init__(self, graph: Graph, costs: Costs, program: Program) -> None:
        self.graph, self.costs, self.program = graph, costs, program
        self.now = -1  # before the first instruction
        self.blocks: dict[Block, tuple[int, int]] = {}  # offset (-1: outside the arena) and bytes
        self.changed: dict[Block, int] = {}  # the instruction that last made a block appear or vanish
        self.flights: dict[Block, Block] = {}  # copies in flight: target -> source
        self.homes: dict[int, int | None] = {}  # the caller's storages -> the value that is there; None: none is
        self.places: dict[int, Place] = {}  # the caller's storages -> where they are
        self.arena: list[tuple[int, int, Block]] = []  # (start, end, block), sorted; none has zero bytes
        self.outside = 0  # device bytes outside the arena
        self.held = [0] * len(program.instructions)  # most bytes outside the arena during each instruction
        self.has_run: set[int] = set()  # ops
        self.latest: dict[str, int] = {}  # channel -> of the ops in it that have run, the last one of the graph
        self.last_replay: dict[int, int] = {}  # for each random op that is repeated, its last run

    def start(self) -> None:
        """Before the step: all that is named exists, and the inputs are there."""
        graph, costs, program = self.graph, self.costs, self.program
        for noun, fingerprint in (("program", program.graph), ("costs", costs.graph)):
            if fingerprint != graph.fingerprint:
                what = f"{noun} for {fingerprint[:12]}, but the graph is {graph.fingerprint[:12]}."
                raise ProgramError("wrong graph", f"wrong graph: {what}")
        sizes = (len(costs.nbytes), len(costs.arena_temporaries), len(costs.in_place))
        if sizes != (len(graph.values), len(graph.ops), len(graph.ops)):
            raise ProgramError("wrong graph", f"wrong graph: costs of {sizes} values, ops and ops.")
        if program.arena < 0:
            raise ProgramError("misplaced", f"misplaced: an arena of {program.arena} B.")
        for index, instruction in enumerate(program.instructions):
            if not _exists(instruction, graph):
                what = f"{instruction}; the graph has {len(graph.ops)} ops, {len(graph.values)} values."
                raise ProgramError("no such", f"no such at instruction {index}: {what}", instruction=index)
            if isinstance(instruction, Run) and instruction.again and graph.ops[instruction.op].random:
                self.last_replay[instruction.op] = index
        for item in graph.inputs:
            storage = graph.values[item.value].storage
            if storage in self.homes:
                what = f"%{self.homes[storage]} and %{item.value} are inputs of one storage."
                raise ProgramError("wrong graph", f"wrong graph: {what}")
            self.homes[storage], self.places[storage] = item.value, item.home
            if item.home == "device":
                self.put(("home", storage), costs.nbytes[item.value], -1)
            self.put((item.home, item.value), 0, -1)

    def run(self, run: Run) -> None:
        """Run an op: what it reads is there, what it makes is there afterwards."""
        graph, op, nbytes = self.graph, run.op, self.costs.nbytes
        self.check_order(op, run.again)
        for value in graph.reads_of(op, again=run.again):
            self.check_readable(("device", value))
        makes = graph.makes_of(op, again=run.again)
        self.check_over(run, makes)
        over = dict(run.over)
        if op in self.last_replay and not run.again:
            self.put(("generator", op), graph.generator_bytes, -1)
        passing: list[Block] = []
        if graph.ops[op].random and run.again:
            passing.append(("present state", op))  # put aside while the old one is in force
            self.put(passing[0], graph.generator_bytes, -1)

        blocks = [(("device", value), nbytes[value]) for value in makes]
        if self.costs.arena_temporaries[op] > 0:
            placed = bool(run.at) and run.at[-1] >= 0
            blocks.append((("temporaries", op), self.costs.temporaries(op, placed=placed)))
        if len(run.at) != (len(blocks) if self.program.arena else 0):
            self.fail("misplaced", f"{self.name_op(op)} makes {len(blocks)} blocks, but at is {run.at}.")
        for (block, size), offset in zip(blocks, run.at or (-1,) * len(blocks), strict=True):
            self.check_offset(block, size, offset)
            where, value = block
            if where == "device" and value in over:
                expected, _ = self.blocks["device", over[value]]
                if offset != expected:
                    self.fail("misplaced", f"%{value} at {offset}, over %{over[value]} at {expected}.")
                continue
            if block in self.blocks:
                block = ("duplicate", value)
            self.put(block, size, offset)
            if block[0] != "device":
                passing.append(block)
        self.note()
        for block in passing:
            self.drop(block)
        for made, read in run.over:
            _, size = self.blocks["device", read]
            self.put(("device", made), size, self.drop(("device", read)))
            if self.at_home(("device", read)):
                self.homes[graph.values[read].storage] = made
        if self.last_replay.get(op) == self.now:
            self.drop(("generator", op))

    def check_order(self, op: int, again: bool) -> None:
        """Whether this op may run now, for the first time or again."""
        name, item = self.name_op(op), self.graph.ops[op]
        first = op not in self.has_run
        effects = ", ".join(f"%{old} to %{new}" for new, old in self.graph.effects[op])
        if again and first:
            self.fail("repeat before first", f"{name} runs again, but has not run yet.")
        others = ", ".join(channel for channel in item.channels if channel != GENERATOR)
        if again and effects and not item.detachable:
            self.fail("side effect twice", f"{name} updates {effects} and cannot run without that.")
        if not first and others:
            self.fail("side effect twice", f"{name} acts in {others} a second time.")
        if not again and not first:
            if effects:
                self.fail("side effect twice", f"{name} updates {effects} a second time: again=False.")
            if item.random:
                self.fail("random replay", f"{name} draws new numbers in its second run: again=False.")
            self.fail("not marked as repeat", f"{name} has run before, but again=False.")
        if first:
            self.check_channels(op)
        self.has_run.add(op)

    def check_channels(self, op: int) -> None:
        """Whether no later op of the graph has run in a channel of this one; a handover is in all of them."""
        name, channels = self.name_op(op), self.graph.ops[op].channels
        for channel, latest in self.latest.items():
            if op < latest and (channel in channels or (channels and HANDOVER in (channel, *channels))):
                if channel == GENERATOR == channels[0]:
                    self.fail("random replay", f"{name} draws its numbers after op {latest}.")
                self.fail("out of order", f"{name} runs after op {latest}, which comes later in {channel}.")
        self.latest |= {channel: max(op, self.latest.get(channel, -1)) for channel in channels}

    def check_over(self, run: Run, makes: tuple[int, ...]) -> None:
        """Whether what this run makes may sit on what it reads."""
        graph, op, nbytes = self.graph, run.op, self.costs.nbytes
        reads, updates = graph.reads_of(op, again=run.again), graph.ops[op].updates
        allowed = updates + self.costs.in_place[op]
        for made, read in run.over:
            lasting = graph.values[read].storage in graph.lasting_storages
            kinds = (graph.values[made].kind, graph.values[read].kind)
            faults = (
                (made not in makes or read not in reads, f"it makes {makes} and reads {reads}"),
                (sum(made == m or read == r for m, r in run.over) > 1, f"one of them is twice in {run.over}"),
                (("device", made) in self.blocks, f"%{made} is there already"),
                ((made, read) not in allowed, f"it allows only {allowed}"),
                (any(made == new and read != old for new, old in updates), f"%{made} is an update of another value"),
                (lasting and (made, read) not in updates, "only an update may write over an input"),
                ("scalar" in kinds, "a number has no bytes"),
                (nbytes[made] != nbytes[read], f"they have {nbytes[made]} B and {nbytes[read]} B"),
            )
            for wrong, why in faults:
                if wrong:
                    self.fail("illegal in-place", f"%{made} over %{read} in {self.name_op(op)}, but {why}.")
            self.check_still(("device", read))
        for made, read in () if run.again else graph.effects[op]:
            if (made, read) not in run.over:
                what = f"{self.name_op(op)} makes %{made} beside %{read}, but this update outlives the step."
                self.fail("illegal in-place", what)

    def check_offset(self, block: Block, nbytes: int, offset: int) -> None:
        """Whether a block may be at this offset, were the arena empty."""
        if offset == -1:
            return
        where, value = block
        fits = 0 <= offset <= self.program.arena - nbytes and offset % self.costs.alignment == 0
        if not fits or self.program.arena == 0 or where in ("host", "disk"):
            arena = f"an arena of {self.program.arena} B in steps of {self.costs.alignment}"
            self.fail("misplaced", f"{nbytes} B of {self.name(block)} at {offset} of {arena}.")
        leaves = where == "device" and value in self.graph.required and self.graph.home[value] == "device"
        if leaves and self.graph.values[value].storage not in self.graph.lasting_storages:
            self.fail("misplaced", f"{self.name(block)} leaves the step, but is at {offset} of the arena.")

    def free(self, block: Block) -> None:
        """Give back a block."""
        if block not in self.blocks:
            if block not in self.changed:
                self.fail("free before made", f"{self.name(block)} was never there.")
            self.fail("double free", f"{self.name(block)} is gone since instruction {self.changed[block]}.")
        self.check_still(block)
        self.drop(block)
        if self.at_home(block):
            self.leave_home(self.graph.values[block[1]].storage)

    def leave_home(self, storage: int) -> None:
        """Nothing is at home; one on the device that the step uses up is gone then, any other keeps its bytes."""
        self.homes[storage] = None
        persistent = any(
            item.persistent and self.graph.values[item.value].storage == storage for item in self.graph.inputs
        )
        if self.places[storage] == "device" and not persistent:
            del self.homes[storage]
            self.drop(("home", storage))

    def copy(self, value: int, to: Place, at: int) -> None:
        """Start a copy from the device, or to it from the host or else from the disk: into the arena, home, or anew."""
        target, storage = (to, value), self.graph.values[value].storage
        if self.graph.values[value].kind == "scalar":
            self.fail("no such", f"%{value} is a number of the program; it has no bytes that could be copied.")
        if target in self.blocks:
            since = self.changed[target]
            self.fail("copied twice", f"{self.name(target)} is there already, since instruction {since}.")
        sources: list[Block] = [("host", value), ("disk", value)] if to == "device" else [("device", value)]
        source = min(sources, key=lambda block: UNREADABLE.index(self.unreadable(block)))
        self.check_readable(source)
        self.check_offset(target, self.costs.nbytes[value], at)
        comes_home = at == -1 and storage in self.homes and self.places[storage] == to
        if comes_home:
            other = self.homes[storage]
            if other is not None:
                self.fail("overlap", f"{self.name(target)} comes home, where {self.name((to, other))} is.")
            self.homes[storage] = value
        self.put(target, 0 if comes_home else self.costs.nbytes[value], at)
        self.flights[target] = source
        self.note()

    def wait(self, target: Block) -> None:
        """A copy has arrived."""
        if target not in self.flights:
            self.fail("wait without copy", f"no copy of {self.name(target)} is in flight.")
        del self.flights[target]

    def end(self) -> None:
        """After the step: what must be there is, outside the arena, and nothing is left over."""
        graph = self.graph
        for target in self.flights:
            what = f"the copy of {self.name(target)} is in flight at the end."
            self.fail("copy never awaited", what, at=self.changed[target])
        for op, item in enumerate(graph.ops):
            if item.random and op not in self.has_run:
                self.fail("random replay", f"{self.name_op(op)} never drew its numbers.")
            if item.channels and op not in self.has_run:
                self.fail("out of order", f"{self.name_op(op)} never ran, but is in {', '.join(item.channels)}.")
        inputs = {item.value for item in graph.inputs}
        wanted = graph.required | self.last_contents()
        for value in sorted(wanted):
            block: Block = (graph.home[value], value)
            if block not in self.blocks:
                how = "gone" if block in self.changed else "never made"
                what = f"{self.name(block)} must be there at the end, but is {how}."
                self.fail("missing output", what, at=self.changed.get(block))
            offset, _ = self.blocks[block]
            if offset != -1:
                what = f"{self.name(block)} outlives the step, but is at {offset} of the arena at the end."
                self.fail("misplaced", what, at=self.changed[block])
            if graph.values[value].storage in graph.lasting_storages and not self.at_home(block):
                what = f"{self.name(block)} is not in the caller's own storage at the end."
                self.fail("away from home", what, at=self.changed[block])
        welcome = {(graph.home[value], value) for value in wanted | inputs}
        for block in self.blocks:
            if block not in welcome and block[0] != "home":
                self.fail("never freed", f"{self.name(block)} is left over.", at=self.changed[block])

    def last_contents(self) -> set[int]:
        """What the storage of each persistent input contains at the end."""
        values = self.graph.values
        last = {values[item.value].storage: item.value for item in self.graph.inputs if item.persistent}
        for op in self.graph.ops:
            last.update((values[old].storage, new) for new, old in op.updates if values[old].storage in last)
        return set(last.values())

    def at_home(self, block: Block) -> bool:
        """Whether a block is in the caller's own storage."""
        place, value = block
        storage = self.graph.values[value].storage
        return self.homes.get(storage) == value and self.places[storage] == place

    def peak(self, budget: int | None) -> int:
        """The arena and the most that was ever outside it, which must be within the budget."""
        arena = self.program.arena
        most = max(self.held, default=self.outside)
        if budget is not None and arena + most > budget:
            bound = most if arena else budget + 1
            at = next((index for index, held in enumerate(self.held) if held >= bound), None)
            total = arena + (most if at is None else self.held[at])
            what = f"{total} B ({arena} B of arena) with a budget of {budget} B; the peak is {arena + most} B."
            self.fail("over budget", what, at=at)
        return arena + most

    def note(self) -> None:
        """Count the bytes outside the arena at this instruction."""
        self.held[self.now] = max(self.held[self.now], self.outside)

    def put(self, block: Block, nbytes: int, offset: int) -> None:
        """Let a block appear; in the arena nothing else may be there."""
        self.blocks[block] = (offset, nbytes)
        self.changed[block] = self.now
        if offset >= 0 and nbytes > 0:
            span = (offset, offset + nbytes, block)
            position = bisect_left(self.arena, span)
            for start, end, other in self.arena[max(0, position - 1) : position + 1]:  # the neighbours
                if start < offset + nbytes and offset < end:
                    mine, theirs = f"at {offset} to {offset + nbytes}", f"at {start} to {end}"
                    self.fail("overlap", f"{self.name(block)} {mine} and {self.name(other)} {theirs}.")
            self.arena.insert(position, span)
        elif block[0] not in ("host", "disk"):
            self.outside += nbytes

    def drop(self, block: Block) -> int:
        """Let a block vanish, and say where it was."""
        offset, nbytes = self.blocks.pop(block)
        self.changed[block] = self.now
        if offset >= 0 and nbytes > 0:
            del self.arena[bisect_left(self.arena, (offset, offset + nbytes, block))]
        elif block[0] not in ("host", "disk"):
            self.outside -= nbytes
        return offset

    def unreadable(self, block: Block) -> str | None:
        """The rule that reading this block now would break."""
        if block in self.blocks:
            return "read before wait" if block in self.flights else None
        return "read after free" if block in self.changed else "read before made"

    def check_readable(self, block: Block) -> None:
        """Whether a block is there and complete."""
        rule = self.unreadable(block)
        if rule == "read before made":
            self.fail(rule, f"{self.name(block)} was never there.")
        if rule is not None:
            how = "gone" if rule == "read after free" else "still being copied"
            self.fail(rule, f"{self.name(block)} is {how} since instruction {self.changed[block]}.")

    def check_still(self, block: Block) -> None:
        """Whether no copy from or to this block is in flight."""
        for target, source in self.flights.items():
            if block in (target, source):
                flight = f"the copy to the {target[0]} of instruction {self.changed[target]} is in flight"
                self.fail("free during copy", f"{self.name(block)}, but {flight}.")

    def name_op(self, op: int) -> str:
        """An op as a person reads it."""
        return f"op {op} {self.graph.ops[op].name}"

    def name(self, block: Block) -> str:
        """A block as a person reads it."""
        where, index = block
        if where in ("temporaries", "generator", "present state"):
            return f"the {where} of {self.name_op(index)}"
        value = f"%{index} {self.graph.values[index].name} ({self.costs.nbytes[index]} B)"
        return value if where == "device" else f"{value} ({where})"

    def fail(self, rule: str, what: str, *, at: int | None = None) -> NoReturn:
        """Refuse the program for what happened at this instruction, by default the one that executes."""
        at = self.now if at is None else at
        lines = self.program.show(self.graph, around=max(at, 0))
        where = f"at instruction {at}" if at >= 0 else "in a program without instructions"
        raise ProgramError(rule, f"{rule} {where}: {what}\n{lines}", instruction=at if at >= 0 else None)


def _exists(instruction: Instruction, graph: Graph) -> bool:
    """Whether all that an instruction names is there."""
    match instruction:
        case Run(op, _, over, _):
            return op in range(len(graph.ops)) and all(v in range(len(graph.values)) for p in over for v in p)
        case Free(value, place) | Wait(value, place) | Copy(value, place, _):
            return value in range(len(graph.values)) and place in get_args(Place)
