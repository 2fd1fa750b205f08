"""Places of what a step allocates: nothing meets, whatever it allocates; what comes as planned goes where planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random

from graphs import Case, lay_out, make_case, make_costs, make_graph, make_program
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.allocator.arena import Event
from lowtide.allocator.scratch import NEVER, Block, arrange, blocks_of, height, most
from lowtide.execute.tape import OUTSIDE, Places, places, temporaries
from lowtide.graph import Graph, Op, Output, Read, Value
from lowtide.program import Copy, Free, Program, Run, Wait
from lowtide.simulate import simulate

LONG = settings(max_examples=150, deadline=None)
Script = list[tuple[str, int, int]]  # of one op: ("make" a temporary | "drop" it | "result", its number, its bytes)


# ------------------------------------------------------------------------------------------- what a step may allocate


class Events:
    """Writes down what a made-up step allocates, as the allocator does."""

    def __init__(self) -> None:
        self.rows: list[Event] = []
        self.alive: dict[int, int] = {}  # block -> bytes
        self.count = 1000  # blocks that were there before have smaller numbers

    def make(self, instruction: int, nbytes: int) -> int:
        self.count += 1
        if nbytes:  # torch allocates nothing for a tensor of no bytes
            self.rows.append(Event(instruction, 0, self.count, nbytes))
            self.alive[self.count] = nbytes
        return self.count

    def free(self, instruction: int, block: int) -> None:
        if block in self.alive:
            self.rows.append(Event(instruction, 1, block, self.alive.pop(block)))


def anything(random: Random, program: Program) -> list[Event]:
    """Allocations that have nothing to do with the program but their sizes, now and then."""
    events = Events()
    before = len(program.instructions)  # what the runner allocates before the first instruction
    numbers = [number for number, item in enumerate(program.instructions) if isinstance(item, Run | Copy)]
    for number in (before, *numbers):
        for _ in range(random.choice((0, 1, 2, 5))):
            if events.alive and random.random() < 0.5:
                events.free(number, random.choice(sorted(events.alive)))
            else:
                events.make(number, random.choice((1, 4, 16, 60, 64, 64, 100, 128, 200, 256, 1000)))
        if random.random() < 0.1:
            events.rows.append(Event(number, 1, random.randrange(100), 64))  # of a block from before
    return events.rows


def scripts(random: Random, graph: Graph) -> list[Script]:
    """For each op what it allocates, in order: its results, and temporaries that it drops again."""
    found = []
    for op in range(len(graph.ops)):
        script: Script = []
        alive: list[int] = []
        results = list(range(len(graph.makes[op])))
        for number in range(random.choice((0, 0, 0, 1, 2, 4))):
            script.append(("make", number, random.choice((4, 8, 64, 64, 100, 128, 300))))
            alive.append(number)
            while results and random.random() < 0.4:
                script.append(("result", results.pop(0), 0))
            while alive and random.random() < 0.5:
                script.append(("drop", alive.pop(random.randrange(len(alive))), 0))
        script += [("result", number, 0) for number in results]
        random.shuffle(alive)
        found.append(script + [("drop", number, 0) for number in alive])
    return found


def alone(script: Script, sizes: list[int]) -> list[Event]:
    """The script run by itself, as it is measured."""
    events, names = Events(), dict[int, int]()
    for what, number, nbytes in script:
        if what == "make":
            names[number] = events.make(0, nbytes)
        elif what == "drop":
            events.free(0, names[number])
        else:
            events.make(0, sizes[number])
    return events.rows


def faithful(graph: Graph, nbytes: tuple[int, ...], program: Program, script: list[Script]) -> list[Event]:
    """What a step allocates that does just what the program says."""
    events, there = Events(), dict[int, int]()
    now = -1
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Free(value, "device"):
                events.free(now, there.pop(value, -1))
            case Copy(value, to):
                now = number
                if to == "device":
                    there[value] = events.make(now, nbytes[value])
            case Run(op, _, over, again):
                now, onto, names = number, dict(over), dict[int, int]()
                makes = graph.makes_of(op, again=again)
                twice = []
                for what, which, size in script[op]:
                    if what == "make":
                        names[which] = events.make(now, size)
                    elif what == "drop":
                        events.free(now, names[which])
                    elif (value := graph.makes[op][which]) in onto:
                        there[value] = there.pop(onto[value], -1)
                    elif value in there and value in makes:
                        twice.append(events.make(now, nbytes[value]))
                    elif value in makes:
                        there[value] = events.make(now, nbytes[value])
                for block in twice:
                    events.free(now, block)
            case _:
                pass
    return events.rows


def make_faithful(size: int, seed: int) -> tuple[Case, list[Script]]:
    """A case whose temporaries were measured as bench_call measures them."""
    random = Random(seed)
    graph = make_graph(random, size)
    script = scripts(random, graph)
    costs = make_costs(random, graph)
    arena_temporaries = []
    for op in range(len(graph.ops)):
        blocks = blocks_of(alone(script[op], [costs.nbytes[value] for value in graph.makes[op]]))
        kept = not graph.outliving.isdisjoint(graph.makes[op])
        results = [block for block in blocks if block.freed == NEVER and not kept]
        arena_temporaries.append(height(arrange([block for block in blocks if block.freed != NEVER], results)))
    costs = dataclasses.replace(costs, arena_temporaries=tuple(arena_temporaries))
    program = make_program(random, graph, costs, wild=random.choice((0.0, 0.2, 0.4, 0.6)))
    return Case(size, seed, graph, costs, lay_out(random, graph, costs, program)), script


def placed(found: Places, program: Program, events: list[Event]) -> Iterator[tuple[Block, int]]:
    """Each block with its offset, after checking that the tape has an entry for it."""
    rows: dict[int, list[Block]] = {}
    for block in blocks_of(events):
        rows.setdefault(block.instruction, []).append(block)
    assert len(found.start) == len(program.instructions) + 2
    assert found.start[-1] == len(found.nbytes) == len(found.offset)
    for number in range(len(program.instructions) + 1):
        first, last = found.start[number], found.start[number + 1]
        blocks = rows.get(number, [])
        assert found.nbytes[first:last] == [block.nbytes for block in blocks]
        yield from zip(blocks, found.offset[first:last], strict=True)


def assert_apart(found: Places, program: Program, events: list[Event]) -> None:
    """No two blocks that are there together meet, and all are in the arena, or counted as outside."""
    rows = list(placed(found, program, events))
    inside = [(block, offset) for block, offset in rows if offset != OUTSIDE]
    for number, (block, offset) in enumerate(inside):
        assert 0 <= offset <= program.arena - block.nbytes
        assert offset % (64 if block.nbytes >= 64 else 16) == 0
        for other, place in inside[:number]:
            together = block.made < other.freed and other.made < block.freed
            assert not together or offset + block.nbytes <= place or place + other.nbytes <= offset, (block, other)
    assert found.outside == most([block for block, offset in rows if offset == OUTSIDE])


SEEDS = st.integers(0, 2**32 - 1)


@LONG
@given(st.integers(1, 10), SEEDS)
def test_whatever_is_allocated_nothing_meets(size: int, seed: int) -> None:
    case = make_case(size, seed)
    events = anything(Random(f"{seed} events"), case.program)
    assert_apart(places(case.graph, case.program, case.costs.nbytes, events), case.program, events)


@LONG
@given(st.integers(1, 10), SEEDS, st.floats(0, 0.3))
def test_what_comes_almost_as_planned_does_not_meet(size: int, seed: int, part: float) -> None:
    case, script = make_faithful(size, seed)
    random = Random(f"{seed} events")
    events = faithful(case.graph, case.costs.nbytes, case.program, script)
    kept = {event.block for event in events if random.random() < part}  # somebody still holds these
    grown = {event.block: 4 * random.randint(1, 50) for event in events if random.random() < part}
    bent = [
        event._replace(nbytes=grown.get(event.block, event.nbytes))
        for event in events
        if not (event.freed and event.block in kept)
    ]
    assert_apart(places(case.graph, case.program, case.costs.nbytes, bent), case.program, bent)


@LONG
@given(st.integers(1, 10), SEEDS)
@example(1, 27461)  # of three equal blocks the one in the arena is not the one that goes first
def test_what_comes_as_planned_goes_where_planned(size: int, seed: int) -> None:
    case, script = make_faithful(size, seed)
    graph, nbytes = case.graph, case.costs.nbytes
    events = faithful(graph, nbytes, case.program, script)
    found = places(graph, case.program, nbytes, events)
    assert_apart(found, case.program, events)
    rows: dict[int, list[tuple[Block, int]]] = {}
    for block, offset in placed(found, case.program, events):
        rows.setdefault(block.instruction, []).append((block, offset))
    foreseen = True
    for number, run in enumerate(case.program.instructions):
        if not isinstance(run, Run):
            continue
        makes = graph.makes_of(run.op, again=run.again)
        planned = [(nbytes[value], offset) for value, offset in zip(makes, run.at, strict=False) if nbytes[value]]
        lasting = [(block.nbytes, offset) for block, offset in rows.get(number, ()) if block.gone > number]
        passing = [offset for block, offset in rows.get(number, ()) if block.gone == number]
        assert set(lasting) <= set(planned)
        # Room was measured with all results in the arena, or with none where the caller keeps some: here they are.
        kept = not graph.outliving.isdisjoint(makes)
        as_measured = sorted(lasting) == sorted(planned) and len(makes) == len(graph.makes[run.op])
        if (
            as_measured
            and all((offset < 0) == kept for _, offset in planned)
            and (not case.costs.arena_temporaries[run.op] or run.at[-1] >= 0)
        ):
            assert OUTSIDE not in passing
        elif passing:
            foreseen = False
    storage = [value.storage for value in graph.values]
    gone = {storage[item.value] for item in case.program.instructions if isinstance(item, Free | Copy)}
    if foreseen and not gone & {storage[item.value] for item in graph.inputs}:
        assert not found.strays
        simulation = simulate(graph, case.costs, case.program)
        assert simulation.start + found.outside <= max((simulation.start, *simulation.outside))


@LONG
@given(st.integers(0, 12), SEEDS)
def test_temporaries_fit_in_the_room_that_was_measured(count: int, seed: int) -> None:
    """Blocks that come and go anyhow, some of them results: the room is large enough, and as small as it can be."""
    random = Random(seed)
    events = Events()
    for _ in range(count):
        if events.alive and random.random() < 0.4:
            events.free(0, random.choice(sorted(events.alive)))
        else:
            events.make(0, random.choice((1, 8, 60, 64, 100, 128, 256)))
    blocks = blocks_of(events.rows)
    results = [block for block in blocks if block.freed == NEVER]
    passing = [block for block in blocks if block.freed != NEVER]
    rooms = arrange(passing, results)
    assert [place.block for place in rooms] == sorted(passing, key=lambda block: -block.nbytes)
    for number, place in enumerate(rooms):
        block, end = place.block, place.offset + place.block.nbytes
        if place.under is not None:
            assert end <= place.under.nbytes
            assert not block.meets(place.under)
        for other in rooms[:number]:
            if other.under is place.under and other.block.meets(block):
                assert end <= other.offset or other.offset + other.block.nbytes <= place.offset
    beside = [place.block for place in rooms if place.under is None]
    assert most(beside) <= height(rooms) <= sum(block.nbytes + 63 for block in beside)


@LONG
@given(st.integers(1, 10), SEEDS)
def test_temporaries_show_in_a_step_as_they_were_measured(size: int, seed: int) -> None:
    case, script = make_faithful(size, seed)
    events = faithful(case.graph, case.costs.nbytes, case.program, script)
    found = temporaries(case.graph, case.program, case.costs.nbytes, events)
    runs = [item for item in case.program.instructions if isinstance(item, Run)]
    altered = {
        run.op
        for run in runs
        if run.over or len(case.graph.makes_of(run.op, again=run.again)) < len(case.graph.makes[run.op])
    }
    assert {op: piece for op, (piece, _) in found.items() if op not in altered} == {
        op: case.costs.arena_temporaries[op] for op in found if op not in altered
    }
    assert all(heap <= piece for op, (piece, heap) in found.items() if op not in altered)


def test_two_temporaries_do_not_meet_under_a_result_that_is_not_there_yet() -> None:
    """The larger one has no planned room and is put over the bytes of a result; so the smaller one can't be there."""
    graph = Graph(
        ops=(Op("op", "made.up", outputs=(0,)), Op("end", "made.up", (Read(0),), outputs=(1,))),
        values=(Value("v", 128, "activation", 0), Value("w", 64, "activation", 1)),
        inputs=(),
        outputs=(Output(1, "result", (0,)),),
    )
    program = Program(graph.fingerprint, (Run(0, (0, -1)), Run(1, (-1,)), Free(0)), arena=320)
    events = [
        Event(0, 0, 1, 300),
        Event(0, 0, 2, 128),
        Event(0, 1, 2, 128),
        Event(0, 1, 1, 300),
        Event(0, 0, 3, 128),
        Event(1, 0, 4, 64),
        Event(1, 1, 3, 128),
    ]
    found = places(graph, program, (128, 64), events)
    assert_apart(found, program, events)
    assert found.offset == [0, OUTSIDE, 0, OUTSIDE]
    assert (found.outside, found.strays) == (128, 0)


def test_what_is_freed_after_a_copy_to_another_place_is_as_planned() -> None:
    graph = Graph(
        ops=(Op("op", "made.up", outputs=(0,)), Op("end", "made.up", (Read(0),), outputs=(1,))),
        values=(Value("v", 128, "activation", 0), Value("w", 64, "activation", 1)),
        inputs=(),
        outputs=(Output(1, "result", (0,)),),
    )
    rows = (Run(0, (0,)), Copy(0, "host"), Wait(0, "host"), Free(0), Copy(0, "device", 0), Wait(0, "device"))
    program = Program(graph.fingerprint, (*rows, Run(1, (-1,)), Free(0), Free(0, "host")), arena=128)
    events = [Event(0, 0, 1, 128), Event(1, 1, 1, 128), Event(4, 0, 2, 128), Event(6, 0, 3, 64), Event(6, 1, 2, 128)]
    assert places(graph, program, (128, 64), events).offset == [0, 0, OUTSIDE]
