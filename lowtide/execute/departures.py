"""Which results of a step with a handover leave it before its end, and after which instruction.

What the caller's code has had at the handover, and what it came back with, is let go of once nothing reads it any more:
whether it stays is the caller's business.

A gradient is of no more use to the step once its last reader has run, and the last reader of its parameter, which a
hook of the caller may update. Those that leave at about the same time leave together, so that there are few stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.captured import Leaving
from lowtide.graph import Graph
from lowtide.kernels import HANDOVER
from lowtide.program import Free, Program, Run

STOPS = 16  # about so many: each costs some 30 microseconds of autograd and Python
WORTH = 2**20  # bytes of all that may leave: for less nobody stops


@dataclass(frozen=True)
class Departure:
    """After this instruction these outputs leave, by their places."""

    instruction: int
    outputs: tuple[int, ...]


def departures(graph: Graph, program: Program, leaving: Sequence[Leaving]) -> tuple[Departure, ...]:
    """The stops in their order; what comes last is none of them, for it leaves when the step ends."""
    free = _of_no_other(graph, (one.output for one in leaving if not one.last))
    if sum(graph.values[graph.outputs[place].value].nbytes for place in free) < WORTH:
        return ()
    used = _last_uses(graph, program)
    homes = {item.path: graph.values[item.value].storage for item in graph.inputs}
    last = {place: used.get(graph.values[graph.outputs[place].value].storage, -1) for place in free}
    for one in leaving:
        if one.output in last and one.parameter:
            last[one.output] = max(last[one.output], used.get(homes.get((one.parameter,), -1), -1))
    return _together(graph, sorted((instruction, place) for place, instruction in last.items()))


def dismissals(graph: Graph, program: Program, leaving: Sequence[Leaving]) -> dict[int, tuple[int, ...]]:
    """By instruction, the results, by place, that the program lets go of after it, with nobody waiting for them."""
    handover = next((number for number, op in enumerate(graph.ops) if op.target == HANDOVER), None)
    if handover is None:
        return {}
    gradients = {one.output for one in leaving}
    results = [place for place, output in enumerate(graph.outputs) if output.role == "result"]
    used = _last_uses(graph, program)
    found: dict[int, list[int]] = {}
    for place in _of_no_other(graph, (place for place in results if place not in gradients)):
        found.setdefault(used[graph.values[graph.outputs[place].value].storage], []).append(place)
    return {instruction: tuple(places) for instruction, places in found.items()}


def _last_uses(graph: Graph, program: Program) -> dict[int, int]:
    """For each storage the last instruction that is about a content of it."""
    used: dict[int, int] = {}
    for number, instruction in enumerate(program.instructions):
        touched: Sequence[int] = ()
        if isinstance(instruction, Run):
            reads = graph.reads_of(instruction.op, again=instruction.again)
            touched = (*reads, *graph.makes_of(instruction.op, again=instruction.again))
        elif not isinstance(instruction, Free):  # to let go of a value is no use of it
            touched = (instruction.value,)
        used.update((graph.values[value].storage, number) for value in touched)
    return used


def _of_no_other(graph: Graph, leaving: Iterable[int]) -> list[int]:
    """Those outputs whose value no output has that stays, and that is not the caller's own."""
    places = set(leaving)
    staying = {output.value for place, output in enumerate(graph.outputs) if place not in places}
    given = {item.value for item in graph.inputs}
    return [place for place in sorted(places) if graph.outputs[place].value not in staying | given]


def _together(graph: Graph, order: list[tuple[int, int]]) -> tuple[Departure, ...]:
    """Stops for what leaves in this order, each with about an equal part of the bytes."""
    total = sum(graph.values[value].nbytes for value in {graph.outputs[place].value for _, place in order})
    found: list[Departure] = []
    waiting: list[int] = []
    values: set[int] = set()
    for number, (instruction, place) in enumerate(order):
        waiting.append(place)
        values.add(graph.outputs[place].value)
        last = number + 1 == len(order)
        same = not last and order[number + 1][0] == instruction
        if not last and not same and STOPS * sum(graph.values[value].nbytes for value in values) >= total:
            found.append(Departure(instruction, tuple(waiting)))
            waiting, values = [], set()
    return tuple(found)
