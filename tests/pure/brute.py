"""Two oracles for the judge, each written another way than it, and one for the planners.

`execute` knows meaning and no rules: it runs a program on symbols, with an arena of real cells that the program can
corrupt, and says whether every op found what it found in the graph's own order. `faults` knows rules and no state: it
answers each question about an instruction by looking back through the instructions before it. `frontier` tries all
programs of a small graph, and `least_peak_of_orders` all orders of its ops.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations

from lowtide.costs import Costs
from lowtide.graph import Graph
from lowtide.program import Copy, Free, Program, Run, Wait

GARBAGE = -1

# A program that breaks one of these can still execute rightly: the damage is never read, or the rule is about form.
LAX = {
    "copied twice",  # the old copy leaks
    "free during copy",  # the copy is never read
    "illegal in-place",  # what it spoils is never read, or the caller does not look at the input it should update
    "misplaced",  # off the grid, or offsets where there is no arena
    "never freed",
    "no such",  # an index from the end
    "not marked as repeat",
    "overlap",  # with bytes that are never read again
    "repeat before first",
    "side effect twice",  # on an old value that was kept elsewhere
    "wait without copy",
}


# -------------------------------------------------------------------------------------------------------------- meaning


class Wrong(Exception):
    """The program cannot be executed, or computes something else."""


class Names:
    """A number for each symbolic result, so that equal numbers mean equal histories."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[object, ...], int] = {}

    def __call__(self, *history: object) -> int:
        return self.numbers.setdefault(history, len(self.numbers))


def results(names: Names, graph: Graph, op: int, contents: dict[int, int], draw: int | None) -> dict[int, int]:
    """What an op makes of these contents; a detachable one needs its lasting old values for their updates only."""
    item = graph.ops[op]
    unused = {old for _, old in graph.effects[op]} if item.detachable else set()
    plain = tuple(contents[value] for value in graph.reads[op] if value not in unused)
    made = {v: names(op, "output", n, plain, draw) for n, v in enumerate(item.outputs) if v is not None}
    for n, (new, old) in enumerate(item.updates):
        if old not in unused:
            made[new] = names(op, "update", n, plain, draw)
        elif unused <= contents.keys():
            made[new] = names(op, "update", n, tuple(contents[value] for value in graph.reads[op]), draw)
    return made


def in_order(graph: Graph, one: int, other: int) -> bool:
    """Whether first runs of two ops may not change places: a channel of both, or the whole world is looked at."""
    first, second = set(graph.ops[one].channels), set(graph.ops[other].channels)
    return bool(first & second) or bool(first and second and "handover" in first | second)


def reference(names: Names, graph: Graph) -> dict[int, int]:
    """The content of every value when the ops run in the order of the graph."""
    contents = {item.value: names("input", item.value) for item in graph.inputs}
    draws = 0
    for op, item in enumerate(graph.ops):
        contents = results(names, graph, op, contents, draws if item.random else None) | contents
        draws += item.random
    return contents


@dataclass(eq=False)
class Cell:
    """A piece of memory: in the arena it has only an address, elsewhere a content of its own."""

    nbytes: int
    offset: int = -1
    content: int = GARBAGE
    home: int | None = None  # the storage of the caller that this is
    alive: bool = True


