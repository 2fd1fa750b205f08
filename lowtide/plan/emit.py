"""A sequence as a program: repeats marked, results on dying arguments, copies awaited before their readers, everything
freed at its last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowtide.graph import Graph, Place
from lowtide.plan.in_place import paired
from lowtide.plan.problem import FETCH, SEND, Ints, Move, Problem
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait


def emit(problem: Problem, sequence: Ints) -> Program:
    """The program that runs the ops in this sequence."""
    graph, ops = problem.graph, len(problem.graph.ops)
    order = [int(op) for op in sequence]
    seen: set[int] = set()
    again = []
    for op in order:
        again.append(op in seen)
        seen.add(op)
    # From the end: a value is alive where it will be read before it is made again.
    alive = _at_the_end(graph)
    rows: list[list[Instruction]] = []
    for op, repeated in zip(reversed(order), reversed(again), strict=True):
        if op >= ops:
            rows.append(_copy(problem.copies.moves[op - ops], alive))
            continue
        reads, makes = graph.reads_of(op, again=repeated), graph.makes_of(op, again=repeated)
        dying = [value for value in reads if value not in alive]
        effects = () if repeated else graph.effects[op]
        over = list(effects) + paired(problem.over_rows[op], set(dying) - {old for _, old in effects})
        taken = {old for _, old in over}
        unused = [value for value in makes if value not in alive]
        frees = [Free(value) for value in (*dying, *unused) if value not in taken]
        rows.append([Run(op, over=tuple(over), again=repeated), *frees])
        alive -= set(makes)
        alive |= set(reads)
        alive |= {old for _, old in effects}
    instructions = [item for row in reversed(rows) for item in row]
    if problem.copies.moves:
        instructions = list(_awaited(graph, instructions))
    return Program(graph.fingerprint, tuple(instructions))


def _at_the_end(graph: Graph) -> set[int]:
    """The values that are on the device at the end."""
    inputs = {item.value for item in graph.inputs}
    given_up = {item.value for item in graph.inputs if not item.persistent} - graph.required
    return {value for value in graph.required | (inputs - given_up) if graph.home[value] == "device"}


def _copy(move: Move, alive: set[int]) -> list[Instruction]:
    """The instructions of a part of a copy, given what is alive behind it; and before it, from now on."""
    if move.kind == FETCH:
        alive.discard(move.value)
        return [Copy(move.value, "device")]
    if move.kind == SEND:
        return [Copy(move.value, move.place)]
    dies = move.value not in alive
    alive.add(move.value)
    return [Wait(move.value, move.place), *([Free(move.value)] if dies else [])]


def _awaited(graph: Graph, instructions: list[Instruction]) -> Iterator[Instruction]:
    """The instructions with what copies need besides: waits before readers, and no bytes elsewhere for longer."""
    fetches = Counter(item.value for item in instructions if isinstance(item, Copy) and item.to == "device")
    elsewhere: dict[int, Place] = {}  # what was copied away and will be back
    homes = {graph.values[item.value].storage: item for item in graph.inputs if item.home != "device"}
    coming: set[int] = set()

    def wait(value: int) -> Iterator[Instruction]:
        if value in coming:
            coming.remove(value)
            yield Wait(value, "device")
            if not fetches[value] and value in elsewhere:
                yield Free(value, elsewhere.pop(value))

    for item in instructions:
        match item:
            case Run(op, _, _, again):
                for value in graph.reads_of(op, again=again):
                    yield from wait(value)
            case Free(value, "device"):
                yield from wait(value)
            case Copy(value, "device"):
                fetches[value] -= 1
                coming.add(value)
            case Copy(value, place):
                yield from wait(value)
                home = homes.get(graph.values[value].storage)
                if home is not None:
                    yield Free(home.value, place)
                else:
                    elsewhere[value] = place
            case _:
                pass
        yield item
