"""Programs that were changed where it is likely to matter: a few of them still do what they should."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

from graphs import break_program

from lowtide.costs import Costs
from lowtide.graph import Graph, Place
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait

Rows = list[Instruction]


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a mutation may look at."""

    random: Random
    graph: Graph
    costs: Costs
    arena: int

    def place(self, rows: Rows) -> int:
        """Before some instruction, or at the end."""
        return self.random.randint(0, len(rows))

    def near(self, rows: Rows, place: int) -> int:
        """Not far from there."""
        return min(len(rows), max(0, place + self.random.randint(-4, 4)))

    def offset(self) -> int:
        """Somewhere in the arena, or outside."""
        if not self.arena or self.random.random() < 0.2:
            return -1
        return self.random.randrange(0, self.arena, 64)

    def of(self, rows: Rows, kind: type) -> int | None:
        """The place of an instruction of a kind."""
        found = [place for place, row in enumerate(rows) if isinstance(row, kind)]
        return self.random.choice(found) if found else None


def mutate(random: Random, graph: Graph, costs: Costs, program: Program) -> Program:
    """The program with one to three changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        if random.random() < 0.3:
            program = break_program(random, graph, program)
            continue
        rows = list(program.instructions)
        random.choice(MUTATIONS)(Scene(random, graph, costs, program.arena), rows)
        program = dataclasses.replace(program, instructions=tuple(rows))
    return program


def _trip(scene: Scene, rows: Rows) -> None:
    """Send a value away, and have it back: soon or late, from where it was or elsewhere."""
    value = _present(scene, rows)
    away: Place = scene.random.choice(("host", "disk"))
    there: Rows = [Copy(value, away), Wait(value, away), Free(value)]
    back: Rows = [Copy(value, "device", scene.offset()), Wait(value, "device"), Free(value, away)]
    if scene.random.random() < 0.2:
        del there[scene.random.randrange(3)]
    out = scene.place(rows)
    home = out + scene.random.randint(0, min(4, len(rows) - out))
    rows[home:home] = back
    rows[out:out] = there


def _present(scene: Scene, rows: Rows) -> int:
    """A value, an input of the caller as often as not."""
    inputs = [item.value for item in scene.graph.inputs]
    lasting = [v for v, item in enumerate(scene.graph.values) if item.storage in scene.graph.lasting_storages]
    pools = [pool for pool in (inputs, lasting, list(range(len(scene.graph.values)))) if pool]
    return scene.random.choice(scene.random.choice(pools))


def _elsewhere(scene: Scene, rows: Rows) -> None:
    """Let an update of the caller's storages run on a copy, which may then go home."""
    updates = [
        n for n, row in enumerate(rows) if isinstance(row, Run) and scene.graph.effects[row.op % len(scene.graph.ops)]
    ]
    if not updates:
        return _trip(scene, rows)
    place = scene.random.choice(updates)
    run = rows[place]
    assert isinstance(run, Run)
    new, old = scene.random.choice(scene.graph.effects[run.op % len(scene.graph.ops)])
    at = scene.offset()
    makes = scene.graph.makes[run.op % len(scene.graph.ops)]
    moved = tuple(at if value == new else offset for value, offset in zip(makes, run.at, strict=False))
    after: Rows = [
        Copy(new, "host"),
        Wait(new, "host"),
        Free(new),
        Copy(new, "device"),
        Wait(new, "device"),
        Free(new, "host"),
    ]
    if scene.random.random() < 0.4:
        del after[scene.random.randrange(6) :]
    before: Rows = [
        Copy(old, "host"),
        Wait(old, "host"),
        Free(old),
        Copy(old, "device", at),
        Wait(old, "device"),
        Free(old, "host"),
    ]
    rows[place : place + 1] = [*before, dataclasses.replace(run, at=moved + run.at[len(makes) :]), *after]


