"""Random small graphs, costs and programs: valid ones, and valid ones that were then broken.

Everything is made from one `random.Random`; the strategies below hand it to hypothesis as a size and a seed, so that
thousands of examples cost seconds and a failing one shrinks to the smallest size that still fails.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations
from random import Random
from typing import Any

from hypothesis import strategies as st

from lowtide.costs import Costs, lanes
from lowtide.graph import Alternative, Arg, Constant, Graph, Input, Kind, Op, Output, Phase, Place, Read, Value, View
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait

SIZES = (0, 1, 60, 64, 64, 64, 100, 128, 128, 256)  # bytes; several values must have equal sizes
AWAY: tuple[Place, ...] = ("host", "disk")
SOMEWHERE = 0  # of the arena, as long as nothing has been laid out


class Stuck(Exception):
    """A value is needed that this program can no longer get back."""


# --------------------------------------------------------------------------------------------------------------- graphs


def make_graph(random: Random, size: int) -> Graph:
    """A graph of `size` ops as capture could have made it: an op only reads what eager still has."""
    values: list[Value] = []
    current: dict[int, int] = {}  # storage -> the value that it contains now
    inputs, ops = [], []

    def new(kind: Kind, nbytes: int, storage: int | None = None) -> int:
        number = len(values)
        place = number if storage is None else storage
        values.append(Value(f"{kind[0]}{number}", nbytes, kind, place, shape=(nbytes,), stride=(1,)))
        current[place] = number
        return number

    kinds: tuple[Kind, ...] = ("parameter", "buffer", "state", "batch", "constant", "gradient")
    for _ in range(random.randint(1, 4)):
        kind = random.choice(kinds)
        persistent = random.random() < (0.5 if kind in ("batch", "gradient") else 0.95)
        value = new(kind, random.choice(SIZES))
        inputs.append(Input(value, (f"{kind}{value}", value), persistent))
    for index in range(size):
        ops.append(_make_op(random, index, values, current, new))
    return Graph(
        ops=tuple(ops),
        values=tuple(dataclasses.replace(value, eager_end=_last_reader(ops, n)) for n, value in enumerate(values)),
        inputs=tuple(inputs),
        outputs=_make_outputs(random, values, current, inputs),
        views=(View(None, "aten.t.default"), View(0, "aten.split.Tensor", (3, (1, True)), item=1)),
        generator_bytes=random.choice((0, 40)),
        notes=("made up",),
    )


def _make_op(random: Random, index: int, values: list[Value], current: dict[int, int], new: Any) -> Op:
    readable = sorted(current.values())
    recent = readable[-5:] if random.random() < 0.6 else readable
    reads = random.sample(recent, min(len(recent), random.choice((0, 1, 1, 2, 2, 3))))
    updated = [value for value in reads if random.random() < 0.25 and values[value].kind != "scalar"]
    outputs: list[int | None] = []
    for _ in range(random.choice((1, 1, 1, 2, 3) if not updated else (0, 1, 1, 2))):
        roll = random.random()
        if roll < 0.1:
            outputs.append(None)
        elif roll < 0.2:
            outputs.append(new("scalar", 0))
        else:
            nbytes = values[random.choice(reads)].nbytes if reads and random.random() < 0.6 else random.choice(SIZES)
            outputs.append(new(random.choice(("activation", "activation gradient", "gradient")), nbytes))
    updates = [(new(values[old].kind, values[old].nbytes, values[old].storage), old) for old in updated]
    args: list[Arg] = [Read(value, random.choice((None, None, 0, 1))) for value in reads]
    kwargs: list[tuple[str, Arg]] = [
        ("dtype", Constant("dtype", "float32")),
        ("scale", random.choice((1.5, float("inf"), 2j))),
    ]
    if args and random.random() < 0.3:
        kwargs.append(("other", args.pop()))
    if len(args) > 1 and random.random() < 0.3:
        args = [tuple(args)]
    return Op(
        name=f"op{index}",
        target=f"aten.made_up.form{index}",
        args=tuple(args),
        kwargs=tuple(kwargs),
        outputs=tuple(outputs),
        updates=tuple(updates),
        detachable=bool(updates) and random.random() < 0.5,
        channels=("generator",) if random.random() < 0.25 else (),
        phase=random.choice(("forward", "backward", "update")),
        module="layer.0",
        source=f"train.py:{index}",
    )


def _make_outputs(
    random: Random, values: list[Value], current: dict[int, int], inputs: list[Input]
) -> tuple[Output, ...]:
    """What became of each updated input, and a few results."""
    outputs = []
    for item in inputs:
        last = current[values[item.value].storage]
        if last != item.value and (item.persistent or random.random() < 0.5):
            outputs.append(Output(last, "input", item.path))
    made = sorted(set(current.values()) - {item.value for item in inputs}) or sorted(current.values())
    pool = made if random.random() < 0.9 else sorted(current.values())
    for number, value in enumerate(random.sample(pool, min(len(pool), random.randint(1, 2)))):
        outputs.append(Output(value, random.choice(("result", "gradient")), (number,), random.choice((None, 0))))
    return tuple(outputs)


def _last_reader(ops: list[Op], value: int) -> int:
    return max((index for index, op in enumerate(ops) if value in op.reads), default=-1)


def make_step(random: Random, size: int) -> Graph:
    """A training step of `size` ops, all of them needed: a forward, a backward that reads it, updates of parameters."""
    values = [Value("x", 64, "batch", 0), Value("w0", 64, "parameter", 1), Value("w1", 128, "parameter", 2)]
    inputs = tuple(Input(number, (value.name,)) for number, value in enumerate(values))
    weights = [1, 2]  # those that are not updated yet
    ops: list[Op] = []

    def add(phase: Phase, reads: list[int], makes: int = 1, updates: tuple[int, ...] = ()) -> list[int]:
        made = list(range(len(values), len(values) + makes))
        values.extend(Value(f"v{n}", 64 * random.choice((1, 1, 2, 3)), "activation", n) for n in made)
        pairs = tuple((len(values) + n, old) for n, old in enumerate(updates))
        values.extend(dataclasses.replace(values[old], name=f"{values[old].name}+") for old in updates)
        draws = ("generator",) if not updates and random.random() < 0.1 else ()
        args = tuple(Read(value) for value in dict.fromkeys(reads))
        ops.append(Op(f"op{len(ops)}", "made.up", args, (), tuple(made), pairs, channels=draws, phase=phase))
        return made

    states, gradient = [0], list[int]()
    while len(ops) < max(1, size // 2):
        other = random.sample(states, random.random() < 0.4) + random.sample(weights, random.random() < 0.4)
        states += add("forward", [states[-1], *other], makes=random.choice((1, 1, 1, 2)))
    while len(ops) < size:
        state = states.pop() if len(states) > 1 else 3
        if gradient and weights and random.random() < 0.3:
            weight = weights.pop(random.randrange(len(weights)))
            add("update", [weight, state, *gradient], makes=0, updates=(weight,))
        else:
            weight_read = random.sample(weights, bool(weights) and random.random() < 0.4)
            gradient = add("backward", [state, *gradient, *weight_read])
    read = {value for op in ops for value in op.reads}
    ends = tuple(Output(value, "result", (value,)) for value in range(3, len(values)) if value not in read)
    return Graph(tuple(ops), tuple(values), inputs, ends, generator_bytes=random.choice((0, 40)))


def persisting(graph: Graph) -> Graph:
    """The same graph, but no input is used up by the step."""
    last = {value.storage: number for number, value in enumerate(graph.values)}
    ends = [(last[graph.values[item.value].storage], item) for item in graph.inputs if not item.persistent]
    outputs = tuple(Output(end, "input", item.path) for end, item in ends if end != item.value)
    inputs = tuple(dataclasses.replace(item, persistent=True) for item in graph.inputs)
    return dataclasses.replace(graph, inputs=inputs, outputs=(*graph.outputs, *outputs))


def with_optional(random: Random, graph: Graph) -> Graph:
    """The graph with an optional op that makes a narrow value of a wide one, and one that makes the wide one of it."""
    wide = random.choice([value for op in graph.ops for value in op.outputs if value is not None])
    narrow = len(graph.values)
    pack = Op("pack", "made.up", (Read(wide),), outputs=(narrow,), optional=True)
    unpack = Op("unpack", "made.up", (Read(narrow),), outputs=(wide,), optional=True)
    values = (*graph.values, Value("narrow", 16, "activation", narrow))
    row = Alternative(wide, narrow, store=len(graph.ops), restore=(len(graph.ops) + 1,))
    ops = (*graph.ops, pack, unpack)
    return dataclasses.replace(graph, ops=ops, values=values, alternatives=(*graph.alternatives, row))


def with_homes(random: Random, graph: Graph) -> Graph:
    """The graph with some inputs, what becomes of them, and some outputs in other places."""
    numbers = {number for number, value in enumerate(graph.values) if value.kind == "scalar"}
    chosen = {value.storage: random.choice(("device", "host", "disk")) for value in graph.values}
    inputs = tuple(
        dataclasses.replace(item, home="device" if item.value in numbers else chosen[graph.values[item.value].storage])
        for item in graph.inputs
    )
    homes = {graph.values[item.value].storage: item.home for item in inputs}
    free = {output.value: random.choice(("device", "host", "disk")) for output in graph.outputs}
    outputs = tuple(
        dataclasses.replace(
            output,
            home=homes.get(
                graph.values[output.value].storage, "device" if output.value in numbers else free[output.value]
            ),
        )
        for output in graph.outputs
    )
    return dataclasses.replace(graph, inputs=inputs, outputs=outputs)


def make_tree(random: Random, size: int) -> Graph:
    """Ops that form trees: each value is read by at most one op; now and then one stays to the end all the same."""
    ops, free = list[Op](), list[int]()
    values = [Value(f"v{n}", 32 * random.randint(0, 4), "activation", n) for n in range(size)]
    for number in range(size):
        reads = random.sample(free, min(len(free), random.choice((0, 1, 1, 2, 3))))
        free = [value for value in free if value not in reads] + [number]
        ops.append(Op(f"op{number}", "made.up", tuple(map(Read, reads)), outputs=(number,)))
    ends = sorted({*free, *(n for n in range(size) if random.random() < 0.1)})
    return Graph(tuple(ops), tuple(values), (), tuple(Output(value, "result", (value,)) for value in ends))


def _possible(graph: Graph, pair: tuple[int, int]) -> bool:
    """Whether a result may sit on an argument at all: both have bytes, and an update sits on nothing else."""
    updated = {new: old for op in graph.ops for new, old in op.updates}
    made, read = pair
    return "scalar" not in (graph.values[made].kind, graph.values[read].kind) and updated.get(made, read) == read


def make_costs(random: Random, graph: Graph) -> Costs:
    """Costs with some temporaries, some rounding up, and some pairs that may be in place (not all of them wise)."""
    rounded = random.random() < 0.3
    nbytes = tuple(-(-value.nbytes // 64) * 64 if rounded else value.nbytes for value in graph.values)
    in_place = []
    for reads, makes in zip(graph.reads, graph.makes, strict=True):
        pairs = [(made, read) for made in makes for read in reads if nbytes[made] == nbytes[read]]
        in_place.append(tuple(pair for pair in pairs if random.random() < 0.6 and _possible(graph, pair)))
    return Costs(
        graph=graph.fingerprint,
        seconds=tuple(random.choice((0.0, 0.5, 1.0, 0.1)) for _ in graph.ops),
        arena_temporaries=tuple(random.choice((0, 0, 0, 1, 64, 200)) for _ in graph.ops),
        nbytes=nbytes,
        in_place=tuple(in_place),
        origin="measured",
        machine="made up",
        lanes=lanes((("host", 1e9), ("disk", 1e8))),
    )


# ------------------------------------------------------------------------------------------------------- valid programs


def must_persist(graph: Graph) -> set[int]:
    """The values that must be there when the step ends."""
    last = {graph.values[i.value].storage: i.value for i in graph.inputs if i.persistent}
    for op in graph.ops:
        last |= {graph.values[old].storage: new for new, old in op.updates if graph.values[old].storage in last}
    return set(last.values()) | set(graph.required)


def make_program(random: Random, graph: Graph, costs: Costs, *, wild: float = 0.3, astray: float = 0.0) -> Program:
    """A valid program; the wilder, the more it recomputes, offloads and works in place.

    `astray` is the part of the copies of the caller's storages that are meant for an arena: then it needs `lay_out`.
    """
    for _ in range(8):
        try:
            writer = _Writer(random, graph, costs, wild, astray)
            writer.write()
        except Stuck:
            wild *= 0.5
            continue
        return Program(graph.fingerprint, tuple(writer.instructions))
    return captured(graph)


def captured(graph: Graph) -> Program:
    """The order of the graph, each value freed after its last use, only the updates that must be in place."""
    last: dict[int, int] = {}
    for index in graph.ordinary:
        last.update(dict.fromkeys(graph.reads[index] + graph.makes[index], index))
    gone = {old for pairs in graph.effects for _, old in pairs}
    keep, home = must_persist(graph), graph.home
    away = [item for item in graph.inputs if item.home != "device"]
    instructions: list[Instruction] = []
    for item in away:
        instructions += [Copy(item.value, "device"), Wait(item.value, "device")]
    for index in graph.ordinary:
        instructions.append(Run(index, over=graph.effects[index]))
        used = graph.reads[index] + graph.makes[index]
        done = [v for v in used if last[v] == index and graph.maker[v] >= 0 and v not in keep | gone]
        instructions.extend(Free(value) for value in done)
    for item in away:
        if item.value not in keep:
            instructions.append(Free(item.value, item.home))
        if item.value not in gone:
            instructions.append(Free(item.value))
    for value in sorted(value for value in keep if home[value] != "device" and graph.maker[value] >= 0):
        instructions += [Copy(value, home[value]), Wait(value, home[value]), Free(value)]
    return Program(graph.fingerprint, tuple(instructions))


class _Writer:
    """Writes a random program, one op after the other, and gets back what it dropped when it is needed."""

    def __init__(self, random: Random, graph: Graph, costs: Costs, wild: float, astray: float) -> None:
        self.random, self.graph, self.costs, self.wild, self.astray = random, graph, costs, wild, astray
        self.instructions: list[Instruction] = []
        self.places: dict[str, set[int]] = {"device": set(), "host": set(), "disk": set()}
        for item in graph.inputs:
            self.places[item.home].add(item.value)
        self.lives = {graph.values[i.value].storage: i.home for i in graph.inputs}
        self.flights: dict[tuple[int, str], str] = {}  # (value, to) -> from
        self.has_run: set[int] = set()
        self.homes: dict[int, int | None] = {graph.values[i.value].storage: i.value for i in graph.inputs}
        self.kept = {graph.values[i.value].storage for i in graph.inputs if i.persistent}

    def write(self) -> None:
        for op in self.order():
            for value in self.graph.reads[op]:
                self.bring(value, set(self.graph.reads[op]))
            self.run(op, set())
            self.disturb()
        persistent, home = must_persist(self.graph), self.graph.home
        keep = {value for value in persistent if home[value] == "device"}
        for value in sorted(persistent - keep):
            self.send_home(value)
        for value in sorted(keep):
            self.bring(value, keep)
        for value in sorted(keep):
            if self.graph.values[value].storage in self.graph.lasting_storages:
                self.bring_home(value)
        for value, place in sorted(self.flights):
            self.wait(value, place)
        for place in self.places:
            for value in sorted(self.places[place]):
                if value in persistent and place == home[value]:
                    continue
                if place == home[value] and self.graph.maker[value] < 0 and self.random.random() < 0.7:
                    continue
                self.free(value, place)

    def order(self) -> list[int]:
        """The ops of the graph in a random order that leaves every result as it is, some dead ones left out."""
        graph = self.graph
        needed = must_persist(graph)
        alive = set()
        for op in reversed(range(len(graph.ops))):
            if graph.ops[op].channels or needed & set(graph.makes[op]) or self.random.random() < 0.7:
                alive.add(op)
                needed |= set(graph.reads[op])
        before: dict[int, set[int]] = {op: {graph.maker[v] for v in graph.reads[op]} - {-1} for op in alive}
        for op in alive:
            for _, old in graph.effects[op]:
                before[op] |= {reader for reader in graph.readers[old] if reader in alive and reader != op}
        acts = sorted(op for op in alive if graph.ops[op].channels)
        for earlier, later in combinations(acts, 2):
            shared = set(graph.ops[earlier].channels) & set(graph.ops[later].channels)
            if shared or "handover" in graph.ops[earlier].channels + graph.ops[later].channels:
                before[later].add(earlier)
        done: list[int] = []
        shuffle = self.random.random() < 0.5
        while len(done) < len(alive):
            ready = sorted(op for op in alive if op not in done and before[op] <= set(done))
            done.append(self.random.choice(ready) if shuffle else ready[0])
        return done

    def bring(self, value: int, protected: set[int]) -> None:
        """Have the value on the device, whatever it takes."""
        if value in self.places["device"]:
            if (value, "device") in self.flights:
                self.wait(value, "device")
            return
        away = [place for place in AWAY if value in self.places[place]]
        if away:
            if all((value, place) in self.flights for place in away):
                self.wait(value, away[0])
            ready = [place for place in away if (value, place) not in self.flights]
            self.copy(value, "device", ready[0])
            return self.bring(value, protected)
        maker = self.graph.maker[value]
        if maker < 0 or maker not in self.has_run or value not in self.graph.makes_of(maker, again=True):
            raise Stuck
        if not self.graph.repeatable(maker) or len(self.instructions) > max(200, 10 * len(self.graph.ops)):
            raise Stuck
        reads = self.graph.reads_of(maker, again=True)
        for read in reads:
            self.bring(read, protected | set(reads))
        self.run(maker, protected)

    def bring_home(self, value: int) -> None:
        """Have the value, which is on the device, in the caller's own storage."""
        storage = self.graph.values[value].storage
        if storage not in self.homes:
            raise Stuck
        other = self.homes[storage]
        if other == value:
            return
        if other is not None:
            self.free(other, "device")
        away = [place for place in AWAY if value in self.places[place]]
        if not away:
            away = [self.random.choice(AWAY)]
            self.copy(value, away[0], "device")
        if all((value, place) in self.flights for place in away):
            self.wait(value, away[0])
        self.free(value, "device")
        self.astray = 0.0
        self.copy(value, "device", next(place for place in away if (value, place) not in self.flights))

    def send_home(self, value: int) -> None:
        """Have the value in the place where the caller has it, which is not the device."""
        place, storage = self.graph.home[value], self.graph.values[value].storage
        if value in self.places[place]:
            return
        self.bring(value, {value})
        other = self.homes.get(storage)
        if other is not None:
            self.free(other, place)
        self.copy(value, place, "device")

    def run(self, op: int, protected: set[int]) -> None:
        graph, again = self.graph, op in self.has_run
        makes, reads = graph.makes_of(op, again=again), graph.reads_of(op, again=again)
        over = [] if again else list(graph.effects[op])
        for made, read in sorted({*graph.ops[op].updates, *self.costs.in_place[op]}):
            if any(made == m or read == r for m, r in over) or made in self.places["device"]:
                continue
            lasting = graph.values[read].storage in graph.lasting_storages or read in graph.required
            possible = made in makes and read in reads and read not in protected and not lasting
            if possible and self.random.random() < self.wild:
                over.append((made, read))
        self.random.shuffle(over)
        for _, read in over:
            self.settle(read, "device")
        self.instructions.append(Run(op, (), tuple(over), again))
        self.has_run.add(op)
        for made, read in over:
            if self.at_home(read, "device"):
                self.homes[graph.values[read].storage] = made
        self.places["device"] -= {read for _, read in over}
        self.places["device"] |= set(makes)

    def disturb(self) -> None:
        """Free what is not needed any more, and drop or send away some of what is."""
        later = {v for op in range(len(self.graph.ops)) if op not in self.has_run for v in self.graph.reads[op]}
        later |= must_persist(self.graph)
        for value in sorted(self.places["device"]):
            roll = self.random.random()
            if (value, "device") in self.flights:
                if roll < 0.5:
                    self.wait(value, "device")
            elif value not in later and roll < 0.7:
                if self.graph.maker[value] >= 0 or self.random.random() < 0.3:
                    self.free(value, "device")
            elif roll < self.wild / 2 and self.graph.values[value].kind != "scalar":
                for place in AWAY:
                    if value not in self.places[place] and not self.taken(value, place) and self.random.random() < 0.6:
                        self.copy(value, place, "device")
                if self.random.random() < 0.5 and any(value in self.places[place] for place in AWAY):
                    self.free(value, "device")
            elif roll < self.wild and self.graph.maker[value] >= 0:
                self.free(value, "device")
        for place in AWAY:
            for value in sorted(self.places[place]):
                if self.random.random() < 0.1 and value in self.places["device"]:
                    self.free(value, place)
                elif value not in self.places["device"] and (value, place) not in self.flights:
                    first = place == "host" or value not in self.places["host"]  # the host comes before the disk
                    if first and self.random.random() < 0.1 and self.may_come(value):
                        self.copy(value, "device", place)

    def settle(self, value: int, place: str) -> None:
        """Wait for every copy that still needs this block."""
        for (other, to), source in list(self.flights.items()):
            if other == value and place in (to, source):
                self.wait(value, to)

    def free(self, value: int, place: str) -> None:
        self.settle(value, place)
        self.instructions.append(Free(value, place))  # type: ignore[arg-type]
        self.places[place].remove(value)
        storage = self.graph.values[value].storage
        if self.at_home(value, place):
            self.homes[storage] = None
            if storage not in self.kept and place == "device":
                del self.homes[storage]

    def may_come(self, value: int) -> bool:
        """Whether there is a place for it: what is of the caller's storages may have to wait until it can go home."""
        return self.astray > 0 or not self.taken(value, "device")

    def taken(self, value: int, place: str) -> bool:
        """Whether a copy to this place would go home, and another content is there."""
        storage = self.graph.values[value].storage
        return self.lives.get(storage) == place and self.homes.get(storage) is not None

    def at_home(self, value: int, place: str) -> bool:
        """Whether the value in this place is in the caller's own storage."""
        storage = self.graph.values[value].storage
        return self.lives.get(storage) == place and self.homes.get(storage) == value

    def copy(self, value: int, to: str, source: str) -> None:
        storage, at = self.graph.values[value].storage, -1
        if to != "device" and self.lives.get(storage) == to:
            if self.taken(value, to):
                raise Stuck
            self.homes[storage] = value
        if to == "device" and self.lives.get(storage) == "device":
            if not self.may_come(value):
                raise Stuck
            occupied = self.homes.get(storage) is not None
            if self.astray and (occupied or self.random.random() < self.astray):
                at = SOMEWHERE
            elif storage in self.homes:
                self.homes[storage] = value
        self.instructions.append(Copy(value, to, at))  # type: ignore[arg-type]
        self.places[to].add(value)
        self.flights[value, to] = source

    def wait(self, value: int, place: str) -> None:
        self.instructions.append(Wait(value, place))  # type: ignore[arg-type]
        del self.flights[value, place]