class Machine:
    """Executes a program on symbols."""

    def __init__(self, graph: Graph, costs: Costs, program: Program) -> None:
        self.graph, self.costs, self.program = graph, costs, program
        self.names = Names()
        self.right = reference(self.names, graph)
        self.arena = [GARBAGE] * program.arena
        self.device: dict[int, Cell] = {}
        self.away: dict[str, dict[int, Cell]] = {"host": {}, "disk": {}}
        self.homes: dict[int | None, Cell] = {}
        self.lives = {graph.values[item.value].storage: item.home for item in graph.inputs}
        for item in graph.inputs:
            storage = graph.values[item.value].storage
            cell = Cell(costs.nbytes[item.value], -1, self.right[item.value], storage)
            self.homes[storage] = self.cells(item.home)[item.value] = cell
        self.kept = {graph.values[item.value].storage for item in graph.inputs if item.persistent}
        self.heap = list(self.device.values())  # every cell of the device that was ever there
        self.flights: dict[tuple[int, str], tuple[Cell, Cell, int]] = {}
        self.draws: list[int] = []  # ops, in the order in which they drew
        self.acts: list[int] = []  # ops of all channels, in the order in which they acted
        self.numbers: dict[int, int] = {}  # op -> which draw it was
        self.now, self.peak = -1, 0
        runs = [(n, row) for n, row in enumerate(program.instructions) if isinstance(row, Run)]
        self.drawing = [  # of each random op, the instructions that run it for the first time, and again
            tuple([n for n, run in runs if run.op == op and run.again == again] for again in (False, True))
            for op, item in enumerate(graph.ops)
            if item.random
        ]

    def cells(self, place: str) -> dict[int, Cell]:
        return self.device if place == "device" else self.away[place]

    def read(self, cell: Cell) -> int:
        if cell.offset < 0 or cell.nbytes == 0:
            return cell.content
        found = set(self.arena[cell.offset : cell.offset + cell.nbytes])
        return found.pop() if len(found) == 1 else GARBAGE

    def write(self, cell: Cell, content: int) -> None:
        cell.content = content
        if cell.offset >= 0:
            self.arena[cell.offset : cell.offset + cell.nbytes] = [content] * cell.nbytes

    def allocate(self, nbytes: int, offset: int) -> Cell:
        if offset != -1 and not 0 <= offset <= len(self.arena) - nbytes:
            raise Wrong(f"{offset} is outside the arena")
        cell = Cell(nbytes, offset)
        self.write(cell, GARBAGE)
        self.heap.append(cell)
        return cell

    def release(self, cell: Cell) -> None:
        self.write(cell, GARBAGE)
        cell.alive = False

    def run(self, run: Run) -> None:
        graph, op, nbytes = self.graph, run.op, self.costs.nbytes
        reads, makes = graph.reads_of(op, again=run.again), graph.makes_of(op, again=run.again)
        at = run.at
        if not self.program.arena:
            at = (-1,) * (len(makes) + 1)
        elif len(at) < len(makes) + (self.costs.arena_temporaries[op] > 0):
            raise Wrong("not enough offsets")
        over = dict(run.over)
        if any(value not in self.device for value in reads) or not set(over) <= set(makes):
            raise Wrong("a value is not there")
        if any(read not in reads or nbytes[read] != nbytes[made] for made, read in over.items()):
            raise Wrong("nothing of this size to sit on")
        fresh = {v: self.allocate(nbytes[v], offset) for v, offset in zip(makes, at, strict=False) if v not in over}
        for value, offset in zip(makes, at, strict=False):
            if value in over and self.device[over[value]].offset != offset:
                raise Wrong("in place at another place")
        needed = self.costs.arena_temporaries[op]
        scratch = self.allocate(needed, at[len(makes)] if needed else -1)

        contents = {value: self.read(self.device[value]) for value in reads}
        if any(contents[value] != self.right[value] for value in reads):
            raise Wrong("an op reads something else than in the graph's order")
        if graph.ops[op].channels and (not run.again or graph.ops[op].channels != ("generator",)):
            self.acts.append(op)
        if graph.ops[op].random and not run.again:
            self.numbers[op] = len(self.draws)
            self.draws.append(op)
        elif graph.ops[op].random and op not in self.numbers:
            raise Wrong("no numbers to repeat")
        if not graph.ops[op].detachable and contents.keys() != set(graph.reads[op]):
            raise Wrong("a side effect that cannot be left out")
        made = results(self.names, graph, op, contents, self.numbers.get(op))
        made |= {value: self.right[value] for value in made if graph.maker[value] != op}  # what optional ops are for
        for value in makes:
            if value not in over:
                self.write(fresh[value], made[value])
                continue
            cell = self.device[over[value]]
            pair = (value, over[value])
            if pair not in graph.ops[op].updates and (pair not in self.costs.in_place[op] or cell.home is not None):
                self.write(cell, GARBAGE)  # an op that reads what it has already written, or somebody else's memory
            else:
                self.write(cell, made[value])
        self.write(scratch, GARBAGE)
        self.count()
        self.release(scratch)
        for value, cell in fresh.items():
            if value in self.device:
                self.release(cell)
            else:
                self.device[value] = cell
        moved = {value: self.device[read] for value, read in over.items()}
        for read in over.values():
            self.device.pop(read, None)
        self.device |= moved

    def free(self, value: int, place: str) -> None:
        if value not in self.cells(place):
            raise Wrong("nothing to free")
        cell = self.cells(place).pop(value)
        if cell.home in self.kept or (cell.home is not None and place != "device"):
            return  # the caller holds it
        self.homes.pop(cell.home, None)
        self.release(cell)

    def copy(self, value: int, to: str, at: int) -> None:
        storage = self.graph.values[value].storage
        home = self.homes.get(storage) if at == -1 and self.lives.get(storage) == to else None
        if to == "device":
            ready = [p for p in ("host", "disk") if value in self.away[p] and (value, p) not in self.flights]
            if not ready:
                raise Wrong("nothing to copy")
            source = self.away[ready[0]][value]
            target = home or self.allocate(self.costs.nbytes[value], at)
        else:
            if value not in self.device:
                raise Wrong("nothing to copy")
            source, target = self.device[value], home or Cell(self.costs.nbytes[value])
        self.write(target, GARBAGE)
        self.cells(to)[value] = target
        self.flights[value, to] = (source, target, self.read(source))

    def wait(self, value: int, place: str) -> None:
        source, target, content = self.flights.pop((value, place), (None, None, 0))
        if source is not None and target is not None:
            steady = source.alive and self.read(source) == content
            self.write(target, content if steady else GARBAGE)

    def generator_states(self, now: int) -> int:
        """How many states of the generator are held at this instruction."""
        held = 0
        for first, again in self.drawing:
            held += bool(first and again and first[0] <= now <= again[-1])
            held += now in again  # the present state waits for its return
        return held

    def count(self) -> None:
        outside = sum(cell.nbytes for cell in self.heap if cell.alive and cell.offset < 0)
        states = self.generator_states(self.now) * self.graph.generator_bytes
        self.peak = max(self.peak, len(self.arena) + outside + states)

    def execute(self) -> int:
        self.count()
        for now, row in enumerate(self.program.instructions):
            self.now = now
            match row:
                case Run():
                    self.run(row)
                case Free(value, place):
                    self.free(value, place)
                case Copy(value, to, at):
                    self.copy(value, to, at)
                case Wait(value, place):
                    self.wait(value, place)
            self.count()
        self.finish()
        return self.peak

    def finish(self) -> None:
        """The next step begins: the arena is used for something else, and the caller looks at what it got."""
        graph = self.graph
        self.arena = [GARBAGE] * len(self.arena)
        if self.flights:
            raise Wrong("a copy is still running")
        if self.draws != [op for op, item in enumerate(graph.ops) if item.random]:
            raise Wrong("the generator is in another state")
        if sorted(self.acts) != [op for op, item in enumerate(graph.ops) if item.channels]:
            raise Wrong("something was done twice, or never")
        if any(in_order(graph, op, other) and op > other for op, other in combinations(self.acts, 2)):
            raise Wrong("things were done in another order")
        last = {graph.values[v].storage: v for v in sorted(self.right)}
        places = {last[storage]: self.lives[storage] for storage in self.kept}
        for value, place in (places | {output.value: output.home for output in graph.outputs}).items():
            cell = self.cells(place).get(value)
            if cell is None or self.read(cell) != self.right[value]:
                raise Wrong(f"%{value} is not there")
            storage = graph.values[value].storage
            if storage in graph.lasting_storages and cell.home != storage:
                raise Wrong(f"%{value} is not where the caller looks")