def _repeat(scene: Scene, rows: Rows) -> None:
    """Run an op once more, and let go of what it makes or not."""
    op = scene.random.randrange(len(scene.graph.ops))
    again = scene.random.random() < (0.3 if scene.graph.ops[op].optional else 0.9)
    makes = scene.graph.makes_of(op, again=again)
    at = (
        tuple(scene.offset() for _ in range(len(makes) + (scene.costs.arena_temporaries[op] > 0)))
        if scene.arena
        else ()
    )
    place = scene.place(rows)
    rows.insert(place, Run(op, at, (), again))
    for value in makes:
        roll = scene.random.random()
        if roll < 0.3:
            rows.insert(place, Free(value))
        elif roll < 0.4:
            rows.insert(scene.near(rows, place + 1), Free(value))


def _restore(scene: Scene, rows: Rows) -> None:
    """Run an optional op, let go of what it reads, and make that again of what it made."""
    ops = scene.graph.ops
    optional = [op for op in range(len(ops)) if ops[op].optional]
    pairs = [(one, other) for one in optional for other in optional if ops[one].reads == ops[other].makes]
    if not pairs:
        return _repeat(scene, rows)
    pack, unpack = scene.random.choice(pairs)

    def run(op: int) -> Run:
        blocks = len(scene.graph.makes[op]) + (scene.costs.arena_temporaries[op] > 0)
        return Run(op, tuple(scene.offset() for _ in range(blocks)) if scene.arena else ())

    place = scene.place(rows)
    later = place + scene.random.randint(0, min(3, len(rows) - place))
    rows[later:later] = [run(unpack), *(Free(value) for value in ops[pack].makes)]
    rows[place:place] = [run(pack), *(Free(value) for value in ops[pack].reads)]


def _skip(scene: Scene, rows: Rows) -> None:
    """Leave out a run, and the end of what it would have made."""
    place = scene.of(rows, Run)
    if place is not None:
        run = rows.pop(place)
        assert isinstance(run, Run)
        for value in scene.graph.makes[run.op % len(scene.graph.ops)]:
            if Free(value) in rows[place:]:
                del rows[rows.index(Free(value), place)]


def _retime(scene: Scene, rows: Rows) -> None:
    """Move an instruction a little."""
    if rows:
        place = scene.random.randrange(len(rows))
        row = rows.pop(place)
        rows.insert(scene.near(rows, place), row)


def _replace(scene: Scene, rows: Rows) -> None:
    """Put one block, or the same one wherever it is made, somewhere else."""
    place = scene.of(rows, Run)
    if place is None or not scene.arena:
        return _retime(scene, rows)
    run = rows[place]
    assert isinstance(run, Run)
    if run.at:
        turned = list(run.at)
        turned[scene.random.randrange(len(turned))] = scene.offset()
        rows[place] = dataclasses.replace(run, at=tuple(turned))


def _sit(scene: Scene, rows: Rows) -> None:
    """Let a result sit on an argument, which then needs no freeing; or no longer."""
    place = scene.of(rows, Run)
    if place is None:
        return
    run = rows[place]
    assert isinstance(run, Run)
    op = run.op % len(scene.graph.ops)
    if run.over and scene.random.random() < 0.4:
        pair = scene.random.choice(run.over)
        rows[place] = dataclasses.replace(run, over=tuple(other for other in run.over if other != pair))
        if scene.random.random() < 0.7:
            rows.insert(place + 1, Free(pair[1]))
        return
    pairs = scene.graph.ops[op].updates + scene.costs.in_place[op]
    if not pairs or scene.random.random() < 0.4:
        pairs = tuple((made, read) for made in scene.graph.makes[op] for read in scene.graph.reads[op])
    if pairs:
        made, read = scene.random.choice(pairs)
        rows[place] = dataclasses.replace(run, over=(*run.over, (made, read)))
        later = [n for n, row in enumerate(rows) if row == Free(read) and n > place]
        if later and scene.random.random() < 0.7:
            del rows[later[0]]


MUTATIONS: tuple[Callable[[Scene, Rows], None], ...] = (
    _trip,
    _elsewhere,
    _repeat,
    _restore,
    _skip,
    _retime,
    _replace,
    _sit,
)