def lay_out(random: Random, graph: Graph, costs: Costs, program: Program) -> Program:
    """The same valid program with an arena: first fit, except for what is at random, or must be, outside."""
    outside = {
        v
        for v in range(len(graph.values))
        if graph.home[v] == "device" and (graph.values[v].storage in graph.lasting_storages or v in graph.required)
    }
    outside |= {v for v in range(len(graph.values)) if random.random() < 0.1}
    for instruction in reversed(program.instructions):
        for made, read in instruction.over if isinstance(instruction, Run) else ():
            outside |= {read} if made in outside else set()
    there: dict[Any, tuple[int, int]] = {("device", i.value): (-1, 0) for i in graph.inputs}
    top = 64

    def fit(key: Any, nbytes: int) -> int:
        nonlocal top
        offset = 0
        while in_the_way := [o + n for o, n in there.values() if 0 <= o < offset + nbytes and offset < o + n]:
            offset = -(-max(in_the_way) // 64) * 64
        top = max(top, offset + nbytes)
        there[key] = (offset, nbytes)
        return offset

    instructions: list[Instruction] = []
    for instruction in program.instructions:
        match instruction:
            case Free(value, "device"):
                del there["device", value]
            case Copy(value, "device", offset):
                if value in outside and offset < 0:
                    there["device", value] = (-1, 0)
                else:
                    offset = fit(("device", value), costs.nbytes[value])
                instruction = Copy(value, "device", offset)
            case Run(op, _, over, again):
                at = []
                for value in graph.makes_of(op, again=again):
                    twice = ("device", value) in there
                    if value in dict(over):
                        at.append(there["device", dict(over)[value]][0])
                    elif value in outside:
                        at.append(-1)
                        there["twice" if twice else "device", value] = (-1, 0)
                    else:
                        at.append(fit(("twice" if twice else "device", value), costs.nbytes[value]))
                if costs.arena_temporaries[op]:
                    at.append(-1 if random.random() < 0.2 else fit(("twice", -1), costs.arena_temporaries[op]))
                there = {key: block for key, block in there.items() if key[0] == "device"}
                for made, read in over:
                    there["device", made] = there.pop(("device", read))
                instruction = Run(op, tuple(at), over, again)
        instructions.append(instruction)
    return Program(program.graph, tuple(instructions), top + random.choice((0, 0, 64)))


# ------------------------------------------------------------------------------------------------------ broken programs


def break_program(random: Random, graph: Graph, program: Program) -> Program:
    """The program with one thing dropped, doubled, moved or altered; now and then it is still valid."""
    rows = list(program.instructions)
    if not rows:
        return dataclasses.replace(program, arena=program.arena + 64)
    where, other = random.randrange(len(rows)), random.randrange(len(rows))
    match random.choice(("drop", "double", "swap", "move", "neighbour", "alter", "alter", "alter", "arena", "new")):
        case "drop":
            del rows[where]
        case "double":
            rows.insert(other, rows[where])
        case "swap":
            rows[where], rows[other] = rows[other], rows[where]
        case "move":
            rows.insert(other, rows.pop(where))
        case "neighbour":
            rows[where : where + 2] = reversed(rows[where : where + 2])
        case "alter":
            rows[where] = _alter(random, graph, rows[where])
        case "arena":
            return dataclasses.replace(
                program, arena=random.choice((0, 64, max(0, program.arena - 64), program.arena // 2))
            )
        case "new":
            value, place = _any_value(random, graph), _any_place(random)
            rows.insert(where, random.choice((Free(value, place), Copy(value, place), Wait(value, place))))
    return dataclasses.replace(program, instructions=tuple(rows))


def _any_value(random: Random, graph: Graph) -> int:
    return random.randint(-1, len(graph.values)) if random.random() < 0.05 else random.randrange(len(graph.values))


def _any_place(random: Random) -> Place:
    return random.choice(("device", "host", "disk"))


def _any_offset(random: Random) -> int:
    return random.choice((-1, -1, 0, 64, 128, 192, 256, 320, 32, -64, 2**20))


def _alter(random: Random, graph: Graph, row: Instruction) -> Instruction:
    match row:
        case Run(op, at, over, again):
            pair = (_any_value(random, graph), _any_value(random, graph))
            known = op in range(len(graph.ops))
            likely = [(made, read) for made in graph.makes[op] for read in graph.reads[op]] if known else []
            turned = list(at)
            if turned:
                turned[random.randrange(len(turned))] = _any_offset(random)
            return random.choice(
                (
                    Run(op, at, over, not again),
                    Run(random.choice((op + 1, op - 1)), at, over, again),
                    Run(op, tuple(turned), over, again),
                    Run(op, tuple(turned), over, again),
                    Run(op, at[1:], over, again),
                    Run(op, (*at, -1), over, again),
                    Run(op, at, over[1:], again),
                    Run(op, at, (*over, random.choice(likely or [pair])), again),
                    Run(op, at, (*over, random.choice(likely or [pair])), again),
                    Run(op, at, (*over, pair), again),
                )
            )
        case Free(value, place):
            return random.choice((Free(_any_value(random, graph), place), Free(value, _any_place(random))))
        case Wait(value, place):
            return random.choice((Wait(_any_value(random, graph), place), Wait(value, _any_place(random))))
        case Copy(value, to, at):
            return random.choice(
                (
                    Copy(_any_value(random, graph), to, at),
                    Copy(value, _any_place(random), at),
                    Copy(value, to, _any_offset(random)),
                )
            )


# ----------------------------------------------------------------------------------------------------------- strategies


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph, its costs and a valid program for it; `seed` makes more of them."""

    size: int
    seed: int
    graph: Graph = dataclasses.field(repr=False)
    costs: Costs = dataclasses.field(repr=False)
    program: Program = dataclasses.field(repr=False)

    def broken(self, count: int) -> list[Program]:
        """Programs that were broken once or twice."""
        random = Random(f"{self.seed} broken")
        once = [break_program(random, self.graph, self.program) for _ in range(count)]
        return [break_program(random, self.graph, p) if random.random() < 0.2 else p for p in once]


def make_case(size: int, seed: int) -> Case:
    """The case with this size and seed."""
    random = Random(seed)
    graph = make_graph(random, size)
    costs = make_costs(random, graph)
    arena, wild = random.random() < 0.6, random.choice((0.0, 0.2, 0.4, 0.6))
    program = make_program(random, graph, costs, wild=wild, astray=random.choice((0.0, 0.5)) if arena else 0.0)
    if arena:
        program = lay_out(random, graph, costs, program)
    return Case(size, seed, graph, costs, program)


def with_channels(random: Random, graph: Graph) -> Graph:
    """The graph with some ops that hand over, or act in groups; some of them draw as well."""
    ops = list(graph.ops)
    for index, op in enumerate(ops):
        if not op.optional and random.random() < 0.3:
            more = random.choice((("handover",), ("group:0",), ("group:1",), ("group:0", "group:1")))
            ops[index] = dataclasses.replace(op, channels=(*op.channels, *more))
    return dataclasses.replace(graph, ops=tuple(ops))


def make_acting_case(size: int, seed: int) -> Case:
    """A case with ops in several channels."""
    random = Random(seed)
    graph = with_channels(random, make_graph(random, size))
    costs = make_costs(random, graph)
    return Case(size, seed, graph, costs, make_program(random, graph, costs, wild=random.choice((0.0, 0.3, 0.6))))


def make_away_case(size: int, seed: int) -> Case:
    """A case in which some inputs and outputs live in other places than the device."""
    random = Random(seed)
    graph = with_homes(random, make_graph(random, size))
    costs = make_costs(random, graph)
    program = make_program(random, graph, costs, wild=random.choice((0.0, 0.3, 0.6)))
    if random.random() < 0.6:
        program = lay_out(random, graph, costs, program)
    return Case(size, seed, graph, costs, program)


def away_cases(max_size: int = 10) -> st.SearchStrategy[Case]:
    """Cases of up to `max_size` ops with inputs and outputs in other places."""
    return st.builds(make_away_case, st.integers(1, max_size), st.integers(0, 2**32 - 1))


def cases(max_size: int = 10) -> st.SearchStrategy[Case]:
    """Cases of up to `max_size` ops."""
    return st.builds(make_case, st.integers(1, max_size), st.integers(0, 2**32 - 1))


@dataclasses.dataclass(frozen=True)
class Costed:
    """A graph and its costs."""

    maker: str
    size: int
    seed: int
    graph: Graph = dataclasses.field(repr=False)
    costs: Costs = dataclasses.field(repr=False)


def make_costed(maker: str, size: int, seed: int) -> Costed:
    """A "graph" as capture could have made it, a "step", one with "optional" ops, or a "tree"; all inputs persist."""
    random = Random(seed)
    graph = {"graph": make_graph, "tree": make_tree}.get(maker, make_step)(random, size)
    if maker == "optional":
        graph = with_optional(random, graph)
    graph = persisting(graph)
    return Costed(maker, size, seed, graph, make_costs(random, graph))


def costed(makers: tuple[str, ...], max_size: int) -> st.SearchStrategy[Costed]:
    """Graphs of these makers with up to `max_size` ops."""
    return st.builds(make_costed, st.sampled_from(makers), st.integers(1, max_size), st.integers(0, 2**32 - 1))