def execute(graph: Graph, costs: Costs, program: Program) -> int | None:
    """The peak of a program that computes the right things, or None."""
    try:
        return Machine(graph, costs, program).execute()
    except (Wrong, IndexError):
        return None


# ---------------------------------------------------------------------------------------------------------------- rules


def faults(graph: Graph, costs: Costs, program: Program) -> tuple[int | None, set[str]]:
    """The first instruction that breaks rules (None: the end does), and all rules that it breaks there."""
    history = History(graph, costs, program)
    if bad := [n for n in range(len(program.instructions)) if history.dangling(n)]:
        return bad[0], {"no such"}
    for now in range(len(program.instructions)):
        if broken := set(history.broken(now)):
            return now, broken
    return None, set(history.broken_at_end())


class History:
    """Answers about a program, found by looking back; `now` is always the time before that instruction."""

    def __init__(self, graph: Graph, costs: Costs, program: Program) -> None:
        self.graph, self.costs, self.rows, self.size = graph, costs, program.instructions, program.arena
        self.known: dict[tuple[int, str, int], int] = {}

    def dangling(self, n: int) -> bool:
        row = self.rows[n]
        if isinstance(row, Run):
            named = {value for pair in row.over for value in pair}
            return not (0 <= row.op < len(self.graph.ops) and named <= set(range(len(self.graph.values))))
        return row.value not in range(len(self.graph.values))

    def since(self, now: int, place: str, value: int) -> int:
        """How long it is there: the row that put it there, -1 for the start, -2 if gone, -3 if it never was there."""
        key = (now, place, value)
        if key not in self.known:
            self.known[key] = self._since(now, place, value)
        return self.known[key]

    def _since(self, now: int, place: str, value: int) -> int:
        rows = self.concerning.get((place, value), [])
        earlier = bisect_left(rows, now)
        if not earlier:
            return -1 if self.graph.maker[value] == -1 and self.is_input(value) and place == self.home(value) else -3
        last = rows[earlier - 1]
        before = self.since(last, place, value)
        match self.rows[last]:
            case Run(op, _, _, again) if value in self.graph.makes_of(op, again=again):
                return before if before >= -1 else last
            case Copy():
                return last
        return -2

    @cached_property
    def concerning(self) -> dict[tuple[str, int], list[int]]:
        """For each block the rows that put it there or take it away."""
        found: dict[tuple[str, int], list[int]] = {}
        for number, row in enumerate(self.rows):
            match row:
                case Run(op, _, over, again):
                    for value in {*self.graph.makes_of(op, again=again), *(read for _, read in over)}:
                        found.setdefault(("device", value), []).append(number)
                case Free(value, place) | Copy(value, place):
                    found.setdefault((place, value), []).append(number)
        return found

    def is_input(self, value: int) -> bool:
        return any(item.value == value for item in self.graph.inputs)

    def home(self, value: int) -> str:
        """Where the caller has it."""
        found = [item.home for item in self.graph.inputs if self.same(item.value, value)]
        return [*found, *(item.home for item in self.graph.outputs if item.value == value), "device"][0]

    def there(self, now: int, place: str, value: int) -> bool:
        return self.since(now, place, value) >= -1

    def flying(self, now: int, place: str, value: int) -> bool:
        """Whether the last thing that happened to this block is a copy that nobody waited for."""
        since = self.since(now, place, value)
        return since >= 0 and isinstance(self.rows[since], Copy) and Wait(value, place) not in self.rows[since:now]  # type: ignore[arg-type]

    def busy(self, now: int, place: str, value: int) -> bool:
        """Whether a copy from or to this block is in flight."""
        if self.flying(now, place, value):
            return True
        for to in ("device", "host", "disk"):
            if to != place and self.flying(now, to, value):
                start = self.since(now, to, value)
                host = self.there(start, "host", value) and not self.flying(start, "host", value)
                source = "device" if to != "device" else "host" if host else "disk"
                if source == place:
                    return True
        return False

    def reading(self, now: int, place: str, value: int) -> Iterator[str]:
        if self.flying(now, place, value):
            yield "read before wait"
        elif not self.there(now, place, value):
            yield "read after free" if self.since(now, place, value) == -2 else "read before made"

    def offset(self, now: int, value: int) -> int:
        """Where a value of the device is."""
        since = self.since(now, "device", value)
        row = self.rows[since] if since >= 0 else None
        if isinstance(row, Copy):
            return row.at
        if isinstance(row, Run) and self.size:
            return row.at[self.graph.makes_of(row.op, again=row.again).index(value)]
        return -1

    def at_home(self, now: int, value: int) -> bool:
        """Whether a value is in the caller's own storage."""
        since = self.since(now, self.home(value), value)
        if since < 0:
            return since == -1
        row = self.rows[since]
        if isinstance(row, Run):
            return any(made == value and self.at_home(since, read) for made, read in row.over)
        return isinstance(row, Copy) and row.at == -1 and self.root(value) and not self.homeless(since, value)

    def homeless(self, now: int, value: int) -> bool:
        """Whether the storage was one that the step uses up, and is gone."""
        mine = {v for v in range(len(self.graph.values)) if self.same(v, value)}
        if self.home(value) != "device" or any(item.persistent and item.value in mine for item in self.graph.inputs):
            return False
        frees = [n for n, row in enumerate(self.rows[:now]) if isinstance(row, Free) and row.place == "device"]
        return any(self.rows[n].value in mine and self.at_home(n, self.rows[n].value) for n in frees)  # type: ignore[union-attr]

    def spans(self, now: int) -> list[tuple[int, int]]:
        """What is in the arena: where it starts and ends."""
        values = [v for v in range(len(self.graph.values)) if self.there(now, "device", v)]
        return [(o, o + self.costs.nbytes[v]) for v in values if (o := self.offset(now, v)) >= 0]

    def broken(self, now: int) -> Iterator[str]:
        row = self.rows[now]
        match row:
            case Run():
                yield from self.broken_order(now, row)
                reads = self.graph.reads_of(row.op, again=row.again)
                for value in reads:
                    yield from self.reading(now, "device", value)
                yield from self.broken_over(now, row)
                yield from self.broken_layout(now, row)
            case Free(value, place):
                if not self.there(now, place, value):
                    yield "double free" if self.since(now, place, value) == -2 else "free before made"
                elif self.busy(now, place, value):
                    yield "free during copy"
            case Wait(value, place):
                if not self.flying(now, place, value):
                    yield "wait without copy"
            case Copy(value, to, at):
                if self.graph.values[value].kind == "scalar":
                    yield "no such"
                if self.there(now, to, value):
                    yield "copied twice"
                if to == "device":
                    found = [list(self.reading(now, place, value)) for place in ("host", "disk")]
                    if [] not in found:
                        yield from (found[0] + found[1])
                    yield from self.misplaced(value, self.costs.nbytes[value], at)
                    if at >= 0 and any(self.meet((at, at + self.costs.nbytes[value]), s) for s in self.spans(now)):
                        yield "overlap"
                else:
                    yield from self.reading(now, "device", value)
                    if at != -1:
                        yield "misplaced"
                same = [v for v in range(len(self.graph.values)) if self.same(v, value) and self.root(v)]
                if (to, at) == (self.home(value), -1) and any(self.at_home(now, v) for v in same):
                    yield "overlap"

    def broken_order(self, now: int, run: Run) -> Iterator[str]:
        earlier = [row for row in self.rows[:now] if isinstance(row, Run)]
        before = any(row.op == run.op for row in earlier)
        item = self.graph.ops[run.op]
        lasting = [old for _, old in item.updates if self.root(old)]
        if run.again and not before:
            yield "repeat before first"
        if run.again and lasting and not item.detachable:
            yield "side effect twice"
        if before and set(item.channels) - {"generator"}:
            yield "side effect twice"
        if before and not run.again:
            yield "side effect twice" if lasting else "random replay" if item.random else "not marked as repeat"
        for other in {row.op for row in earlier if row.op > run.op} if not before else ():
            if item.random and self.graph.ops[other].random:
                yield "random replay"
            if in_order(self.graph, run.op, other) and {*item.channels, *self.graph.ops[other].channels} != {
                "generator"
            }:
                yield "out of order"

    def same(self, one: int, other: int) -> bool:
        """Whether two values are contents of one storage."""
        return self.graph.values[one].storage == self.graph.values[other].storage

    def root(self, value: int) -> bool:
        """Whether the storage of a value is that of an input."""
        return any(self.graph.values[i.value].storage == self.graph.values[value].storage for i in self.graph.inputs)

    def broken_over(self, now: int, run: Run) -> Iterator[str]:
        op, size = self.graph.ops[run.op], self.costs.nbytes
        allowed = [pair for pair in self.costs.in_place[run.op] if not self.root(pair[1])] + list(op.updates)
        made, read = [m for m, _ in run.over], [r for _, r in run.over]
        if len({*made}) < len(made) or len({*read}) < len(read) or not {*run.over} <= {*allowed}:
            yield "illegal in-place"
        if not {*made} <= {*self.graph.makes_of(run.op, again=run.again)}:
            yield "illegal in-place"
        if not {*read} <= {*self.graph.reads_of(run.op, again=run.again)}:
            yield "illegal in-place"
        if any(size[m] != size[r] or self.there(now, "device", m) for m, r in run.over):
            yield "illegal in-place"
        if not run.again and any(pair not in run.over for pair in op.updates if self.root(pair[1])):
            yield "illegal in-place"
        if any(self.graph.values[value].kind == "scalar" for pair in run.over for value in pair):
            yield "illegal in-place"
        if any(m == new and r != old for m, r in run.over for new, old in op.updates):
            yield "illegal in-place"
        if any(self.busy(now, "device", value) for value in read):
            yield "free during copy"

    def misplaced(self, value: int | None, nbytes: int, offset: int) -> Iterator[str]:
        leaves = value is not None and value in self.graph.required and not self.root(value)
        leaves = leaves and value is not None and self.home(value) == "device"
        grid = range(0, self.size, 64) if nbytes or not self.size else range(0, self.size + 1, 64)
        if offset != -1 and (offset not in grid or offset + nbytes > self.size or leaves):
            yield "misplaced"

    def meet(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        return len(range(max(a[0], b[0]), min(a[1], b[1]))) > 0

    def broken_layout(self, now: int, run: Run) -> Iterator[str]:
        makes, needed = self.graph.makes_of(run.op, again=run.again), self.costs.arena_temporaries[run.op]
        if len(run.at) != (len(makes) + bool(needed) if self.size else 0):
            yield "misplaced"
            return
        if not self.size:
            return
        spans = self.spans(now)
        for value, offset in zip((*makes, None) if needed else makes, run.at, strict=True):
            nbytes = needed if value is None else self.costs.nbytes[value]
            yield from self.misplaced(value, nbytes, offset)
            under = [read for made, read in run.over if made == value]
            if under and self.there(now, "device", under[0]):
                if self.offset(now, under[0]) != offset:
                    yield "misplaced"
            elif offset >= 0:
                if any(self.meet((offset, offset + nbytes), span) for span in spans):
                    yield "overlap"
                spans.append((offset, offset + nbytes))

    def broken_at_end(self) -> Iterator[str]:
        graph, end = self.graph, len(self.rows)
        ran = {row.op for row in self.rows if isinstance(row, Run)}
        if any(item.random and op not in ran for op, item in enumerate(graph.ops)):
            yield "random replay"
        if any(set(item.channels) - {"generator"} and op not in ran for op, item in enumerate(graph.ops)):
            yield "out of order"
        for value in range(len(graph.values)):
            written = any(value == old for op in graph.ops for _, old in op.updates)
            persistent = any(item.persistent and self.same(item.value, value) for item in graph.inputs) and not written
            expected = any(output.value == value for output in graph.outputs) or persistent
            home = self.home(value)
            for place in ("device", "host", "disk"):
                if self.flying(end, place, value):
                    yield "copy never awaited"
                if self.there(end, place, value) and (place != home or not (expected or self.is_input(value))):
                    yield "never freed"
            if expected and not self.there(end, home, value):
                yield "missing output"
            if expected and self.there(end, home, value) and home == "device" and self.offset(end, value) != -1:
                yield "misplaced"
            elif expected and self.there(end, home, value) and self.root(value) and not self.at_home(end, value):
                yield "away from home"


# -------------------------------------------------------------------------------------------------------------- optimum


@dataclass(frozen=True)
class State:
    """How far a program is: the values on the device, the special ops that have run, the saved generator states."""

    there: frozenset[int]
    ran: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()


def frontier(graph: Graph, costs: Costs) -> list[tuple[int, float]]:
    """For every peak that pays, rising, the least seconds: (bytes, seconds), by trying all programs of Run and Free.

    Shortest paths over states. Inputs are never freed; results take the bytes of arguments first come, first served.
    """
    found: list[tuple[int, float]] = []
    useful = _useful(graph)
    start = State(frozenset(item.value for item in graph.inputs))
    queue = [(0.0, _nbytes(graph, costs, start), 0, start)]
    least: dict[State, int] = {}  # the least peak with which a state was left; those that come later took longer
    count = 0
    while queue:
        seconds, peak, _, state = heapq.heappop(queue)
        if peak >= least.get(state, peak + 1) or (found and peak >= found[-1][0]):
            continue
        least[state] = peak
        if graph.required <= state.there and all(op in state.ran for op in useful if graph.ops[op].channels):
            found.append((peak, seconds))
            continue
        steps = [(seconds, peak, after) for after in _releases(graph, costs, state)]
        for op in useful:
            for used, after in _runs(graph, costs, state, op, useful):
                steps.append((seconds + costs.seconds[op], max(peak, used), after))
        for took, most, after in steps:
            if most < least.get(after, most + 1):
                count += 1
                heapq.heappush(queue, (took, most, count, after))
    return found[::-1]


def _useful(graph: Graph) -> set[int]:
    """The ops that can be needed for what must be there at the end."""
    useful, more = set[int](), {op for op, item in enumerate(graph.ops) if item.channels}
    while True:
        useful |= more
        wanted = graph.required.union(*(graph.reads[op] for op in useful))
        more = {op for op, made in enumerate(graph.makes) if wanted & set(made)} - useful
        if not more:
            return useful


def _nbytes(graph: Graph, costs: Costs, state: State) -> int:
    return sum(costs.nbytes[value] for value in state.there) + len(state.saved) * graph.generator_bytes


def _lasting(graph: Graph, value: int) -> bool:
    return graph.values[value].storage in graph.lasting_storages


def _releases(graph: Graph, costs: Costs, state: State) -> Iterator[State]:
    """The states with one thing less; what takes no bytes may stay."""
    for value in state.there:
        if costs.nbytes[value] and not _lasting(graph, value):
            yield State(state.there - {value}, state.ran, state.saved)
    for op in state.saved:
        yield State(state.there, state.ran, state.saved - {op})


def _runs(graph: Graph, costs: Costs, state: State, op: int, useful: set[int]) -> Iterator[tuple[int, State]]:
    """The bytes in use and the state after each way to run an op: which arguments go, whether a state is saved."""
    item, again = graph.ops[op], op in state.ran
    reads, makes = graph.reads_of(op, again=again), graph.makes_of(op, again=again)
    effects = () if again else graph.effects[op]
    earlier = {other for other in useful if other < op and in_order(graph, op, other)}
    if not state.there.issuperset(reads) or (again and not graph.repeatable(op)):
        return
    if item.random and again and op not in state.saved:
        return
    if not again and not earlier <= state.ran:
        return
    there = state.there - set(makes) - {old for _, old in effects}
    ran = state.ran | {op} if item.channels or graph.effects[op] else state.ran
    can_go = [value for value in reads if not _lasting(graph, value)]
    for gone in (frozenset(some) for size in range(len(can_go) + 1) for some in combinations(can_go, size)):
        for saves in ({op}, set[int]()) if item.random and not again else (set[int](),):
            before = State(there, ran, state.saved | saves)
            used = (
                _nbytes(graph, costs, before)
                + sum(costs.nbytes[value] for value in makes)
                + costs.arena_temporaries[op]
            )
            used += graph.generator_bytes if item.random and again else 0
            yield used - _taken(graph, costs, op, gone), State(there - gone | set(makes), ran, before.saved)


def _taken(graph: Graph, costs: Costs, op: int, gone: frozenset[int]) -> int:
    """The bytes of results that take the place of arguments which are gone then."""
    pairs: dict[int, int] = {}
    for made, read in dict.fromkeys((*graph.ops[op].updates, *costs.in_place[op])):
        free = read in gone and read not in pairs.values() and made not in pairs and not _lasting(graph, made)
        if free and costs.nbytes[made] == costs.nbytes[read]:
            pairs[made] = read
    return sum(costs.nbytes[made] for made in pairs)


def least_peak_of_orders(graph: Graph, costs: Costs) -> int:
    """The least peak of all orders that run every op once."""
    everything = frozenset(range(len(graph.ops)))

    def waits(op: int) -> set[int]:
        makers = {graph.maker[value] for value in graph.reads[op]}
        readers = {reader for _, old in graph.effects[op] for reader in graph.readers[old]}
        acts = {other for other in range(op) if in_order(graph, op, other)}
        return (makers | readers | acts) - {-1, op}

    def alive(done: frozenset[int]) -> set[int]:
        made = {value for op in done for value in graph.makes[op] if not _lasting(graph, value)}
        return {value for value in made if value in graph.required or set(graph.readers[value]) - done}

    @cache
    def rest(done: frozenset[int]) -> int:
        peaks = [0] if done == everything else []
        for op in everything - done:
            if waits(op) <= done:
                before, after = alive(done), alive(done | {op})
                there = [value for value in before.union(graph.makes[op]) if not _lasting(graph, value)]
                used = sum(costs.nbytes[value] for value in there) + costs.arena_temporaries[op]
                used -= _taken(graph, costs, op, frozenset(before - after))
                peaks.append(max(used, rest(done | {op})))
        return min(peaks)

    return sum(costs.nbytes[item.value] for item in graph.inputs) + rest(frozenset())
